# frozen_string_literal: true

require "etc"
require_relative "cuda"
require_relative "debian13"
require_relative "etcd"
require_relative "fuzz"
require_relative "gem_test"
require_relative "gems"
require_relative "native"
require_relative "system_packages"
require_relative "unchanged"

module Setup
  # Which legs the tests have, and what each runs. Each method queues one or more legs.
  class Legs
    NATIVE = File.join(ROOT, "build/native")

    # The logic of devices, on host memory: the CPU's tensors count as those of GPU 0. With gloo operations run on copies of them.
    STAND_INS = {
      "nccl" => %w[gpu_devices pieces data_parallel_unused data_parallel_options sync_batch_norm clip_grad_norm],
      "gloo" => %w[collectives pieces coalescing point_to_point objects work data_parallel data_parallel_unused]
    }.freeze

    # `rake test`, longest first.
    QUICK = %i[ruby c launch stand_ins partners laws].freeze
    # What CI runs after it, longest first.
    FURTHER = %i[debian13 slow asan tsan slow_c cuda fuzz schedulers gem lint].freeze

    # What decides how a leg ends, for those that are left out while it stays the same.
    C_FILES = %w[CMakeLists.txt include/**/* src/**/* test/c/**/* test/bench/**/*].freeze
    GEM_FILES = %w[CMakeLists.txt torch-ddp.gemspec bin/**/* include/**/* src/**/* lib/**/* ext/**/*].freeze
    FUZZ_FILES = %w[CMakeLists.txt include/**/* src/{base,net,store,launch}/**/* test/fuzz/**/* ext/setup/fuzz.rb].freeze
    SCHEDULER_FILES = %w[CMakeLists.txt bin/**/* include/**/* src/**/* lib/**/* ext/torch_ddp/**/* examples/{common,kubernetes,slurm,mnist}/**/*
      test/schedulers/**/* ext/setup/system_packages.rb].freeze

    # @param names [String] those wanted of `rake test`, with commas; empty: all
    # @return [Array<Symbol>]
    # @raise [Failure] for a name that is none of them
    def self.quick(names)
      wanted = names.split(",").map(&:to_sym)
      unknown = wanted - QUICK
      raise Failure, "TDDP_LEGS: #{unknown.join(", ")}: expected some of #{QUICK.join(", ")}" if unknown.any?

      wanted.empty? ? QUICK : QUICK & wanted
    end

    # @param tests [Tests]
    # @param libtorch [Libtorch, nil] nil: only legs that do without
    def initialize(tests, libtorch)
      @tests = tests
      @libtorch = libtorch
    end

    PACKAGES = {
      c: [SystemPackages::CURL, "libcurl and its header, which a test reads"],
      partners: [SystemPackages::PYTORCH, "PyTorch as a partner"],
      schedulers: [SystemPackages::SCHEDULERS, "schedulers to be tested with"],
      fuzz: [SystemPackages::FUZZ, "for fuzzing"],
      lint: [SystemPackages::LINT, "checks the format"]
    }.freeze
    private_constant :PACKAGES

    # Installs what legs need beyond the build, before any of them runs. What cannot be installed is told by the tests that miss it.
    def prepare(*legs)
      PACKAGES.slice(*legs).each_value { |packages, why| SystemPackages.available?(packages, why: why) }
      Etcd.provide if (legs & %i[c launch slow asan tsan]).any?
      gems.ensure_lint! if legs.include?(:lint)
      gems.ensure_vision! if legs.include?(:slow)
    end

    def c
      @tests.leg("c", slots: 3) { @tests.ctest("c", NATIVE, jobs: 3, only: %w[-LE slow]) }
    end

    def laws
      minitest("laws", "test/lint/**/*_test.rb")
    end

    def ruby
      minitest("ruby", "test/ruby/**/*_test.rb", jobs: 3, preload: "torch/distributed")
    end

    def launch
      minitest("launch", "test/launch/**/*_test.rb", jobs: 2)
    end

    def partners
      minitest("partners", "test/partners/**/*_test.rb", jobs: 2)
    end

    def stand_ins
      libraries = {"TDDP_CUDART_LIBRARY" => "cudart", "TDDP_NCCL_LIBRARY" => "nccl"}
      env = libraries.transform_values { |name| File.join(NATIVE, "lib/libstandin_#{name}.so") }
      STAND_INS.each do |backend, names|
        minitest("stand-ins-#{backend}", *names.map { |name| "test/ruby/#{name}_test.rb" },
          env: env.merge("TDDP_STAND_IN_CUDA" => "1", "TDDP_TEST_BACKEND" => backend, "STANDIN_DEVICES" => "1"))
      end
    end

    def slow
      minitest("slow", "test/slow/**/*_test.rb", jobs: 3)
    end

    def slow_c
      @tests.leg("slow-c", slots: 2) { @tests.ctest("slow-c", NATIVE, jobs: 2, only: %w[-L slow]) }
    end

    def schedulers
      unless_unchanged("schedulers", SCHEDULER_FILES, @libtorch.key) { @tests.minitest("schedulers", "test/schedulers/**/*_test.rb") }
    end

    def gem
      unless_unchanged("gem", GEM_FILES, @libtorch.key) { @tests.check("gem") { GemTest.new(gems).run } }
    end

    def asan
      @tests.leg("asan", slots: 3) do
        folder = Native.cmake("asan", options: {"TDDP_SANITIZE" => "address,undefined"})
        @tests.ctest("asan", folder, jobs: 3, only: %w[-LE many],
          env: {"ASAN_OPTIONS" => "detect_leaks=1:abort_on_error=0", "UBSAN_OPTIONS" => "print_stacktrace=1"})
      end
    end

    def tsan
      @tests.leg("tsan", slots: 3) do
        # Gloo is a system library without ThreadSanitizer, which then sees races in it that are none.
        folder = Native.cmake("tsan", options: {"TDDP_SANITIZE" => "thread", "TDDP_GLOO" => "OFF"})
        # Some kernels place memory where ThreadSanitizer does not expect it, unless told not to randomise it.
        wrapper = system("setarch", "-R", "true", out: File::NULL, err: File::NULL) ? %w[setarch -R] : []
        @tests.ctest("tsan", folder, jobs: 3, only: %w[-LE many], wrapper: wrapper,
          env: {"TSAN_OPTIONS" => "halt_on_error=1 second_deadlock_stack=1"})
      end
    end

    def fuzz
      unless_unchanged("fuzz", FUZZ_FILES) do
        if SystemPackages.missing(SystemPackages::FUZZ).any? || !Fuzz.compiler
          @tests.skip("fuzz", "clang and libFuzzer are not here and could not be installed")
        else
          fuzz = Fuzz.new
          Fuzz.harnesses.each { |harness| @tests.check("fuzz/#{File.basename(harness, ".c")}") { fuzz.run(harness) } }
        end
      end
    end

    def lint
      @tests.leg("lint") do
        if SystemPackages.program?("clang-format")
          @tests.check("clang-format") { clang_format }
        else
          @tests.skip("clang-format", "clang-format is not here and could not be installed")
        end
        if gems.lint?
          @tests.check("standardrb") { standardrb }
        else
          @tests.skip("standardrb", "the gem standard could not be installed")
        end
      end
    end

    def debian13
      @tests.leg("debian13", slots: 3) { Debian13.new.run(@tests, Unchanged.new("debian13/c", C_FILES, *Debian13::PACKAGES)) }
    end

    def cuda
      @tests.leg("cuda", slots: 2) { CUDA.new.run(@tests) }
    end

    private

    def gems
      @gems ||= Gems.new(@libtorch)
    end

    def minitest(name, *patterns, jobs: 1, **options)
      @tests.leg(name, slots: jobs) { @tests.minitest(name, *patterns, jobs: jobs, **options) }
    end

    def unless_unchanged(name, patterns, *settings)
      @tests.leg(name) do
        unchanged = Unchanged.new(name, patterns, *settings)
        if (reason = unchanged.reason)
          @tests.skip(name, reason)
        else
          yield
          unchanged.passed! unless @tests.failed?(name)
        end
      end
    end

    def clang_format
      files = Dir.glob("{include,src,ext,test,examples}/**/*.{c,cc,h}", base: ROOT).sort
      Console.step("clang-format: #{files.size} files", "clang-format", "--dry-run", "-Werror", *files, log: "clang-format", cure: "clang-format -i FILE")
    end

    def standardrb
      Console.step("standardrb", *Gems.exec("standardrb", "--no-fix"), env: Gems::LINT, log: "standardrb", cure: "BUNDLE_WITH=lint bundle exec standardrb --fix")
    end
  end
end
