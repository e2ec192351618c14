# frozen_string_literal: true

require "etc"
require_relative "launch_case"

# What a worker finds when it starts.
class WorkersTest < LaunchCase
  def environments(*flags, env: {})
    result = run_torchrun(*flags, *shell('env | sort | tr "\n" ";"; echo'), env: env)
    assert_code 0, result
    all = result.out.lines.map { |line| line.chomp.split(";").filter_map { |pair| pair.split("=", 2) if pair.include?("=") }.to_h }
    all.sort_by { |variables| variables["RANK"].to_i }
  end

  def test_the_environment_of_pytorchs_workers
    all = environments("--nproc-per-node=3", "--max-restarts=2", "--role=trainer", "--rdzv-id=job7")
    assert_equal 3, all.size
    all.each_with_index do |variables, rank|
      expected = {
        "RANK" => rank, "LOCAL_RANK" => rank, "WORLD_SIZE" => 3, "LOCAL_WORLD_SIZE" => 3, "GROUP_RANK" => 0,
        "GROUP_WORLD_SIZE" => 1, "ROLE_RANK" => rank, "ROLE_WORLD_SIZE" => 3, "ROLE_NAME" => "trainer",
        "MASTER_ADDR" => "127.0.0.1", "TORCHELASTIC_RESTART_COUNT" => 0, "TORCHELASTIC_MAX_RESTARTS" => 2,
        "TORCHELASTIC_RUN_ID" => "job7", "TORCHELASTIC_USE_AGENT_STORE" => "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING" => 1,
        "TORCHELASTIC_SIGNALS_TO_HANDLE" => "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "LAUNCH_MARK" => @mark
      }
      expected.each { |name, value| assert_equal value.to_s, variables[name], name }
      assert_match(/\A\d+\z/, variables["MASTER_PORT"])
      assert_match(%r{\A#{@temporary}/torchrun_\w+/attempt_0/#{rank}/error\.json\z}, variables["TORCHELASTIC_ERROR_FILE"])
    end
    assert_equal 1, all.map { |variables| variables["MASTER_PORT"] }.uniq.size
  end

  def test_inherited_ranks_are_replaced
    variables = environments("--standalone", env: {"RANK" => "9", "WORLD_SIZE" => "10", "MASTER_PORT" => "1"}).first
    assert_equal %w[0 1], variables.values_at("RANK", "WORLD_SIZE")
    refute_equal "1", variables["MASTER_PORT"]
  end

  # How often the agent's threads were woken; nil: one of them is about to run.
  def wakes(agent)
    tasks = Dir["/proc/#{agent}/task/*/"]
    return unless tasks.all? { |task| File.read("#{task}stat")[/\) (\S)/, 1] == "S" }

    tasks.sum { |task| File.read("#{task}status")[/^voluntary_ctxt_switches:\s+(\d+)/, 1].to_i }
  end

  def test_while_nothing_happens_torchrun_sleeps
    run = start("--nproc-per-node=2", "--health-check-port=0", *shell("echo ready; exec sleep 600"))
    run.await(/(ready\n){2}/)
    agent = run.agent
    before = nil
    eventually("all threads to sleep") { Array.new(5) { wakes(agent).tap { sleep 0.02 } }.uniq.then { |seen| before = seen.first if seen.size == 1 } }
    sleep 1
    assert_equal before, wakes(agent)
    run.signal(:TERM)
    assert_code 143, run.finish
  end

  THREADS = %w[OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS].freeze

  def test_threads_are_the_cores_divided_by_the_workers
    each = [Etc.nprocessors / 2, 1].max.to_s
    all = environments("--nproc-per-node=2")
    all.each { |variables| assert_equal [each] * 3, variables.values_at(*THREADS) }
    one = environments.first
    assert_equal [Etc.nprocessors.to_s] * 3, one.values_at(*THREADS)
  end

  def test_the_help_tells_of_threads
    assert_match(/OMP_NUM_THREADS.*share of the cores/m, run_torchrun("--help").out)
  end

  def test_threads_that_people_have_set_stand
    set = environments("--nproc-per-node=2", env: {"OMP_NUM_THREADS" => "7"})
    set.each { |variables| assert_equal ["7", nil, "7"], variables.values_at(*THREADS) }
    set = environments("--nproc-per-node=64", env: {"OPENBLAS_NUM_THREADS" => "3", "MKL_NUM_THREADS" => "2"})
    set.each { |variables| assert_equal %w[1 2 3], variables.values_at(*THREADS) } if Etc.nprocessors < 128
  end

  def test_signals_to_handle_are_told
    variables = environments("--signals-to-handle=SIGTERM,USR1").first
    assert_equal "SIGTERM,SIGUSR1", variables["TORCHELASTIC_SIGNALS_TO_HANDLE"]
  end

  def test_a_setting_of_nccl_is_kept
    variables = environments(env: {"TORCH_NCCL_ASYNC_ERROR_HANDLING" => "3"}).first
    assert_equal "3", variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
  end

  def test_virtual_local_ranks
    all = environments("--nproc-per-node=3", "--virtual-local-rank", env: {"CUDA_VISIBLE_DEVICES" => nil})
    assert_equal %w[0 1 2], all.map { |variables| variables["RANK"] }
    all.each { |variables| assert_equal %w[0 3], variables.values_at("LOCAL_RANK", "LOCAL_WORLD_SIZE") }
    assert_equal %w[0 1 2], all.map { |variables| variables["CUDA_VISIBLE_DEVICES"] } unless File.exist?("/dev/nvidia0")
  end

  def test_virtual_local_ranks_take_the_visible_gpus_in_order
    skip "this machine has GPUs of its own" if Dir.exist?("/proc/driver/nvidia/gpus")
    all = environments("--nproc-per-node=2", "--virtual-local-rank", env: {"CUDA_VISIBLE_DEVICES" => "6, 4"})
    assert_equal %w[6 4], all.map { |variables| variables["CUDA_VISIBLE_DEVICES"] }
    result = run_torchrun("--nproc-per-node=3", "--virtual-local-rank", *shell("echo started"), env: {"CUDA_VISIBLE_DEVICES" => "6,4"})
    assert_code 1, result
    assert_empty result.out
    assert_match(/--virtual-local-rank: 3 workers, but no GPU for each \(CUDA_VISIBLE_DEVICES="6,4"\)/, result.err)
  end

  def test_affinity_counts
    skip "one core only" if Etc.nprocessors < 2
    result = run_torchrun("-c", "0", BINARY, *shell("echo $OMP_NUM_THREADS"), command: ["taskset"])
    assert_equal "1\n", result.out
  end

  def test_the_store_answers
    result = run_torchrun("--nproc-per-node=2", *ruby('require "socket"; TCPSocket.new(ENV["MASTER_ADDR"], ENV["MASTER_PORT"].to_i).close; puts "ok"'))
    assert_equal "ok\nok\n", result.out
  end

  def test_only_the_three_standard_descriptors_are_open
    File.open(File::NULL) do |extra|
      result = run_torchrun("--nproc-per-node=2", "--no-ruby", "ls", "/proc/self/fd", 9 => extra)
      # The last is the folder that ls reads.
      assert_equal %w[0 0 1 1 2 2 3 3], result.out.split.sort
    end
  end

  def test_many_workers_have_pipes_and_logs_under_a_low_limit_which_stays_theirs
    logs = File.join(@folder, "logs")
    result = run_torchrun("--nproc-per-node=24", "--tee=3", "--log-dir=#{logs}", *shell("ulimit -n; ulimit -Hn"), rlimit_nofile: [64, 400])
    assert_code 0, result
    assert_empty result.err
    assert_equal ["400\n"] * 24 + ["64\n"] * 24, result.out.lines.map { |line| line[/\d+\n/] }.sort
  end

  def test_the_first_worker_reads_standard_input
    File.write("#{@folder}/input", "one\ntwo\n")
    result = run_torchrun("--nproc-per-node=2", *shell('read line; echo "$RANK:$line"'), stdin: "#{@folder}/input")
    assert_equal ["0:one\n", "1:\n"], result.out.lines.sort
  end

  STATUS = "grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status"

  def test_signal_mask_and_dispositions_are_the_defaults
    plain = `env -i sh -c "#{STATUS}"`
    result = run_torchrun("--no-ruby", "grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")
    assert_equal plain, result.out
    assert_match(/SigBlk:\s+0+$/, result.out)
    assert_match(/SigIgn:\s+0+$/, result.out)
  end

  def test_ignored_signals_stay_ignored
    result = run_torchrun("trap '' HUP PIPE CHLD; exec #{BINARY} --no-ruby grep SigIgn /proc/self/status", command: %w[sh -c])
    assert_code 0, result
    assert_equal (1 << 0) | (1 << 12), result.out[/\h{16}/].hex
  end

  def test_workers_have_sessions_of_their_own
    result = run_torchrun("--nproc-per-node=2", *shell("cut -d' ' -f1,5,6 /proc/$$/stat"))
    assert_equal 2, result.out.lines.uniq.size
    result.out.each_line { |line| assert_equal 1, line.split.uniq.size, line }
  end

  def test_a_private_error_file_folder
    result = run_torchrun(*shell('stat -c %a "$(dirname "$(dirname "$(dirname "$TORCHELASTIC_ERROR_FILE")")")"'))
    assert_equal "700\n", result.out
  end

  def test_a_temporary_folder_that_cannot_be_made_does_not_stop_the_job
    result = run_torchrun(*shell('echo "${TORCHELASTIC_ERROR_FILE:-none}"'), env: {"TMPDIR" => "/dev/null"})
    assert_code 0, result
    assert_equal "none\n", result.out
    assert_match(/no error file/, result.err)
  end

  def test_torchruns_own_error_file_is_no_workers
    result = run_torchrun(*shell('echo "${TORCHELASTIC_ERROR_FILE:-none}"'),
      env: {"TMPDIR" => "/dev/null", "TORCHELASTIC_ERROR_FILE" => "#{@folder}/own.json"})
    assert_code 0, result
    assert_equal "none\n", result.out
  end
end
