# frozen_string_literal: true

require_relative "nodes_case"

# Where nodes meet: addresses, and what else may listen there.
class EndpointsTest < NodesCase
  WAIT = 'echo "$RANK of $WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT at $MASTER_ADDR"; while [ ! -e $1 ]; do sleep 0.05; done'

  def at(endpoint, *flags, nodes: 2, id: "my-job", **options)
    start("--nnodes=#{nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=#{endpoint}", "--rdzv-id=#{id}", *flags, **options)
  end

  # --- addresses

  def test_ipv6
    port = free_port
    code = 'require "socket"; TCPSocket.new(ENV["MASTER_ADDR"], ENV["MASTER_PORT"].to_i).close; puts ENV["MASTER_ADDR"]'
    runs = 2.times.map { at("[::1]:#{port}", "-e", code) }
    results = runs.map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal ["::1\n"] * 2, results.map(&:out)
  end

  def test_a_name_becomes_an_address
    port = free_port
    results = 2.times.map { at("localhost:#{port}", *shell("echo $MASTER_ADDR")) }.map(&:finish)
    results.each { |result| assert_code 0, result }
    results.each { |result| assert_includes %W[127.0.0.1\n ::1\n], result.out }
  end

  def test_the_static_rendezvous_gives_an_address_too
    port = free_port
    runs = [0, 1].map do |rank|
      start("--nnodes=2", "--node-rank=#{rank}", "--master-addr=localhost", "--master-port=#{port}", *shell("echo $MASTER_ADDR $MASTER_PORT"))
    end
    results = runs.map(&:finish)
    results.each { |result| assert_code 0, result }
    results.each { |result| assert_includes ["127.0.0.1 #{port}\n", "::1 #{port}\n"], result.out }
  end

  def test_a_local_address
    port = free_port
    results = 2.times.map { at("127.0.0.1:#{port}", "--local-addr=127.0.0.2", *shell("echo $MASTER_ADDR")) }.map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal ["127.0.0.2\n"] * 2, results.map(&:out)
  end

  # Nobody listens at an address of the documentation's network.
  def test_a_local_address_that_the_others_cannot_reach
    port = free_port
    runs = 2.times.map { at("127.0.0.1:#{port}", "--local-addr=192.0.2.1", *shell("echo $RANK")) }
    results = runs.map(&:finish)
    results.each do |result|
      assert_code 1, result
      refute_match(/1/, result.out)
      assert_match(/no way from \S+ to the workers' store .* 192\.0\.2\.1 port \d+.*--local-addr=/m, result.err)
    end
  end

  def test_a_local_address_that_is_none
    result = at("127.0.0.1:#{free_port}", "--local-addr=no.such.host.invalid", *shell("echo no")).finish
    assert_code 1, result
    assert_match(/no\.such\.host\.invalid/, result.err)
  end

  # The rank does not say who hosts: that is who has the address.
  def test_the_first_rank_is_not_where_the_endpoint_is
    port = free_port
    other = at("192.0.2.1:#{port}", "--node-rank=0", "--rdzv-conf=join_timeout=1", *shell("echo no"))
    second = at("127.0.0.1:#{port}", "--node-rank=1", *shell("echo $RANK"))
    first = at("127.0.0.1:#{port}", "--node-rank=0", "--rdzv-conf=is_host=0", *shell("echo $RANK"))
    assert_equal %W[0\n 1\n], [first, second].map(&:finish).map(&:out)
    result = other.finish
    assert_code 1, result
    assert_match(/tried 192\.0\.2\.1:#{port}/, result.err)
  end

  # The host of an elastic job, and another node of it.
  def elastic_nodes(endpoint, *flags)
    first = at(endpoint, *flags, nodes: "1:2")
    first.await(/0 of 1/)
    second = at(endpoint, *flags, nodes: "1:2")
    second.await(/of 2/)
    [first, second]
  end

  # Nothing of the store is left, so the others start from nothing there rather than wait for what is gone.
  def test_the_only_endpoint_is_back_at_once
    endpoint = "127.0.0.1:#{free_port}"
    flags = ["--rdzv-conf=#{CONF}", *wait_for_go]
    first, second = elastic_nodes(endpoint, *flags)
    lose(first)
    third = at(endpoint, *flags, nodes: "1:2")
    [second, third].each { |run| run.await(/of 2 restart 0.*of 2 restart 0|\A0 of 2/m) }
    finish_all([second, third])
    assert_match(/is lost/, second.err)
  end

  # For a while nobody leads this node's job there: what it had to say of its last round must not come into the next one.
  def test_the_store_of_another_job_is_there_at_once
    endpoint = "127.0.0.1:#{free_port}"
    first, second = elastic_nodes(endpoint, "--rdzv-conf=#{CONF}", *wait_for_go)
    other = standing_still(second) do
      lose(first)
      at(endpoint, "--rdzv-conf=#{CONF}", *shell("echo here; #{IDLE}"), nodes: "1:2", id: "another").tap { |run| run.await(/here/) }
    end
    second.await(/0 of 1 restart 0/)
    finish_all([second])
    other.insist(:TERM)
    assert_match(/is lost: another one is there now/, second.err)
  end

  # A host and another node with workers, in a job of two.
  def two_nodes(*flags)
    port = free_port
    first, second = [0, 1].map { |rank| node(rank, *flags, *wait_for_go, port: port) }
    [first, second].each { |run| run.await(/of 2 restart 0/) }
    [first, second]
  end

  # Stops a node's agent for the time of the block.
  def standing_still(run)
    agent = run.agent
    Process.kill(:STOP, agent)
    yield
  ensure
    Process.kill(:CONT, agent)
  end

  # Workers run on: silence is no loss where all nodes are needed.
  def test_a_host_that_stands_still
    first, second = two_nodes("--rdzv-conf=heartbeat_timeout=1")
    standing_still(first) { second.await(/hosts the rendezvous at \S+ does not answer: /, stream: :err) }
    second.await(/answers again/, stream: :err)
    finish_all([first, second])
    assert_equal ["0 of 2 restart 0 at 127.0.0.1\n", "1 of 2 restart 0 at 127.0.0.1\n"], [first, second].map(&:out)
  end

  # They share its store.
  def test_another_job_at_the_same_endpoint
    endpoint = "127.0.0.1:#{free_port}"
    others = 2.times.map { at(endpoint, *wait_for_go, id: "another") }
    others.each { |run| run.await(/of 2/) }
    runs = 2.times.map { at(endpoint, REPORTS, *shell("echo $RANK $MASTER_PORT"), id: "my-job") }
    results = runs.map(&:finish)
    results.each { |result| assert_code 0, result }
    ranks, ports = results.map { |result| result.out.split }.sort.transpose
    assert_equal %w[0 1], ranks
    assert_equal 1, ports.uniq.size
    refute_equal endpoint[/\d+\z/], ports[0] # their workers have a store of their own
    finish_all(others)
  end

  def test_the_first_rank_comes_late
    port = free_port
    second = at("127.0.0.1:#{port}", "--node-rank=1", *shell("echo $RANK"))
    await_host(port)
    first = at("127.0.0.1:#{port}", "--node-rank=0", *shell("echo $RANK"))
    assert_equal %W[0\n 1\n], [first, second].map(&:finish).map(&:out)
  end

  def test_another_jobs_name
    port = free_port
    first = at("127.0.0.1:#{port}", *shell("echo no"))
    await_host(port)
    result = at("127.0.0.1:#{port}", "--rdzv-conf=join_timeout=1", *shell("echo no"), id: "their-job").finish
    assert_code 1, result
    assert_match(/only 1 of the 2 nodes came to 127\.0\.0\.1:#{port} within 1 s/, result.err)
    first.signal(:INT)
    assert_code 130, first.finish
  end

  def test_what_is_no_store
    TCPServer.open("127.0.0.1", 0) do |server|
      Thread.new do
        loop { server.accept.tap { |client| client.write("HTTP/1.1 400 Bad Request\r\n\r\n") }.close }
      rescue IOError
        # The test is over.
      end
      result = at("127.0.0.1:#{server.addr[1]}", *shell("echo no")).finish
      assert_code 1, result
      assert_match(/127\.0\.0\.1:#{server.addr[1]}/, result.err)
    end
  end

  # --- workers that one node cannot start

  def test_a_node_that_cannot_start_its_workers
    port = free_port
    good = at("127.0.0.1:#{port}", "--rdzv-conf=is_host=1", *shell("exec sleep 60"))
    path = File.join(@folder, "not-a-program")
    File.write(path, "\x7fELF no")
    File.chmod(0o755, path)
    bad = at("127.0.0.1:#{port}", "--no-ruby", path)
    results = [good, bad].map(&:finish)
    results.each { |result| assert_code 1, result }
    assert_match(/FAILED elsewhere/, results[0].err)
  end
end
