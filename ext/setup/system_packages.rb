# frozen_string_literal: true

require "etc"
require "open3"
require_relative "console"

module Setup
  # Debian packages: which are missing, and installing them where that is allowed.
  module SystemPackages
    BUILD = %w[ccache cmake g++ make libgloo-dev libopenblas0-pthread ninja-build pkg-config ruby-dev].freeze
    LIBTORCH = %w[libtorch-dev].freeze
    PYTORCH = %w[python3-torch].freeze
    CURL = %w[libcurl4-openssl-dev].freeze
    MPI = %w[openmpi-bin libopenmpi-dev].freeze
    LINT = %w[clang-format].freeze
    FUZZ = %w[clang-14 libclang-rt-14-dev].freeze
    DEBIAN13 = %w[mmdebstrap].freeze
    COVERAGE = %w[gcovr].freeze
    NPM = %w[npm].freeze
    SCHEDULERS = %w[slurm-wlm munge openmpi-bin mpich python3-jsonschema].freeze

    module_function

    # What a checkout needs: libtorch's package only where no other libtorch is named.
    def needed
      ENV["LIBTORCH"].to_s.empty? ? BUILD + LIBTORCH : BUILD
    end

    # @return [Array<String>] those of `packages` that are not installed
    def missing(packages)
      return missing_programs(packages) unless debian?

      out, = Open3.capture2("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *packages, err: File::NULL)
      installed = out.lines.filter_map { |line| line[/\Ainstalled (\S+)/, 1] }
      packages - installed - own_ruby
    end

    # @raise [Failure] with the one command to run where this user may not install
    def ensure!(packages, why: "needed to build")
      absent = missing(packages)
      return if absent.empty?

      unless debian?
        raise Failure, "step failed: system packages\n  not found: #{absent.join(", ")}\n  likely cure: install them with this " \
          "system's package manager (the names are Debian's)"
      end
      prefix = privilege
      unless prefix
        raise Failure, "step failed: system packages (#{why}): this user may not install them\n  run this once, then try again:\n" \
          "    sudo apt-get update && sudo apt-get install -y --no-install-recommends #{absent.join(" ")}"
      end
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
        # One unreachable source of many is no reason to stop: what is needed may come from the others.
        Console.say "#{e.message}\n  going on with the lists that are there"
      end
      Console.step("system packages (#{why}): installing #{packages.join(" ")}", *apt, "install", "-y",
        "--no-install-recommends", *packages, log: "apt", cure: "check the network and the system's package sources")
    end

    # @return [Array<String>, nil] what to put before apt-get; nil without the right to install
    def privilege
      return [] if Process.uid.zero?

      ["sudo", "-n"] if system("sudo", "-n", "true", out: File::NULL, err: File::NULL)
    end

    def debian?
      File.executable?("/usr/bin/dpkg-query")
    end

    # A Ruby that did not come from Debian brings its own headers.
    def own_ruby
      headers = File.join(RbConfig::CONFIG["rubyhdrdir"].to_s, "ruby.h")
      File.file?(headers) ? ["ruby-dev"] : []
    end

    # Elsewhere only the programs can be looked for.
    def missing_programs(packages)
      {"cmake" => "cmake", "g++" => "g++", "make" => "make", "clang-format" => "clang-format", "clang-14" => "clang",
       "mmdebstrap" => "mmdebstrap", "npm" => "npm"}.filter_map do |package, program|
        package if packages.include?(package) && !program?(program)
      end
    end

    def program?(name)
      ENV["PATH"].split(":").any? { |dir| File.executable?(File.join(dir, name)) }
    end
  end
end
