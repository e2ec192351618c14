# frozen_string_literal: true

require_relative "mpi_modules"
require_relative "scheduler_case"
require_relative "slurm_cluster"

# Slurm's srun and sbatch, of a real one.
class SlurmTest < SchedulerCase
  def setup
    super
    reason = SlurmCluster.obstacle
    skip reason if reason
    @cluster = SlurmCluster.shared
  end

  # A job that a test which failed has left is no job of the next.
  def teardown
    @cluster&.cancel
    super
  end

  def environment(extra = {})
    super((@cluster ? @cluster.environment : {}).merge("TORCHRUN" => BINARY.to_s, "NPROC" => "1").merge(extra))
  end

  def srun(*command, **options)
    run_command("srun", *command, **options)
  end

  def torchrun(*arguments)
    [BINARY, *arguments.map(&:to_s)]
  end

  # Submits a script from the checkout's folder.
  #
  # @return [String] the job's number; its output comes into a file
  def submit(*arguments, env: {})
    @output = File.join(@folder, "job.log")
    out, err, status = Open3.capture3(environment(env), "sbatch", "--parsable", "--output=#{@output}", *arguments.map(&:to_s), chdir: ROOT)
    assert status.success?, err
    out.strip
  end

  def output
    File.exist?(@output) ? File.read(@output) : ""
  end

  def state(job)
    @cluster.ask("scontrol", "show", "job", job)[/JobState=(\w+)/, 1]
  end

  # Waits for a job's end.
  #
  # @return [Array(String, String)] its state, and its output
  def ended(job)
    eventually(-> { "job #{job} to end; it is #{state(job)}:\n#{output}" }) do
      state(job) if %w[COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL].include?(state(job))
    end.then { |found| [found, output] }
  end

  def await_output(pattern)
    eventually(-> { "#{pattern.inspect} in:\n#{output}" }) { output[pattern] }
  end

  def test_tasks_of_one_node_meet
    lines = joined(srun("-n2", "-N1", *script(JOIN)))
    assert_equal [%w[3 0 2 0 2 127.0.0.1], %w[3 1 2 1 2 127.0.0.1]], lines.map { |line| line.first(6) }
    assert_equal 1, lines.map(&:last).uniq.size
  end

  def test_tasks_of_two_nodes_meet_at_the_first
    skip "this machine's only name is localhost" if @cluster.nodes.size < 2
    # By blocks: two tasks on the first node, one on the second.
    lines = joined(srun("-n3", "-N2", "-m", "block", *script(JOIN)))
    first = @cluster.ask("scontrol", "show", "hostnames", @cluster.nodes.join(",")).lines(chomp: true).min
    assert_equal [%W[6 0 3 0 2 #{first}], %W[6 1 3 1 2 #{first}], %W[6 2 3 0 1 #{first}]], lines.map { |line| line.first(6) }
  end

  # Two parts of one step, each with options of its own.
  def test_tasks_of_a_job_of_two_parts_meet
    skip "this machine's only name is localhost" if @cluster.nodes.size < 2
    lines = joined(srun("-n2", "-N1", *script(JOIN), ":", "-n1", "-N1", *script(JOIN)))
    assert_equal [%w[6 0 3 0 2], %w[6 1 3 1 2], %w[6 2 3 0 1]], lines.map { |line| line.first(5) }
  end

  def test_tasks_that_were_placed_by_hand_want_an_address
    skip "this machine's only name is localhost" if @cluster.nodes.size < 2
    hosts = File.join(@folder, "hosts")
    File.write(hosts, "#{@cluster.nodes.sort.reverse.join("\n")}\n")
    by_hand = ["-n2", "-m", "arbitrary"]
    result = srun(*by_hand, "--kill-on-bad-exit=1", *script(JOIN), env: {"SLURM_HOSTFILE" => hosts})
    refute_equal 0, result.code
    assert_match(/MASTER_ADDR is not set, and Slurm's srun does not say/, result.err)
    lines = joined(srun(*by_hand, *script(JOIN), env: {"SLURM_HOSTFILE" => hosts, "MASTER_ADDR" => "localhost"}))
    assert_equal [%w[3 0 2 0 1 localhost], %w[3 1 2 0 1 localhost]], lines.map { |line| line.first(6) }
  end

  def test_steps_of_one_job_at_once_do_not_meet
    File.write(File.join(@folder, "both.sh"), <<~SH)
      #!/bin/sh
      srun -n2 -N1 --exact "$@" &
      srun -n2 -N1 --exact "$@"
      wait
    SH
    job = submit("--ntasks=4", "--nodes=1", File.join(@folder, "both.sh"), *script(JOIN))
    state, text = ended(job)
    assert_equal "COMPLETED", state, text
    lines = text.lines.map(&:split)
    assert_equal 4, lines.size, text
    assert_equal [2, 2], lines.map(&:last).tally.values, text
    assert_equal %w[3] * 4, lines.map { |line| line[1] }
  end

  # Its environment looks like a task's.
  def test_the_script_of_sbatch_is_no_task
    File.write(File.join(@folder, "job.sh"), "#!/bin/sh\nenv | grep -c SLURM_PROCID=0\n#{RbConfig.ruby} #{ruby(JOIN).first}\n")
    state, text = ended(submit("--ntasks=2", File.join(@folder, "job.sh")))
    assert_equal "FAILED", state
    assert_match(/\A1$/, text)
    assert_match(/rank is not known.*start it with srun/, text)
  end

  def test_pytorchs_variables_go_before_slurms
    code = 'puts ENV.values_at("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID").join(" ")'
    result = srun("-n1", *torchrun("--nproc-per-node=2", *ruby("#{JOIN}\n#{code}")), env: {"MASTER_ADDR" => nil})
    lines = joined(result)
    assert_equal [%w[3 0 2 0 2], %w[3 1 2 1 2]], lines.map { |line| line.first(5) }
    assert_equal ["0 2 0 0", "1 2 1 0"], result.out.lines(chomp: true).grep(/\A\d/).sort
  end

  def test_a_failing_task_ends_the_step
    code = 'exit 3 if ENV["SLURM_PROCID"] == "1"; sleep'
    result = srun("-n2", "--kill-on-bad-exit=1", *script(code))
    # Srun itself ends with the highest code, which may be that of a task that it ended.
    refute_equal 0, result.code
    assert_match(/task 1: Exited with exit code 3/, result.err)
  end

  # Tasks that meet by MPI alone, with Slurm's own way to tell them of each other.
  def test_the_backend_mpi
    reason = MPIModules.obstacle("mpich")
    skip reason if reason
    result = srun("--mpi=pmi2", "-n2", *script(JOIN.sub('"gloo"', '"mpi"')), env: {"TDDP_BACKEND_PATH" => MPIModules.folder("mpich"), "TDDP_SHM" => "0"})
    assert_equal [%w[3 0 2 0 2], %w[3 1 2 1 2]], joined(result).map { |line| line.first(5) }
  end

  def test_the_example_with_a_process_for_each_task
    job = submit("--nodes=1", "#{ROOT}/examples/slurm/srun.sbatch", RbConfig.ruby, TRAIN)
    state, text = ended(job)
    assert_equal "COMPLETED", state, text
    assert_match(/^0: rank 0 of 2, local rank 0, on /, text)
    assert_match(/^1: rank 1 of 2, local rank 1, on /, text)
    assert_match(/^0: 20 steps, loss 0\.\d+$/, text)
  end

  def test_the_example_with_a_torchrun_for_each_node
    nodes = @cluster.nodes.size
    job = submit("--nodes=#{nodes}", "#{ROOT}/examples/slurm/torchrun.sbatch", TRAIN, env: {"NPROC" => "2"})
    state, text = ended(job)
    assert_equal "COMPLETED", state, text
    size = 2 * nodes
    assert_equal size.times.map { |rank| "rank #{rank} of #{size}, local rank #{rank % 2}" },
      text.scan(/rank \d+ of \d+, local rank \d+/).sort
    assert_match(/20 steps, loss 0\.\d+$/, text)
  end

  def test_scancel_leaves_nothing
    # A child in a session of its own, and one that is deaf.
    code = <<~'RUBY'
      $stdout.sync = true
      spawn("sleep", "1000", pgroup: true)
      fork { Process.setsid; trap("TERM", "IGNORE"); sleep }
      puts "up #{ENV["RANK"]}\n"
      sleep
    RUBY
    File.write(File.join(@folder, "job.sh"), "#!/bin/sh\nexec srun -n1 #{torchrun("--nproc-per-node=2", *ruby(code)).join(" ")}\n")
    job = submit(File.join(@folder, "job.sh"), env: {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT" => "1"})
    await_output(/up 0/)
    await_output(/up 1/)
    assert_operator marked.size, :>=, 6
    @cluster.ask("scancel", job)
    assert_equal "CANCELLED", ended(job).first
    eventually(-> { "nothing to be left: #{marked.map { |pid| command_line(pid) }}" }) { marked.empty? }
  end

  def test_the_elastic_example_is_queued_again_and_goes_on
    checkpoint = File.join(@folder, "model.pt")
    job = submit("--nodes=1", "#{ROOT}/examples/slurm/elastic.sbatch", TRAIN, "--checkpoint", checkpoint, "--steps", 60, "--pause", 0.05)
    await_output(/starting at step 0 with 1 processes/)
    eventually("a checkpoint") { File.exist?(checkpoint) }
    @cluster.ask("scancel", "--batch", "--signal=USR1", job)
    await_output(/queued again/)
    # Slurm itself would let it rest for two minutes. Its clock of jobs that were ended counts seconds: within the same one
    # it would not start again.
    eventually("idle nodes") { @cluster.idle? && marked.empty? }
    sleep 2
    @cluster.ask("scontrol", "update", "JobId=#{job}", "StartTime=now")
    await_output(/starting at step [1-9]\d* with 1 processes/)
    state, text = ended(job)
    assert_equal "COMPLETED", state, text
    assert_match(/60 steps, loss 0\.\d+$/, text)
  end
end
