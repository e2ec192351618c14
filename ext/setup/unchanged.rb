# frozen_string_literal: true

require "digest"
require "fileutils"
require_relative "cache"
require_relative "console"
require_relative "source_files"

module Setup
  # Whether a leg of the tests has passed with just these files before. What it found then is kept in the cache under
  # the name of the leg; TDDP_EVERYTHING=1 (`rake everything`) has all legs run.
  class Unchanged
    # @param leg [String]
    # @param patterns [Array<String>] of the files that decide how the leg ends
    # @param settings [Array<String>] what else does, such as the versions of libraries
    def initialize(leg, patterns, *settings)
      @leg = leg
      @patterns = patterns
      @settings = settings
    end

    # @return [String, nil] why the leg need not be run
    def reason(env = ENV)
      return if env["TDDP_EVERYTHING"] == "1" || !File.file?(file)

      before, date = File.read(file).strip.split(" ", 2)
      "unchanged: it passed on #{date}, and no file that it depends on has changed since; TDDP_EVERYTHING=1 runs it" if before == digest
    end

    # Remembers that the leg has passed.
    def passed!
      FileUtils.mkdir_p(File.dirname(file))
      partial = "#{file}.#{Process.pid}"
      File.write(partial, "#{digest} #{Time.now.utc.strftime("%F %R UTC")}\n")
      File.rename(partial, file)
    end

    # @return [String] of names and contents of the files that matter, as they are when it is first asked for
    def digest
      @digest ||= begin
        sum = Digest::SHA256.new << Cache.ruby_key << @settings.join("\n")
        SourceFiles.matching(@patterns).each { |path| sum << "#{path} #{Digest::SHA256.file(File.join(ROOT, path)).hexdigest}\n" }
        sum.hexdigest
      end
    end

    private

    def file
      Cache.path("passed", @leg.tr("/", "-"))
    end
  end
end
