# frozen_string_literal: true

require_relative "support/elastic_case"

# A node that dies is known at once, by its connection; one that is silent has half a minute, or, with the static rendezvous,
# as long as it takes. All with the defaults.
class ElasticSilenceTest < ElasticCase
  # Not much more than the 0.2 s in which a connection may be made anew.
  SOON = 0.5 * Float(ENV.fetch("TDDP_TEST_TIMEOUT_MULTIPLIER", "1"))

  def static(host, *flags, nodes:)
    on(host, "--nnodes=#{nodes}", "--node-rank=#{host}", "--master-addr=#{address(0)}", "--master-port=29500", *flags, *shell(WORKER))
  end

  def job(count, *flags, kind: :c10d, nnodes: count)
    runs = Array.new(count) { |host| (kind == :static) ? static(host, *flags, nodes: count) : node(host, *flags, nnodes: nnodes) }
    await_world(count, on: [*0...count])
    runs
  end

  # Seconds until a torchrun's standard error matches.
  def elapsed(run, pattern, since)
    run.await(pattern, stream: :err)
    wall - since
  end

  def test_a_killed_node_is_known_at_once
    hosts(3)
    runs = job(3)
    since = wall
    kill_all(2)
    times = runs.first(2).map { |run| Thread.new { elapsed(run, /node \d is lost: its torchrun is gone/, since) } }.map(&:value)
    assert_operator times.max, :<, SOON
    runs.each { |run| refute_equal 0, run.finish.code }
  end

  def test_a_killed_host_is_known_at_once
    hosts(3)
    runs = job(3)
    since = wall
    kill_all(0)
    pattern = /hosts the rendezvous at \S+ is lost/
    times = runs.last(2).map { |run| Thread.new { elapsed(run, pattern, since) } }.map(&:value)
    assert_operator times.max, :<, SOON
    runs.each { |run| refute_equal 0, run.finish.code }
  end

  # 20 s are less than half a minute; and more than any answer may take.
  %i[static c10d].each do |kind|
    define_method(:"test_each_agent_stands_still_for_a_while_with_#{kind}") do
      hosts(2)
      runs = job(2, kind: kind)
      runs.each do |run|
        agent = run.agent
        Process.kill(:STOP, agent)
        sleep 20
        Process.kill(:CONT, agent)
      end
      await_world(2, on: [0, 1])
      finish_all(*runs)
      assert_equal 2, lives.size
      assert_equal [0], lives.map(&:restarts).uniq
    end
  end

  # Longer than the half minute: the others have given it up, and take it again.
  def assert_one_restart(cut, runs)
    @hosts.cut(cut)
    sleep 40
    since = wall
    @hosts.mend(cut)
    world = await_world(2, on: [0, 1], since: since)
    assert_equal [1], world.values.flatten.map(&:restarts).uniq
    sleep 3 # nothing follows from what comes late
    finish_all(*runs)
    assert_equal [[0, 2], [1, 2]], lives.map(&:restarts).tally.sort
  end

  def test_a_partition_costs_one_restart
    hosts(2)
    assert_one_restart(1, job(2, "--max-restarts=1"))
  end

  %i[leader other].each do |who|
    define_method(:"test_a_partition_with_etcd_costs_one_restart_of_the_#{who}") do
      hosts(3)
      etcd_on(2)
      runs = job(2, "--max-restarts=1")
      assert_one_restart((who == :leader) ? lives.find { |life| life.rank == 0 }.host[-1].ord - "a".ord : 1, runs)
    end
  end
end
