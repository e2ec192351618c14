# frozen_string_literal: true

require_relative "support/elastic_case"
require_relative "support/lossy_link"

# Two nodes over a link that loses, delays and reorders packets: what TCP mends costs time, never a restart.
class ElasticLossyTest < ElasticCase
  def setup
    super
    skip LossyLink.obstacle if LossyLink.obstacle
    @seed = Integer(ENV.fetch("SEED", Random.new_seed % 1_000_000))
    hosts(2)
    @link = LossyLink.new(@hosts, loss: 0.05, delay: 0.005..0.03, seed: @seed)
  end

  def teardown
    @link&.close
    puts "SEED=#{@seed}" if @link && !passed?
    super
  end

  def address(host)
    "10.79.0.#{host + 1}"
  end

  def test_a_job_of_two_nodes_with_one_failure
    flags = ["--rdzv-conf=heartbeat_timeout=20", "--max-restarts=1", "--local-addr"]
    runs = [0, 1].map { |host| node(host, *flags, address(host), nnodes: 2) }
    first = await_world(2, on: [0, 1])
    assert_equal [0], first.values.flatten.map(&:restarts).uniq
    since = wall
    fail_on(1)
    again = await_world(2, on: [0, 1], since: since)
    assert_equal [1], again.values.flatten.map(&:restarts).uniq
    eventually("packets that were lost, and some that came out of order") { @link.lost > 0 && @link.reordered > 0 }
    finish_all(*runs)
  end
end
