# frozen_string_literal: true

require "rubygems"
require_relative "native"

module Setup
  # Builds the gem's two files: the sources, and for x86-64 Linux the same with the C core compiled.
  #
  # In the second are libtddp, torchrun and the NCCL backend, which link libc alone. The backends gloo and mpi, the libtorch shim and the
  # extension go with the very Gloo, MPI, libtorch, torch-rb and Rice that are installed, so both files have their sources, compiled at
  # installation.
  # rake-compiler's native gems have no extension to compile, so this is plain RubyGems.
  class GemFiles
    FOLDER = File.join(ROOT, "build/gems")
    PLATFORM = "x86_64-linux"
    # Debian 12's. What is compiled elsewhere must not need a newer one.
    GLIBC = "2.36"
    # Where its users find the core; extconf.rb looks here too.
    NATIVE = "lib/torch_ddp/native"
    # Of src, what is compiled at installation.
    SHIMS = %r{\Asrc/(torch|backend/gloo|backend/mpi)/}
    # Files of the repository that are for those who work on it.
    UNSHIPPED = %r{\A(\.|(Gemfile|Rakefile|torch-ddp\.gemspec)\z|(examples|test|ext/setup)/|ext/Rakefile\z)}

    # @return [Gem::Specification]
    def self.specification
      Gem::Specification.load(File.join(ROOT, "torch-ddp.gemspec")) or raise Failure, "step failed: torch-ddp.gemspec could not be read"
    end

    # Compares the sources' file list with git.
    #
    # @return [Array<String>] what is missing and what is surplus, a line each
    # @raise [Failure] outside a git checkout
    def self.differences
      tracked = SourceFiles.all
      files = specification.files
      missing = tracked.grep_v(UNSHIPPED) - files
      missing.map { |path| "#{path} is in git, not in the gem" } + (files - tracked).map { |path| "#{path} is in the gem, not in git" }
    end

    # @return [Boolean] whether the precompiled gem can be made here
    def self.native?
      RbConfig::CONFIG.values_at("host_cpu", "host_os").join("-").match?(/\Ax86_64-linux(-gnu)?\z/)
    end

    def initialize
      @spec = self.class.specification
    end

    # @return [String] the gem file
    def source
      @source ||= build(@spec, ROOT)
    end

    # @return [String] the gem file
    # @raise [Failure] where what is compiled would not run on every x86-64 Linux with {GLIBC}
    def native
      return @native if @native

      raise Failure, "step failed: the precompiled gem is for x86-64 Linux, not for #{RbConfig::CONFIG["host"]}" unless self.class.native?

      stage = File.join(FOLDER, "stage")
      FileUtils.rm_rf(stage)
      spec = @spec.dup
      spec.platform = Gem::Platform.new(PLATFORM)
      spec.files = @spec.files.reject { |path| path.start_with?("src/") && !path.match?(SHIMS) && !path.end_with?(".cmake") }
      spec.files.each { |path| copy(path, stage) }
      spec.files += compile_core(stage)
      File.write(File.join(stage, "torch-ddp.gemspec"), spec.to_ruby)
      @native = build(spec, stage)
    end

    private

    def copy(path, stage)
      FileUtils.mkdir_p(File.dirname(File.join(stage, path)))
      FileUtils.cp(File.join(ROOT, path), File.join(stage, path), preserve: true)
    end

    # @return [Array<String>] what it installed, below the folder
    def compile_core(stage)
      prefix = File.join(stage, NATIVE)
      # Optimized more than what is developed with, which gives other warnings.
      folder = Native.cmake("core", options: {"TDDP_TESTS" => "OFF", "TDDP_GLOO" => "OFF", "TDDP_MPI" => "OFF", "TDDP_WERROR" => "OFF", "CMAKE_BUILD_TYPE" => "Release"})
      Console.step("gem: the compiled core", "cmake", "--install", folder, "--strip", "--prefix", prefix, log: "gem", cure: Native::CURE)
      # RubyGems warns of links in gems, and a copy does as well: programs and modules name the library by its soname.
      Dir.glob("#{prefix}/lib/*").select { |path| File.symlink?(path) }.each do |path|
        file = File.realpath(path)
        File.delete(path)
        FileUtils.cp(file, path)
      end
      installed = Dir.glob("#{NATIVE}/**/*", base: stage).select { |path| File.file?(File.join(stage, path)) }.sort
      installed.each { |path| check_glibc(File.join(stage, path)) }
    end

    def check_glibc(path)
      return unless File.binread(path, 4) == "\x7FELF".b

      out, status = Open3.capture2("objdump", "-T", path)
      raise Failure, "step failed: objdump could not read #{path}" unless status.success?

      newest = out.scan(/\bGLIBC_([\d.]+)/).flatten.map { |version| Gem::Version.new(version) }.max
      return unless newest && newest > Gem::Version.new(GLIBC)

      raise Failure, "step failed: #{path} needs glibc #{newest}, and the precompiled gem promises #{GLIBC}\n" \
        "  likely cure: `rake release:check` builds it in a root folder of Debian 12"
    end

    def build(spec, folder)
      file = File.join(FOLDER, spec.file_name)
      FileUtils.mkdir_p(FOLDER)
      Console.step("gem: building #{spec.file_name}", "gem", "build", "torch-ddp.gemspec", "--output", file, chdir: folder, log: "gem",
        cure: "the message in the log")
      file
    end
  end
end
