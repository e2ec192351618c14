# frozen_string_literal: true

require "fileutils"
require "tmpdir"
require_relative "cache"
require_relative "console"
require_relative "system_packages"

module Setup
  # etcd, which tests of torchrun's client need: unpacked from Debian's package into the cache. Installing the package
  # would start a service.
  module Etcd
    PACKAGE = "etcd-server"

    module_function

    # Puts the program on this process's path, unless it is there or cannot be had. Tests that miss it say so.
    def provide
      return if SystemPackages.program?("etcd") || !SystemPackages.debian?

      folder = Cache.path("etcd")
      Cache.locked(folder) { fetch(folder) unless File.directory?(folder) }
      ENV["PATH"] = "#{File.join(folder, "usr/bin")}:#{ENV["PATH"]}"
    rescue Failure => e
      Console.say(e.message)
    end

    def fetch(folder)
      unfinished = "#{folder}.unfinished"
      FileUtils.rm_rf(unfinished)
      Dir.mktmpdir do |dir|
        Console.step("etcd, for tests: fetching Debian's package", "apt-get", "-q", "download", PACKAGE, log: "etcd", chdir: dir,
          cure: "`apt-get update`, or check the network")
        Console.step("etcd, for tests: unpacking it into #{folder}", "dpkg-deb", "--extract", Dir.glob(File.join(dir, "*.deb")).fetch(0),
          unfinished, log: "etcd", cure: "free space below #{File.dirname(folder)}")
      end
      File.rename(unfinished, folder)
    end
  end
end
