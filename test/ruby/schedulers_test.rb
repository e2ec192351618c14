# frozen_string_literal: true

require_relative "test_helper"

# What schedulers leave in the environment, as it was seen in their tasks. test/schedulers has the real ones.
class SchedulersTest < Minitest::Test
  Schedulers = Distributed::Schedulers

  # A task of the second node of `srun`, on nodes with two tasks each but the last.
  SLURM = {
    "SLURM_JOB_ID" => "4711", "SLURM_STEP_ID" => "2", "SLURM_STEPID" => "2", "SLURM_PROCID" => "3", "SLURM_LOCALID" => "1",
    "SLURM_NODEID" => "1", "SLURM_NTASKS" => "5", "SLURM_NPROCS" => "5", "SLURM_STEP_NUM_TASKS" => "5", "SLURM_STEP_NUM_NODES" => "3",
    "SLURM_STEP_TASKS_PER_NODE" => "2(x2),1", "SLURM_STEP_NODELIST" => "node[07-08],gpu1", "SLURM_JOB_NODELIST" => "node[01-08],gpu1"
  }.freeze

  # What sbatch gives its script.
  SCRIPT = {
    "SLURM_JOB_ID" => "4711", "SLURM_PROCID" => "0", "SLURM_LOCALID" => "0", "SLURM_NODEID" => "0", "SLURM_NTASKS" => "5",
    "SLURM_NPROCS" => "5", "SLURM_TASKS_PER_NODE" => "2(x2),1", "SLURM_JOB_NODELIST" => "node[07-08],gpu1"
  }.freeze

  # Open MPI 4, on the second of two hosts.
  ORTE = {
    "OMPI_COMM_WORLD_RANK" => "2", "OMPI_COMM_WORLD_SIZE" => "4", "OMPI_COMM_WORLD_LOCAL_RANK" => "0", "OMPI_COMM_WORLD_LOCAL_SIZE" => "2",
    "OMPI_MCA_orte_hnp_uri" => "91.0;tcp://203.0.113.1,198.51.100.7:34129;tcp6://[2001:db8::1]:39957",
    "OMPI_MCA_orte_local_daemon_uri" => "91.1;tcp://203.0.113.2:40129", "PMIX_NAMESPACE" => "5963777", "PMIX_HOSTNAME" => "b"
  }.freeze

  # Open MPI 5.
  PRRTE = {
    "OMPI_COMM_WORLD_RANK" => "2", "OMPI_COMM_WORLD_SIZE" => "4", "OMPI_COMM_WORLD_LOCAL_RANK" => "0", "OMPI_COMM_WORLD_LOCAL_SIZE" => "2",
    "PMIX_NAMESPACE" => "prterun-node-7-31415@1", "PMIX_HOSTNAME" => "node-8", "PMIX_RANK" => "2"
  }.freeze

  HYDRA = {"PMI_RANK" => "1", "PMI_SIZE" => "2", "MPI_LOCALRANKID" => "1", "MPI_LOCALNRANKS" => "2", "PMI_FD" => "8"}.freeze

  def task(env)
    Schedulers.task(env)
  end

  def wrong(env, &call)
    call ||= -> { task(env) }
    assert_raises(ArgumentError, &call).message
  end

  def test_a_task_of_srun
    found = task(SLURM)
    assert_equal [3, 5, 1, 2], [found.rank, found.world_size, found.local_rank, found.local_world_size]
    assert_equal "node07", found.master_addr
    assert_equal 1, task(SLURM.merge("SLURM_PROCID" => "4", "SLURM_NODEID" => "2", "SLURM_LOCALID" => "0")).local_world_size
  end

  def test_a_step_on_one_host_meets_on_loopback
    one = SLURM.merge("SLURM_NODEID" => "0", "SLURM_STEP_TASKS_PER_NODE" => "5", "SLURM_STEP_NODELIST" => "node07")
    assert_equal "127.0.0.1", task(one).master_addr
  end

  def test_shells_within_a_job_are_no_task
    assert_nil task(SCRIPT)
    # The batch script's own step, where a Slurm tells it, and an interactive shell's.
    [0xffff_fffb, 0xffff_fffa].each { |step| assert_nil task(SCRIPT.merge("SLURM_STEP_ID" => step.to_s)) }
    assert_nil task(SCRIPT.merge("SLURM_STEP_ID" => "batch"))
    assert_nil task("SLURM_CONF" => "/etc/slurm.conf")
    assert_match(/job 4711 .* srun/, Schedulers.obstacle(SCRIPT))
    assert_nil Schedulers.obstacle({})
  end

  def test_what_srun_should_have_left
    message = wrong(SLURM.reject { |name,| %w[SLURM_NTASKS SLURM_NPROCS SLURM_STEP_NUM_TASKS].include?(name) })
    assert_match(/SLURM_PROCID is 3.*SLURM_STEP_NUM_TASKS, SLURM_NTASKS, SLURM_NPROCS are not set/, message)
    assert_match(/SLURM_PROCID expected a whole number, got "x"/, wrong(SLURM.merge("SLURM_PROCID" => "x")))
    assert_match(/number 5 of 5: expected 0 to 4/, wrong(SLURM.merge("SLURM_PROCID" => "5")))
    bare = task(SLURM.reject { |name,| name.end_with?("NODELIST") })
    assert_match(/MASTER_ADDR is not set.*SLURM_STEP_NODELIST.*scontrol show hostnames/, wrong({}) { bare.master_addr })
  end

  # Srun -m arbitrary, with a file of hosts.
  def test_tasks_that_were_placed_by_hand
    assert_match(/list of one's own.*Set MASTER_ADDR/, wrong({}) { task(SLURM.merge("SLURM_DISTRIBUTION" => "arbitrary")).master_addr })
    assert_match(/list of one's own/, wrong({}) { task(SLURM.merge("SLURM_PROCID" => "0")).master_addr })
    assert_equal "node07", task(SLURM.merge("SLURM_DISTRIBUTION" => "cyclic")).master_addr
  end

  def test_ports_of_jobs_and_steps
    port = ->(job, step) { task(SLURM.merge("SLURM_JOB_ID" => job.to_s, "SLURM_STEP_ID" => step.to_s)).master_port }
    ports = (4711...4791).flat_map { |job| 4.times.map { |step| port[job, step] } }
    assert_equal ports.uniq, ports
    assert ports.all? { |each| each.between?(10_300, 29_279) }
    assert_equal port[4711, 2], task(SLURM).master_port
    assert_equal 12_001, task(SLURM.merge("SLURM_STEP_RESV_PORTS" => "12001-12002")).master_port
  end

  def test_open_mpi_to_version_4
    found = task(ORTE)
    assert_equal [2, 4, 0, 2], [found.rank, found.world_size, found.local_rank, found.local_world_size]
    assert_equal "203.0.113.1", found.master_addr
    assert_equal found.master_port, task(ORTE.merge("OMPI_COMM_WORLD_RANK" => "3")).master_port
    refute_equal found.master_port, task(ORTE.merge("PMIX_NAMESPACE" => "5963778")).master_port
    assert_equal "127.0.0.1", task(ORTE.merge("OMPI_COMM_WORLD_LOCAL_SIZE" => "4")).master_addr
  end

  def test_an_address_that_this_host_reaches
    several = "91.0;tcp://203.0.113.1,127.5.0.1:34129"
    assert_equal "127.5.0.1", task(ORTE.merge("OMPI_MCA_orte_hnp_uri" => several)).master_addr
    only6 = "91.0;tcp6://[2001:db8::1]:39957"
    assert_equal "2001:db8::1", task(ORTE.merge("OMPI_MCA_orte_hnp_uri" => only6)).master_addr
    assert_match(/MASTER_ADDR is not set/, wrong({}) { task(ORTE.merge("OMPI_MCA_orte_hnp_uri" => "91.0")).master_addr })
  end

  def test_open_mpi_from_version_5
    assert_equal "node-7", task(PRRTE).master_addr
    message = wrong({}) { task(PRRTE.merge("PMIX_NAMESPACE" => "something")).master_addr }
    assert_match(/MASTER_ADDR is not set.*mpirun -x MASTER_ADDR=HOST/, message)
  end

  def test_rank_0_knows_that_mpirun_runs_elsewhere
    [ORTE, PRRTE].each do |env|
      first = env.merge("OMPI_COMM_WORLD_RANK" => "0")
      assert_match(/another host than rank 0.*mpirun -x MASTER_ADDR=HOST/, wrong({}) { task(first).master_addr })
    end
    assert_equal "node-7", task(PRRTE.merge("OMPI_COMM_WORLD_RANK" => "0", "PMIX_HOSTNAME" => "node-7")).master_addr
  end

  def test_half_of_mpiruns_variables
    assert_match(/OMPI_COMM_WORLD_SIZE is not set/, wrong(ORTE.reject { |name,| name == "OMPI_COMM_WORLD_SIZE" }))
    assert_match(/OMPI_COMM_WORLD_RANK is not set/, wrong(ORTE.reject { |name,| name == "OMPI_COMM_WORLD_RANK" }))
    assert_match(/PMI_SIZE is not set/, wrong("PMI_RANK" => "0"))
  end

  def test_hydra
    found = task(HYDRA)
    assert_equal [1, 2, 1, 2, "127.0.0.1"], [found.rank, found.world_size, found.local_rank, found.local_world_size, found.master_addr]
    far = task(HYDRA.merge("MPI_LOCALNRANKS" => "1", "MPI_LOCALRANKID" => "0"))
    assert_match(/MASTER_ADDR is not set.*mpiexec -genv MASTER_ADDR HOST/, wrong({}) { far.master_addr })
    assert_equal 29_500, far.master_port
  end

  # A proxy starts each process, or a shell that starts it, in a session of its own.
  def test_the_port_of_processes_with_the_same_proxy
    expected = task(HYDRA).send(:port_of, Process.pid)
    assert_includes 10_300..29_279, expected
    assert_equal expected, told_by_child(-> { Process.setsid }) { task(HYDRA).master_port }
    behind_a_shell = told_by_child(-> { Process.setsid }) { told_by_child { task(HYDRA).master_port } }
    assert_equal expected, behind_a_shell
  end

  # What the call gives in a forked process.
  def told_by_child(before = nil)
    reader, writer = IO.pipe
    pid = fork do
      reader.close
      before&.call
      writer.write(Marshal.dump(yield))
    ensure
      writer.close
      exit!
    end
    writer.close
    Marshal.load(reader.read)
  ensure
    Process.wait(pid) if pid
    reader&.close
  end

  # mpirun starts its helpers on other nodes by srun, whose variables the processes then have as well.
  def test_the_nearest_launcher_counts
    assert_kind_of Schedulers::OpenMPI, task(SLURM.merge(ORTE))
    assert_kind_of Schedulers::Hydra, task(SLURM.merge(HYDRA))
    assert_kind_of Schedulers::Slurm, task(SLURM.merge("PMI_RANK" => "3", "PMI_SIZE" => "5", "PMI_FD" => "11"))
  end

  def test_who_this_process_is
    assert_equal({"RANK" => "3", "WORLD_SIZE" => "5", "LOCAL_RANK" => "1", "LOCAL_WORLD_SIZE" => "2"}, Schedulers.variables(SLURM))
    assert_empty Schedulers.variables(SCRIPT)
    torchrun = {"RANK" => "1", "WORLD_SIZE" => "8", "LOCAL_RANK" => "1"}
    assert_equal torchrun, Schedulers.variables(SLURM.merge(torchrun))
    # A launcher within the task that tells no local rank: the task's own would be another's.
    assert_equal({"RANK" => "0", "WORLD_SIZE" => "8"}, Schedulers.variables(SLURM.merge("RANK" => "0", "WORLD_SIZE" => "8")))
    same = SLURM.merge("RANK" => "3", "WORLD_SIZE" => "5")
    assert_equal "1", Schedulers.variables(same)["LOCAL_RANK"]
  end

  NOTHING = %w[RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT].to_h { |name| [name, nil] }.freeze
  ALONE = SLURM.merge("SLURM_PROCID" => "0", "SLURM_LOCALID" => "0", "SLURM_NODEID" => "0", "SLURM_STEP_NUM_TASKS" => "1",
    "SLURM_STEP_TASKS_PER_NODE" => "1", "SLURM_STEP_NODELIST" => "node07").freeze

  # The error of an `init_process_group` with these variables.
  def init_fails(env, **options)
    with_env(NOTHING.merge(env)) { wrong({}) { Distributed.init_process_group("gloo", timeout: 5, **options) } }
  end

  # The variables of a job of one task, of a number from which a port is made that is free here.
  def alone_in_a_job
    @alone_in_a_job ||= begin
      ALONE.merge("SLURM_JOB_ID" => rand(1 << 30).to_s).tap { |variables| held_port(task(variables).master_port) }
    rescue Errno::EADDRINUSE
      retry
    end
  end

  def test_init_sets_what_is_missing
    with_env(NOTHING.merge(alone_in_a_job)) do
      assert_equal 0, Distributed.get_node_local_rank
      assert_equal "1", Distributed.launch_variables["WORLD_SIZE"]
      refute ENV.key?("RANK")
      Distributed.init_process_group("gloo", timeout: 10)
      assert_equal [0, 1], [Distributed.get_rank, Distributed.get_world_size]
      assert_equal ["0", "1", "0", "1", "127.0.0.1", task(alone_in_a_job).master_port.to_s], ENV.values_at(*NOTHING.keys)
    ensure
      Distributed.destroy_process_group
    end
  end

  def test_init_keeps_what_is_set
    port = held_port.to_s
    with_env(NOTHING.merge(SLURM, "RANK" => "0", "WORLD_SIZE" => "1", "MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => port)) do
      Distributed.init_process_group("gloo", timeout: 10)
      assert_equal ["0", "1", nil, nil, "127.0.0.1", port], ENV.values_at(*NOTHING.keys)
    ensure
      Distributed.destroy_process_group
    end
  end

  # Scripts of sbatch often export some, and leave the rank to Slurm.
  def test_a_world_size_that_is_set_goes_with_slurms_rank
    port = held_port.to_s
    with_env(NOTHING.merge(ALONE, "WORLD_SIZE" => "1", "MASTER_PORT" => port)) do
      Distributed.init_process_group("gloo", timeout: 10)
      assert_equal ["0", "1", "0", "1", "127.0.0.1", port], ENV.values_at(*NOTHING.keys)
    ensure
      Distributed.destroy_process_group
    end
  end

  def test_variables_that_contradict_each_other
    message = init_fails(SLURM.merge("WORLD_SIZE" => "8"))
    assert_match(/WORLD_SIZE is 8, but RANK is not set, and Slurm's srun.*says WORLD_SIZE 5 and RANK 3: set both, or neither/, message)
    assert_match(/RANK is 0, but WORLD_SIZE is not set/, init_fails(SLURM.merge("RANK" => "0")))
    assert_match(/RANK is 2, but WORLD_SIZE is not set/, init_fails(SLURM, rank: 2))
  end

  def test_what_was_looked_for
    message = init_fails(SLURM.transform_values { nil })
    assert_match(/rank is not known.*RANK is not set, WORLD_SIZE is not set.*SLURM_PROCID.*OMPI_COMM_WORLD_RANK.*PMI_RANK/, message)
    assert_match(/rank is not known.*job 4711.*start it with srun/, init_fails(SLURM.transform_values { nil }.merge(SCRIPT)))
    assert_match(/world size is not known/, init_fails(SLURM.transform_values { nil }.merge("RANK" => "0")))
  end

  def test_a_port_that_was_made_and_is_taken
    server = TCPServer.open("127.0.0.1", task(alone_in_a_job).master_port)
    with_env(NOTHING.merge(alone_in_a_job)) do
      error = assert_raises(Distributed::NetworkError) { Distributed.init_process_group("gloo", timeout: 5) }
      assert_equal :TDDP_ADDRESS_IN_USE, error.status
      assert_match(/in use.*made from the job's number: set MASTER_PORT/, error.message)
    end
  ensure
    server&.close
  end

  def test_host_lists
    {
      "node1" => %w[node1],
      "a,b-2,c" => %w[a b-2 c],
      "node[01-03,07],gpu1" => %w[node01 node02 node03 node07 gpu1],
      "n[9-11]" => %w[n9 n10 n11],
      "n[098-101]-ib" => %w[n098-ib n099-ib n100-ib n101-ib],
      "r[1-2]n[1,3]" => %w[r1n1 r1n3 r2n1 r2n3],
      "x[5]" => %w[x5]
    }.each { |text, hosts| assert_equal hosts, Schedulers::HostList.expand(text) }
    ["", "a,", ",a", "a,,b", "n[1-3", "n1-3]", "n[]", "n[3-1]", "n[a]", "n[1--2]", "n[1,]", "n[[1]]", "n[0-99999999]"].each do |text|
      assert_match(/host list #{Regexp.escape(text.inspect)}/, wrong({}) { Schedulers::HostList.expand(text) })
    end
  end

  def test_numbers_per_host
    assert_equal [2, 2, 2, 1], Schedulers::HostList.counts("2(x3),1")
    assert_equal [4], Schedulers::HostList.counts("4")
    ["", "2(x0)", "2(x)", "two", "1,", "1(x99999999)"].each { |text| assert_match(/numbers such as/, wrong({}) { Schedulers::HostList.counts(text) }) }
  end
end
