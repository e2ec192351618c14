# frozen_string_literal: true

require_relative "mpi_modules"
require_relative "scheduler_case"

# The backend "mpi" with each MPI that is here, whose module the test compiles.
class MPIBackendTest < SchedulerCase
  BEGIN_ = <<~RUBY
    require "torch/distributed"
    D = Torch::Distributed
    D.init_process_group("mpi", timeout: 60)
    RANK, SIZE = D.rank, D.world_size
    def expect(expected, found) = expected == found || raise("rank \#{RANK}: expected \#{expected.inspect}, found \#{found.inspect}")
    def all_ok(text) = D.barrier.then { puts(text) if D.rank.zero? }
  RUBY

  MPIModules::KINDS.each_key do |kind|
    define_method(:"test_random_programs_with_#{kind}") { each_size(kind, [2, 4]) { |size| check_programs(kind, size) } }
    define_method(:"test_messages_with_#{kind}") { each_size(kind, [3]) { |size| check_ok(kind, size, MESSAGES) } }
    define_method(:"test_large_reductions_with_#{kind}") { each_size(kind, [3]) { |size| check_ok(kind, size, LARGE) } }
    define_method(:"test_a_wait_that_is_interrupted_with_#{kind}") { each_size(kind, [2]) { |size| check_ok(kind, size, INTERRUPTED) } }
    define_method(:"test_groups_with_#{kind}") { each_size(kind, [4]) { |size| check_ok(kind, size, GROUPS) } }
    define_method(:"test_ranks_of_one_host_with_#{kind}") { each_size(kind, [2]) { |size| check_ok(kind, size, ONE_HOST, env: {"TDDP_SHM" => "1"}) } }
    define_method(:"test_data_parallel_with_#{kind}") { each_size(kind, [1, 3]) { |size| check_ok(kind, size, DATA_PARALLEL) } }
    define_method(:"test_divided_models_and_objects_with_#{kind}") { each_size(kind, [2]) { |size| check_ok(kind, size, DIVIDED) } }
    define_method(:"test_the_example_with_#{kind}") { check_example(kind) }
    define_method(:"test_ranks_that_differ_with_#{kind}") { check_differing(kind) }
    define_method(:"test_a_rank_that_does_not_come_with_#{kind}") { check_missing(kind) }
    define_method(:"test_a_rank_that_is_killed_with_#{kind}") { check_lost(kind, "Process.kill(:KILL, Process.pid)") }
    define_method(:"test_a_rank_that_fails_with_#{kind}") { check_lost(kind, "raise %(oops)") }
  end

  MESSAGES = <<~RUBY
    %i[uint8 int64 float16 bfloat16 float32 complex64 bool].each_with_index do |dtype, tag|
      x = Torch.ones(5).to(dtype)
      if RANK == 0
        (1...SIZE).each { |peer| D.send(x, dst: peer, tag: tag) }
      else
        D.recv(y = Torch.zeros(5).to(dtype), src: 0, tag: tag)
        expect(x.to(:float64).to_a, y.to(:float64).to_a) unless dtype == :complex64
      end
    end
    # Out of their order, larger than what is sent at once, from any rank, and to itself by way of the next.
    if RANK == 0
      works = [3, 2, 1].map { |tag| D.isend(Torch.full([200_000], tag.to_f), dst: 1, tag: tag) }
      works.each(&:wait)
    elsif RANK == 1
      [1, 2, 3].each do |tag|
        D.recv(y = Torch.zeros(200_000), src: 0, tag: tag)
        expect([tag.to_f] * 2, [y[0].item, y[-1].item])
      end
    end
    D.barrier
    if RANK == 0
      found = (1...SIZE).map { D.recv(y = Torch.zeros(1)).then { |source| [source, y.item] } }
      expect((1...SIZE).map { |rank| [rank, rank * 2.0] }, found.sort)
    else
      D.send(Torch.tensor([RANK * 2.0]), dst: 0)
    end
    D.barrier # what comes next would be from any rank as well
    operations = [D::P2POp.new(:isend, Torch.tensor([RANK.to_f]), (RANK + 1) % SIZE), D::P2POp.new(:irecv, from = Torch.zeros(1), (RANK - 1) % SIZE)]
    D.batch_isend_irecv(operations).each(&:wait)
    expect((RANK - 1) % SIZE, from.item.to_i)
    if RANK == 0
      D.send(Torch.zeros(3), dst: 1)
    elsif RANK == 1
      begin
        D.recv(Torch.zeros(4), src: 0)
        raise "nothing was raised"
      rescue D::MismatchError => e
        raise unless e.message.include?("rank 0 sends 3 elements of float32, rank 1 receives 4 elements of float32")
      end
    end
    puts "ok" if RANK == 0
    D.destroy_process_group
  RUBY

  # Of several chunks and segments, which differ in size, on all ranks and on two.
  LARGE = <<~RUBY
    parts = Torch.arange(0, 300_001) % 5
    [D.default_process_group, D.new_group([2, 0])].product([
      %i[int64 sum], %i[int32 max], %i[float32 avg], %i[float64 sum], %i[bfloat16 max], %i[float16 sum], %i[uint8 bor]
    ]).each do |group, (dtype, op)|
      next if D.get_rank(group) < 0

      ranks = D.get_process_group_ranks(group)
      values = (0...5).map { |n| ranks.map { |rank| n + rank } }
      expected = values.map { |each| {sum: each.sum, max: each.max, avg: each.sum / ranks.size.to_f, bor: each.inject(:|)}.fetch(op).to_f }
      D.all_reduce(x = (parts + RANK).to(dtype), op: op, group: group)
      expect([true] * 5, Array.new(5) { |n| Torch.allclose(x[parts.eq(n)].to(:float64), Torch.tensor(expected[n], dtype: :float64), rtol: 1e-6) })
    end
    all_ok("ok")
    D.destroy_process_group
  RUBY

  # It goes on without the wait, at any size.
  INTERRUPTED = <<~RUBY
    require "timeout"
    store = D::PrefixStore.new("test", D::TCPStore.new(ENV["MASTER_ADDR"], Integer(ENV["MASTER_PORT"]), nil, false))
    [1, 10_000, 1_000_000].each do |count|
      x = Torch.full([count], RANK + 1.0)
      if RANK == 0
        begin
          Timeout.timeout(0.3) { D.all_reduce(x) }
          raise "nothing was raised"
        rescue Timeout::Error
          store.set("interrupted \#{count}", "1")
        end
      else
        store.get("interrupted \#{count}")
        D.all_reduce(x)
      end
      D.barrier
      expect([3.0], x.to_a.uniq)
    end
    puts "ok" if RANK == 0
    D.destroy_process_group
  RUBY

  GROUPS = <<~RUBY
    groups = [[0], [0, SIZE - 1].uniq, (0...SIZE).to_a.reverse.uniq].map { |ranks| [ranks, D.new_group(ranks)] }
    3.times do
      groups.each do |ranks, group|
        next unless ranks.include?(RANK)

        D.all_reduce(x = Torch.tensor([RANK + 1.0]), group: group)
        expect(ranks.sum { |rank| rank + 1.0 }, x.item)
      end
    end
    if SIZE == 4
      mesh = D.init_device_mesh("cpu", [2, 2], mesh_dim_names: %w[dp tp])
      expect([RANK / 2 * 2, RANK / 2 * 2 + 1], mesh["tp"].get_group.all_gather(Torch.tensor([RANK])).map { |each| each.item.to_i })
    end
    all_ok("ok")
    D.destroy_process_group
  RUBY

  # They share memory, and MPI is not begun.
  ONE_HOST = <<~RUBY
    D.all_reduce(x = Torch.full([1000], RANK + 1.0))
    expect([3.0], x.to_a.uniq)
    expect(true, File.foreach("/proc/self/maps").grep(/memfd:tddp/).any?)
    puts "ok" if RANK == 0
    D.destroy_process_group
  RUBY

  # Of one process with all batches, which the others are compared with.
  ALONE = <<~RUBY
    def net = Torch.manual_seed(3).then { Torch::NN::Sequential.new(Torch::NN::Linear.new(6, 16), Torch::NN::ReLU.new, Torch::NN::Linear.new(16, 2)) }
    Torch.manual_seed(5)
    x, y = Torch.randn(12, 6), Torch.randn(12, 2)
    def train(model, steps)
      optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.1)
      steps.times { optimizer.zero_grad; yield(model).backward; optimizer.step }
    end
    alone = net
    train(alone, 5) { |model| Torch::NN::F.mse_loss(model.call(x), y) }
    rows = (RANK * 12 / SIZE)...((RANK + 1) * 12 / SIZE)
    def compare(one, other) = Torch.allclose(one, other, rtol: 1e-5, atol: 1e-6) || raise("rank \#{RANK} differs")
  RUBY

  DATA_PARALLEL = ALONE + <<~RUBY
    model = Torch::NN::Parallel::DistributedDataParallel.new(inner = net, bucket_cap_mb: 0.0003)
    train(model, 5) { |wrapped| Torch::NN::F.mse_loss(wrapped.call(x[rows]), y[rows]) }
    inner.parameters.zip(alone.parameters) { |one, other| compare(one, other) }
    all_ok("ok")
    D.destroy_process_group
  RUBY

  # Parameters in shards; layers that are divided; what programs send besides.
  DIVIDED = ALONE + <<~RUBY
    D::FSDP.fully_shard(sharded = net)
    train(sharded, 5) { |model| Torch::NN::F.mse_loss(model.call(x[rows]), y[rows]) }
    D::FSDP.full_state_dict(sharded).each { |name, value| compare(value, alone.state_dict[name]) }

    ways = D::Tensor::Parallel
    mesh = D.init_device_mesh("cpu", [SIZE], mesh_dim_names: ["tp"])
    divided = ways.parallelize_module(net, mesh["tp"], {"0" => ways::ColwiseParallel.new, "2" => ways::RowwiseParallel.new})
    train(divided, 5) { |model| Torch::NN::F.mse_loss(model.call(x), y) }
    compare(divided.call(x), alone.call(x))

    expect((0...SIZE).map { |rank| {"rank" => rank} }, D.all_gather_object({"rank" => RANK}))
    D.broadcast_object_list(list = [RANK.zero? ? %w[from 0] : nil], src: 0)
    expect([%w[from 0]], list)
    all_ok("ok")
    D.destroy_process_group
  RUBY

  def each_size(kind, sizes, &block)
    need(kind)
    sizes.each(&block)
  end

  def need(kind)
    obstacle = MPIModules.obstacle(kind)
    skip obstacle if obstacle
  end

  # A script on ranks that MPI has started, and between which it moves the data.
  def ranks(kind, size, code, *arguments, env: {})
    @leaves_files = true # a launcher's own
    run_command(*MPIModules::KINDS[kind].last, size.to_s, *script(BEGIN_ + code, *arguments), env: environment_of(kind).merge(env))
  end

  def environment_of(kind)
    {"TDDP_BACKEND_PATH" => MPIModules.folder(kind), "TDDP_SHM" => "0"}
  end

  def check_ok(kind, size, code, env: {})
    result = ranks(kind, size, code, env: env)
    assert_code 0, result
    assert_equal ["ok"], result.out.lines.map(&:strip).grep(/\Aok/), result.err
  end

  def check_programs(kind, size)
    result = ranks(kind, size, <<~RUBY, ROOT, (1000 * size).to_s)
      require "\#{ARGV[0]}/test/ruby/random_collectives"
      15.times do |n|
        program = RandomCollectives.new(Integer(ARGV[1]) + n, SIZE)
        wrong = D.all_gather_object(RandomCollectives::Rank.new(program, RANK).run)
        raise "seed \#{program.seed}: \#{wrong.compact.first}" if wrong.any?
      end
      all_ok("ok")
      D.destroy_process_group
    RUBY
    assert_code 0, result
    assert_includes result.out, "ok"
  end

  def check_differing(kind)
    need(kind)
    result = ranks(kind, 2, <<~RUBY)
      D.all_reduce(Torch.ones(3))
      begin
        D.all_reduce(Torch.ones(3 + RANK))
      rescue D::MismatchError => e
        $stdout.write("\#{RANK}: \#{e.message}\n")
      end
      D.destroy_process_group
    RUBY
    assert_code 0, result
    2.times do |rank|
      assert_match(/^#{rank}: .*rank #{rank} of 2.*#{3 + rank} elements of float32.*rank 0 calls what both called in operation 1: it has left out a call/, result.out)
    end
  end

  # The group has failed, and the end of the other rank is not waited for.
  def check_missing(kind)
    need(kind)
    result = ranks(kind, 2, <<~RUBY)
      sleep if RANK == 1
      D.default_process_group.timeout = 3
      2.times do
        D.all_reduce(Torch.ones(3))
      rescue D::Error => e
        $stdout.write("\#{e.class}: \#{e.message}\n")
      end
      $stdout.flush
      exit!(3)
    RUBY
    refute_equal 0, result.code
    assert_match(/^Torch::Distributed::TimeoutError: .*all_reduce 1 .*: not done after 3000 ms; rank 1 has not done its part; not arrived: rank 1 /, result.out)
    assert_match(/^Torch::Distributed::GroupError: /, result.out)
  end

  def check_lost(kind, ending)
    need(kind)
    result = ranks(kind, 3, <<~RUBY)
      D.barrier
      #{ending} if RANK == 1
      begin
        D.all_reduce(Torch.ones(3))
      rescue D::Error => e
        $stdout.write("\#{RANK}: \#{e.message}\n")
        exit!(3)
      end
      $stdout.write("went on\n")
    RUBY
    refute_equal 0, result.code
    refute_match(/went on|not done after/, result.out)
  end

  def check_example(kind)
    need(kind)
    result = run_command(*MPIModules::KINDS[kind].last, "2", RbConfig.ruby, TRAIN, "--backend", "mpi", env: environment_of(kind))
    assert_code 0, result
    assert_match(/^20 steps, loss 0\.\d+$/, result.out)
  end

  def any_kind
    MPIModules::KINDS.keys.find { |kind| !MPIModules.obstacle(kind) }.tap { |kind| need("openmpi") unless kind }
  end

  def test_processes_that_mpi_has_not_started
    @leaves_files = true # each process's own, as that of a launcher
    result = run_command(BINARY, "--standalone", "--nproc-per-node=2", *ruby(BEGIN_), env: environment_of(any_kind))
    assert_code 1, result
    assert_match(/ranks 0 and 1 are both number 0 of MPI's processes: start all by one mpirun, mpiexec or srun --mpi of (Open MPI v|MPICH Version:)/, result.err + result.out)
  end

  # A library before MPI's that says what an MPI without them says.
  def test_an_mpi_without_threads
    kind = any_kind
    File.write("#{@folder}/serial.c", <<~C)
      #include <mpi.h>
      int MPI_Init_thread(int *count, char ***words, int required, int *provided)
      {
          (void)required;
          return PMPI_Init_thread(count, words, MPI_THREAD_SERIALIZED, provided) | (*provided = MPI_THREAD_SERIALIZED, 0);
      }
    C
    MPIModules.compile(kind, "#{@folder}/serial.c", "-o", "#{@folder}/serial.so")
    result = ranks(kind, 2, "", env: {"LD_PRELOAD" => "#{@folder}/serial.so"})
    assert_code 1, result
    assert_match(/this MPI does not allow several threads to call it \(.+\): expected one with MPI_THREAD_MULTIPLE/, result.err + result.out)
  end

  def test_a_child_of_a_fork
    result = ranks(any_kind, 2, <<~RUBY, "#{@folder}/store")
      D.destroy_process_group
      child = fork do
        D.init_process_group("mpi", store: D::FileStore.new(ARGV[0], SIZE), rank: RANK, world_size: SIZE)
      rescue D::Error => e
        $stdout.write("\#{e.message}\n")
        exit!(0)
      end
      Process.wait(child)
    RUBY
    assert_code 0, result
    assert_match(/MPI was begun by process \d+, and this is its child \d+: begin it in the child alone/, result.out)
  end
end
