# frozen_string_literal: true

require "digest"
require "etc"
require "fileutils"
require_relative "root"

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
      src/torch/*.{cc,h,cmake,map} test/c/CMakeLists.txt test/c/*.{c,h} test/c/{backend,nccl,real,standin}/*.{c,h}
      ext/setup/{cuda,root}.rb
    ].freeze
    SETTINGS = %w[-DCMAKE_BUILD_TYPE=RelWithDebInfo -DTDDP_WERROR=ON -DTDDP_TESTS=ON -DTDDP_GLOO=OFF -DTDDP_TORCH=ON
      -DTDDP_CUDA=ON -DTDDP_NCCL_HEADERS=ON].freeze
    ROOMS = %w[backend nccl real].freeze
    BUILD = "#{Root::SOURCE}/build/cuda"

    # @param root [Root] for tests, another one
    # @param files [Array<String>] patterns, likewise
    def initialize(root: Root.new("cuda", PACKAGES, options: OPTIONS, surplus: SURPLUS), files: FILES)
      @root = root
      @files = files
    end

    # One leg's work: skipped where it cannot be, or need not be done.
    #
    # @param tests [Tests]
    def run(tests, env: ENV)
      digest = fingerprint
      if (reason = unchanged(digest, env) || @root.obstacle || @root.make)
        return tests.skip("cuda", reason)
      end

      @root.using do
        tests.check("cuda/build") { build }
        next if tests.failed?

        tests.ctest("cuda", BUILD, env: @root.environment("TDDP_TEST_REAL" => "1"), wrapper: @root.enter,
          only: ["-R", "^(#{ROOMS.join("|")})/"])
      end
      File.write(passed, "#{digest} #{Time.now.utc.strftime("%F %R UTC")}\n") unless tests.failed?
    end

    # @return [String] of names and contents of the files that matter
    def fingerprint
      sum = Digest::SHA256.new << @root.folder
      found = Root.source_files.select { |path| @files.any? { |pattern| File.fnmatch?(pattern, path, File::FNM_PATHNAME | File::FNM_EXTGLOB) } }
      found.sort.each { |path| sum << "#{path} #{Digest::SHA256.file(File.join(ROOT, path)).hexdigest}\n" }
      sum.hexdigest
    end

    # @return [String, nil] why this need not be done
    def unchanged(digest, env = ENV)
      return "TDDP_CUDA_LEG=0 leaves it out" if env["TDDP_CUDA_LEG"] == "0"
      return unless env["TDDP_CUDA_LEG"].to_s.empty? && File.file?(passed)

      before, date = File.read(passed).strip.split(" ", 2)
      "it passed on #{date}, and no file that it depends on has changed since; TDDP_CUDA_LEG=1 runs it" if before == digest
    end

    private

    # Kept beside the root: it says nothing once that is another one.
    def passed
      "#{@root.folder}.passed"
    end

    def build
      inside("configuring", "cmake", "-S", Root::SOURCE, "-B", BUILD, *SETTINGS, cure: "the packages of #{self.class} in ext/setup/cuda.rb")
      inside("building on #{Etc.nprocessors} cores", "cmake", "--build", BUILD, "-j", Etc.nprocessors.to_s, "--target", *targets,
        cure: "the compiler's message in the log")
    end

    def inside(title, *command, cure:)
      Console.step("compile against CUDA: #{title}", *@root.enter(*command), env: @root.environment, log: "cuda-build", cure: cure)
    end

    def targets
      tests = Dir.glob(ROOMS.map { |room| "test/c/#{room}/*_test.c" }, base: ROOT).map do |path|
        "test_#{path[%r{([^/]+)/[^/]+\z}, 1]}_#{File.basename(path, "_test.c")}"
      end
      %w[tddp tddp_backend_nccl tddp_torch standin_cudart standin_nccl] + tests.sort
    end
  end
end
