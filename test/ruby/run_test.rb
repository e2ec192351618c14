# frozen_string_literal: true

require_relative "test_helper"
require_relative "../launch/launch_case"

class RunTest < Minitest::Test
  # What a launcher leaves in the environment.
  VARIABLES = %w[RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_ERROR_FILE].freeze

  # Without a launcher, or with the variables of one.
  def launch(variables = {}, device: "cpu", **options, &block)
    with_env(VARIABLES.to_h { |name| [name, nil] }.merge(variables)) { Distributed.run(device: device, **options, &block) }
  end

  def wrong(variables = {}, kind: ArgumentError, **options)
    assert_raises(kind) { launch(variables, **options) { flunk "the block ran" } }.message
  end

  # Runs in each process of a world, which are launched.
  def launched(size, **options)
    Timeout.timeout(LIMIT) do
      Distributed.fork_world(size) do |rank|
        value_or_failure { Distributed.run(device: "cpu", timeout: LIMIT / 2, **options) { |ctx| yield ctx, rank } }
      end
    end
  end

  def place(ctx)
    [ctx.rank, ctx.local_rank, ctx.world_size, ctx.local_world_size, Distributed._device_name(ctx.device), ctx.main?]
  end

  # As if there were GPUs.
  def with_gpus(count)
    cuda = Torch::CUDA.singleton_class
    cuda.send(:alias_method, :real_available?, :available?)
    cuda.send(:alias_method, :real_device_count, :device_count)
    cuda.send(:define_method, :available?) { count.positive? }
    cuda.send(:define_method, :device_count) { count }
    yield
  ensure
    %i[available? device_count].each { |name| cuda.send(:alias_method, name, :"real_#{name}") }
  end

  # --- the ranks of a launcher -------------------------------------------------------------------

  def test_each_rank_has_its_place_and_a_mesh
    found = launched(4, mesh: {dp: -1, tp: 2}) do |ctx, rank|
      sum = Distributed.all_reduce(Torch.tensor([rank + 1.0]), group: ctx.mesh.get_group("tp")).item
      [place(ctx), ctx.mesh.shape, ctx.mesh.mesh_dim_names, ctx.mesh.get_coordinate, sum]
    end
    found.each_with_index do |here, rank|
      assert_equal [[rank, rank, 4, 4, "cpu", rank.zero?], [2, 2], %w[dp tp], [rank / 2, rank % 2], (rank < 2) ? 3.0 : 7.0], here
    end
  end

  def test_the_ranks_of_mpirun
    found = Distributed.fork_world(2) do |rank|
      VARIABLES.each { |name| ENV.delete(name) unless name.start_with?("MASTER") }
      names = %w[RANK SIZE LOCAL_RANK LOCAL_SIZE].map { |name| "OMPI_COMM_WORLD_#{name}" }
      ENV.update(names.zip([rank, 2, rank, 2].map(&:to_s)).to_h)
      Distributed.run(processes: 3, nodes: 1, device: "cpu") { |ctx| place(ctx) }
    end
    assert_equal [[0, 0, 2, 2, "cpu", true], [1, 1, 2, 2, "cpu", false]], found
  end

  def test_random_numbers_are_those_of_the_seed_on_all_ranks
    dropped = -> { Torch::NN::F.dropout(Torch.ones(32), p: 0.5).to_a }
    draw = ->(*) { [Torch.randn(2).to_a, dropped.call, rand(1_000_000)] }
    zero, one = [{}, {seed: 1}].map { |options| launched(2, **options, &draw) }
    expected = Distributed.fork_world(1) { Torch.manual_seed(0).then { [Torch.randn(2).to_a, dropped.call, Random.new(0).rand(1_000_000)] } }.first
    assert_equal [expected] * 2, zero
    assert_equal 1, one.uniq.size
    refute_equal zero, one
  end

  # Dropout masks differ then, and DistributedDataParallel still makes the models equal.
  def test_seeds_by_rank
    draw = -> { [Torch::NN::F.dropout(Torch.ones(32), p: 0.5).to_a, rand(1_000_000)] }
    net = -> { Torch::NN::Linear.new(2, 2, bias: false) }
    found = launched(2, seed: 7, seed_by_rank: true) do
      drawn = draw.call
      [*drawn, Torch::NN::Parallel::DistributedDataParallel.new(net.call).module.weight.to_a]
    end
    expected = Distributed.fork_world(1) do
      [7, 8].map do |seed|
        srand(seed)
        Torch.manual_seed(seed)
        [*draw.call, net.call.weight.to_a]
      end
    end.first
    assert_equal expected.map { |numbers| numbers.first(2) }, found.map { |numbers| numbers.first(2) }
    refute_equal expected[0][0], expected[1][0]
    assert_equal [expected[0][2]] * 2, found.map(&:last)
  end

  def test_without_a_seed_nothing_is_seeded
    draw = ->(*) { [Torch.randn(2).to_a, rand(1_000_000)] }
    outside, inside = Distributed.fork_world(1) do
      [draw, -> { launch(seed: nil, &draw) }].map do |program|
        Torch.manual_seed(5)
        srand(5)
        program.call
      end
    end.first
    assert_equal outside, inside
  end

  def test_groups_are_destroyed_however_the_block_ends
    found = Distributed.fork_world(2) do
      values = [Distributed.run { |ctx| Distributed.initialized? && ctx.rank }]
      values << Distributed.initialized?
      values << failure { Distributed.run { raise IOError, "now" } } << Distributed.initialized?
      values << Distributed.run { Distributed.run {} }
    rescue Distributed::GroupError => e
      values << e.message << Distributed.initialized?
    end
    found.each_with_index do |values, rank|
      assert_equal [rank, false, %w[IOError now], false], values.first(4)
      assert_match(/there is one already: call destroy_process_group/, values[4])
      refute values[5]
    end
  end

  def test_an_exception_on_one_rank_ends_the_others_naming_it
    found = launched(3) { |_, rank| (rank == 1) ? raise(IOError, "the disk\e[2J is full") : Distributed.all_reduce(Torch.ones(1)) }
    assert_equal ["IOError", "the disk\e[2J is full"], found[1]
    [0, 2].each do |rank|
      assert_match(/PeerLostError all_reduce .* rank 1 .* has left the group because of an error: IOError: the disk\?\[2J is full/,
        found[rank].join(" "))
    end
  end

  def test_arguments_that_differ_are_named_on_all_ranks
    found = Distributed.fork_world(2) { |rank| failure { Distributed.run(mesh: (rank == 1) ? {dp: 2} : {tp: 2}) { flunk } } }
    found.each { |error| assert_match(/MismatchError.*mesh: (dp|tp) 2.*mesh: (dp|tp) 2/, error.join(" ")) }
  end

  # What differs between the machines.
  def test_a_machine_that_is_not_as_it_should_be
    found = Distributed.fork_world(2) do |rank|
      with_gpus((rank == 1) ? 1 : 2) { failure { Distributed.run(gpus_per_node: 2, backend: "gloo") { flunk } } }
    end
    assert_match(/MismatchError.*global rank 1 could not take part in run: gpus_per_node: 2, but 1 GPU is visible/, found[0].join(" "))
    assert_match(/ArgumentError gpus_per_node: 2, but 1 GPU is visible/, found[1].join(" "))
    found = Distributed.fork_world(2) { with_gpus(3) { failure { Distributed.run(nodes: 2, backend: "gloo") { flunk } } } }
    assert_match(/ArgumentError nodes: 2, but 2 of 2 processes are on .*expected 1\.0 on each machine/, found[0].join(" "))
  end

  def test_a_process_has_the_gpu_of_its_local_rank
    device = lambda do |count, asked, local|
      group = Struct.new(:rank, :size).new(local, 4)
      with_gpus(count) do
        with_env("RANK" => local.to_s, "WORLD_SIZE" => "4", "LOCAL_RANK" => local.to_s, "LOCAL_WORLD_SIZE" => "4") do
          arguments = Distributed::Run::Arguments.new(processes: nil, nodes: nil, gpus_per_node: nil, backend: "gloo", seed: nil,
            mesh: nil, device: asked, timeout: nil)
          Distributed._device_name(arguments.context(group).device)
        end
      end
    rescue ArgumentError => e
      e.message
    end
    assert_equal %w[cuda:0 cuda:3 cuda:0 cuda:2 cpu cpu], [device.call(4, nil, 0), device.call(4, "cuda", 3), device.call(1, nil, 3),
      device.call(4, "cuda:2", 1), device.call(4, :cpu, 1), device.call(0, nil, 1)]
    assert_match(/local rank 2 takes GPU 2, but 2 GPUs are visible/, device.call(2, nil, 2))
    assert_match(/device: cuda:4, but 4 GPUs are visible/, device.call(4, "cuda:4", 0))
    assert_match(/local rank 1 takes GPU 1, but 0 GPUs are visible/, device.call(0, "cuda", 1))
  end

  # --- this process alone ------------------------------------------------------------------------

  def test_a_world_of_one
    found = launch { |ctx| [place(ctx), ctx.mesh, Distributed.get_world_size, ctx.frozen?] }
    assert_equal [[0, 0, 1, 1, "cpu", true], nil, 1, true], found
    assert_equal [1, 1], launch(processes: 1, mesh: {dp: nil, tp: 1}, device: "cpu") { |ctx| ctx.mesh.shape }
    # One task of srun's.
    task = {"SLURM_STEP_ID" => "0", "SLURM_PROCID" => "0", "SLURM_NTASKS" => "1", "SLURM_LOCALID" => "0"}
    assert_equal 1, launch(task, &:world_size)
    refute Distributed.initialized?
  end

  def test_wrong_arguments_are_named_before_anything_begins
    assert_match(/block/, assert_raises(ArgumentError) { Distributed.run }.message)
    {processes: 0, nodes: "two", gpus_per_node: 1.5}.each do |name, value|
      assert_match(/#{name}: expected a whole number from 1 or nil, got #{value.inspect}/, wrong(**{name => value}))
    end
    [-1, 2**63, "0"].each { |seed| assert_match(/seed: expected a whole number .*got #{Regexp.escape(seed.inspect)}/, wrong(seed: seed)) }
    assert_match(/seed_by_rank: expected true or false, got 1/, wrong(seed_by_rank: 1))
    assert_match(/seed_by_rank: true adds the rank to the seed, which is nil/, wrong(seed: nil, seed_by_rank: true))
    assert_match(/timeout: expected a positive number of seconds, got 0/, wrong(timeout: 0))
    assert_match(/backend: expected .*got 1/, wrong(backend: 1, kind: TypeError))
    assert_match(/carrier_pigeon/, wrong(backend: "carrier_pigeon", kind: Distributed::UnavailableError))
    assert_match(/device: expected .*got "tpu"/, wrong(device: "tpu"))
    assert_match(/device: expected .*got 0/, wrong(device: 0, kind: TypeError))
    [[], {}, {dp: 0}, {dp: "2"}, 2].each { |mesh| assert_match(/mesh: expected a Hash of names and sizes from 1, got/, wrong(mesh: mesh)) }
    assert_match(/a size for all dimensions but one/, wrong(mesh: {dp: -1, tp: nil}))
    assert_match(/expected different names/, wrong(mesh: {"dp" => 1}.merge(dp: 1)))
    assert_match(/expected an Array of names/, wrong(mesh: {1 => 1}))
  end

  def test_numbers_that_do_not_fit_are_both_named
    launcher = {"RANK" => "0", "WORLD_SIZE" => "4"}
    assert_equal "mesh: dp 2 x tp 4: expected a product of the world size 4, got 8", wrong(launcher, mesh: {dp: 2, tp: 4})
    assert_equal "mesh: dp -1 x tp 3: expected sizes that divide the world size 4, got 3", wrong(launcher, mesh: {dp: nil, tp: 3})
    assert_match(/mesh: dp 4: expected a product of the world size 2, got 4/, wrong(processes: 2, mesh: {dp: 4}))
    assert_match(/nodes: 2 with gpus_per_node: 8 is 16 processes, but the launcher started 4/, wrong(launcher, nodes: 2, gpus_per_node: 8))
    assert_match(/processes: 4, but gpus_per_node: 2/, wrong(processes: 4, gpus_per_node: 2))
    assert_match(/gpus_per_node: 2, but 0 GPUs are visible on #{Socket.gethostname}/, with_gpus(0) { wrong(gpus_per_node: 2) })
    assert_match(/processes: 3, but 2 GPUs are visible/, with_gpus(2) { wrong(processes: 3, device: nil, backend: "gloo") })
    assert_match(/RANK is 1, but WORLD_SIZE is not set/, wrong({"RANK" => "1"}))
    assert_match(/WORLD_SIZE is 2, but RANK is not set/, wrong({"WORLD_SIZE" => "2"}))
    assert_match(/WORLD_SIZE expected a whole number, got "two"/, wrong({"RANK" => "1", "WORLD_SIZE" => "two"}))
  end

  def test_the_commands_for_several_machines
    error = nil
    out, err = capture_io do
      error = assert_raises(SystemExit) do
        launch({"MASTER_ADDR" => "10.0.0.1", "BUNDLE_GEMFILE" => nil}, nodes: 2, gpus_per_node: 4, mesh: {dp: 2, tp: 4}) { flunk }
      end
    end
    assert_equal 2, error.status
    assert_match(/\Anodes: 2, but no launcher started this process: run the commands above, one on each machine$/, err)
    commands = [0, 1].map do |node|
      ["torchrun", "--nnodes=2", "--node-rank=#{node}", "--nproc-per-node=4", "--master-addr=10.0.0.1", "--master-port=29500",
        $PROGRAM_NAME, *Distributed::SPAWN_ARGV]
    end
    lines = out.lines(chomp: true)
    assert_equal ["# on 10.0.0.1", "# on machine 2 of 2"], lines.values_at(0, 2)
    assert_equal commands, lines.values_at(1, 3).map(&:shellsplit)
    assert_includes lines[1], "torchrun --nnodes=2 --node-rank=0 "
  end

  # --- processes that it starts itself -----------------------------------------------------------

  def test_it_starts_processes_itself
    value = launch(processes: 2, device: "cpu") do |ctx|
      weight = Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(1, 1, bias: false))
      weight.call(Torch.tensor([[ctx.rank + 1.0]])).sum.backward
      [place(ctx), weight.parameters.first.grad.sum.item]
    end
    assert_equal [[0, 0, 2, 2, "cpu", true], 1.5], value
    refute Distributed.initialized?
  end

  def test_values_that_cannot_be_sent
    assert_equal [[1], nil, nil], [[1], Torch.ones(1), -> {}].map { |value| Distributed.send(:dumpable, value) }
  end
end

class RunUnderTorchrunTest < LaunchCase
  def test_its_report_has_what_a_block_raised
    script = ruby(<<~RUBY)
      require "torch/distributed"
      value = Torch::Distributed.run(processes: 7, nodes: 1, device: "cpu", mesh: {dp: -1}) do |ctx|
        [ctx.rank, ctx.world_size, ctx.mesh.shape]
      end
      print "\#{value.inspect}\\n"
      Torch::Distributed.run(device: "cpu") { |ctx| (ctx.rank == 1) ? raise(IOError, "the disk is full") : Torch::Distributed.barrier }
    RUBY
    # Torch needs its bundle.
    env = {"RUBYLIB" => $LOAD_PATH.join(File::PATH_SEPARATOR), "BUNDLE_GEMFILE" => ENV["BUNDLE_GEMFILE"]}
    result = run_torchrun("--nproc-per-node=2", *script, env: env)
    assert_code 1, result
    assert_equal ["[0, 2, [2]]", "[1, 2, [2]]"], result.out.scan(/\[.*\]$/).sort
    assert_match(/Root cause.*?\n(?:  .*\n)*?  rank      : 1 .*\n(?:  .*\n)*?  message   : IOError: the disk is full$/, result.err)
  end

  # By forks here, over Gloo; test/launch/store_test.rb has torchrun.
  def test_a_host_without_ipv4
    only_ipv6 = ["unshare", "--net", "sh", "-c", 'ip link set lo up && ip -4 addr flush dev lo && exec "$@"', "sh"]
    skip "a network namespace needs root and ip" unless system(*only_ipv6, "true", out: File::NULL, err: File::NULL)

    code = <<~RUBY
      D = Torch::Distributed
      sum = proc { [ENV["MASTER_ADDR"], D.all_reduce(Torch.ones(1)).item] }
      p D.run(2, device: "cpu", &sum), D.fork_world(2) { D.init_process_group("gloo") { sum.call } }
    RUBY
    paths = $LOAD_PATH.flat_map { |path| ["-I", path] }
    out, err, status = Timeout.timeout(LIMIT) do
      Open3.capture3({"TDDP_SHM" => "0"}, *only_ipv6, RbConfig.ruby, *paths, "-rtorch/distributed", "-e", code)
    end
    assert_predicate status, :success?, err
    assert_equal %(["::1", 2.0]\n[["::1", 2.0], ["::1", 2.0]]\n), out
  end
end
