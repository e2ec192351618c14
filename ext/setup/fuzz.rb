# frozen_string_literal: true

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
      program = File.join(FOLDER, name)
      corpus = FileUtils.mkdir_p(File.join(FOLDER, "corpus", name)).first
      seeds = Dir.glob("test/fuzz/corpus/#{name}", base: ROOT)
      Console.step("fuzz #{name}: building", self.class.compiler, *FLAGS, "-fsanitize=fuzzer,#{SANITIZERS}", "-Iinclude", "-Isrc",
        "-o", program, harness, *objects, "-lpthread", "-ldl", "-lm", log: "fuzz-#{name}", cure: "the compiler's message in the log")
      Console.step("fuzz #{name}: #{SECONDS} s", program, "-max_total_time=#{SECONDS}", "-timeout=10", "-rss_limit_mb=2048",
        "-artifact_prefix=#{FOLDER}/#{name}-", corpus, *seeds, log: "fuzz-#{name}",
        limit: SECONDS + 60, cure: "the log names the input that broke it, in build/fuzz")
    end

    private

    # The rooms compiled for fuzzing: all but torchrun's own main.
    #
    # @return [Array<String>] what to link
    def objects
      @objects ||= begin
        folder = Native.cmake("fuzz-rooms", targets: %w[tddp_rooms tddp_launch], options: {
          "CMAKE_C_COMPILER" => self.class.compiler, "CMAKE_BUILD_TYPE" => "None", "CMAKE_C_FLAGS" => FLAGS.join(" "),
          "TDDP_SANITIZE" => "fuzzer-no-link,#{SANITIZERS}", "TDDP_GLOO" => "OFF", "TDDP_WERROR" => "OFF"
        })
        [*Dir.glob("src/launch/CMakeFiles/tddp_launch.dir/**/*.o", base: folder), "test/c/libtddp_rooms.a"].map { |path| File.join(folder, path) }
      end
    end
  end
end
