# frozen_string_literal: true

# Runs the files of minitest that the command line names in one process; options of minitest may follow.
# What is skipped is told with its reason.
#
#   bundle exec ruby -Ilib -Itest test/run.rb test/ruby/store_test.rb -n /pattern/

require "minitest/autorun"

# minitest itself tells the reasons only when it is verbose.
class SkipReasons < Minitest::AbstractReporter
  def initialize
    super
    @skipped = []
  end

  def record(result)
    @skipped << "skipped: #{result.class_name}##{result.name}: #{result.failure.message}" if result.skipped?
  end

  def report
    puts @skipped
  end
end

Minitest.extensions << "skip_reasons"

def Minitest.plugin_skip_reasons_init(_options)
  reporter << SkipReasons.new
end

# What is started in the background or by nohup ignores these, and its children would as well: tests of them need the default.
%w[INT QUIT HUP].each { |name| trap(name, "DEFAULT") }

ARGV.take_while { |argument| !argument.start_with?("-") }.each { |file| require File.expand_path(file) }
