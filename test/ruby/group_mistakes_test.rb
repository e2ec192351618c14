# frozen_string_literal: true

require_relative "test_helper"

# What becomes of groups whose ranks make mistakes, disagree, come late or die.
class GroupMistakesTest < Minitest::Test
  def sum(group, number)
    tensor = Torch.tensor([number, 1], dtype: :int64)
    Distributed.all_reduce(tensor, group: group)&.to_a
  end

  def test_lists_that_are_wrong_on_every_rank
    said = world(2) do
      [failure { Distributed.new_group([0, 2]) }, failure { Distributed.new_group([1, 1]) }, failure { Distributed.new_group([]) },
        failure { Distributed.new_group([0, nil]) }, failure { Distributed.new_group("all") }, failure { Distributed.new_group([0, 1.0]) },
        failure { Distributed.new_group([-1]) }, failure { Distributed.new_group([0], timeout: 0) },
        failure { Distributed.new_group([0], backend: "carrier_pigeon") },
        failure { Distributed.new_subgroups(3) }, failure { Distributed.new_subgroups(0) },
        failure { Distributed.new_subgroups_by_enumeration([[0], [1, 0]]) }, failure { Distributed.new_subgroups_by_enumeration([0, 1]) },
        failure { Distributed.new_subgroups_by_enumeration([]) }, failure { Distributed.split_group(nil, [[0, 2]]) },
        failure { Distributed.split_group }, failure { Distributed.new_group([0], use_local_synchronization: true, timeout: "long") },
        Distributed.new_group.ranks, Distributed.get_pg_count]
    end
    said.each_with_index do |here, rank|
      [/ArgumentError.*ranks: expected ranks of the parent group, 0 to 1, got 2 in \[0, 2\]/, /ArgumentError.*rank 1 is there 2 times: \[1, 1\]/,
        /ArgumentError.*empty Array/, /ArgumentError.*got nil in \[0, nil\]/, /TypeError.*expected an Array of ranks, got "all"/,
        /ArgumentError.*got 1\.0/, /ArgumentError.*got -1/, /ArgumentError.*timeout: expected a positive number of seconds, got 0/,
        /UnavailableError.*carrier_pigeon/, /ArgumentError.*group_size: expected a divisor of the group's size 2, got 3/,
        /ArgumentError.*group_size: .*got 0/, /ArgumentError.*rank 0 is in both \[0\] and \[1, 0\]/,
        /TypeError.*ranks_per_subgroup_list\[0\]: expected an Array of ranks, got 0/, /ArgumentError.*empty/,
        /ArgumentError.*split_ranks\[0\]: expected ranks of the parent group, 0 to 1, got 2/, /TypeError.*split_ranks: .*got nil/].each_with_index do |text, index|
        assert_match text, here[index]&.join(": ").to_s
      end
      rank.zero? ? assert_match(/timeout: .*"long"/, here[16][1]) : assert_nil(here[16])
      assert_equal [[0, 1], 2], here.last(2)
    end
  end

  # Who disagrees is told to all of them, at once.
  def test_one_rank_that_goes_its_own_way
    said = world(3) do |rank|
      [failure { Distributed.new_group((rank == 2) ? [0, 2] : [0, 1]) },
        failure { Distributed.new_group((rank == 1) ? [0, 9] : [0, 1]) },
        failure { Distributed.new_group([0, 1], backend: (rank == 1) ? "fake" : "gloo") },
        failure { rank.zero? ? Distributed.new_subgroups(3) : Distributed.new_group([0, 1, 2]) },
        failure { Distributed.new_subgroups_by_enumeration((rank == 1) ? 5 : [[0, 1], [2]]) },
        failure { Distributed.split_group(nil, [[0, rank]]) },
        sum(Distributed.new_group([0, 1, 2]), rank)]
    end
    said.each_with_index do |(lists, argument, backends, calls, type, three, after), rank|
      assert_match(/MismatchError.*global rank \d calls new_group\(\[0, [12]\], .*global rank \d new_group\(\[0, [12]\]/, lists.join(" "))
      assert_includes [/\[0, 1\].*\[0, 2\]/, /\[0, 2\].*\[0, 1\]/].map { |text| lists[1].match?(text) }, true
      if rank == 1
        assert_equal "ArgumentError", argument[0]
        assert_equal "TypeError", type[0]
      else
        assert_match(/MismatchError global rank 1 could not take part in new_group: ranks: expected .*got 9.*ArgumentError/, argument.join(" "))
        assert_match(/MismatchError global rank 1 could not take part in new_subgroups_by_enumeration: .*got 5/, type.join(" "))
      end
      assert_match(/MismatchError.*backend: "(gloo|fake)".*backend: "(gloo|fake)"/, backends.join(" "))
      assert_match(/MismatchError.*(new_subgroups\(.*new_group\(|new_group\(.*new_subgroups\()/, calls.join(" "))
      rank.zero? ? assert_match(/ArgumentError.*rank 0 is there 2 times/, three.join(" ")) : assert_match(/MismatchError/, three.join(" "))
      assert_equal [3, 3], after
    end
  end

  def test_an_agreement_leaves_no_keys
    said = world(3) do |rank|
      3.times { |member| Distributed.new_group([member, 2].uniq) }
      Distributed.new_group([1, 2], use_local_synchronization: true) unless rank.zero?
      Distributed.barrier # rank 0 removes what it has agreed on, else the last one
      store = Distributed.default_process_group._store
      store.list_keys.grep(/\Aagreement/).tap { store.close }
    end
    assert_equal [[]], said.uniq
  end

  def test_long_lists_are_shown_where_they_differ
    said = world(2) do |rank|
      lists = Array.new(120) { [0, 1] }
      # Ranks that are there twice are refused by the lists' own check: this is about the text alone.
      agreement = Distributed::Agreement.new(Distributed::PrefixStore.new("long", Distributed.default_process_group._store), "test", Distributed.default_process_group)
      lists[100] = [1, 0] if rank == 1
      failure { agreement.hold { agreement.reach("test(#{lists.inspect})") } }
    end
    said.each do |name, text|
      assert_equal "Torch::Distributed::MismatchError", name
      assert_operator text.size, :<, 600
      assert_match(/\[1, 0\]/, text)
    end
  end

  # Its text lies in the store once, and is removed where the ranks agree and where they do not, with the store's host and without it.
  def test_long_calls_are_compared_by_digest_and_leave_no_text
    said = world(3) do |rank|
      Distributed::Agreement.send(:remove_const, :LEAVE_TIMEOUT)
      Distributed::Agreement.const_set(:LEAVE_TIMEOUT, LIMIT)
      group = Distributed.default_process_group
      store = group._store
      outcomes = [[0, 1, 2], [1, 2]].product([true, false]).map do |ranks, same|
        next unless ranks.include?(rank)

        agreement = Distributed::Agreement.new(Distributed::PrefixStore.new("long/#{ranks.size}/#{same}", store), "test", group, ranks)
        value_or_failure do
          agreement.hold do
            agreement.reach("test(#{"x" * 1000}#{same ? "same" : rank})")
            agreement.instance_variable_get(:@calls).records.map(&:bytesize)
          end
        end
      end
      Distributed.barrier # the last one removes them
      [outcomes, store.list_keys.grep(/\Along/)].tap { store.close }
    end
    said.each_with_index do |(outcomes, keys), rank|
      assert_empty keys
      sizes, all, pair_sizes, pair = outcomes
      assert_equal [3, 1, true], [sizes.size, sizes.uniq.size, sizes.first < 80]
      assert_equal "Torch::Distributed::MismatchError", all[0]
      assert_equal 2, all[1].scan(/global rank \d (?:calls )?\.\.\. x+\d\)/).uniq.size, all[1]
      next if rank.zero?

      assert_equal [2, true], [pair_sizes.size, pair_sizes.first < 80]
      assert_match(/global rank 1 calls \.\.\. x+1\), global rank 2 \.\.\. x+2\)/, pair[1])
    end
  end

  def test_a_rank_that_does_not_come_is_named
    told = Array.new(3) { Event.new }
    alone = Event.new
    said = world(4) do |rank|
      if rank == 3
        told.each(&:wait)
        next [nil, failure { Distributed.new_group([0, 1], timeout: 5) }]
      end
      missed = failure { Distributed.new_group([0, 1], timeout: 2) }
      told[rank].set
      pair = failure { Distributed.new_group([0, 2], use_local_synchronization: true, timeout: 0.3) } if rank == 2
      alone.set if rank == 2
      alone.wait
      [missed, pair]
    end
    said.take(3).each do |(name, text), _|
      assert_equal "Torch::Distributed::TimeoutError", name
      assert_match(/global rank [012] waited 2\.0 s in vain for global rank 3 of 4 to call new_group/, text)
    end
    # Who comes late is told that the others have gone.
    assert_match(/waited 2\.0 s in vain for global rank 3 of 4/, said[3][1][1])
    assert_match(/global rank 2 waited 0\.3 s in vain for global rank 0 of 2 to call new_group/, said[2][1][1])
  end

  def test_a_long_wait_says_for_whom
    told = Event.new
    said = world(3) do |rank|
      Distributed::Agreement.send(:remove_const, :REPORT_EVERY)
      Distributed::Agreement.const_set(:REPORT_EVERY, 0.9)
      written = Tempfile.create
      File.unlink(written)
      $stderr.reopen(written)
      rank.zero? ? Thread.new { await("the line") { written.size > 0 } && told.set } : told.wait
      Distributed.new_group([0, 1])
      written.rewind
      written.read
    end
    assert_match(/\Atorch-ddp: global rank 0 has waited \d+ s in new_group for global ranks 1, 2 of 3\n/, said[0])
    assert_equal ["", ""], said.drop(1)
  end

  def test_a_rank_that_has_died_does_not_come
    said = without(1) { |_, others| Distributed.new_group(others) }
    said.each do |(name, text), pid|
      assert_equal "Torch::Distributed::PeerLostError", name
      assert_match(/global rank 1 \(host .*, pid #{pid}\) has ended and will not call new_group/, text)
    end
  end

  def test_a_rank_that_dies_with_the_store_is_named
    said = without(0, within: true) { |_, others| Distributed.new_group(others) }
    said.each do |(name, text), pid|
      assert_equal "Torch::Distributed::PeerLostError", name
      assert_match(/\Anew_group: lost global rank 0 \(host .*, pid #{pid}\): its process has ended; seen here: store /, text)
    end
  end

  def test_a_monitored_barrier_names_a_rank_that_dies
    [0, 2].each do |victim|
      said = without(victim, within: true) { Distributed.monitored_barrier }
      said.each do |(name, text), pid|
        assert_equal "Torch::Distributed::PeerLostError", name
        assert_match(/\Amonitored_barrier 1 of group "default_pg".*: lost rank #{victim} \(host .*, pid #{pid}\): its process has ended/, text)
      end
    end
  end

  def test_a_member_that_is_lost_on_the_way_is_named_by_both_its_ranks
    said = world(3) do |rank|
      if rank == 2
        Distributed::ProcessGroup.define_singleton_method(:_create) { |*| raise IOError, "lost" }
      end
      failure { Distributed.new_group([1, 2], timeout: 2) }
    end
    assert_nil said[0]
    assert_match(/TimeoutError.*rank\(s\) 1 of 2.*global ranks 1, 2/, said[1].join(" "))
    assert_equal %w[IOError lost], said[2]
  end

  def test_an_interrupted_rank_tells_the_others
    interrupted = Event.new
    said = world(3) do |rank|
      interrupted.wait if rank == 2
      failure { Timeout.timeout((rank == 1) ? 0.3 : nil) { Distributed.new_group([0, 2]) } }
    ensure
      interrupted.set if rank == 1
    end
    assert_equal "Timeout::Error", said[1][0]
    said.values_at(0, 2).each { |here| assert_match(/MismatchError.*global rank 1 could not take part in new_group: .*(Timeout::|was interrupted)/, here.join(" ")) }
  end
end
