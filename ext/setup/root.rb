# frozen_string_literal: true

require "digest"
require "fileutils"
require "open3"
require_relative "cache"
require_relative "console"
require_relative "source_files"
require_relative "system_packages"

module Setup
  # A Debian 13 in a folder of its own, made once by mmdebstrap and kept in the cache: its name there is a digest of
  # its packages. What it needs of the running system is mounted in a mount namespace that ends with each command.
  class Root
    SUITE = "trixie"
    # Seconds that making it may take.
    LIMIT = 1200
    SOURCE = "/root/torch-ddp"
    # Directories are mounted, then the shell becomes the command in the root.
    ENTER = <<~SHELL
      set -e
      mount -t proc proc "$1/proc"
      mount --rbind /dev "$1/dev"
      cd "$1"
      exec chroot "$@"
    SHELL

    attr_reader :folder

    # @param name [String] the folder in the cache that it is kept in
    # @param packages [Array<String>]
    # @param options [Array<String>] more for mmdebstrap
    # @param surplus [Array<String>] patterns of files that the packages bring and nothing here uses
    def initialize(name, packages, options: [], surplus: [])
      @name = name
      @packages = packages
      @options = options
      @surplus = surplus
      @folder = Cache.path(name, Digest::SHA256.hexdigest(packages.join(" "))[0, 12])
    end

    # @return [String, nil] why there can be no such root here
    def obstacle
      return "making a root folder needs root" unless Process.uid.zero?
      return "unshare was not found" unless SystemPackages.program?("unshare")

      out, status = Open3.capture2e("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt")
      return "mounts are not permitted here: #{out.strip}" unless status.success?

      "mmdebstrap could not be installed" unless SystemPackages.available?(SystemPackages::DEBIAN13, why: "makes the Debian 13 root")
    end

    # Makes it if it is not in the cache.
    #
    # @return [String, nil] why it could not be made
    def make
      Cache.locked(@folder) do
        make_folder unless File.directory?(@folder)
      end
      nil
    rescue Failure => e
      Console.say(e.message)
      "mmdebstrap could not make it, see build/log/#{log}.log"
    end

    # Holds it, with the present sources inside.
    def using
      Cache.locked("#{@folder}.run") do
        copy_network_settings
        copy_sources
        yield
      end
    end

    # @return [Array<String>] what runs a command inside; without one, what to put before it
    def enter(*command)
      ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", @folder, *command]
    end

    # The environment inside: proxies and certificates as here, nothing else of this shell.
    def environment(more = {})
      passed = ENV.select { |name, _| name.match?(/\A(https?_proxy|no_proxy|SSL_CERT_\w+|CI|BUNDLE_SSL\w*|BUNDLE_MIRROR\w*)\z/i) }
      ENV.keys.to_h { |name| [name, nil] }.merge(passed, "HOME" => "/root", "LANG" => "C.UTF-8",
        "PATH" => "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **more)
    end

    private

    def log
      "mmdebstrap-#{@name}"
    end

    def make_folder
      unfinished = "#{@folder}.unfinished"
      FileUtils.rm_rf(unfinished)
      FileUtils.mkdir_p(unfinished)
      # mmdebstrap takes the mirror from its own default.
      Console.step("Debian 13 root for #{@name}: mmdebstrap, about two minutes, kept in #{@folder}", "mmdebstrap", "--variant=apt",
        *@options, "--include=#{@packages.join(",")}", SUITE, unfinished, log: log, limit: LIMIT, cure: "check the network and the Debian mirror")
      FileUtils.rm_f(Dir.glob(@surplus, base: unfinished).map { |path| File.join(unfinished, path) })
      File.rename(unfinished, @folder)
    end

    def copy_network_settings
      %w[/etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt].each do |path|
        next unless File.file?(path)

        target = File.join(@folder, path)
        FileUtils.rm_f(target)
        FileUtils.mkdir_p(File.dirname(target))
        FileUtils.cp(path, target)
      end
    end

    # Only what changed is written, so that the build inside keeps what it has. Files of ours that are gone
    # here go there too; what is built there stays.
    def copy_sources
      target = File.join(@folder, SOURCE)
      wanted = SourceFiles.all
      wanted.each do |path|
        from = File.join(ROOT, path)
        to = File.join(target, path)
        next if File.file?(to) && FileUtils.identical?(from, to) && File.stat(from).mode == File.stat(to).mode

        FileUtils.mkdir_p(File.dirname(to))
        FileUtils.cp(from, to)
        File.chmod(File.stat(from).mode, to)
      end
      remove_strays(target, wanted)
    end

    def remove_strays(target, wanted)
      list = File.join(target, ".bundle/copied-files")
      before = File.file?(list) ? File.readlines(list, chomp: true) : []
      (before - wanted).each { |path| FileUtils.rm_f(File.join(target, path)) }
      FileUtils.mkdir_p(File.dirname(list))
      File.write(list, wanted.map { |path| "#{path}\n" }.join)
    end
  end
end
