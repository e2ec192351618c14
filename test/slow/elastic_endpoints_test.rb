# frozen_string_literal: true

require_relative "support/elastic_case"

# Three hosts hold the rendezvous: each of them may be lost.
class ElasticEndpointsTest < ElasticCase
  FLAGS = ["--rdzv-conf=last_call_timeout=1,join_timeout=30", "--shutdown-timeout=2"].freeze

  # Losses are noticed sooner, so that the test is over sooner.
  SOONER = FLAGS.map { |flag| flag.sub("last_call_timeout", "heartbeat_timeout=3,last_call_timeout") }.freeze

  def job(flags = FLAGS)
    Array.new(3) { |host| node(host, *flags, nnodes: "2:3", endpoints: [0, 1, 2]) }.tap { await_world(3, on: [0, 1, 2]) }
  end

  3.times do |lost|
    rest = [0, 1, 2] - [lost]

    define_method(:"test_endpoint_#{lost}_is_killed") do
      hosts(3)
      runs = job
      since = wall
      kill_all(lost)
      runs[lost].finish
      world = await_world(2, on: rest, since: since)
      assert_equal [0], world.values.flatten.map(&:restarts).uniq
      # A new torchrun in its place is let in, and votes again.
      since = wall
      runs[lost] = node(lost, *FLAGS, nnodes: "2:3", endpoints: [0, 1, 2])
      await_world(3, on: [0, 1, 2], since: since)
      finish_all(*runs)
    end

    define_method(:"test_endpoint_#{lost}_is_cut_off") do
      hosts(3)
      runs = job(SOONER)
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
  end

  # The second loss comes when the first is healed: nobody is needed for ever.
  def test_one_after_the_other
    hosts(3)
    runs = job(SOONER)
    [0, 1].each do |lost|
      since = wall
      kill_all(lost)
      runs[lost].finish
      await_world(2, on: [0, 1, 2] - [lost], since: since)
      since = wall
      runs[lost] = node(lost, *SOONER, nnodes: "2:3", endpoints: [0, 1, 2])
      await_world(3, on: [0, 1, 2], since: since)
    end
    finish_all(*runs)
  end

  def test_an_endpoint_that_never_comes_is_no_hindrance
    hosts(3)
    runs = [1, 2].map { |host| node(host, *FLAGS, nnodes: "2:3", endpoints: [0, 1, 2]) }
    await_world(2, on: [1, 2])
    finish_all(*runs)
  end

  def test_without_a_majority_nobody_leads
    hosts(3)
    run = node(1, "--rdzv-conf=join_timeout=4", nnodes: "1:3", endpoints: [0, 1, 2])
    result = run.finish
    assert_code 1, result
    assert_empty lives
    [0, 2].each { |host| assert_match(/#{Regexp.escape(address(host))}:29400/, result.err) }
  end

  def test_two_endpoints_survive_the_loss_of_none
    hosts(2)
    runs = [0, 1].map { |host| node(host, *FLAGS, nnodes: "1:2", endpoints: [0, 1]) }
    await_world(2, on: [0, 1])
    assert(runs.any? { |run| run.err.match?(/two endpoints|2 endpoints/) }, situation)
    finish_all(*runs)
  end
end
