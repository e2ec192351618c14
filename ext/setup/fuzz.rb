# frozen_string_literal: true

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
      Console.step("fuzz #{name}: building", self.class.compiler, *FLAGS, "-fsanitize=fuzzer,address,undefined",
        "-I#{ROOT}/include", "-I#{ROOT}/src", "-o", program, File.join(ROOT, harness), library, "-lpthread", "-ldl", "-lm",
        log: "fuzz-#{name}", cure: "the compiler's message in the log")
      program
    end

    # The rooms, compiled for fuzzing: all but torchrun's own main.
    def library
      @library ||= begin
        objects = sources.map { |source| compile(source) }
        archive = File.join(FOLDER, "librooms.a")
        FileUtils.rm_f(archive)
        Console.step("fuzz: packing the rooms", "ar", "rcs", archive, *objects, log: "fuzz-rooms", cure: "see the log")
        archive
      end
    end

    def sources
      Dir.glob("src/{base,net,store,backend,group,reducer,launch}/**/*.c", base: ROOT).sort - ["src/launch/main.c"]
    end

    def compile(source)
      object = File.join(FOLDER, "#{source.tr("/", "-")}.o")
      FileUtils.mkdir_p(FOLDER)
      command = [self.class.compiler, *FLAGS, "-fsanitize=fuzzer-no-link,address,undefined", "-I#{ROOT}/include", "-I#{ROOT}/src",
        "-c", "-o", object, File.join(ROOT, source)]
      log = Console.log_path("fuzz-rooms")
      return object if system(*command, out: [log, "a"], err: [log, "a"])

      raise Failure, "step failed: fuzz: compiling #{source}\n  log: #{log.delete_prefix("#{ROOT}/")}\n  likely cure: the compiler's message there"
    end
  end
end
