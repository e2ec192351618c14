# frozen_string_literal: true

require_relative "support/elastic_case"

# Three hosts have a member of etcd each, and a node of the job: each of them may be lost.
class ElasticEtcdTest < ElasticCase
  FLAGS = ["--rdzv-conf=last_call_timeout=1,join_timeout=60,heartbeat_timeout=5", "--shutdown-timeout=2"].freeze

  def job
    hosts(3)
    etcd_on(0, 1, 2)
    Array.new(3) { |host| node(host, *FLAGS, nnodes: "2:3") }.tap { await_world(3, on: [0, 1, 2]) }
  end

  # A host that is up again has its member of etcd, and a new torchrun.
  def revive(lost)
    @cluster.kill(lost)
    @cluster.start(lost)
    node(lost, *FLAGS, nnodes: "2:3")
  end

  3.times do |lost|
    rest = [0, 1, 2] - [lost]

    define_method(:"test_host_#{lost}_is_killed") do
      runs = job
      since = wall
      kill_all(lost)
      runs[lost].finish
      world = await_world(2, on: rest, since: since)
      assert_equal [0], world.values.flatten.map(&:restarts).uniq
      since = wall
      runs[lost] = revive(lost)
      await_world(3, on: [0, 1, 2], since: since)
      finish_all(*runs)
    end

    define_method(:"test_host_#{lost}_is_cut_off") do
      runs = job
      before = lives.select { |life| life.host == @hosts.host_name(lost) }
      since = wall
      @hosts.cut(lost)
      world = await_world(2, on: rest, since: since)
      refute_together(before, world.values.flatten)
      since = wall
      @hosts.mend(lost)
      await_world(3, on: [0, 1, 2], since: since)
      finish_all(*runs)
    end

    define_method(:"test_host_#{lost}_is_stopped") do
      runs = job
      since = wall
      3.times { signal_all(lost, :STOP) }
      await_world(2, on: rest, since: since)
      since = wall
      signal_all(lost, :CONT)
      await_world(3, on: [0, 1, 2], since: since)
      finish_all(*runs)
    end
  end

  # The second loss comes when the first is healed: nobody is needed for ever.
  def test_one_after_the_other
    runs = job
    [0, 1].each do |lost|
      since = wall
      kill_all(lost)
      runs[lost].finish
      await_world(2, on: [0, 1, 2] - [lost], since: since)
      since = wall
      runs[lost] = revive(lost)
      await_world(3, on: [0, 1, 2], since: since)
    end
    finish_all(*runs)
  end

  # Members of etcd that are lost while all nodes live cost nothing, as long as a majority is left.
  def test_members_alone_are_killed_stopped_and_started_again
    runs = job
    3.times do |member|
      @cluster.kill(member)
      @cluster.start(member)
    end
    began = lives.size
    finish_all(*runs)
    assert_equal began, lives.size
  end

  def test_without_a_majority_nobody_leads
    hosts(3)
    etcd_on(0, 1, 2)
    [0, 2].each { |member| @cluster.kill(member) }
    run = node(1, "--rdzv-conf=join_timeout=6", nnodes: "1:3")
    result = run.finish
    assert_code 1, result
    assert_empty lives
    [0, 1, 2].each { |host| assert_match(/#{Regexp.escape(address(host))}:2379/, result.err) }
  end

  # A host without a member, and with it the coordinator or not: two hosts are left, and a majority.
  def test_a_divided_network_runs_one_job
    hosts(4)
    etcd_on(0, 1, 2)
    runs = Array.new(4) { |host| node(host, *FLAGS, nnodes: "2:4") }
    await_world(4, on: [0, 1, 2, 3])
    since = wall
    @hosts.divide(0, 3)
    majority = await_world(2, on: [1, 2], since: since)
    minority = lives.select { |life| %w[node-a node-d].include?(life.host) }
    assert_equal 2, minority.size, "the minority began workers: #{situation}"
    refute_together(minority, majority.values.flatten)
    since = wall
    @hosts.unite
    await_world(4, on: [0, 1, 2, 3], since: since)
    refute_together(minority, lives.select { |life| life.began > since })
    finish_all(*runs)
  end
end
