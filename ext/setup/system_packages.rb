# frozen_string_literal: true

require "tmpdir"
require_relative "cache"

module Setup
  # Finds out which Debian packages are missing, and installs them where this user may.
  module SystemPackages
    BUILD = %w[ccache cmake g++ make libgloo-dev libopenblas0-pthread ninja-build pkg-config ruby-dev].freeze
    LIBTORCH = %w[libtorch-dev].freeze
    PYTORCH = %w[python3-torch].freeze
    TORCHRUN = %w[libcurl4-openssl-dev libhwloc-dev].freeze
    MPI = %w[openmpi-bin libopenmpi-dev].freeze
    UCX = %w[libucx-dev].freeze
    LINT = %w[clang-format].freeze
    DOCS = %w[doxygen].freeze
    BROWSER = %w[chromium].freeze
    FUZZ = %w[clang-14 libclang-rt-14-dev].freeze
    DEBIAN13 = %w[mmdebstrap].freeze
    COVERAGE = %w[gcovr].freeze
    NPM = %w[npm].freeze
    SCHEDULERS = %w[slurm-wlm munge openmpi-bin libopenmpi-dev mpich libmpich-dev python3-jsonschema].freeze

    module_function

    # What a build needs: libtorch's package only if LIBTORCH names no other.
    def needed
      ENV["LIBTORCH"].to_s.empty? ? BUILD + LIBTORCH : BUILD
    end

    # @return [Array<String>] those of `packages` that are not installed
    def missing(packages)
      return missing_programs(packages) unless debian?

      out, = Open3.capture2("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *packages, err: File::NULL)
      installed = out.lines.filter_map { |line| line[/\Ainstalled (\S+)/, 1] }
      # A Ruby that did not come from Debian brings its own headers.
      installed << "ruby-dev" if File.file?(File.join(RbConfig::CONFIG["rubyhdrdir"].to_s, "ruby.h"))
      packages - installed
    end

    # @raise [Failure] with the one command to run if this user may not install
    def ensure!(packages, why: "needed to build")
      absent = missing(packages)
      return if absent.empty?

      unless debian?
        raise Failure, "step failed: system packages\n  not found: #{absent.join(", ")}\n  likely cure: install them with this " \
          "system's package manager (the names are Debian's)"
      end
      prefix = privilege or
        raise Failure, "step failed: system packages (#{why}): this user may not install them\n  run this once, then try again:\n" \
          "    sudo apt-get update && sudo apt-get install -y --no-install-recommends #{absent.join(" ")}"
      install(prefix, absent, why)
    end

    # @return [Boolean] whether the packages are there now, installed if need be
    def available?(packages, why:)
      ensure!(packages, why: why)
      true
    rescue Failure => e
      Console.say(e.message)
      false
    end

    def install(prefix, packages, why)
      apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]
      begin
        Console.step("system packages: reading the lists", *apt, "update", log: "apt", cure: "check the network")
      rescue Failure => e
        # One of several sources may be unreachable: the packages may come from the others.
        Console.say "#{e.message}\n  going on with the lists that are there"
      end
      Console.step("system packages (#{why}): installing #{packages.join(" ")}", *apt, "install", "-y",
        "--no-install-recommends", *packages, log: "apt", cure: "check the network and the system's package sources")
    end

    # @return [Array<String>, nil] what to put before apt-get; nil if this user may not install
    def privilege
      return [] if Process.uid.zero?

      ["sudo", "-n"] if system("sudo", "-n", "true", out: File::NULL, err: File::NULL)
    end

    def debian?
      File.executable?("/usr/bin/dpkg-query")
    end

    # Elsewhere only the programs can be looked for.
    def missing_programs(packages)
      {"cmake" => "cmake", "g++" => "g++", "make" => "make", "clang-format" => "clang-format", "clang-14" => "clang",
       "mmdebstrap" => "mmdebstrap", "npm" => "npm"}.filter_map do |package, program|
        package if packages.include?(package) && !program?(program)
      end
    end

    # Puts etcd, which tests of torchrun's client need, on this process's path: unpacked from Debian's package into the cache, because
    # installing the package would start a service. Tests skip if it is absent.
    def provide_etcd
      return if program?("etcd") || !debian?

      folder = Cache.path("etcd")
      Cache.make(folder) do |unfinished|
        Dir.mktmpdir do |dir|
          Console.step("etcd, for tests: fetching Debian's package", "apt-get", "-q", "download", "etcd-server", log: "etcd", chdir: dir,
            cure: "`apt-get update`, or check the network")
          Console.step("etcd, for tests: unpacking it into #{folder}", "dpkg-deb", "--extract", *Dir.glob(File.join(dir, "*.deb")), unfinished,
            log: "etcd", cure: "free space below #{File.dirname(folder)}")
        end
      end
      ENV["PATH"] = "#{File.join(folder, "usr/bin")}:#{ENV["PATH"]}"
    rescue Failure => e
      Console.say(e.message)
    end

    def program?(name)
      ENV["PATH"].split(":").any? { |dir| File.executable?(File.join(dir, name)) }
    end
  end
end
