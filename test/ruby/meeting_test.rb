# frozen_string_literal: true

require_relative "test_helper"

# Meetings of ranks in a store, without a group unless processes are to be watched. test/c/backend/meeting_test.c has their orders.
class MeetingTest < Minitest::Test
  Meeting = Distributed::Meeting

  def setup
    @store = Distributed::HashStore.new
  end

  def meet(rank, size = 3, name: "here", store: @store)
    Meeting.new(store, name, rank, size)
  end

  def test_each_gets_the_records_of_all
    [1, 2, 4].each do |size|
      before = @store.num_keys
      2.times do
        said = Array.new(size) do |rank|
          Thread.new do
            meeting = meet(rank, size)
            meeting.give("\0#{rank}\xFF".b)
            meeting.await(LIMIT)
            [meeting.records, meeting.missing, meeting.failure].tap { meeting.leave }
          end
        end.map(&:value)
        assert_equal [[Array.new(size) { |rank| "\0#{rank}\xFF".b }, [], nil]], said.uniq
        # The name serves again, as the last one has removed the keys.
        assert_equal before, @store.num_keys
      end
    end
  end

  def test_who_is_missing
    meeting = meet(1)
    meeting.give("one")
    name, text = failure { meeting.await(0.01) }
    assert_equal ["Torch::Distributed::TimeoutError", "rank(s) 0, 2 of 3 did not arrive in time"], [name, text]
    assert_equal [[0, 2], [nil, "one", nil], nil], [meeting.missing, meeting.records, meeting.failure]
    # Who comes later is read, and the meeting goes on.
    meet(0).give("zero")
    meeting.read
    assert_equal [2], meeting.missing
    meet(2).give("")
    meeting.await(0)
    assert_equal ["zero", "one", ""], meeting.records
  end

  def test_a_rank_that_fails_ends_it_for_those_that_wait_and_those_that_come_late
    meeting = meet(0)
    meeting.give("zero")
    waiting = Thread.new { [failure { meeting.await(LIMIT) }, meeting.failure] }
    await_waiting(waiting)
    meet(1).fail("it broke: \u00e9")
    late = meet(2)
    late.give("two")
    [waiting.value, [failure { late.await(LIMIT) }, late.failure]].each do |(name, text), (rank, reason)|
      assert_equal ["Torch::Distributed::PeerLostError", "rank 1 failed: it broke: \u00e9"], [name, text]
      assert_equal [1, "it broke: \u00e9".b], [rank, reason]
    end
  end

  def test_once_all_are_there_a_failure_changes_nothing
    2.times { |rank| meet(rank, 2).give(rank.to_s) }
    meet(1, 2).fail("too late")
    meeting = meet(0, 2)
    meeting.await(0)
    assert_equal [%w[0 1], [1, "too late"]], [meeting.records, meeting.failure]
  end

  # The wait goes on where it was.
  def test_an_interrupted_wait
    meeting = meet(0, 2)
    meeting.give("zero")
    raised = assert_raises(Timeout::Error) { Timeout.timeout(0.05) { meeting.await(LIMIT) } }
    refute_kind_of Distributed::Error, raised
    waiting = Thread.new { meeting.await(LIMIT) }
    waiting.report_on_exception = false
    await_waiting(waiting)
    waiting.raise(Interrupt)
    assert_raises(Interrupt) { waiting.value }
    killed = Thread.new { meeting.await(LIMIT) }
    await_waiting(killed)
    killed.kill.join
    meet(1, 2).give("one")
    meeting.await(LIMIT)
    assert_equal %w[zero one], meeting.records
  end

  # Its handler raises nothing: the wait goes on.
  def test_a_signal_during_a_wait
    meeting = meet(0, 2)
    meeting.give("zero")
    handled = Queue.new
    before = trap(:USR1) { handled << failure { meeting.read } }
    other = when_waiting do
      Process.kill(:USR1, Process.pid)
      said = handled.pop
      meet(1, 2).give("one")
      said
    end
    meeting.await(LIMIT)
    # One call at a time: a second one is refused.
    assert_equal ["ThreadError", "another call of this meeting \"here\" is under way"], other.value
    assert_equal %w[zero one], meeting.records
  ensure
    trap(:USR1, before) if before
  end

  def test_one_thread_at_a_time
    meeting = meet(0, 2)
    meeting.give("zero")
    waiting = Thread.new { meeting.await(LIMIT) }
    await_waiting(waiting)
    %i[read close records failure leave remove].each do |name|
      assert_match(/under way/, failure { meeting.public_send(name) }.last)
    end
    meet(1, 2).give("one")
    waiting.join
    meeting.close
    assert_match(/closed/, failure { meeting.read }.last)
    meeting.close
  end

  # The store may be closed meanwhile: the meeting has a reference of its own.
  def test_the_store_is_closed_meanwhile
    store = Distributed::PrefixStore.new("below", @store)
    meeting = meet(0, 2, store: store)
    meeting.give("zero")
    waiting = Thread.new { meeting.await(LIMIT) }
    await_waiting(waiting)
    store.close
    meet(1, 2, store: Distributed::PrefixStore.new("below", @store)).give("one")
    waiting.join
    assert_equal %w[zero one], meeting.records
  end

  def test_arguments
    [[-> { meet(3) }, /rank: expected 0 to 2, got 3/], [-> { meet(-1) }, /got -1/], [-> { meet(0, 0) }, /rank: expected/],
      [-> { meet(0, name: "n" * 61) }, /name: expected at most 60 bytes/], [-> { meet(0, name: "a\0b") }, /null byte/],
      [-> { meet(0, store: "store") }, /expected a Torch::Distributed::Store, got "store"/],
      [-> { meet(0).give(7) }, /record: expected a String, got 7/], [-> { meet(0).await(nil) }, /timeout: expected a number of seconds, got nil/],
      [-> { meet(0).await(-1) }, /timeout: expected seconds, 0 or more, got -1/], [-> { meet(0).fail("a\0b") }, /null byte/],
      [-> { Meeting.allocate.read }, /never opened/], [-> { meet(0).tap { |one| one.send(:initialize, @store, "x", 0, 1) } }, /is open/]].each do |call, text|
      assert_match text, failure(&call)&.last.to_s
    end
  end

  # It has kept nothing, so that the store may be closed, or the same object be opened.
  def test_a_group_that_is_destroyed
    said = world(1) do
      group = Distributed.new_group([0])
      Distributed.destroy_process_group(group)
      meeting, store = Meeting.allocate, Distributed::HashStore.new
      refused = failure { meeting.send(:initialize, store, "here", 0, 1, group, [0]) }
      meeting.send(:initialize, store, "here", 0, 1)
      meeting.give("zero")
      [refused, meeting.tap(&:read).records]
    end
    assert_equal ["Torch::Distributed::GroupError", ["zero"]], [said[0][0][0], said[0][1]]
  end

  # Yields a meeting of members of the default group.
  def watched(members, name: "watched")
    group = Distributed.default_process_group
    store = group._store
    meeting = Meeting.new(store, name, members.index(group.rank), members.size, group, members)
    yield meeting
  ensure
    [meeting, store].each { |each| each&.close }
  end

  def test_members_are_ranks_of_the_group
    said = world(2) do
      group = Distributed.default_process_group
      [failure { watched([0, 1, 2]) {} }, failure { Meeting.new(@store, "x", 0, 2, group, [0]) }, failure { Meeting.new(@store, "x", 0, 1, group) }]
    end
    said.each do |world, size, none|
      assert_match(/rank 2/, world&.last.to_s)
      assert_match(/members: expected 2 ranks, got 1/, size&.last.to_s)
      assert_match(/nil/, none&.last.to_s)
    end
  end

  # One that dies before it comes, and while the others wait.
  def test_a_rank_that_dies_is_named
    [false, true].each do |within|
      said = without(1, within: within) do
        watched([0, 1, 2]) do |meeting|
          meeting.give("here")
          [failure { meeting.await(LIMIT) }, meeting.records[1], meeting.failure]
        end
      end
      said.each do |((name, text), record, failed), pid|
        assert_equal ["Torch::Distributed::PeerLostError", nil, nil], [name, record, failed]
        assert_match(/\Aglobal rank 1 \(host .*, pid #{pid}\) has ended\z/, text)
      end
    end
  end

  # Its record stays, and what it has failed with counts more than its end.
  def test_a_rank_that_dies_after_it_came
    said = without(1) do |rank, _|
      store = Distributed.default_process_group._store
      # Both of the others act for it.
      came, failed = meet(1, name: "came", store: store), meet(1, name: "failed", store: store)
      came.give("one")
      failed.fail("why")
      records = watched([0, 1, 2], name: "came") do |meeting|
        meeting.give(rank.to_s)
        meeting.await(LIMIT)
        meeting.records
      end
      watched([0, 1, 2], name: "failed") { |meeting| [records, failure { meeting.await(LIMIT) }, meeting.failure] }
    ensure
      [came, failed, store].each { |each| each&.close }
    end
    said.each do |(records, (name, _), failed), _|
      assert_equal [%w[0 one 2], "Torch::Distributed::PeerLostError", [1, "why"]], [records, name, failed]
    end
  end
end
