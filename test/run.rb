# frozen_string_literal: true

# Runs the files of minitest that the command line names; options of minitest may follow. What is skipped is told with its reason.
#
#   bundle exec ruby -Ilib -Itest test/run.rb test/ruby/store_test.rb -n /pattern/       # in this process
#   bundle exec ruby -Ilib -Itest test/run.rb --jobs 3 --require torch/distributed test/ruby/*_test.rb
#
# The second one runs each file in a fork of its own, three at a time; what all of them need is loaded once.

require "minitest"

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

# Runs each file in a process of its own, forked from this one, and adds up their counts.
class ForkedFiles
  COUNTS = /^(\d+) runs, (\d+) assertions, (\d+) failures, (\d+) errors, (\d+) skips$/
  NAMES = %w[runs assertions failures errors skips].freeze

  def initialize(files, jobs, arguments)
    # Large files tend to take long; begun last, they would be waited for alone.
    @waiting = files.sort_by { |file| -File.size(file) }
    @jobs = jobs
    @arguments = arguments
    @running = {}
    @sums = Array.new(NAMES.size, 0)
  end

  # @return [Boolean] whether all passed
  def run
    until @waiting.empty? && @running.empty?
      start(@waiting.shift) while @running.size < @jobs && @waiting.any?
      pid, status = Process.wait2
      finish(*@running.delete(pid), status) if @running.key?(pid)
    end
    puts "", @sums.zip(NAMES).map { |pair| pair.join(" ") }.join(", ")
    $stdout.flush
    @sums[0].positive? && @sums[2..3].sum.zero?
  ensure
    @running.each do |pid, (file, output, _)|
      Process.kill(:TERM, pid)
      puts "#{file}: not done", File.read(output.path).scrub
      File.unlink(output.path)
    end
  end

  private

  def start(file)
    output = Tempfile.create("torch-ddp-test")
    pid = fork do
      # By name and for writing alone, so that tests can reopen them as those of any program.
      $stdout.reopen(output.path, "a")
      $stderr.reopen(output.path, "a")
      $stdout.sync = true
      @running.clear
      leave_out_static_destructors
      # The last test that it names is the one that it is at.
      ARGV.replace(["--verbose", *@arguments])
      require "minitest/autorun"
      require file
      # What the file defines becomes old, too: its tests fork.
      3.times { GC.start(full_mark: false) }
    end
    @running[pid] = [file, output, Process.clock_gettime(Process::CLOCK_MONOTONIC)]
  end

  # libtorch's take 0.2 s of a core in a fork. Handlers of exit run last one first: this one after all that is Ruby's and what
  # the tests registered since, and before those that came with the libraries.
  def leave_out_static_destructors
    libc = Fiddle::Handle::DEFAULT
    Fiddle::Function.new(libc["on_exit"], [Fiddle::TYPE_VOIDP, Fiddle::TYPE_VOIDP], Fiddle::TYPE_INT).call(libc["_exit"], nil)
  end

  def finish(file, output, started, status)
    output.rewind
    text = output.read.scrub
    output.close
    File.unlink(output.path)
    counts = text.scan(COUNTS).last&.map(&:to_i)
    # One whose tests the options leave out, which newer versions of minitest take for a mistake, has not failed.
    left_out = counts&.first&.zero?
    # A process that ended without a word counts as an error.
    counts ||= [1, 0, 0, 1, 0]
    counts[3] += 1 if !status.success? && counts[2..3].sum.zero? && !left_out
    @sums = @sums.zip(counts).map(&:sum)
    name = file.delete_prefix("#{Dir.pwd}/")
    puts format("%-60s %4d runs %7.1f s", name, counts[0], Process.clock_gettime(Process::CLOCK_MONOTONIC) - started)
    passed = status.success? || left_out
    puts passed ? text.lines.grep(/\Askipped: /) : text.gsub(COUNTS, "")
    puts "#{name}: #{status}" unless passed
    $stdout.flush
  end
end

# What is started in the background or by nohup ignores these, and its children would as well: tests of them need the default.
%w[INT QUIT HUP].each { |name| trap(name, "DEFAULT") }

jobs = (ARGV.first == "--jobs") ? Integer(ARGV.shift(2).last) : 1
preload = (ARGV.first == "--require") ? ARGV.shift(2).last : nil
files = ARGV.take_while { |argument| !argument.start_with?("-") }.map { |file| File.expand_path(file) }
if jobs > 1
  require "fiddle"
  require "tempfile"
  require preload if preload
  # Objects that are old are left where they are by the collector, so that forks go on sharing their pages.
  4.times { GC.start } if preload
  # Exit handlers are the files' own.
  exit!(ForkedFiles.new(files, jobs, ARGV.drop(files.size)).run)
else
  require "minitest/autorun"
  files.each { |file| require file }
end
