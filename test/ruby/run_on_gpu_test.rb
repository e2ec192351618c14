# frozen_string_literal: true

require "minitest/autorun"
require "fileutils"
require "open3"
require "tmpdir"

# test/gpu/run itself, which no machine without a GPU would try otherwise: with the tests' stand-ins for CUDA and NCCL.
class RunOnGPUTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  PROGRAM = File.join(ROOT, "test/gpu/run")

  def run_program(*arguments, env: {})
    Open3.capture2e({"OUT" => nil, **env}, PROGRAM, *arguments)
  end

  # The parts themselves are in test/slow/gpu_build_test.rb.
  def test_parts_that_pass_are_reported
    with_programs("echo \"ok $0\"; echo \"a note of $0\" >>\"$TDDP_GPU_NOTES\"") do |dir|
      out, status = run_program("--stand-ins", "--build", dir, env: {"OUT" => File.join(dir, "out"), "PYTHON" => "no-python"})
      assert status.success?, out
      assert_equal out, File.read(File.join(dir, "out/report.md"))
      assert_match(/\A# test\/gpu\/run: WITH STAND-INS/, out)
      %w[operations failures].each { |part| assert_match(/^- passed: #{part}, \d+ s$/, out) }
      assert_match(/^- not run: shim: its CUDA part has no stand-in$/, out)
      assert_match(/a note of .*gpu_failures$/, out)
      assert_match(/^with stand-ins: 2 passed, 0 failed, \d not run, /, out)
      log = File.read(File.join(dir, "out/log.txt"))
      %w[operations failures].each { |name| assert_match(/^ok .*gpu_#{name}$/, log) }
    end
  end

  def test_a_part_that_fails_is_shown
    with_programs("echo \"the reason of $0\"; exit 3") do |dir|
      out, status = run_program("--stand-ins", "--build", dir, "--out", File.join(dir, "out"), env: {"PYTHON" => "no-python"})
      assert_equal 1, status.exitstatus
      assert_match(/^- FAILED: operations: exit status 3, \d s\n +the reason of .*gpu_operations$/, out)
      assert_match(/^- not run: benchmark: it is run by Python/, out)
    end
  end

  def test_a_part_that_hangs_is_ended
    with_programs("exec sleep 60") do |dir|
      out, status = run_program("--stand-ins", "--build", dir, "--out", File.join(dir, "out"), "--seconds", "2", env: {"PYTHON" => "no-python"})
      assert_equal 1, status.exitstatus
      assert_match(/^- FAILED: operations: more than its \d s$/, out)
      assert_match(/^- FAILED: failures: the 2 s for all parts were over before it began$/, out)
    end
  end

  def test_without_a_gpu_it_says_so_at_once
    skip "there is a GPU here" unless Dir["/dev/nvidia[0-9]*"].empty?

    out, status = run_program
    assert_equal 77, status.exitstatus
    assert_match(/no NVIDIA GPU here.*--stand-ins/, out)
  end

  def test_a_wrong_call_is_told
    [["--nonsense"], ["--seconds", "many"], ["--build"]].each do |arguments|
      out, status = run_program(*arguments)
      assert_equal 2, status.exitstatus, arguments.inspect
      assert_includes out, arguments.last
    end
  end

  private

  # A build folder of programs that all do the same.
  def with_programs(script)
    Dir.mktmpdir do |dir|
      FileUtils.mkdir_p(File.join(dir, "test"))
      %w[operations failures all_reduce].each do |name|
        path = File.join(dir, "test/gpu_#{name}")
        File.write(path, "#!/bin/sh\n#{script}\n")
        File.chmod(0o755, path)
      end
      yield dir
    end
  end
end
