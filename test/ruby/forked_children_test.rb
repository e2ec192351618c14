# frozen_string_literal: true

require_relative "test_helper"

# What a child that a rank forks sees of gradients and parameters, which lie in memory that ranks of a host share, and what
# becomes of what it writes there. test/c/shm/arena_test.c looks at the memory itself.
class ForkedChildrenTest < Minitest::Test
  include Worlds

  DDP = Torch::NN::Parallel::DistributedDataParallel
  ZeRO = Torch::Distributed::Optim::ZeroRedundancyOptimizer

  # @return [Hash{Symbol => Torch::Tensor}] one of each kind, all of whose elements are 2
  def tensors
    linear = -> { Torch::NN::Linear.new(30, 4).tap { |net| Torch.no_grad { net.parameters.each { |each| each.fill!(2) } } } }
    kinds = {}
    {gradient: {}, gradient_apart: {gradient_as_bucket_view: false}}.each do |name, options|
      net = linear.call
      DDP.new(net, **options).call(Torch.ones(2, 30)).sum.backward
      kinds[name] = net.weight.grad
    end
    {zero: false, zero_view: true}.each do |name, views|
      net = linear.call
      optimizer = ZeRO.new(net.parameters, optimizer_class: Torch::Optim::SGD, lr: 0.0, parameters_as_bucket_view: views)
      net.call(Torch.ones(1, 30)).sum.backward
      optimizer.step
      kinds[name] = net.weight
    end
    kinds[:sharded] = linear.call.tap { |net| Distributed::FSDP.fully_shard(net) }.parameters.first
    kinds[:shared] = Distributed.empty_shared(100).fill!(2)
    kinds
  end

  def values(tensors)
    tensors.transform_values { |tensor| Torch.no_grad { tensor.detach.to_a.flatten.uniq } }
  end

  def fill(tensors, value)
    Torch.no_grad { tensors.each_value { |tensor| tensor.detach.fill!(value) } }
  end

  # A child that reads once the parent has written, then writes, and says what it read.
  #
  # @return [Array(IO, IO, Integer)]
  def forked(tensors, value)
    answer, said = IO.pipe
    go, wrote = IO.pipe
    pid = fork do
      [answer, wrote].each(&:close)
      go.read(1) # another child has its other end too
      seen = values(tensors)
      fill(tensors, value)
      said.write(Marshal.dump([seen, values(tensors)]))
      said.close
      exit!(0)
    end
    [said, go].each(&:close)
    [answer, wrote, pid]
  end

  def test_children_have_copies_as_of_the_fork
    results = world(2) do
      mine = tensors
      children = [7, 8].map { |value| forked(mine, value) }
      fill(mine, 5)
      seen = children.map do |answer, wrote, pid|
        wrote.write(".")
        text = answer.read
        Process.wait(pid)
        Marshal.load(text)
      end
      Distributed.barrier
      after = values(mine)
      Distributed.barrier
      [seen, after, Distributed.all_reduce(mine[:shared])[0].item]
    end
    kinds = %i[gradient gradient_apart zero zero_view sharded shared]
    all = ->(value) { kinds.to_h { |kind| [kind, [value]] } }
    results.each do |seen, after, sum|
      assert_equal [[all.call(2.0), all.call(7.0)], [all.call(2.0), all.call(8.0)]], seen
      assert_equal all.call(5.0), after
      assert_equal 10.0, sum, "the memory is still shared with the other rank"
    end
  end

  # Process.daemon ends the rank, and goes on in a child of it; which makes a group of its own here.
  def test_a_daemon_has_copies
    answer, said = IO.pipe
    Distributed.fork_world(2) do |half|
      rank = fork do
        Distributed.init_process_group(BACKEND, timeout: LIMIT / 2)
        kept = Distributed.empty_shared(100).fill!(half + 2)
        Distributed.barrier
        Process.daemon(true, true)
        Distributed.init_process_group(BACKEND, store: Distributed::HashStore.new, rank: 0, world_size: 1)
        said.puts(Distributed.all_reduce(kept).sum.item.to_i)
        exit!(0)
      end
      Process.wait(rank)
    end
    said.close
    assert_equal %w[200 300], answer.read.split.sort
  end

  # Under a limit of the address space that leaves no room for a copy.
  def test_without_memory_for_copies
    bytes = 64 << 20
    said, ended, kept = world(2) do |rank|
      kept = Distributed.empty_shared(bytes / 4)
      kept[0] = 1
      found = [*fork_without_memory(bytes / 4) { kept[0].item }, kept[0].item] if rank.zero?
      Distributed.barrier
      found
    end.first
    assert_match(/warn shm: process \d+ forks without memory for a copy of #{bytes} bytes of gradients and parameters: the child ends if it uses them/, said)
    assert_equal [true, 1.0], [ended, kept]
  end

  # @param room [Integer] bytes that this process may map besides what it has
  # @return [Array(String, Boolean)] what it said when it forked, and whether a signal ended the child, which runs the block
  def fork_without_memory(room)
    size = File.read("/proc/self/status")[/VmSize:\s+(\d+) kB/, 1].to_i * 1024
    limits = Process.getrlimit(:AS)
    answer, said = IO.pipe
    before = $stderr.dup
    $stderr.reopen(said)
    Process.setrlimit(:AS, size + room, limits[1])
    child = fork do
      $stderr.reopen(File::NULL) # where Ruby reports the signal
      Process.setrlimit(:CORE, 0)
      yield
      exit!(0)
    end
    Process.setrlimit(:AS, *limits)
    $stderr.reopen(before)
    said.close
    [answer.read, Process.wait2(child)[1].signaled?]
  end

  # @return [Integer] by how many bytes the block has raised what this process has at most
  def peak_of
    File.write("/proc/self/clear_refs", "5") # the peak is what is there now
    status = -> { File.read("/proc/self/status")[/VmHWM:\s+(\d+) kB/, 1].to_i * 1024 }
    before = status.call
    yield
    status.call - before
  end

  # Where Ruby forks for a program, as it does in a process of root's, that copies nothing; other forks do.
  def test_programs_that_are_started_take_no_copies
    bytes = 32 << 20
    peaks = world(2) do
      kept = Distributed.empty_shared(bytes / 4).fill!(1)
      programs = [-> { system("true") }, -> { `true` }, -> { Process.wait(spawn("true")) }, -> { IO.popen("true").close }]
      forks = [-> { Process.wait(fork { exit!(0) }) }, -> { (IO.popen("-") || exit!(0)).close }]
      [programs, forks].map { |kind| kind.map { |start| peak_of(&start) } }.tap { kept.sum }
    end
    peaks.each do |programs, forks|
      programs.each { |peak| assert_operator peak, :<, bytes / 2 }
      forks.each { |peak| assert_operator peak, :>, bytes / 2 }
    end
  end
end
