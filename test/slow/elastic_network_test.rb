# frozen_string_literal: true

require_relative "support/elastic_case"

# Addresses, names and interfaces.
class ElasticNetworkTest < ElasticCase
  SAY = 'echo "$RANK $WORLD_SIZE $MASTER_ADDR"'
  CONNECT = "require 'socket'; TCPSocket.new(ENV['MASTER_ADDR'], ENV['MASTER_PORT'].to_i).close; puts ENV.values_at('RANK', 'MASTER_ADDR').join(' ')"

  def pair(first, second)
    [first, second].each_with_index.map { |flags, host| on(host, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=network", *flags) }
  end

  def assert_all_reach(master, runs)
    results = runs.map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal ["0 #{master}\n", "1 #{master}\n"], results.map(&:out).sort
  end

  def test_the_master_is_an_address_that_all_hosts_reach
    hosts(2)
    assert_all_reach(@hosts.ipv4(0), pair(*[["--rdzv-endpoint=#{@hosts.ipv4(0)}:29400", "-e", CONNECT]] * 2))
  end

  def test_ipv6_alone
    hosts(2, ipv4: false)
    assert_all_reach(@hosts.ipv6(0), pair(*[["--rdzv-endpoint=[#{@hosts.ipv6(0)}]:29400", "-e", CONNECT]] * 2))
  end

  def test_ipv6_alone_with_the_static_rendezvous
    hosts(2, ipv4: false)
    runs = Array.new(2) do |host|
      on(host, "--nnodes=2", "--node-rank=#{host}", "--master-addr=#{@hosts.ipv6(0)}", "--master-port=29500", "-e", CONNECT)
    end
    assert_all_reach(@hosts.ipv6(0), runs)
  end

  def test_ipv6_where_there_is_ipv4_as_well
    hosts(2)
    assert_all_reach(@hosts.ipv6(0), pair(*[["--rdzv-endpoint=[#{@hosts.ipv6(0)}]:29400", "-e", CONNECT]] * 2))
  end

  # Rank 0's node advertises an address of a network that the other has no way to.
  def test_a_wrong_interface_is_named
    hosts(2)
    @hosts.add_address(0, "10.78.0.1/24")
    endpoint = "--rdzv-endpoint=#{@hosts.ipv4(0)}:29400"
    runs = pair([endpoint, "--local-addr=10.78.0.1", *shell(SAY)], [endpoint, *shell(SAY)])
    results = runs.map(&:finish)
    results.each do |result|
      assert_code 1, result
      assert_match(/10\.78\.0\.1/, result.err)
      assert_match(/--local-addr/, result.err)
    end
    # The one that has the address may have begun; the other has not.
    assert_empty results[1].out
    assert_match(/10\.77\.0\.2/, results[1].err)
  end

  # Nothing says that nobody is there, as behind a firewall; the node that tries shows life meanwhile.
  def test_a_silent_address_is_named
    hosts(2)
    assert system("ip", "-n", @hosts.name(1), "neighbor", "add", "10.77.0.99", "lladdr", "02:00:00:00:00:99", "dev", "eth0")
    endpoint = "--rdzv-endpoint=#{@hosts.ipv4(0)}:29400"
    runs = pair([endpoint, "--local-addr=10.77.0.99", *shell(SAY)], [endpoint, *shell(SAY)])
    result = runs.map(&:finish).last
    assert_code 1, result
    assert_match(/no way from \S+ to the workers' store .*timed out connecting to 10\.77\.0\.99/, result.err)
    refute_match(/is lost/, result.err)
  end

  # Debian's installer gives a host's own name this address of the loopback interface.
  def test_a_host_knows_itself_as_loopback
    hosts(2)
    flags = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=network", "--rdzv-endpoint=first:29400", "-e", CONNECT]
    runs = ["127.0.1.1", @hosts.ipv4(0)].each_with_index.map do |own, host|
      names = File.join(@folder, "hosts#{host}")
      File.write(names, "127.0.0.1 localhost\n#{own} first\n")
      # Each command on a host has mounts of its own.
      start(*flags, command: [*@hosts.command(host), "sh", "-c", 'mount --bind "$1" /etc/hosts && shift && exec "$@"', "sh", names, BINARY])
    end
    assert_all_reach(@hosts.ipv4(0), runs)
  end

  def test_an_address_that_the_host_does_not_have
    hosts(2)
    endpoint = "--rdzv-endpoint=#{@hosts.ipv4(0)}:29400"
    runs = pair([endpoint, "--local-addr=10.99.0.1", *shell(SAY)], [endpoint, *shell(SAY)])
    result = runs[0].finish
    refute_equal 0, result.code
    assert_match(/10\.99\.0\.1/, result.err)
    runs[1].signal(:INT)
    runs[1].finish
  end

  def test_the_right_interface_is_taken_when_it_is_named
    hosts(2)
    2.times { |host| @hosts.add_address(host, "10.78.0.#{host + 1}/24") }
    endpoint = "--rdzv-endpoint=#{@hosts.ipv4(0)}:29400"
    assert_all_reach("10.78.0.1", pair([endpoint, "--local-addr=10.78.0.1", "-e", CONNECT], [endpoint, "-e", CONNECT]))
  end

  # Host names are unknown to all name services here, in every test; one that is asked for is told.
  def test_a_name_that_does_not_resolve
    hosts(2)
    run = on(1, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=network", "--rdzv-endpoint=node-a:29400", "--rdzv-conf=join_timeout=2", *shell(SAY))
    result = run.finish
    assert_code 1, result
    assert_match(/node-a/, result.err)
  end

  def test_nobody_listens_there
    hosts(2)
    run = on(1, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=network", "--rdzv-endpoint=#{@hosts.ipv4(0)}:29400", "--rdzv-conf=join_timeout=2", *shell(SAY))
    result = run.finish
    assert_code 1, result
    assert_match(/10\.77\.0\.1:29400/, result.err)
  end

  def test_what_is_waited_for_is_told_again_and_again
    hosts(2)
    run = on(0, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=network", "--rdzv-endpoint=#{@hosts.ipv4(0)}:29400", "--rdzv-conf=report_interval=1", *shell(SAY))
    run.await(/(waiting at 10\.77\.0\.1:29400 for 1 of 2 nodes.*){2}/m, stream: :err)
    run.signal(:INT)
    assert_code 130, run.finish
  end
end
