# frozen_string_literal: true

require_relative "test_helper"

class GroupsTest < Minitest::Test
  Stranger = Distributed::GroupMember::NON_GROUP_MEMBER

  # Every rank's numbers, added up over a group; nil for those who are not in it.
  def sum(group, number)
    tensor = Torch.tensor([number, 1], dtype: :int64)
    Distributed.all_reduce(tensor, group: group)&.to_a
  end

  def quiet
    stderr = $stderr
    $stderr = File.open(File::NULL, "w")
    yield
  ensure
    $stderr = stderr
  end

  # --- ranks -------------------------------------------------------------------------------------

  def test_ranks_within_a_group_and_global_ones
    said = world(4) do |rank|
      group = Distributed.new_group([3, 1], group_desc: "odd")
      default = Distributed.default_process_group
      here = {global: [default.ranks, Distributed.get_group_rank(nil, 3), Distributed.get_global_rank(default, 2)],
              rank: [Distributed.get_rank(group), Distributed.get_world_size(group)]}
      if group.is_a?(Distributed::ProcessGroup)
        here[:member] = [group.ranks, Distributed.get_process_group_ranks(group), Distributed.get_backend(group), group.description,
          group.inspect[/gloo.*/], [1, 3].map { |global| Distributed.get_group_rank(group, global) },
          [0, 1].map { |within| Distributed.get_global_rank(group, within) }]
        here[:wrong] = [failure { Distributed.get_group_rank(group, 2) }, failure { Distributed.get_global_rank(group, 2) }]
      else
        here[:stranger] = [group.equal?(Stranger), failure { Distributed.get_backend(group) }, failure { Distributed.get_process_group_ranks(group) }]
      end
      here
    end
    said.each_with_index do |here, rank|
      assert_equal [[0, 1, 2, 3], 3, 2], here[:global]
      assert_equal [[-1, -1], [0, 2], [-1, -1], [1, 2]][rank], here[:rank]
      if rank.odd?
        assert_equal [[1, 3], [1, 3], "gloo", "odd", "gloo rank #{rank / 2} of 2, global ranks [1, 3], \"odd\">", [0, 1], [1, 3]], here[:member]
        assert_match(/global_rank: expected a global rank of .*\[1, 3\].*, got 2/, here[:wrong][0][1])
        assert_match(/group_rank: expected a rank within the group, from 0 to 1, got 2/, here[:wrong][1][1])
      else
        assert here[:stranger][0]
        here[:stranger].drop(1).each { |name, text| assert_equal ["TypeError", true], [name, text.include?("NON_GROUP_MEMBER")] }
      end
    end
  end

  def test_ranks_in_the_order_given
    said = world(3) do |rank|
      group = Distributed.new_group([2, 0], sort_ranks: false)
      next sum(group, 1).inspect if rank == 1 && quiet { sum(group, 1) }
      next Distributed.get_rank(group) if rank == 1

      list = [Torch.zeros(1), Torch.zeros(1)]
      Distributed.all_gather(list, Torch.tensor([rank + 0.0]), group: group)
      [Distributed.get_rank(group), group.ranks, list.map(&:item)]
    end
    assert_equal [[1, [2, 0], [2.0, 0.0]], -1, [0, [2, 0], [2.0, 0.0]]], said
  end

  def test_a_source_is_a_global_rank_or_one_within_the_group
    said = world(4) do |rank|
      group = Distributed.new_group([1, 2, 3])
      next if rank.zero?

      sent = [{src: 3}, {group_src: 0}, {src: 2}].map do |source|
        Distributed.broadcast(Torch.tensor([rank * 10]), group: group, **source).item
      end
      [sent, failure { Distributed.broadcast(Torch.ones(1), src: 0, group: group) },
        failure { Distributed.broadcast(Torch.ones(1), group_src: 3, group: group) },
        failure { Distributed.broadcast(Torch.ones(1), src: 1, group_src: 1, group: group) },
        failure { Distributed.broadcast(Torch.ones(1), group: group) }]
    end
    said.drop(1).each do |sent, stranger, beyond, both, none|
      assert_equal [30, 10, 20], sent
      assert_match(/src: expected a global rank of .*\[1, 2, 3\].*, got 0/, stranger[1])
      assert_match(/group_src: expected a rank within the group, from 0 to 2, got 3/, beyond[1])
      assert_match(/src: 1 and group_src: 1 are both given, expected one/, both[1])
      assert_match(/src: .*got nil/, none[1])
      [stranger, beyond, both, none].each { |name, _| assert_equal "ArgumentError", name }
    end
  end

  def test_strangers_are_warned_and_nothing_is_done
    said = world(2) do |rank|
      group = Distributed.new_group([0])
      tensor = Torch.tensor([5.0])
      returned = nil
      warned = capture_io do
        2.times do
          returned = [Distributed.all_reduce(tensor, group: group), Distributed.broadcast(tensor, src: 0, group: group),
            Distributed.barrier(group: group), Distributed.all_gather([tensor], tensor, group: group),
            Distributed.reduce_scatter(tensor, [tensor], group: group),
            Distributed.all_reduce(tensor, group: group, async_op: true)&.wait, Distributed.split_group(group, [[0]])]
        end
      end.last
      [if rank.zero?
         nil
       else
         returned.map { |each| each.equal?(Stranger) ? :stranger : each }
       end, tensor.item, warned.lines]
    end
    assert_equal [], said[0][2]
    assert_equal [[nil] * 6 + [:stranger], 5.0], said[1].take(2)
    # Each place in the program once.
    assert_equal 7, said[1][2].size, said[1][2].inspect
    assert_match(/groups_test\.rb:\d+: warning: all_reduce on a group that global rank 1 is not in: nothing is done/, said[1][2][0])
  end

  # --- the algebra of groups ---------------------------------------------------------------------

  LISTS = [[0, 2, 4, 6], [1, 3, 5, 7], [0, 7], [3, 4, 5], [6], (0..7).to_a].freeze

  def test_overlapping_groups_of_eight
    said = world(8) do |rank|
      groups = LISTS.map { |list| Distributed.new_group(list) }
      sums = groups.map { |group| sum(group, rank) if group.is_a?(Distributed::ProcessGroup) }
      # All at once, and waited for from the last to the first.
      started = groups.each_with_index.filter_map do |group, index|
        next unless group.is_a?(Distributed::ProcessGroup)

        tensor = Torch.tensor([rank + 100 * index], dtype: :int64)
        [index, tensor, Distributed.all_reduce(tensor, group: group, op: :max, async_op: true)]
      end
      started.reverse_each { |_, _, work| work.wait }
      [sums, started.to_h { |index, tensor, _| [index, tensor.item] }, Distributed.get_pg_count, groups.map { |group| Distributed.get_rank(group) }]
    end
    said.each_with_index do |(sums, largest, count, places), rank|
      mine = LISTS.map { |list| list.include?(rank) }
      assert_equal LISTS.zip(mine).map { |list, member| [list.sum, list.size] if member }, sums
      assert_equal LISTS.each_with_index.filter_map { |list, index| [index, list.max + 100 * index] if mine[index] }.to_h, largest
      assert_equal 1 + mine.count(true), count
      assert_equal LISTS.map { |list| list.index(rank) || -1 }, places
    end
  end

  def test_cutting_and_splitting_eight
    said = world(8) do |rank|
      halves, all = Distributed.new_subgroups(4)
      # Each half is split in itself, by ranks within it.
      pair = Distributed.split_group(halves, [[3, 0], [1, 2]], group_desc: "pair")
      single = Distributed.split_group(pair, [[1]])
      of_half, = Distributed.new_subgroups(2, group: halves)
      listed, lists = Distributed.new_subgroups_by_enumeration([[7, 0], [2, 3, 4]])
      [halves.ranks, all.map { |each| Distributed.get_rank(each) }, pair.ranks, Distributed.get_rank(single), of_half.ranks,
        Distributed.get_rank(listed), lists.map { |each| Distributed.get_world_size(each) },
        sum(pair, rank), sum(of_half, rank), sum(halves, rank)]
    end
    said.each_with_index do |(half, in_all, pair, single, of_half, listed, lists, *sums), rank|
      base = rank / 4 * 4
      assert_equal (base...base + 4).to_a, half
      assert_equal [[rank % 4, -1], [-1, rank % 4]][rank / 4], in_all
      pairs = [[base, base + 3], [base + 1, base + 2]].find { |each| each.include?(rank) }
      assert_equal pairs, pair
      assert_equal (pairs.last == rank) ? 0 : -1, single
      assert_equal [rank / 2 * 2, rank / 2 * 2 + 1], of_half
      assert_equal({7 => 1, 0 => 0, 2 => 0, 3 => 1, 4 => 2}.fetch(rank, -1), listed)
      assert_equal [[0, 7].include?(rank) ? 2 : -1, [2, 3, 4].include?(rank) ? 3 : -1], lists
      assert_equal [[pairs.sum, 2], [of_half.sum, 2], [half.sum, 4]], sums
    end
  end

  def test_other_collectives_within_groups
    said = world(3) do |rank|
      group = Distributed.new_group([0, 2])
      next if rank == 1

      gathered = Torch.zeros(4, dtype: :int64)
      Distributed.all_gather_into_tensor(gathered, Torch.tensor([rank, rank + 1]), group: group)
      scattered = Torch.zeros(1, dtype: :int64)
      Distributed.reduce_scatter_tensor(scattered, Torch.tensor([rank, 10 * rank]), group: group)
      Distributed.barrier(group: group)
      [gathered.to_a, scattered.to_a]
    end
    assert_equal [[[0, 1, 2, 3], [2]], nil, [[0, 1, 2, 3], [20]]], said
  end

  def test_a_model_is_trained_within_a_group
    said = world(3) do |rank|
      group = Distributed.new_group([1, 2])
      model = Torch::NN::Linear.new(1, 1)
      Torch.no_grad { model.parameters.each { |parameter| parameter.fill!(rank + 5.0) } }
      model.bias.requires_grad = false
      next failure { Torch::NN::Parallel::DistributedDataParallel.new(model, process_group: group) } if rank.zero?

      wrapped = Torch::NN::Parallel::DistributedDataParallel.new(model, process_group: group)
      start = model.parameters.map { |parameter| parameter.sum.item }
      wrapped.call(Torch.tensor([[10.0 * rank]])).sum.backward
      [start, model.weight.grad.sum.item]
    end
    assert_equal [[[6.0, 6.0], 15.0]] * 2, said.drop(1)
    assert_match(/TypeError.*NON_GROUP_MEMBER/, said[0].join(" "))
  end

  def test_only_the_members_come
    said = world(3) do |rank|
      first = Distributed.new_group([0, 2], use_local_synchronization: true) unless rank == 1
      again = Distributed.new_group([2, 0], use_local_synchronization: true) unless rank == 1
      third = Distributed.new_group([1, 2], use_local_synchronization: true)
      [first, again, third].map do |group|
        next group.equal?(Stranger) unless group.is_a?(Distributed::ProcessGroup)

        [group.ranks, sum(group, rank)]
      end
    end
    assert_equal [[[[0, 2], [2, 2]], [[0, 2], [2, 2]], true], [false, false, [[1, 2], [3, 2]]],
      [[[0, 2], [2, 2]], [[0, 2], [2, 2]], [[1, 2], [3, 2]]]], said
  end

  # --- their life --------------------------------------------------------------------------------

  def test_one_is_destroyed_or_all_of_them
    said = world(3) do |rank|
      default = Distributed.default_process_group
      groups = [[0, 1], [1, 2], [0, 2], [0, 1, 2]].map { |list| Distributed.new_group(list) }.grep(Distributed::ProcessGroup)
      counts = [Distributed.get_pg_count]
      groups.each { |group| sum(group, rank) }
      # Another order on each rank.
      gone = groups.rotate(rank).take(2)
      gone.each { |group| 2.times { Distributed.destroy_process_group(group) } }
      Distributed.destroy_process_group(Stranger)
      counts << Distributed.get_pg_count << sum(nil, rank)
      left = groups - gone
      closed = [gone, left].map { |each| each.map(&:closed?) }
      error = failure { Distributed.barrier(group: gone.first) }
      (rank == 2) ? Distributed.destroy_process_group(default) : Distributed.destroy_process_group
      [counts, closed, error[0], left.map(&:closed?), Distributed.get_pg_count, Distributed.initialized?, gone.first.ranks.include?(rank)]
    end
    said.each { |here| assert_equal [[4, 2, [3, 3]], [[true, true], [false]], "Torch::Distributed::GroupError", [true], 0, false, true], here }
  end

  # Nothing that the groups left behind keeps their store's server.
  def port_free?(port)
    TCPServer.new("127.0.0.1", port).close.nil?
  rescue Errno::EADDRINUSE
    false
  end

  def test_groups_that_follow_each_other
    second = held_port
    ended = Event.new
    said = Distributed.fork_world(2) do |rank, port|
      Distributed.init_process_group("gloo", init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 2, timeout: 20)
      sums = Array.new(10) do |turn|
        group = Distributed.new_group([0, 1])
        sum(group, rank + turn)[0]
      ensure
        Distributed.destroy_process_group(group)
      end
      Distributed.destroy_process_group
      store = Distributed::TCPStore.new("127.0.0.1", second, 2, rank.zero?)
      turns = Array.new(3) do |turn|
        Distributed.init_process_group("gloo", store: store, rank: rank, world_size: 2, timeout: 20)
        group = Distributed.new_group((turn == 1) ? [1] : [0, 1])
        [group.is_a?(Distributed::ProcessGroup) && group.name, quiet { sum(group, rank + turn) }]
      ensure
        Distributed.destroy_process_group
      end
      # The store's host goes last.
      rank.zero? ? ended.wait : ended.set
      [sums, turns, rank.zero? && port_free?(port)]
    end
    sums = (0..9).map { |turn| 1 + 2 * turn }
    assert_equal [sums, [["group_0", [1, 2]], [false, nil], ["group_0", [5, 2]]], true], said[0]
    assert_equal [sums, [["group_0", [1, 2]], ["group_0", [2, 1]], ["group_0", [5, 2]]], false], said[1]
  end

  def test_groups_on_a_file_and_in_this_process
    alone do
      group = Distributed.new_group([0])
      assert_equal [7, 1], sum(group, 7)
      assert_equal [[0], 0], [group.ranks, Distributed.get_rank(group)]
      assert_equal [group.class] * 2, [Distributed.new_subgroups(1).first, Distributed.split_group(group, [[0]])].map(&:class)
      assert_equal 4, Distributed.get_pg_count
    end
    assert_equal 0, Distributed.get_pg_count
    Dir.mktmpdir do |folder|
      said = Distributed.fork_world(3) do |rank|
        Distributed.init_process_group("gloo", init_method: "file://#{folder}/store", rank: rank, world_size: 3, timeout: 20)
        group = Distributed.new_group([0, 2])
        [quiet { sum(group, rank) }, failure { Distributed.new_group([0, rank + 1]) }&.first]
      ensure
        Distributed.destroy_process_group
      end
      assert_equal [[2, 2], nil, [2, 2]], said.map(&:first)
      assert_equal %w[Torch::Distributed::MismatchError Torch::Distributed::MismatchError ArgumentError], said.map(&:last)
    end
  end

  # The process that hosts the store is not in the group, and has nothing else to do.
  def test_the_stores_host_stays_until_the_group_is_made
    host = Event.new
    said = Distributed.fork_world(3) do |rank, port|
      Distributed.init_process_group("gloo", init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 3, timeout: 20)
      rank.zero? ? when_waiting { host.set } : host.wait
      group = Distributed.new_group([1, 2])
      quiet { sum(group, rank) }
    ensure
      Distributed.destroy_process_group
    end
    assert_equal [nil, [3, 2], [3, 2]], said
  end

  def test_nobody_refers_to_a_group_in_use
    said = world(2) do |rank|
      tensors = Array.new(6) { Torch.full([20_000], rank + 1.0) }
      works = tensors.map { |tensor| Distributed.all_reduce(tensor, group: Distributed.new_group([0, 1]), async_op: true) }
      3.times { GC.start }
      GC.compact if GC.respond_to?(:compact)
      works.each(&:wait)
      [tensors.map { |tensor| [tensor.min.item, tensor.max.item] }.uniq, Distributed.get_pg_count]
    end
    assert_equal [[[[3.0, 3.0]], 7]] * 2, said
  end

  def test_a_forked_child_is_told_whose_groups_they_are
    alone do
      group = Distributed.new_group([0], group_desc: "the parent's")
      said = Distributed.fork_world(1) do
        here = [failure { Distributed.new_group([0]) }, failure { Distributed.all_reduce(Torch.ones(1), group: group) },
          group.ranks, group.closed?, Distributed.get_pg_count]
        Distributed.destroy_process_group(group)
        Distributed.init_process_group("gloo", timeout: 20)
        here << sum(Distributed.new_group([0]), 4)
      ensure
        Distributed.destroy_process_group
      end.first
      assert_match(/GroupError.*before a fork, in process #{Process.pid}/, said[0].join(" "))
      assert_match(/GroupError.*made by process #{Process.pid}/, said[1].join(" "))
      assert_equal [[0], true, 0, [4, 1]], said.drop(2)
      assert_equal [2, 1], sum(group, 2)
    end
  end

  def test_times
    alone do
      group = Distributed.new_group([0], timeout: 7)
      assert_equal 7.0, group.timeout
      assert_equal Distributed.default_process_group.timeout, Distributed.new_group.timeout
      Distributed.set_timeout(2.5, group)
      Distributed.set_timeout(90)
      assert_equal [2.5, 90.0], [group.timeout, Distributed.default_process_group.timeout]
      assert_match(/timeout: .*got -1/, assert_raises(ArgumentError) { Distributed.set_timeout(-1, group) }.message)
    end
  end

  def test_the_place_on_this_machine
    with_env("LOCAL_RANK" => "3") { assert_equal 3, Distributed.get_node_local_rank }
    with_env("LOCAL_RANK" => nil) do
      assert_equal 2, Distributed.get_node_local_rank(2)
      assert_match(/LOCAL_RANK is not set/, assert_raises(Distributed::Error) { Distributed.get_node_local_rank }.message)
    end
    with_env("LOCAL_RANK" => "x") { assert_match(/LOCAL_RANK.*"x"/, assert_raises(ArgumentError) { Distributed.get_node_local_rank }.message) }
    said = Distributed.fork_world(2) do
      Distributed.init_process_group("gloo", timeout: 20)
      [Distributed.get_node_local_rank, Distributed.new_subgroups.first.ranks]
    ensure
      Distributed.destroy_process_group
    end
    assert_equal [[0, [0, 1]], [1, [0, 1]]], said
  end

  def test_placeholders_for_groups
    alone do
      assert_equal [3, 1], sum(Distributed::GroupMember::WORLD, 3)
      assert_equal [0, 1], [Distributed.get_rank(Distributed::GroupMember::WORLD), Distributed.get_world_size(Distributed::GroupMember::WORLD)]
      Distributed.destroy_process_group(Distributed::GroupMember::WORLD)
      refute Distributed.initialized?
    end
    assert_match(/NON_GROUP_MEMBER/, Stranger.inspect)
  end
end
