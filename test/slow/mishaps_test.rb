# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rbconfig"
require "tempfile"
require "tmpdir"
require_relative "../../examples/common/mnist_data"

# What befalls a real training run: a killed or stopped worker, Ctrl-C, a checkpoint that cannot be written. Each
# ends, says why, and leaves no process behind.
class MishapsTest < Minitest::Test
  FACTOR = Float(ENV.fetch("TDDP_TEST_TIMEOUT_MULTIPLIER", "1"))

  # Seconds after which a training is stuck.
  LIMIT = 60 * FACTOR

  ROOT = File.expand_path("../..", __dir__)
  DATA = File.join(ROOT, "examples/mnist/data")

  def setup
    MNISTData.fetch(DATA)
    @mark = "MISHAPS_TEST_#{Process.pid}_#{name}"
  rescue MNISTData::Unreachable => e
    skip "MNIST is not here and cannot be fetched: #{e.message}"
  end

  # Starts a training, yields its torchrun's process id and its workers' once batches pass, and returns its
  # output and status.
  def mishap(*options, command: %w[bundle exec torchrun --standalone --nproc-per-node=2 --shutdown-timeout=5])
    log = Tempfile.new("mishap")
    pid = Process.spawn({@mark => "1"}, *command, "examples/mnist/distributed.rb", "--data-dir", DATA, "--log-interval", "1",
      *options, :chdir => ROOT, [:out, :err] => log.path, :pgroup => true)
    wait_until { File.read(log.path).match?(/3 of 469 batches/) }
    yield pid, workers(pid)
    status = nil
    wait_until { status = Process.wait2(pid, Process::WNOHANG)&.last }
    wait_until { marked.empty? }
    [File.read(log.path), status]
  ensure
    marked.each { |left| Process.kill("KILL", left) }
    log&.close!
  end

  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC)
  end

  def wait_until
    limit = now + LIMIT
    until yield
      flunk "waited #{LIMIT} s in vain" if now > limit
      sleep 0.05
    end
  end

  # Those that a process has started; where it is torchrun, whose agent starts them, its agent's.
  def workers(parent)
    found = children(parent)
    agents = found.select { |pid| File.read("/proc/#{pid}/comm").start_with?("torchrun") }
    agents.empty? ? found : agents.flat_map { |agent| children(agent) }
  end

  def children(parent)
    Dir["/proc/[0-9]*/stat"].filter_map do |file|
      fields = File.read(file).rpartition(")").last.split
      Integer(file[/\d+/]) if fields[1] == parent.to_s
    rescue Errno::ENOENT, Errno::ESRCH
      nil
    end
  end

  # Processes that inherited this test's mark.
  def marked
    Dir["/proc/[0-9]*/environ"].filter_map do |file|
      Integer(file[/\d+/]) if File.binread(file).include?("#{@mark}=1")
    rescue Errno::ENOENT, Errno::ESRCH, Errno::EACCES
      nil
    end
  end

  def test_a_killed_worker
    out, status = mishap { |_, workers| Process.kill("KILL", workers.last) }
    assert_equal 1, status.exitstatus
    assert_match(/SIGKILL/, out)
    assert_match(/rank +: [01]/, out)
  end

  def test_ctrl_c
    out, status = mishap { |torchrun, _| Process.kill("INT", -torchrun) }
    assert_equal 130, status.exitstatus || 128 + status.termsig
    assert_equal ["torchrun: SIGINT received: stopping workers; send it again to kill them"], told(out)
  end

  def test_ctrl_c_without_torchrun
    out, status = mishap("--gpus", "2", command: [RbConfig.ruby]) { |parent, _| Process.kill("INT", -parent) }
    assert_equal 130, status.exitstatus
    assert_equal ["interrupted"], told(out)
  end

  # All but the training's own lines.
  def told(out)
    out.lines(chomp: true).grep_v(/\A(2 ranks on|epoch 1: )/)
  end

  def test_a_stopped_worker_does_not_outlive_the_job
    out, status = mishap do |torchrun, workers|
      Process.kill("STOP", workers.first)
      Process.kill("TERM", torchrun)
    end
    assert_equal 143, status.exitstatus || 128 + status.termsig
    assert_match(/SIGTERM/, out)
  end

  def test_a_checkpoint_that_cannot_be_written_ends_the_job
    Dir.mktmpdir do |dir|
      File.write(File.join(dir, "file"), "kept")
      out, status = Open3.capture2e("bundle", "exec", "torchrun", "--standalone", "--nproc-per-node=2",
        "examples/mnist/distributed.rb", "--data-dir", DATA, "--subset", "500", "--epochs", "1", "--checkpoint", File.join(dir, "file", "c"),
        chdir: ROOT)
      assert_equal 1, status.exitstatus
      assert_match(/CheckpointError: .*(File exists|Not a directory)/, out)
      assert_equal ["file"], Dir.children(dir)
      assert_equal "kept", File.read(File.join(dir, "file"))
    end
  end
end
