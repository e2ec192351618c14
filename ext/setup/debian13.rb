# frozen_string_literal: true

require "digest"
require "fileutils"
require "open3"
require_relative "cache"
require_relative "console"
require_relative "native"
require_relative "system_packages"

module Setup
  # The same sources and tests on Debian 13 (libtorch 2.6, torch-rb 0.19.1, Ruby 3.3), in a root folder of its own.
  #
  # The root is made once by mmdebstrap and kept in the cache, with the gems compiled inside and the last
  # build's products. What it needs of the running system is mounted in a mount namespace that ends with the run.
  class Debian13
    SUITE = "trixie"
    PACKAGES = (%w[ca-certificates procps rake ruby ruby-bundler] + SystemPackages::BUILD + SystemPackages::LIBTORCH +
      SystemPackages::PYTORCH).sort.freeze
    SOURCE = "/root/torch-ddp"
    RESULTS = "#{SOURCE}/build/results.jsonl"
    # Directories are mounted, then the shell becomes the command in the root.
    ENTER = <<~SHELL
      set -e
      mount -t proc proc "$1/proc"
      mount --rbind /dev "$1/dev"
      cd "$1"
      exec chroot "$@"
    SHELL

    attr_reader :root

    def initialize
      @root = Cache.path("debian13", Digest::SHA256.hexdigest(PACKAGES.join(" "))[0, 12])
    end

    # @return [String, nil] why there can be no such root here
    def obstacle
      return "making a root folder needs root" unless Process.uid.zero?
      return "unshare was not found" unless SystemPackages.program?("unshare")

      out, status = Open3.capture2e("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt")
      return "mounts are not permitted here: #{out.strip}" unless status.success?

      "mmdebstrap could not be installed" unless SystemPackages.available?(SystemPackages::DEBIAN13, why: "makes the Debian 13 root")
    end

    # Makes the root if it is not in the cache.
    #
    # @return [String, nil] why it could not be made
    def make
      Cache.locked(@root) do
        make_root unless File.directory?(@root)
      end
      nil
    rescue Failure => e
      Console.say(e.message)
      "mmdebstrap could not make it, see build/log/mmdebstrap.log"
    end

    # Brings the present sources and runs the tests inside.
    #
    # @return [Array(Boolean, String)] whether all was well, and the file of the results
    def test
      Cache.locked("#{@root}.run") do
        copy_network_settings
        copy_sources
        results = File.join(@root, RESULTS)
        FileUtils.rm_f(results)
        status, = Console.tee(*enter("sh", "-c", "cd #{SOURCE} && mkdir -p build && exec rake test"), log: "debian13", env: environment,
          limit: 2400)
        [status&.success? || false, results]
      end
    end

    private

    def make_root
      unfinished = "#{@root}.unfinished"
      FileUtils.rm_rf(unfinished)
      FileUtils.mkdir_p(unfinished)
      # mmdebstrap takes the mirror from its own default.
      Console.step("Debian 13 root: mmdebstrap, about two minutes, kept in #{@root}", "mmdebstrap", "--variant=apt",
        "--include=#{PACKAGES.join(",")}", SUITE, unfinished, log: "mmdebstrap", cure: "check the network and the Debian mirror")
      File.rename(unfinished, @root)
    end

    def copy_network_settings
      %w[/etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt].each do |path|
        next unless File.file?(path)

        target = File.join(@root, path)
        FileUtils.rm_f(target)
        FileUtils.mkdir_p(File.dirname(target))
        FileUtils.cp(path, target)
      end
    end

    # Only what changed is written, so that the build inside keeps what it has. Files of ours that are gone
    # here go there too; what is built there stays.
    def copy_sources
      target = File.join(@root, SOURCE)
      wanted = source_files
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

    # Tracked and new files, not what git ignores.
    def source_files
      out, status = Open3.capture2("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
      raise Failure, "step failed: Debian 13: git does not list the sources of #{ROOT}\n  likely cure: run it in a git checkout" unless status.success?

      out.split("\0").select { |path| File.file?(File.join(ROOT, path)) }
    end

    def enter(*command)
      ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", @root, *command]
    end

    # The tests' environment inside: proxies and certificates as here, nothing else of this shell.
    def environment
      passed = ENV.select { |name, _| name.match?(/\A(https?_proxy|no_proxy|SSL_CERT_\w+|CI|BUNDLE_SSL\w*|BUNDLE_MIRROR\w*)\z/i) }
      ENV.keys.to_h { |name| [name, nil] }.merge(passed, "HOME" => "/root", "LANG" => "C.UTF-8", "TDDP_RESULTS" => RESULTS,
        "PATH" => "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    end
  end
end
