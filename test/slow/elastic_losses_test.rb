# frozen_string_literal: true

require_relative "support/elastic_case"

# Hosts that die or cannot be reached.
class ElasticLossesTest < ElasticCase
  FLAGS = ["--rdzv-conf=last_call_timeout=1,heartbeat_timeout=5", "--shutdown-timeout=2"].freeze

  def job(count, nnodes, **options)
    runs = Array.new(count) { |host| node(host, *FLAGS, nnodes: nnodes, **options) }
    await_world(count, on: [*0...count])
    runs
  end

  # @return [Hash] the world of the others, begun soon after the block
  def others_go_on(others)
    since = wall
    yield
    world = await_world(others.size, on: others, since: since)
    puts format("noticed, stopped and started again in %.1f s (%s)", world.values.flatten.map(&:began).max - since, name) if ENV["TIMES"]
    world.each_value { |of| assert_equal [[0], [others.size]], [of.map(&:restarts), of.map(&:nodes)] }
    world
  end

  def test_a_host_without_power
    hosts(3)
    runs = job(3, "1:3")
    others_go_on([0, 1]) { crash(2) }
    runs[2].finish
    finish_all(*runs.first(2))
  end

  def test_all_of_a_host_is_killed
    hosts(3)
    runs = job(3, "1:3")
    others_go_on([0, 2]) { kill_all(1) }
    runs[1].finish
    finish_all(runs[0], runs[2])
  end

  def test_torchrun_alone_is_killed
    hosts(2)
    runs = job(2, "1:2")
    others_go_on([0]) { runs[1].signal(:KILL) }
    runs[1].finish
    assert_empty @hosts.processes(1)
    finish_all(runs[0])
  end

  # Who has the last rank leaves all others where they are, so it is free when the node comes back.
  def last_host
    lives.max_by(&:group_rank).host.then { |name| [0, 1, 2].find { |host| @hosts.host_name(host) == name } }
  end

  def test_a_host_that_is_cut_off_comes_back_with_its_rank
    hosts(3)
    etcd_on(0, 1, 2)
    runs = job(3, "2:3")
    before = lives
    cut = last_host
    world = others_go_on([0, 1, 2] - [cut]) { @hosts.cut(cut) }
    # The one that is alone stops its workers before the others begin a new world.
    refute_together(before.select { |life| life.host == @hosts.host_name(cut) }, world.values.flatten)
    since = wall
    @hosts.mend(cut)
    world = await_world(3, on: [0, 1, 2], since: since)
    assert_equal ranks(before), ranks(world.values.flatten)
    finish_all(*runs)
  end

  def ranks(workers)
    workers.to_h { |life| [life.host, life.group_rank] }
  end

  def test_a_torchrun_that_is_started_again_gets_its_rank_back
    hosts(3)
    runs = job(3, "2:3")
    before = lives
    lost = last_host
    others_go_on([0, 1, 2] - [lost]) { kill_all(lost) }
    runs[lost].finish
    since = wall
    runs[lost] = node(lost, *FLAGS, nnodes: "2:3")
    world = await_world(3, on: [0, 1, 2], since: since)
    assert_equal ranks(before), ranks(world.values.flatten)
    finish_all(*runs)
  end

  def test_a_stopped_host_is_lost_and_comes_back
    hosts(2)
    runs = job(2, "1:2")
    others_go_on([0]) { 3.times { signal_all(1, :STOP) } }
    since = wall
    signal_all(1, :CONT)
    await_world(2, on: [0, 1], since: since)
    finish_all(*runs)
  end

  # With c10d nobody can go on without the endpoint: who is cut off from it looks for it as long as nodes are waited for.
  def test_the_only_endpoint_is_cut_off
    hosts(2)
    runs = Array.new(2) { |host| node(host, "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=5,join_timeout=4", "--shutdown-timeout=2", nnodes: "1:2") }
    await_world(2, on: [0, 1])
    @hosts.cut(0)
    result = runs[1].finish
    assert_code 1, result
    assert_match(/10\.77\.0\.1:29400/, result.err)
    assert_match(/--rdzv-backend=etcd survives that/, result.err)
    await_world(1, on: [0])
    finish_all(runs[0])
  end
end
