# frozen_string_literal: true

require_relative "scheduler_case"

# Open MPI's mpirun and MPICH's mpiexec, which start processes that know nothing of MPI.
class MPITest < SchedulerCase
  # Debian has both under one name, and these besides.
  MPIRUN = "mpirun.openmpi"
  MPIEXEC = "mpiexec.hydra"

  def need(program)
    return if system("sh", "-c", "command -v #{program}", out: File::NULL, err: File::NULL)

    skip "#{program} is not installed (Debian's #{(program == MPIRUN) ? "openmpi-bin" : "mpich"}; rake test:schedulers installs openmpi-bin)"
  end

  # All of it on the loopback interface, and with as many processes as one likes.
  def mpirun(*arguments, **options)
    need(MPIRUN)
    root = Process.uid.zero? ? ["--allow-run-as-root"] : []
    # Its folder of the session is its own affair.
    @leaves_files = true
    run_command(MPIRUN, *root, "--oversubscribe", "--bind-to", "none", "--mca", "oob_tcp_if_include", "lo", "--mca", "btl", "self,vader", *arguments, **options)
  end

  def test_processes_of_one_host_meet
    lines = joined(mpirun("-np", "3", *script(JOIN)))
    assert_equal 3.times.map { |rank| %W[6 #{rank} 3 #{rank} 3 127.0.0.1] }, lines.map { |line| line.first(6) }
    assert_equal 1, lines.map(&:last).uniq.size
  end

  def test_two_jobs_at_once_do_not_meet
    need(MPIRUN)
    ports = Array.new(2) { Thread.new { joined(mpirun("-np", "2", *script(JOIN))).map(&:last).uniq } }.map(&:value)
    assert_equal [1, 1], ports.map(&:size)
    assert_equal 2, ports.flatten.uniq.size
  end

  # The second host is this machine under another name, entered by what stands for ssh.
  def test_processes_of_two_hosts_meet_where_mpirun_runs
    need(MPIRUN)
    skip "another host name needs root" unless system("unshare", "-u", "true", out: File::NULL, err: File::NULL)
    agent = File.join(@folder, "agent")
    File.write(agent, %(#!/bin/sh\nhost=$1\nshift\nexec unshare -u sh -c "hostname $host; $*"\n))
    File.chmod(0o755, agent)
    lines = joined(mpirun("--mca", "plm_rsh_agent", agent, "--mca", "plm", "rsh", "--host", "#{Socket.gethostname}:2,127.0.0.2:1", "-np", "3", *script(JOIN)))
    assert_equal [%w[6 0 3 0 2 127.0.0.1], %w[6 1 3 1 2 127.0.0.1], %w[6 2 3 0 1 127.0.0.1]], lines.map { |line| line.first(6) }
  end

  def test_what_is_set_goes_before
    port = free_port.to_s
    lines = joined(mpirun("-np", "2", "-x", "MASTER_ADDR=localhost", "-x", "MASTER_PORT=#{port}", *script(JOIN)))
    assert_equal [["localhost", port]] * 2, lines.map { |line| line.last(2) }
  end

  def test_a_torchrun_within
    lines = joined(mpirun("-np", "1", BINARY, "--nproc-per-node=2", *ruby(JOIN)))
    assert_equal [%w[3 0 2 0 2], %w[3 1 2 1 2]], lines.map { |line| line.first(5) }
  end

  def test_the_example
    result = mpirun("-np", "2", RbConfig.ruby, TRAIN)
    assert_code 0, result
    assert_match(/^20 steps, loss 0\.\d+$/, result.out)
  end

  def test_mpich
    need(MPIEXEC)
    lines = joined(run_command(MPIEXEC, "-n", "3", *script(JOIN)))
    assert_equal 3.times.map { |rank| %W[6 #{rank} 3 #{rank} 3 127.0.0.1] }, lines.map { |line| line.first(6) }
    # A shell between does not matter: all have the same ancestor.
    lines = joined(run_command(MPIEXEC, "-n", "2", "sh", "-c", "#{script(JOIN).join(" ")}; true"))
    assert_equal %w[3 3], lines.map(&:first)
  end
end
