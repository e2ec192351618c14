# frozen_string_literal: true

require "etc"
require "fileutils"
require_relative "console"
require_relative "native"

module Setup
  # Builds each harness of test/fuzz with libFuzzer and the sanitizers, and runs it for a bounded time.
  #
  # A harness test/fuzz/NAME_fuzz.c starts from the inputs in test/fuzz/corpus/NAME_fuzz, if there are any.
  class Fuzz
    SECONDS = 30
    FLAGS = %w[-std=c11 -D_GNU_SOURCE -g -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all].freeze
    SANITIZERS = "address,undefined"
    FOLDER = File.join(ROOT, "build/fuzz")

    def self.harnesses
      Dir.glob("test/fuzz/*.c", base: ROOT).sort
    end

    # @return [String, nil]
    def self.compiler
      %w[clang-14 clang].find { |name| SystemPackages.program?(name) }
    end

    # @raise [Failure] with the input that broke it
    def run(harness)
      name = File.basename(harness, ".c")
      program = build(harness, name)
      corpus = File.join(FOLDER, "corpus", name)
      FileUtils.mkdir_p(corpus)
      seeds = File.join(ROOT, "test/fuzz/corpus", name)
      Console.step("fuzz #{name}: #{SECONDS} s", program, "-max_total_time=#{SECONDS}", "-timeout=10", "-rss_limit_mb=2048",
        "-artifact_prefix=#{FOLDER}/#{name}-", corpus, *(File.directory?(seeds) ? [seeds] : []), log: "fuzz-#{name}",
        limit: SECONDS + 60, cure: "the log names the input that broke it, in build/fuzz")
    end

    private

    def build(harness, name)
      program = File.join(FOLDER, name)
      FileUtils.mkdir_p(FOLDER)
      Console.step("fuzz #{name}: building", self.class.compiler, *FLAGS, "-fsanitize=fuzzer,#{SANITIZERS}",
        "-I#{ROOT}/include", "-I#{ROOT}/src", "-o", program, File.join(ROOT, harness), *rooms, "-lpthread", "-ldl", "-lm",
        log: "fuzz-#{name}", cure: "the compiler's message in the log")
      program
    end

    # The rooms, compiled for fuzzing as CMake compiles them otherwise: all but torchrun's own main.
    #
    # @return [Array<String>] what to link
    def rooms
      @rooms ||= begin
        folder = File.join(FOLDER, "rooms")
        cure = "the compiler's message in the log"
        Console.step("fuzz: configuring the rooms", "cmake", "-S", ROOT, "-B", folder, "-DCMAKE_C_COMPILER=#{self.class.compiler}",
          "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_C_FLAGS=#{FLAGS.join(" ")}", "-DTDDP_SANITIZE=fuzzer-no-link,#{SANITIZERS}", "-DTDDP_GLOO=OFF",
          "-DTDDP_TORCH=OFF", *Native.launcher, log: "fuzz-rooms", cure: cure)
        Console.step("fuzz: building the rooms", "cmake", "--build", folder, "-j", Etc.nprocessors.to_s, "--target", "tddp_rooms", "tddp_launch",
          log: "fuzz-rooms", env: Native.ccache, cure: cure)
        [*Dir.glob("src/launch/CMakeFiles/tddp_launch.dir/**/*.o", base: folder), "test/c/libtddp_rooms.a"].map { |path| File.join(folder, path) }
      end
    end
  end
end
