# frozen_string_literal: true

require_relative "gem_test"
require_relative "native"
require_relative "roots"
require_relative "tests"

module Setup
  # The legs of the tests. Each public method queues one or more legs.
  class Legs
    # The logic of devices, on host memory: the CPU's tensors count as those of GPU 0. With gloo operations run on copies of them.
    STAND_INS = {
      "nccl" => %w[gpu_devices gpu_training gpu_hooks gpu_offload gpu_sharded gpu_tensor gpu_pipeline pieces data_parallel_unused
        data_parallel_options sync_batch_norm clip_grad_norm pipeline],
      "gloo" => %w[collectives pieces coalescing point_to_point objects work data_parallel data_parallel_unused]
    }.freeze

    # `rake test`, longest first.
    QUICK = %i[ruby c launch laws].freeze
    # As quick, and of other things: the logic of GPUs, and PyTorch, which is large to install.
    ASIDE = %i[stand_ins partners].freeze
    # What CI runs after it, longest first.
    FURTHER = (%i[debian13 newest slow asan tsan slow_c cuda fuzz schedulers] + ASIDE + %i[gem docs lint]).freeze

    # What the roots run. Their Ruby is the same, so torchrun's tests are run in one of them; the laws and what needs stand-ins
    # in the other.
    DEBIAN13 = (QUICK + ASIDE - %i[launch]).freeze
    NEWEST = %i[ruby c launch partners].freeze

    # The files that decide how a leg ends, for legs that are skipped while these stay the same.
    C_FILES = %w[CMakeLists.txt include/**/* src/**/* test/c/**/* test/bench/**/*].freeze
    GEM_FILES = %w[CMakeLists.txt torch-ddp.gemspec bin/**/* include/**/* src/**/* lib/**/* ext/**/*].freeze
    NEWEST_FILES = (C_FILES + GEM_FILES + %w[Gemfile test/*.rb test/{ruby,launch,partners}/**/* examples/**/*]).uniq.freeze
    FUZZ_FILES = %w[CMakeLists.txt include/**/* src/{base,net,store,launch}/**/* test/c/CMakeLists.txt test/fuzz/**/* ext/setup/legs.rb].freeze
    SCHEDULER_FILES = %w[CMakeLists.txt bin/**/* include/**/* src/**/* lib/**/* ext/torch_ddp/**/* examples/{common,kubernetes,slurm,mnist}/**/*
      test/schedulers/**/* test/ruby/random_collectives.rb ext/setup/system_packages.rb].freeze

    DOCS_FILES = %w[.yardopts Gemfile README.md CHANGELOG.md docs/* include/**/* lib/**/* examples/**/*.md src/README.md ext/torch_ddp/**/* sig/*
      ext/setup/docs.rb ext/setup/docs/* test/docs/**/*].freeze

    PACKAGES = {
      c: [SystemPackages::TORCHRUN + SystemPackages::UCX, "libraries that torchrun and a module load, with their headers, which tests read"],
      partners: [SystemPackages::PYTORCH, "PyTorch as a partner"],
      schedulers: [SystemPackages::SCHEDULERS, "schedulers to be tested with"],
      fuzz: [SystemPackages::FUZZ, "for fuzzing"],
      docs: [SystemPackages::DOCS + SystemPackages::BROWSER, "makes the reference, and searches it"],
      lint: [SystemPackages::LINT, "checks the format"]
    }.freeze
    private_constant :PACKAGES

    # @param names [String] of legs of `rake test`, with commas; empty: all
    # @return [Array<Symbol>]
    # @raise [Failure] for an unknown name
    def self.quick(names)
      wanted = names.split(",").map(&:to_sym)
      all = QUICK + ASIDE
      unknown = wanted - all
      raise Failure, "TDDP_LEGS: #{unknown.join(", ")}: expected some of #{all.join(", ")}" if unknown.any?

      wanted.empty? ? QUICK : all & wanted
    end

    # Runs legs and prints the sums.
    #
    # @param libtorch [Libtorch, nil] nil: only legs that need none
    # @raise [Failure] if a test failed
    def self.run(*names, libtorch:)
      Tests.run do |tests|
        legs = new(tests, libtorch)
        legs.prepare(*names)
        names.each { |name| legs.public_send(name) }
      end
    end

    def initialize(tests, libtorch)
      @tests = tests
      @libtorch = libtorch
    end

    # Installs what legs need beyond the build, before any of them runs. Tests that lack something say so.
    def prepare(*legs)
      PACKAGES.slice(*legs).each_value { |packages, why| SystemPackages.available?(packages, why: why) }
      SystemPackages.provide_etcd if (legs & %i[c launch slow asan tsan]).any?
      {lint: Gems::LINT, slow: Gems::VISION, docs: Gems::DOCS}.each { |leg, group| gems.ensure_group!(group) if legs.include?(leg) }
    end

    def c
      # A third of their time they wait for ends, deadlines and other processes; torchrun's tests do most of it.
      @tests.leg("c", slots: 2) { @tests.ctest("c", Native::BUILD, jobs: 3, only: %w[-LE slow]) }
    end

    {
      laws: {folder: "lint"}, ruby: {jobs: 3, preload: "torch/distributed"}, launch: {jobs: 2, slots: 1}, partners: {jobs: 2}, slow: {jobs: 3}
    }.each do |name, options|
      define_method(name) { minitest(name.to_s, "test/#{options.fetch(:folder, name)}/**/*_test.rb", **options.except(:folder)) }
    end

    def stand_ins
      libraries = {"TDDP_CUDART_LIBRARY" => "cudart", "TDDP_NCCL_LIBRARY" => "nccl"}
      env = libraries.transform_values { |name| File.join(Native::BUILD, "lib/libstandin_#{name}.so") }
      STAND_INS.each do |backend, names|
        minitest("stand-ins-#{backend}", *names.map { |name| "test/ruby/#{name}_test.rb" },
          env: env.merge("TDDP_STAND_IN_CUDA" => "1", "TDDP_TEST_BACKEND" => backend, "STANDIN_DEVICES" => "1"))
      end
    end

    def slow_c
      @tests.leg("slow-c", slots: 2) { @tests.ctest("slow-c", Native::BUILD, jobs: 2, only: %w[-L slow]) }
    end

    def schedulers
      @tests.leg("schedulers", slots: 2) do
        @tests.unless_unchanged("schedulers", SCHEDULER_FILES, @libtorch.key) do
          @tests.minitest("schedulers", "test/schedulers/**/*_test.rb", jobs: 2)
        end
      end
    end

    def gem
      unless_unchanged("gem", GEM_FILES, @libtorch.key) { @tests.check("gem") { GemTest.new(gems).run } }
    end

    def docs
      unless_unchanged("docs", DOCS_FILES, @libtorch.key) do
        next @tests.skip("docs", "yard is not here and could not be installed") unless gems.group?(Gems::DOCS)

        @tests.minitest("docs", "test/docs/**/*_test.rb", env: Gems::DOCS)
      end
    end

    def asan
      sanitized("asan", {"TDDP_SANITIZE" => "address,undefined"},
        env: {"ASAN_OPTIONS" => "detect_leaks=1:abort_on_error=0", "UBSAN_OPTIONS" => "print_stacktrace=1"})
    end

    def tsan
      # Some kernels place memory where ThreadSanitizer does not expect it, unless randomization is off.
      wrapper = system("setarch", "-R", "true", out: File::NULL, err: File::NULL) ? %w[setarch -R] : []
      # Gloo is a system library without ThreadSanitizer, which would report races in it that are none.
      sanitized("tsan", {"TDDP_SANITIZE" => "thread", "TDDP_GLOO" => "OFF"}, wrapper: wrapper,
        env: {"TSAN_OPTIONS" => "halt_on_error=1 second_deadlock_stack=1"})
    end

    def fuzz
      unless_unchanged("fuzz", FUZZ_FILES) do
        compiler = %w[clang-14 clang].find { |name| SystemPackages.program?(name) }
        if SystemPackages.missing(SystemPackages::FUZZ).any? || !compiler
          next @tests.skip("fuzz", "clang and libFuzzer are not here and could not be installed")
        end

        # clang warns where gcc, which the others are compiled with, does not.
        folder = Native.cmake("fuzz", targets: %w[fuzz], options: {
          "TDDP_SANITIZE" => "fuzzer-no-link,address,undefined", "TDDP_GLOO" => "OFF", "TDDP_WERROR" => "OFF",
          "CMAKE_C_COMPILER" => compiler, "CMAKE_BUILD_TYPE" => "None", "CMAKE_C_FLAGS" => "-g -O1"
        })
        @tests.ctest("fuzz", folder, only: %w[-R ^fuzz/])
      end
    end

    def lint
      files = Dir.glob("{include,src,ext,test,examples}/**/*.{c,cc,h}", base: ROOT).sort
      @tests.leg("lint") do
        check_format("clang-format", "clang-format", "--dry-run", "-Werror", *files, available: SystemPackages.program?("clang-format"),
          cure: "clang-format -i FILE")
        check_format("standardrb", *Gems.exec("standardrb", "--no-fix"), available: gems.group?(Gems::LINT), env: Gems::LINT,
          cure: "BUNDLE_WITH=lint bundle exec standardrb --fix")
      end
    end

    def debian13
      @tests.leg("debian13", slots: 3) { Debian13.new.run(@tests, "debian13", DEBIAN13, C_FILES) }
    end

    def newest
      @tests.leg("newest", slots: 3) do
        root = Unstable.new
        if (reason = root.obstacle)
          next @tests.skip("newest", reason)
        end

        @tests.unless_unchanged("newest", NEWEST_FILES, root.folder) { root.run(@tests, "newest", NEWEST, C_FILES) }
      end
    end

    def cuda
      @tests.leg("cuda", slots: 2) { CUDA.new.run(@tests) }
    end

    private

    def gems
      @gems ||= Gems.new(@libtorch)
    end

    def sanitized(name, build, **options)
      @tests.leg(name, slots: 3) { @tests.ctest(name, Native.cmake(name, options: build), jobs: 3, only: %w[-LE many], **options) }
    end

    def minitest(name, *patterns, jobs: 1, slots: jobs, **options)
      @tests.leg(name, slots: slots) { @tests.minitest(name, *patterns, jobs: jobs, **options) }
    end

    def unless_unchanged(name, patterns, *settings, &block)
      @tests.leg(name) { @tests.unless_unchanged(name, patterns, *settings, &block) }
    end

    def check_format(name, *command, available:, **options)
      return @tests.skip(name, "#{name} is not here and could not be installed") unless available

      @tests.check(name) { Console.step(name, *command, log: name, **options) }
    end
  end
end
