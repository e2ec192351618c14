# frozen_string_literal: true

require "etc"
require "fileutils"
require_relative "root"
require_relative "unchanged"

module Setup
  # What is compiled against CUDA, in a Debian 13 root that has it but no GPU: the NCCL module, held against the
  # libraries' own headers, and the shim against a libtorch for CUDA. Then the C tests of both, and one with the real
  # libraries, which tells what is said without a GPU.
  #
  # The root takes minutes to make and the shim minutes to compile, so this is done only when the files that it depends
  # on are others than when it last passed.
  class CUDA
    PACKAGES = %w[ca-certificates cmake g++ libnccl-dev libtorch-cuda-dev make nvidia-cuda-dev pkgconf procps].freeze
    # CUDA and NCCL are not among Debian's free software; what needs them is in contrib.
    # cuDNN, which libtorch's package wants, would be fetched from its vendor as it is installed, with its license agreed to:
    # nothing is linked with it, so this is declined.
    OPTIONS = ["--components=main,contrib,non-free,non-free-firmware",
      "--essential-hook=echo nvidia-cudnn nvidia-cudnn/question select I Decline | chroot \"$1\" debconf-set-selections"].freeze
    # More than half of what is unpacked: libraries to be linked statically, and the packages themselves.
    SURPLUS = %w[usr/lib/**/*_static*.a var/cache/apt/archives/*.deb].freeze

    # What is built and tested here, and what says how.
    FILES = %w[
      CMakeLists.txt include/**/*.h src/**/CMakeLists.txt src/backend/*.{c,h} src/backend/{cuda,fake,nccl}/*.{c,h}
      src/torch/**/*.{cc,h,cmake,map} test/c/CMakeLists.txt test/c/*.{c,h} test/c/{backend,nccl,real,standin}/*.{c,h}
      ext/setup/{cuda,root}.rb
    ].freeze
    SETTINGS = %w[-DCMAKE_BUILD_TYPE=RelWithDebInfo -DTDDP_WERROR=ON -DTDDP_TESTS=ON -DTDDP_GLOO=OFF -DTDDP_TORCH=ON
      -DTDDP_CUDA=ON -DTDDP_NCCL_HEADERS=ON].freeze
    ROOMS = %w[backend nccl real].freeze
    BUILD = "#{Root::SOURCE}/build/cuda"

    # Seconds; what has not ended then counts as not run.
    LIMIT = 1500

    # @param root [Root] for tests, another one
    # @param files [Array<String>] patterns, likewise
    def initialize(root: Root.new("cuda", PACKAGES, options: OPTIONS, surplus: SURPLUS), files: FILES)
      @root = root
      @files = files
    end

    # One leg's work: skipped where it cannot be, or need not be done.
    #
    # @param tests [Tests]
    def run(tests)
      unchanged = Unchanged.new("cuda", @files, @root.folder)
      if (reason = unchanged.reason || @root.obstacle || @root.make)
        return tests.skip("cuda", reason)
      end

      passed = @root.using { tests.check("cuda/build", optional: true) { build } && test(tests) }
      unchanged.passed! if passed
    end

    private

    def test(tests)
      tests.ctest("cuda", BUILD, env: @root.environment("TDDP_TEST_REAL" => "1"), wrapper: @root.enter, only: ["-R", "^(#{ROOMS.join("|")})/"])
    end

    def build
      inside("configuring", "cmake", "-S", Root::SOURCE, "-B", BUILD, *SETTINGS, cure: "the packages of #{self.class} in ext/setup/cuda.rb")
      inside("building on #{Etc.nprocessors} cores", "cmake", "--build", BUILD, "-j", Etc.nprocessors.to_s, "--target", *targets,
        cure: "the compiler's message in the log")
    end

    def inside(title, *command, cure:)
      Console.step("compile against CUDA: #{title}", *@root.enter(*command), env: @root.environment, log: "cuda-build", limit: LIMIT, cure: cure)
    end

    def targets
      tests = Dir.glob(ROOMS.map { |room| "test/c/#{room}/*_test.c" }, base: ROOT).map do |path|
        "test_#{path[%r{([^/]+)/[^/]+\z}, 1]}_#{File.basename(path, "_test.c")}"
      end
      %w[tddp tddp_backend_nccl tddp_torch standin_cudart standin_nccl] + tests.sort
    end
  end
end
