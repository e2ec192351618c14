# frozen_string_literal: true

require_relative "support/elastic_case"

# Nodes come and go while a job runs.
class ElasticMembersTest < ElasticCase
  QUICK = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=3,join_timeout=30"

  def test_nodes_join_a_running_job
    hosts(3)
    runs = []
    3.times do |host|
      since = wall
      runs << node(host, QUICK, "--nproc-per-node=2", nnodes: "1:3")
      world = await_world(2 * (host + 1), on: [*0..host], since: since)
      # Who was there keeps its rank, and no failure is counted.
      assert_equal (0..host).to_h { |at| [at, [at]] }, world.transform_values { |of| of.map(&:group_rank).uniq }
      assert_equal [[0], [host + 1]], [world.values.flatten.map(&:restarts).uniq, world.values.flatten.map(&:nodes).uniq]
    end
    finish_all(*runs)
  end

  def test_a_node_leaves_by_ctrl_c_and_comes_again
    hosts(3)
    runs = Array.new(3) { |host| node(host, QUICK, nnodes: "1:3") }
    await_world(3, on: [0, 1, 2])
    since = wall
    runs[1].signal(:INT)
    assert_code 130, runs[1].finish
    world = await_world(2, on: [0, 2], since: since)
    assert_equal [0], world.values.flatten.map(&:restarts).uniq
    since = wall
    runs[1] = node(1, QUICK, nnodes: "1:3")
    await_world(3, on: [0, 1, 2], since: since)
    finish_all(*runs)
  end

  def test_below_the_minimum_the_rest_waits
    hosts(2)
    runs = Array.new(2) { |host| node(host, QUICK, nnodes: "2:3") }
    await_world(2, on: [0, 1])
    runs[1].signal(:TERM)
    assert_code 143, runs[1].finish
    eventually("the workers of the rest to be stopped") { lives.all? { |life| life.last < wall - 0.7 } }
    sleep 1
    assert_operator lives.map(&:last).max, :<, wall - 1
    since = wall
    runs[1] = node(1, QUICK, nnodes: "2:3")
    world = await_world(2, on: [0, 1], since: since)
    assert_equal [[0], [1]], [world[0].map(&:group_rank), world[1].map(&:group_rank)]
    finish_all(*runs)
  end

  def test_below_the_minimum_for_too_long
    hosts(2)
    conf = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=3,join_timeout=3"
    runs = Array.new(2) { |host| node(host, conf, nnodes: "2:3") }
    await_world(2, on: [0, 1])
    runs[1].signal(:INT)
    runs[1].finish
    result = runs[0].finish
    assert_code 1, result
    assert_match(/only 1 of the 2 nodes came/, result.err)
  end

  def test_a_spare_waits_until_a_place_is_free
    hosts(3)
    runs = Array.new(2) { |host| node(host, QUICK, nnodes: "1:2") }
    await_world(2, on: [0, 1])
    spare = node(2, QUICK, nnodes: "1:2")
    spare.await(/spare|place/, stream: :err)
    sleep 1
    assert_empty lives.select { |life| life.host == "node-c" }
    since = wall
    runs[1].signal(:INT)
    runs[1].finish
    world = await_world(2, on: [0, 2], since: since)
    assert_equal [0], world[0].map(&:group_rank)
    finish_all(runs[0], spare)
  end

  def test_node_ranks_are_kept
    hosts(3)
    given = {0 => 2, 1 => 0, 2 => 1}
    runs = given.map { |host, rank| node(host, "--node-rank=#{rank}", QUICK, nnodes: "1:3") }
    world = await_world(3, on: [0, 1, 2])
    assert_equal given, world.transform_values { |of| of[0].group_rank }
    # Who is left stays in this order.
    since = wall
    runs[2].signal(:INT)
    runs[2].finish
    world = await_world(2, on: [0, 1], since: since)
    assert_equal({0 => 1, 1 => 0}, world.transform_values { |of| of[0].group_rank })
    since = wall
    runs[2] = node(2, "--node-rank=1", QUICK, nnodes: "1:3")
    world = await_world(3, on: [0, 1, 2], since: since)
    assert_equal given, world.transform_values { |of| of[0].group_rank }
    finish_all(*runs)
  end

  def test_a_failure_restarts_all_nodes_and_is_counted
    hosts(2)
    runs = Array.new(2) { |host| node(host, QUICK, "--max-restarts=1", nnodes: "1:2") }
    await_world(2, on: [0, 1])
    since = wall
    fail_on(1)
    world = await_world(2, on: [0, 1], since: since)
    assert_equal [1], world.values.flatten.map(&:restarts).uniq
    # The next one is one too many.
    fail_on(0)
    runs.each { |run| assert_code 1, run.finish }
    assert_match(/exit code 9/, runs[0].err)
    assert_match(/exit code 9/, runs[1].err)
  end

  def test_a_job_of_fixed_size_waits_for_a_replacement
    hosts(3)
    flags = ["--rdzv-conf=heartbeat_timeout=2,join_timeout=20", "--max-restarts=1"]
    runs = Array.new(2) { |host| node(host, *flags, nnodes: "2") }
    await_world(2, on: [0, 1])
    since = wall
    crash(1)
    runs[1].finish
    eventually("the loss to stop the rest") { lives.all? { |life| life.last < wall - 0.7 } }
    replacement = node(2, *flags, nnodes: "2")
    world = await_world(2, on: [0, 2], since: since)
    assert_equal [1], world.values.flatten.map(&:restarts).uniq
    # No restart is left for a second loss, and the text names who was lost.
    crash(2)
    replacement.finish
    result = runs[0].finish
    assert_code 1, result
    assert_match(/node 1.*lost/, result.err)
    assert_match(/node-c|10\.77\.0\.3/, result.err)
  end
end
