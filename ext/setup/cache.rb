# frozen_string_literal: true

require "digest"
require "fileutils"
require "open3"
require "rbconfig"
require_relative "console"

module Setup
  # What is made once for all checkouts, in the user's cache folder.
  module Cache
    module_function

    def root
      base = ENV["XDG_CACHE_HOME"].to_s
      base = File.join(Dir.home, ".cache") unless base.start_with?("/")
      File.join(base, "torch-ddp")
    end

    def path(*parts)
      File.join(root, *parts)
    end

    # Makes a folder of the cache unless it is there. It is filled under another name and then renamed, so it is complete or absent.
    #
    # @yieldparam unfinished [String] the folder to fill
    # @return [Boolean] whether it was made now
    def make(folder)
      locked(folder) do
        next false if File.directory?(folder)

        unfinished = "#{folder}.unfinished"
        FileUtils.rm_rf(unfinished)
        FileUtils.mkdir_p(unfinished)
        yield unfinished
        File.rename(unfinished, folder)
        true
      end
    end

    # Holds the lock of a folder, so that two checkouts do not change it at the same time. The lock ends with the process.
    def locked(folder)
      FileUtils.mkdir_p(File.dirname(folder))
      File.open("#{folder}.lock", File::RDWR | File::CREAT) do |file|
        unless file.flock(File::LOCK_EX | File::LOCK_NB)
          Console.say "waiting: another process is making #{folder}"
          file.flock(File::LOCK_EX)
        end
        yield
      end
    end

    # Writes a small file, which is complete or absent at any time.
    def write(file, text)
      FileUtils.mkdir_p(File.dirname(file))
      File.write("#{file}.#{Process.pid}", text)
      File.rename("#{file}.#{Process.pid}", file)
    end

    # Ruby's ABI and the machine, as folder names show them.
    def ruby_key
      "ruby-#{RbConfig::CONFIG["ruby_version"]}-#{RbConfig::CONFIG["arch"]}"
    end
  end

  # The files of this checkout that git tracks or would track: no build products.
  module SourceFiles
    module_function

    # @return [Array<String>] paths below the checkout
    # @raise [Failure] outside a git checkout
    def all
      out, status = Open3.capture2("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
      raise Failure, "step failed: git does not list the sources of #{ROOT}\n  likely cure: run it in a git checkout" unless status.success?

      out.split("\0").select { |path| File.file?(File.join(ROOT, path)) }
    end

    # @param patterns [Array<String>] as for File.fnmatch, with ** and {a,b}
    def matching(patterns)
      all.select { |path| patterns.any? { |pattern| File.fnmatch?(pattern, path, File::FNM_PATHNAME | File::FNM_EXTGLOB) } }.sort
    end

    # @param paths [Array<String>] below the checkout
    # @return [String] a digest of their names and contents, and of `settings`
    def digest(paths, settings)
      sum = Digest::SHA256.new << settings
      paths.each { |path| sum << "#{path} #{Digest::SHA256.file(File.join(ROOT, path)).hexdigest}\n" }
      sum.hexdigest
    end
  end

  # Whether a leg of the tests has passed with just these files before. The cache holds the digest and date of each leg's last pass;
  # with TDDP_EVERYTHING=1 (`rake everything`) all legs run.
  class Unchanged
    # @param leg [String]
    # @param patterns [Array<String>] of the files that decide how the leg ends
    # @param settings [Array<String>] what else does, such as the versions of libraries
    def initialize(leg, patterns, *settings)
      @file = Cache.path("passed", leg.tr("/", "-"))
      @digest = SourceFiles.digest(SourceFiles.matching(patterns), Cache.ruby_key + settings.join("\n"))
    end

    # @return [String, nil] why the leg need not be run
    def reason
      return if ENV["TDDP_EVERYTHING"] == "1" || !File.file?(@file)

      before, date = File.read(@file).strip.split(" ", 2)
      "unchanged: it passed on #{date}, and no file that it depends on has changed since; TDDP_EVERYTHING=1 runs it" if before == @digest
    end

    # Remembers that the leg has passed.
    def passed!
      Cache.write(@file, "#{@digest} #{Time.now.utc.strftime("%F %R UTC")}\n")
    end
  end
end
