# frozen_string_literal: true

require_relative "test_helper"

class ProcessGroupTest < Minitest::Test
  def test_without_a_group
    refute Distributed.initialized?
    assert Distributed.available?
    assert_nil Distributed.default_process_group
    [-> { Distributed.get_rank }, -> { Distributed.all_reduce(Torch.ones(1)) }, -> { Distributed.barrier }].each do |call|
      error = assert_raises(Distributed::GroupError, &call)
      assert_kind_of Torch::Error, error
      assert_match(/init_process_group/, error.message)
    end
    assert_nil Distributed.destroy_process_group
  end

  def test_the_life_of_a_group
    store = Distributed::HashStore.new
    2.times do
      group = Distributed.init_process_group("gloo", store: store, rank: 0, world_size: 1)
      assert_equal [0, 1, "gloo"], [group.rank, group.size, group.backend]
      assert_equal [0, 1, "gloo"], [Distributed.get_rank, Distributed.get_world_size, Distributed.get_backend]
      assert_same group, Distributed.default_process_group
      assert_equal [2.0], Distributed.all_reduce(Torch.tensor([2.0]), group: group).to_a
      error = assert_raises(Distributed::GroupError) { Distributed.init_process_group("gloo", store: store, rank: 0, world_size: 1) }
      assert_match(/destroy_process_group first/, error.message)
      Distributed.destroy_process_group
      Distributed.destroy_process_group
      refute Distributed.initialized?
      assert group.closed?
      assert_match(/destroyed/, assert_raises(Distributed::GroupError) { Distributed.barrier(group: group) }.message)
      assert_match(/destroyed/, group.inspect)
    end
  end

  def test_a_symbol_names_a_backend_and_nil_chooses
    [:gloo, nil].each do |backend|
      skip "this machine has a GPU" if backend.nil? && Torch::CUDA.available?
      Distributed.init_process_group(backend, store: Distributed::HashStore.new, rank: 0, world_size: 1)
      assert_equal "gloo", Distributed.get_backend
    ensure
      Distributed.destroy_process_group
    end
  end

  def test_with_gpus_the_default_serves_both_kinds_of_tensors
    Distributed.define_singleton_method(:cuda?) { true }
    assert_equal ["cpu:gloo,cuda:nccl", "nccl", "gloo"],
      [nil, "cuda:0", "cpu"].map { |device| Distributed.__send__(:default_backend, device) }
  ensure
    Distributed.singleton_class.remove_method(:cuda?)
  end

  def test_backends_that_are_not_here
    assert Distributed.gloo_available?
    refute Distributed.backend_available?("carrier_pigeon")
    options = {store: Distributed::HashStore.new, rank: 0, world_size: 1}
    error = assert_raises(Distributed::UnavailableError) { Distributed.init_process_group("carrier_pigeon", **options) }
    assert_match(/carrier_pigeon/, error.message)
    unless Distributed.mpi_available?
      error = assert_raises(Distributed::UnavailableError) { Distributed.init_process_group("mpi", **options) }
      assert_match(/no backend "mpi" in this installation: install an MPI \(Debian: libopenmpi-dev or libmpich-dev\)/, error.message)
    end
    skip "nccl is here" if Distributed.nccl_available?
    error = assert_raises(Distributed::UnavailableError) { Distributed.init_process_group("nccl", **options) }
    assert_match(/nccl/, error.message)
    refute Distributed.initialized?
  end

  def test_devices_and_their_backends
    assert_equal %w[gloo nccl gloo nccl gloo],
      ["cpu", "cuda:1", :cpu, :cuda, Torch.device("cpu")].map { |device| Distributed.get_default_backend_for_device(device) }
    ["toaster", :xla, 3.5, "cpu:one"].each do |device|
      assert_match(/#{Regexp.escape(device.inspect)}/, assert_raises(ArgumentError) { Distributed.get_default_backend_for_device(device) }.message)
    end
  end

  def wrong(**options)
    assert_raises(ArgumentError) { Distributed.init_process_group("gloo", timeout: 5, **options) }.message
  end

  def test_arguments_that_are_wrong
    store = Distributed::HashStore.new
    assert_match(/rank 2 is outside the world: expected 0 to 1/, wrong(store: store, rank: 2, world_size: 2))
    assert_match(/rank -1 is outside/, wrong(store: store, rank: -1, world_size: 2))
    assert_match(/world size 0/, wrong(store: store, rank: 0, world_size: 0))
    assert_match(/world size is not known/, wrong(store: store, rank: 0))
    assert_match(/rank: expected a whole number, got "one"/, wrong(store: store, rank: "one", world_size: 2))
    assert_match(/init_method: expected .*got "smoke:/, wrong(init_method: "smoke://", rank: 0, world_size: 1))
    assert_match(/tcp:\/\/host:port/, wrong(init_method: "tcp://127.0.0.1", rank: 0, world_size: 1))
    assert_match(/70000/, wrong(init_method: "tcp://127.0.0.1:70000", rank: 0, world_size: 1))
    assert_match(/needs rank: and world_size:/, wrong(init_method: "tcp://127.0.0.1:29500"))
    assert_match(/rank in .*two/, wrong(init_method: "tcp://127.0.0.1:29500?rank=two&world_size=2"))
    assert_match(/absolute path/, wrong(init_method: "file://relative/path", rank: 0, world_size: 1))
    assert_match(/timeout: expected a positive number/,
      assert_raises(ArgumentError) { Distributed.init_process_group("gloo", store: store, rank: 0, world_size: 1, timeout: 0) }.message)
    assert_match(/store: expected a Torch::Distributed::Store/,
      assert_raises(TypeError) { Distributed.init_process_group("gloo", store: {}, rank: 0, world_size: 1) }.message)
  end

  def test_variables_that_are_wrong
    good = {"RANK" => "0", "WORLD_SIZE" => "1", "MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => "29500"}
    {
      {"RANK" => "abc"} => /RANK expected a whole number, got "abc"/,
      {"RANK" => nil} => /RANK is not set/,
      {"WORLD_SIZE" => "2x"} => /WORLD_SIZE expected a whole number, got "2x"/,
      {"RANK" => "1"} => /rank 1 is outside the world: expected 0 to 0/,
      {"MASTER_PORT" => "70000"} => /MASTER_PORT expected a port from 1 to 65535, got 70000/,
      {"MASTER_PORT" => "http"} => /MASTER_PORT .*"http"/,
      {"MASTER_ADDR" => ""} => /MASTER_ADDR is empty/
    }.each do |change, text|
      with_env(good.merge(change)) { assert_match text, wrong }
    end
  end

  def test_a_master_that_does_not_answer
    with_env("RANK" => "1", "WORLD_SIZE" => "2", "MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => held_port.to_s) do
      error = assert_raises(Distributed::Error) { Distributed.init_process_group("gloo", timeout: 0.5) }
      assert_match(/127\.0\.0\.1.*#{ENV["MASTER_PORT"]}/, error.message)
      refute Distributed.initialized?
    end
  end

  # Ranks that are through early find the store of the group before. In half of the rounds one rank stays until another
  # is about to make the next group.
  def test_groups_that_follow_each_other_at_one_address
    next_one = Array.new(4) { Event.new }
    ranks = Distributed.fork_world(3) do |rank, port|
      Array.new(8) do |round|
        when_waiting { next_one[round - 1].set } if round.between?(1, 4) && rank == round % 3
        Distributed.init_process_group("gloo", init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 3, timeout: 20)
        sum = Distributed.all_reduce(Torch.tensor([rank + round])).item
        next_one[round].wait if rank == round % 3 && round < 4
        Distributed.destroy_process_group
        sum
      end
    end
    assert_equal [Array.new(8) { |round| 3 + 3 * round }] * 3, ranks
  end

  def test_tcp_and_file_addresses
    ranks = Distributed.fork_world(2) do |rank, port|
      Distributed.init_process_group("gloo", init_method: "tcp://127.0.0.1:#{port}?rank=#{rank}&world_size=2", timeout: 20)
      sum = Distributed.all_reduce(Torch.tensor([rank + 1.0])).item
      Distributed.destroy_process_group
      path = File.join(Dir.tmpdir, "torch-ddp-test-#{Process.ppid}-#{port}")
      Distributed.init_process_group("gloo", init_method: "file://#{path}", rank: rank, world_size: 2, timeout: 20)
      again = Distributed.all_reduce(Torch.tensor([rank + 2.0])).item
      Distributed.destroy_process_group
      [sum, again, path]
    end
    ranks.each { |sum, again, path| assert_equal [3.0, 5.0, false], [sum, again, File.exist?(path)] }
  end

  # Under torchrun every rank is a client of the launcher's store, which stays when workers are restarted.
  def test_the_launchers_store_serves_several_attempts
    server = Distributed::TCPStore.new("127.0.0.1", 0, nil, true)
    2.times do |attempt|
      sums = Distributed.fork_world(2) do |rank, _port|
        ENV.update("MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => server.port.to_s,
          "TORCHELASTIC_USE_AGENT_STORE" => "True", "TORCHELASTIC_RESTART_COUNT" => attempt.to_s)
        Array.new(2) do
          Distributed.init_process_group("gloo", timeout: 20)
          Distributed.all_reduce(Torch.tensor([rank + 1.0])).item
        ensure
          Distributed.destroy_process_group
        end
      end
      assert_equal [[3.0, 3.0]] * 2, sums
    end
  ensure
    server&.close
  end

  def test_a_group_made_before_a_fork_refuses_the_child
    alone do
      group = Distributed.default_process_group
      said = Distributed.fork_world(1) do
        here = [Distributed.initialized?, failure { Distributed.barrier }, failure { Distributed.barrier(group: group) }]
        Distributed.destroy_process_group
        Distributed.init_process_group("gloo", timeout: 20)
        sum = Distributed.all_reduce(Torch.tensor([4.0])).item
        Distributed.destroy_process_group
        [*here, sum]
      end
      initialized, default, given, sum = said[0]
      assert_equal false, initialized
      assert_match(/before a fork/, default[1])
      assert_equal "Torch::Distributed::GroupError", given[0]
      assert_match(/made by process \d+, this is its child/, given[1])
      assert_equal 4.0, sum
      assert_equal 1.0, Distributed.all_reduce(Torch.ones(1)).item
    end
  end

  def test_a_dead_peer_is_news
    said = without(1) do
      [failure { Distributed.all_reduce(Torch.ones(4)) }, failure { Distributed.barrier }]
    end
    said.each do |((name, text), after), _|
      assert_equal ["Torch::Distributed::PeerLostError", "Torch::Distributed::GroupError"], [name, after[0]]
      assert_match(/all_reduce/, text)
      assert_match(/lost rank 1/, text)
    end
  end

  def test_a_group_left_open_ends_quietly_with_the_process
    code = <<~RUBY
      store = Torch::Distributed::TCPStore.new("127.0.0.1", 0, 1, true)
      Torch::Distributed.init_process_group("gloo", store: store, rank: 0, world_size: 1)
      work = Torch::Distributed.all_reduce(Torch.ones(10), async_op: true)
      at_exit { puts "bye" }
      exit Integer(ARGV[0]) if ARGV[0]
      raise "on purpose" if ENV["RAISE"]
    RUBY
    assert_equal ["bye\n", "", 0], ruby(code).then { |out, err, status| [out, err, status.exitstatus] }
    assert_equal ["bye\n", "", 3], ruby(code, "3").then { |out, err, status| [out, err, status.exitstatus] }
    out, err, status = ruby(code, env: {"RAISE" => "1"})
    assert_equal ["bye\n", 1], [out, status.exitstatus]
    assert_match(/\A-e:6.*on purpose \(RuntimeError\)\n\z/, err)
  end

  def test_ends_in_any_order
    ended = Array.new(3) { Event.new }
    world(3) do |rank|
      tensor = Distributed.all_reduce(Torch.ones(10))
      # Rank 1, then 0, then 2.
      ended[{0 => 1, 2 => 0}.fetch(rank)].wait unless rank == 1
      Distributed.destroy_process_group
      ended[rank].set
      tensor.sum.item
    end.each { |sum| assert_equal 30.0, sum }
  end

  # The other rank never comes: without the interrupt destroying would wait for ten seconds.
  def test_destroying_is_interrupted_and_ends_the_group
    interrupted = Event.new
    said, = world(2) do |rank, _port|
      next interrupted.wait if rank == 1

      work = Distributed.all_reduce(Torch.ones(3), async_op: true)
      assert_raises(Timeout::Error) { Timeout.timeout(0.3) { Distributed.destroy_process_group } }
      interrupted.set
      [Distributed.initialized?, work.completed?, failure { work.wait }]
    end
    assert_equal [false, true, "Torch::Distributed::GroupError"], [*said[0, 2], said[2][0]]
  end

  def test_connections_that_are_refused_leave_nothing_open
    before = Dir.children("/proc/self/fd").size
    10.times { alone { Distributed.barrier } }
    GC.start
    assert_operator Dir.children("/proc/self/fd").size, :<=, before + 2
    assert_equal [], Dir.children("/proc/self/task").map { |task| File.read("/proc/self/task/#{task}/comm").chomp }.grep(/tddp/)
  end

  class Stop < StandardError; end

  # An interrupt may come when the group has just been made and nobody has got it yet.
  def test_groups_that_are_interrupted_while_they_are_made_end
    500.times do
      store = Distributed::HashStore.new
      thread = Thread.new do
        Distributed::ProcessGroup._create("gloo", "interrupted", store, 0, 1, 10, nil, false)
      rescue Stop
        nil
      end
      thread.report_on_exception = false
      sleep 0.0003 * rand
      thread.raise(Stop)
      begin
        thread.join
      rescue Stop
        nil
      end
    end
    3.times { GC.start }
    # The collector may take an old value on the stack for the last one.
    await("the groups' threads to end") { threads.size <= 1 }
  end

  # Each of them waits a second for the store's lock at its end, which is not Ruby's to wait for.
  def test_the_collector_does_not_wait_for_the_end_of_a_group
    Dir.mktmpdir do |folder|
      path = File.join(folder, "store")
      dropped = Thread.new do
        Array.new(20) { |number| Distributed::ProcessGroup._create("fake", "dropped #{number}", Distributed::FileStore.new(path), 0, 1, 10, nil, false) }
      end.value
      File.open(path) do |file|
        file.flock(File::LOCK_EX)
        dropped.clear
        GC.start
        assert_includes threads, "tddp-blocking"
      end
      await("the groups to end") { !threads.include?("tddp-blocking") }
    end
  end

  # The names of the library's threads.
  def threads
    Dir.children("/proc/self/task").map { |task| File.read("/proc/self/task/#{task}/comm").chomp }.grep(/tddp/)
  rescue Errno::ENOENT, Errno::ESRCH
    retry
  end
end
