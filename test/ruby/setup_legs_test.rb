# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rbconfig"
require "tmpdir"
require_relative "../../ext/setup/legs"

# How the legs of the tests run side by side.
class SetupLegsTest < Minitest::Test
  # What legs of these tests find is not the run's.
  def setup
    @results = ENV.delete("TDDP_RESULTS")
  end

  def teardown
    ENV["TDDP_RESULTS"] = @results
  end

  def test_a_job_starts_as_soon_as_its_slots_are_free
    pool = Setup::Pool.new(3)
    begun = Queue.new
    finish = Hash.new { |all, name| all[name] = Queue.new }
    {"a" => 2, "b" => 2, "c" => 1, "d" => 9}.each do |name, slots|
      pool.add(name, slots) do
        begun << name
        finish[name].pop
        Setup::Console.say "#{name} speaks"
      end
    end
    names = []
    out, = capture_io do
      runner = Thread.new { pool.run }
      2.times { names << begun.pop } # a and c: b does not fit beside a
      finish["a"] << true
      names << begun.pop
      finish["c"] << true
      finish["b"] << true
      names << begun.pop # d, which asks for more than there is, alone
      finish["d"] << true
      runner.join
    end
    assert_equal %w[a c], names.first(2).sort
    assert_equal %w[b d], names.last(2)
    assert_equal %w[a b c d], out.scan(/^(\w) speaks\n== \1: over after/).flatten.sort
  end

  def test_a_job_that_raises_ends_the_others
    pool = Setup::Pool.new(2)
    begun, ended = Array.new(2) { Queue.new }
    pool.add("waits", 1) do
      begun << true
      Queue.new.pop
    ensure
      ended << true
    end
    pool.add("raises", 1) do
      begun.pop
      raise IndexError, "broken"
    end
    capture_io { assert_equal "broken", assert_raises(IndexError) { pool.run }.message }
    assert_equal 1, ended.size
  end

  def test_a_leg_that_cannot_be_built_is_a_failure
    tests = Setup::Tests.new(slots: 2)
    tests.leg("one") { raise Setup::Failure, "no compiler" }
    tests.leg("two") { tests.check("two") {} }
    out, = capture_io { assert_equal "1 failed; their output is above and in build/log", assert_raises(Setup::Failure) { tests.close }.message }
    assert_includes out, "no compiler"
    assert_match(/^  one +passed +0   failed +1 /, out)
    assert_match(/^  two +passed +1   failed +0 /, out)
  end

  def test_an_optional_check_that_takes_too_long_was_not_run
    tests = Setup::Tests.new
    slow = -> { Setup::Console.step("sleeping", "sleep", "60", log: "test-late", cure: "wake it", limit: 0) }
    capture_io do
      refute tests.check("optional", optional: true, &slow)
      refute tests.failed?
      refute tests.check("needed", &slow)
      assert tests.failed?
    end
    out, = capture_io { assert_raises(Setup::Failure) { tests.close } }
    assert_match(/^  optional: all of it: not run to its end: step failed \(took too long\): sleeping$/, out)
  end

  def test_some_legs_are_chosen_by_name
    assert_equal Setup::Legs::QUICK, Setup::Legs.quick("")
    assert_equal %i[ruby c], Setup::Legs.quick("c,ruby")
    error = assert_raises(Setup::Failure) { Setup::Legs.quick("c,rubi") }
    assert_equal "TDDP_LEGS: rubi: expected some of ruby, c, launch, laws, stand_ins, partners", error.message
  end

  def test_three_tests_at_a_time_for_each_core_unless_it_is_said_otherwise
    before = ENV.delete("TDDP_TEST_SLOTS")
    assert_equal 3 * Etc.nprocessors, Setup::Tests.slots
    ENV["TDDP_TEST_SLOTS"] = "5"
    assert_equal 5, Setup::Tests.slots
  ensure
    ENV["TDDP_TEST_SLOTS"] = before
  end

  def test_legs_are_those_that_there_are
    assert_empty (Setup::Legs::QUICK + Setup::Legs::FURTHER) - Setup::Legs.public_instance_methods(false)
    patterns = [Setup::Legs::C_FILES, Setup::Legs::GEM_FILES, Setup::Legs::FUZZ_FILES, Setup::Legs::NEWEST_FILES,
      Setup::Legs::SCHEDULER_FILES].flatten
    skip "git is not here" unless Setup::SystemPackages.program?("git") && File.exist?(File.join(Setup::ROOT, ".git"))

    assert_empty(patterns.select { |pattern| Setup::SourceFiles.matching([pattern]).empty? })
    assert_includes Setup::SourceFiles.matching(["src/**/*"]), "src/net/net.h"
    assert_includes Setup::SourceFiles.matching(["src/**/*"]), "src/README.md"
  end

  def test_files_in_forks_are_added_up
    status, out = run_files("--jobs", "2", {"a" => "assert_equal 1, 1", "b" => "assert_equal 1, 2", "c" => "Process.exit!(3)", "d" => "skip 'no moon'"})
    refute status.success?
    assert_equal({passed: 1, failed: 2, skipped: 1}, Setup::Summary.minitest(out))
    assert_equal "4 runs, 2 assertions, 1 failures, 1 errors, 1 skips", out.lines.last.chomp
    assert_match(/  1\) Failure:\nBTest#test_it .*\nExpected: 1\n  Actual: 2/, out)
    assert_match(/c_test\.rb: pid \d+ exit 3/, out)
    assert_match(/^skipped: DTest#test_it: no moon/, out)
  end

  def test_files_in_forks_that_pass
    status, out = run_files("--jobs", "3", "--require", "set", {"a" => "assert defined?(Set)", "b" => "assert true"})
    assert status.success?, out
    assert_equal({passed: 2, failed: 0, skipped: 0}, Setup::Summary.minitest(out))
    _, out = run_files("--jobs", "2", {"a" => "assert true", "b" => "assert true"}, more: ["-n", "ATest#test_it"])
    assert_equal({passed: 1, failed: 0, skipped: 0}, Setup::Summary.minitest(out))
  end

  private

  def run_files(*options, bodies, more: [])
    Dir.mktmpdir do |dir|
      files = bodies.map do |name, body|
        path = File.join(dir, "#{name}_test.rb")
        File.write(path, "require 'minitest/autorun'\nclass #{name.upcase}Test < Minitest::Test\ndef test_it = (#{body})\nend\n")
        path
      end
      out, status = Open3.capture2e(RbConfig.ruby, File.join(Setup::ROOT, "test/run.rb"), *options, *files, *more)
      [status, out]
    end
  end
end
