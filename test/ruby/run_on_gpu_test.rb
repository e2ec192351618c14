# frozen_string_literal: true

require "minitest/autorun"
require "fileutils"
require "open3"
require "tmpdir"

# test/gpu/run and test/gpu/ruby themselves, which no machine without a GPU would try otherwise: with the tests' stand-ins for
# CUDA and NCCL.
class RunOnGPUTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  PROGRAM = File.join(ROOT, "test/gpu/run")
  RUBY_PROGRAM = File.join(ROOT, "test/gpu/ruby")

  def run_program(*arguments, env: {}, program: PROGRAM)
    Open3.capture2e({"OUT" => nil, **env}, program, *arguments)
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

  # By a Python that knows nothing of torch, and has measured.
  def test_what_ranks_warn_of_does_not_end_a_table
    with_programs("echo ok") do |dir|
      python = File.join(dir, "python")
      File.write(python, <<~'SH', perm: 0o755)
        #!/bin/sh
        case "$1" in
        *machine.py) echo "python_version='Python 3.12'" ;;
        *bench.py) printf '| 8 B | 1.5 |\n[rank1]:[W1127 nccl.cpp:4094] Warning: a communicator\n| 1 KiB | 2.5 |\n' ;;
        esac
      SH
      out, status = run_program("--stand-ins", "--build", dir, "--out", File.join(dir, "out"), env: {"PYTHON" => python})
      assert status.success?, out
      assert_match(/^## Times, with stand-ins.*\n\n\| 8 B \| 1.5 \|\n\| 1 KiB \| 2.5 \|$/, out)
      assert_match(/^\[rank1\]:/, File.read(File.join(dir, "out/log.txt")))
    end
  end

  # The system's timeout(1) ends what hangs; in its place here stands one that says so of each part at once.
  def test_a_part_that_hangs_is_ended
    with_programs("exec sleep 60") do |dir|
      path = File.join(dir, "timeout")
      File.write(path, "#!/bin/sh\n[ \"$1\" = -k ] || exit 127\necho \"$@\" >>#{dir}/limits\nexit 124\n")
      File.chmod(0o755, path)
      out, status = run_program("--stand-ins", "--build", dir, "--out", File.join(dir, "out"),
        env: {"PYTHON" => "no-python", "PATH" => "#{dir}:#{ENV["PATH"]}"})
      assert_equal 1, status.exitstatus
      %w[operations failures].each do |part|
        seconds = out[/^- FAILED: #{part}: more than its (\d+) s$/, 1]
        assert seconds, out
        assert_match(%r{^-k 5 #{seconds} .*/gpu_#{part}$}, File.read(File.join(dir, "limits")))
      end
    end
  end

  def test_parts_do_not_begin_once_the_time_for_all_is_over
    with_programs("exec sleep 60") do |dir|
      out, status = run_program("--stand-ins", "--build", dir, "--out", File.join(dir, "out"), "--seconds", "0", env: {"PYTHON" => "no-python"})
      assert_equal 1, status.exitstatus
      %w[operations failures].each { |part| assert_match(/^- FAILED: #{part}: the 0 s for all parts were over before it began$/, out) }
    end
  end

  def test_without_a_gpu_it_says_so_at_once
    skip "there is a GPU here" unless Dir["/dev/nvidia[0-9]*"].empty?

    [[PROGRAM], [RUBY_PROGRAM, "--gems", "gems"]].each do |program, *arguments|
      out, status = run_program(*arguments, program: program)
      assert_equal 77, status.exitstatus
      assert_match(/no NVIDIA GPU here.*--stand-ins/, out)
    end
  end

  def test_a_wrong_call_is_told
    [["--nonsense"], ["--seconds", "many"], ["--build"]].each do |arguments|
      out, status = run_program(*arguments)
      assert_equal 2, status.exitstatus, arguments.inspect
      assert_includes out, arguments.last
    end
    [["--nonsense"], ["--gems", "gems", "--seconds", "many"], ["--gloo"], ["--stand-ins"]].each do |arguments|
      out, status = run_program(*arguments, program: RUBY_PROGRAM)
      assert_equal 2, status.exitstatus, arguments.inspect
      assert_includes out, arguments.last
    end
  end

  # By a Ruby of its own kind, which runs a file of tests as a shell's.
  def test_files_of_ruby_tests_are_parts
    Dir.mktmpdir do |dir|
      File.write(File.join(dir, "interpreter"), "#!/bin/sh\nexec sh \"$2\"\n", perm: 0o755)
      {
        gpu_one: "echo '2 runs, 3 assertions, 0 failures, 0 errors, 1 skips'; echo 'skipped: OneTest#test_it: the other GPU'",
        gpu_two: "echo '2 runs, 0 assertions, 0 failures, 0 errors, 2 skips'; echo 'skipped: TwoTest#test_it: no GPU is here'",
        three: "echo 'Expected: 1'; echo '12 runs, 3 assertions, 1 failures, 0 errors, 2 skips'; exit 1"
      }.each { |name, script| File.write(File.join(dir, "#{name}_test.rb"), script) }
      script = ". test/gpu/parts.sh; open_report \"$0\" 60; RUBY=(\"$0/interpreter\"); ruby_parts 20 \"$@\"; say \"$passed $failed $absent\""
      out, = Open3.capture2e("bash", "-c", script, dir, *%w[gpu_one gpu_two three].map { |name| File.join(dir, "#{name}_test.rb") }, chdir: ROOT)
      assert_equal out, File.read(File.join(dir, "report.md"))
      assert_match(/\A- passed: ruby-one, \d s: 2 runs, 3 assertions, 0 failures, 0 errors, 1 skips\n      skipped: OneTest#test_it: the other GPU$/, out)
      assert_match(/^- not run: ruby-two: no GPU is here$/, out)
      assert_match(/^- FAILED: ruby-three: exit status 1, \d s\n      Expected: 1$/, out)
      assert_match(/^1 1 1$/, out)
    end
  end

  # What it needs beside a compiler is said before anything is built.
  def test_without_what_ruby_needs_it_says_so
    Dir.mktmpdir do |dir|
      out, status = run_program("--stand-ins", "--gems", dir, "--build", dir, program: RUBY_PROGRAM, env: {"PYTHON" => "no-python", "LIBTORCH" => ""})
      assert_equal 1, status.exitstatus
      assert_match(/^- FAILED: no Python with a torch and its headers is here: PYTHON or LIBTORCH names one$/, out)
    end
  end

  private

  # A build folder of programs that all do the same.
  def with_programs(script)
    Dir.mktmpdir do |dir|
      FileUtils.mkdir_p(File.join(dir, "test"))
      %w[operations failures bench].each do |name|
        path = File.join(dir, "test/gpu_#{name}")
        File.write(path, "#!/bin/sh\n#{script}\n")
        File.chmod(0o755, path)
      end
      yield dir
    end
  end
end
