# frozen_string_literal: true

# Runs the files of minitest that the command line names in one process; options of minitest may follow.
#
#   bundle exec ruby -Ilib -Itest test/run.rb test/ruby/store_test.rb -n /pattern/

require "minitest/autorun"

ARGV.take_while { |argument| !argument.start_with?("-") }.each { |file| require File.expand_path(file) }
