# frozen_string_literal: true

require_relative "on_gpu"
require "fiddle"
require "json"

# What operations on a GPU's memory promise.
class GPUDevicesTest < Minitest::Test
  include OnGPU

  ReduceOp = Distributed::ReduceOp

  # Has the host not wait for the CPU's stand-in for a stream, as it does not for a GPU's.
  def detach_default_stream
    return unless STAND_INS

    control = Fiddle.dlopen(ENV.fetch("TDDP_CUDART_LIBRARY"))["standin_set_default_detached"]
    Fiddle::Function.new(control, [Fiddle::TYPE_INT], Fiddle::TYPE_VOID).call(1)
  end

  # Two ranks, of which the other one comes to its `count` operations only once rank 0's block has called what it is given.
  def one_after_the_other(count = 1)
    ranks(2) do |rank|
      detach_default_stream
      Distributed.all_reduce(filled(1.0))
      store = Distributed::TCPStore.new(ENV.fetch("MASTER_ADDR"), ENV.fetch("MASTER_PORT").to_i)
      if rank == 1
        store.wait(["go on"])
        count.times { Distributed.all_reduce(filled(1.0, 10_000)) }
        next Distributed.barrier
      end
      yield -> { store.set("go on", "1") }
    end.first
  end

  def test_the_result_is_there_for_what_comes_after_the_wait
    sums = ranks(2) do |rank|
      tensor = filled(rank + 1.0)
      work = Distributed.all_reduce(tensor, async_op: true)
      work.wait
      doubled = tensor * 2
      [doubled.cpu.to_a, work.exception, work.operation]
    end
    assert_equal [[[6.0] * 5, nil, :all_reduce]] * 2, sums
  end

  def test_many_are_under_way_at_once
    totals = ranks(2) do |rank|
      tensors = Array.new(20) { |i| filled(rank + i.to_f, 1000 + i) }
      works = tensors.map { |tensor| Distributed.all_reduce(tensor, async_op: true) }
      works.each(&:wait)
      tensors.map { |tensor| tensor.cpu.to_a.uniq }
    end
    assert_equal [Array.new(20) { |i| [2.0 * i + 1] }] * 2, totals
  end

  # Nobody keeps the tensor or the work; the collector comes in between, and other tensors of their size.
  def test_memory_lives_until_the_device_is_done
    found = one_after_the_other(20) do |go_on|
      20.times { Distributed.all_reduce(filled(1.0, 10_000), async_op: true) }
      3.times { GC.start }
      others = Array.new(50) { filled(9.0, 10_000) }
      go_on.call
      Distributed.barrier
      others.map { |tensor| tensor.cpu.to_a.uniq }.uniq
    end
    assert_equal [[9.0]], found
  end

  def test_a_wait_puts_the_operation_before_what_comes_next_and_goes_on
    done = one_after_the_other do |go_on|
      work = Distributed.all_reduce(filled(1.0, 10_000), async_op: true)
      work.wait
      before = work.completed?
      go_on.call
      work.wait(20)
      Distributed.barrier
      [before, work.completed?]
    end
    assert_equal [false, true], done
  end

  def test_a_wait_with_a_time_has_the_host_wait
    done = one_after_the_other do |go_on|
      work = Distributed.all_reduce(filled(1.0, 10_000), async_op: true)
      short = failure { work.wait(timeout: 0.01) }[0]
      before = work.completed?
      waiting = when_waiting { go_on.call }
      work.wait(20)
      after = work.completed?
      waiting.join
      Distributed.barrier
      [short, before, after]
    end
    assert_equal ["Torch::Distributed::TimeoutError", false, true], done
  end

  def test_a_host_that_waits_by_choice
    done = with_env("TORCH_NCCL_BLOCKING_WAIT" => "1") do
      one_after_the_other do |go_on|
        work = Distributed.all_reduce(filled(1.0, 10_000), async_op: true)
        waiting = when_waiting { go_on.call }
        work.wait
        done = work.completed?
        waiting.join
        Distributed.barrier
        done
      end
    end
    assert done
  end

  def test_synchronize_never_has_the_host_wait
    done = with_env("TORCH_NCCL_BLOCKING_WAIT" => "1") do
      one_after_the_other do |go_on|
        work = Distributed.all_reduce(filled(1.0, 10_000), async_op: true)
        returned = work.synchronize
        before = work.completed?
        go_on.call
        work.wait
        Distributed.barrier
        [returned, before, work.completed?]
      end
    end
    assert_equal [nil, false, true], done
  end

  def test_messages
    got = ranks(2) do |rank|
      out = filled(rank + 10.0)
      into = filled(0.0)
      messages = [Distributed::P2POp.new(:isend, out, 1 - rank), Distributed::P2POp.new(:irecv, into, 1 - rank)]
      messages.reverse! if rank.zero?
      Distributed.batch_isend_irecv(messages).each(&:wait)
      again = filled(0.0)
      Distributed.coalescing_manager do
        Distributed.irecv(again, src: 1 - rank)
        Distributed.isend(out, dst: 1 - rank)
      end
      objects = [nil]
      if rank.zero?
        Distributed.send_object_list([{"a" => 1}], dst: 1, device: device)
      else
        source = Distributed.recv_object_list(objects, src: 0, device: device)
      end
      [into.cpu.to_a.uniq, again.cpu.to_a.uniq, source, objects]
    end
    assert_equal [[[11.0], [11.0], nil, [nil]], [[10.0], [10.0], 0, [{"a" => 1}]]], got
  end

  # The message comes only once the call has returned.
  def test_who_has_sent
    found = ranks(2) do |rank|
      detach_default_stream
      into = filled(0.0)
      # The first one connects the two.
      rank.zero? ? Distributed.recv(into, src: 1) : Distributed.send(filled(1.0), dst: 0)
      store = Distributed::TCPStore.new(ENV.fetch("MASTER_ADDR"), ENV.fetch("MASTER_PORT").to_i)
      if rank.zero?
        source = Distributed.recv(into, src: 1)
        store.set("go on", "1")
      else
        store.wait(["go on"])
        Distributed.send(filled(3.0), dst: 0)
      end
      Distributed.barrier
      [source, into.cpu.to_a.uniq]
    end
    assert_equal [1, [3.0]], found.first
  end

  def test_a_group_for_host_and_device
    need_gloo
    got = ranks(2, "cpu:gloo,cuda:nccl") do |rank|
      host = Torch.tensor([rank + 1])
      tensor = filled(rank.to_f)
      Distributed.all_reduce(host)
      Distributed.all_reduce(tensor, op: ReduceOp::AVG)
      Distributed.barrier
      [Distributed.get_backend, host.to_a, tensor.cpu.to_a.uniq]
    end
    assert_equal [["cpu:gloo,cuda:nccl", [3], [0.5]]] * 2, got
  end

  def test_gloo_takes_a_device_s_memory
    need_gloo
    got = ranks(3, "gloo") do |rank|
      tensor = filled(rank.to_f, 7)
      Distributed.all_reduce(tensor)
      parts = Array.new(3) { filled(0.0, 2) }
      Distributed.all_gather(parts, filled(rank.to_f, 2))
      [tensor.cpu.to_a.uniq, parts.map { |part| part.cpu.to_a.uniq }]
    end
    assert_equal [[[3.0], [[0.0], [1.0], [2.0]]]] * 3, got
  end

  def test_objects_and_barriers
    got = ranks(2) do |rank|
      all = Array.new(2)
      Distributed.all_gather_object(all, {rank: rank, words: %w[a b] * rank})
      list = [rank.zero? ? "first" : nil]
      Distributed.broadcast_object_list(list, src: 0)
      Distributed.monitored_barrier
      [all, list]
    end
    assert_equal [[[{rank: 0, words: []}, {rank: 1, words: %w[a b]}], ["first"]]] * 2, got
  end

  def test_a_group_of_some
    got = ranks(3) do |rank|
      pair = Distributed.new_group([0, 2])
      tensor = filled(rank.to_f)
      Distributed.all_reduce(tensor, group: pair) unless rank == 1
      Distributed.barrier
      tensor.cpu.to_a.uniq
    end
    assert_equal [[2.0], [1.0], [2.0]], got
  end

  def test_memory_on_another_device_than_the_group_s
    skip "there is one GPU" unless STAND_INS || Torch::CUDA.device_count > 1
    said = with_env("STANDIN_DEVICES" => "2") do
      ranks(1, device_id: 1) { failure { Distributed.all_reduce(filled(1.0)) } }
    end
    assert_match(/memory on cuda:0: expected cuda:1, the device that this group was made for/, said[0][1])
  end

  def test_what_nccl_does_not_have
    said = ranks(2) do
      failure { Distributed.all_reduce(Torch.tensor([1, 2]).to(DEVICE), op: ReduceOp::BAND) }
    end
    said.each { |_, message| assert_match(/nccl has no band of int64.*use gloo/, message) }
  end

  def test_a_rank_that_dies_is_told_of
    said = Distributed.fork_world(1, start_method: START_METHOD) do |_, port|
      victim = fork do
        join(1, port)
        sleep
      end
      join(0, port)
      Process.kill(:KILL, victim)
      Process.wait(victim)
      failure { Distributed.all_reduce(filled(1.0, 1 << 20), async_op: true).wait(20) }
    ensure
      Distributed.destroy_process_group
    end
    error, text = said[0]
    assert_equal "Torch::Distributed::PeerLostError", error
    assert_match(/rank 1/, text)
  end

  Stop = Class.new(StandardError)

  # It waits until the other rank's connects, without the GVL. The interrupt ends that wait, not the operation.
  def test_a_first_operation_that_is_interrupted
    in_folder do |folder|
      interrupted = File.join(folder, "interrupted")
      got = ranks(2) do |rank|
        tensors = Array.new(2) { filled(rank + 1.0) }
        if rank.zero?
          caller = Thread.current
          Thread.new do
            Thread.pass until caller.status == "sleep"
            caller.raise(Stop)
          end
          assert_raises(Stop) { Distributed.all_reduce(tensors[0]) }
          File.write(interrupted, "")
        else
          Thread.pass until File.exist?(interrupted)
          Distributed.all_reduce(tensors[0])
        end
        Distributed.all_reduce(tensors[1])
        Distributed.barrier
        tensors.map { |tensor| tensor.cpu.to_a.uniq }
      end
      assert_equal [[[3.0], [3.0]]] * 2, got
    end
  end

  # Groups made from one that is for one GPU: what NCCL has of it is divided.
  def test_groups_made_from_one_that_is_bound
    got = ranks(2, device_id: 0) do |rank|
      own, = Distributed.new_subgroups(1)
      all = Distributed.new_group
      sums = [own, all].map { |group| filled(rank + 1.0).tap { |tensor| Distributed.all_reduce(tensor, group: group) } }
      sums.map { |tensor| tensor.cpu.to_a.uniq }
    end
    assert_equal [[[1.0], [3.0]], [[2.0], [3.0]]], got
  end

  # By a trace: buckets leave before the last gradient is there.
  def test_buckets_travel_while_backward_goes_on
    in_folder("TDDP_TRACE") do |folder|
      ranks(2) do
        net = Torch::NN::Sequential.new(*Array.new(6) { Torch::NN::Linear.new(256, 256) }).to(DEVICE)
        model = Torch::NN::Parallel::DistributedDataParallel.new(net, bucket_cap_mb: 0.3)
        5.times { model.call(Torch.ones(256, 256).to(DEVICE)).sum.backward }
      end
      2.times do |rank|
        spans = JSON.parse(File.read(File.join(folder, "trace_rank_#{rank}.json"))).select { |event| event["ph"] == "X" }
        reductions, backwards, waits = %w[all_reduce backward wait].map { |name| spans.select { |span| span["name"] == name }.map { |span| span["ts"] } }
        early = backwards.zip(waits).drop(1).sum { |first, last| reductions.count { |start| start.between?(first, last) } }
        assert_operator early, :>=, 1, "rank #{rank}: reductions #{reductions}, backwards #{backwards}, waits #{waits}"
      end
    end
  end

  # Whole numbers that both dtypes have, and their halves: with all parameters 1 the layers give 7 x + 1.
  def test_hooks_that_send_halves
    expected = [[49.0, 98.0], [63.0, 14.0], [65.0, 2.0]].flatten.map { |value| [:float32, [value]] }
    %i[fp16_compress bf16_compress].each do |name|
      gradients = ranks(2) do |rank|
        net = Torch::NN::Sequential.new(*[1, 2, 3].map { Torch::NN::Linear.new(7, 7) })
        net.parameters.each { |parameter| Torch.no_grad { parameter.fill!(1) } }
        model = Torch::NN::Parallel::DistributedDataParallel.new(net.to(DEVICE), bucket_cap_mb: 0.0002)
        model.register_comm_hook(name)
        3.times do
          net.zero_grad
          model.call(Torch.full([2, 7], rank.to_f).to(DEVICE)).sum.backward
        end
        net.parameters.map { |parameter| [parameter.grad.dtype, parameter.grad.cpu.flatten.to_a.uniq] }
      end
      assert_equal [expected] * 2, gradients, name
    end
  end

  def need_gloo
    skip "gloo was not built" unless Distributed.gloo_available?
  end

  def join(rank, port)
    share_gpu(rank)
    Distributed.init_process_group("nccl", init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 2, timeout: 30)
    tensor = filled(rank.to_f)
    Distributed.all_reduce(tensor)
    raise "wrong sum" unless tensor.cpu.to_a.uniq == [1.0]
  end
end
