# frozen_string_literal: true

require_relative "nodes_case"

# Several torchruns as the nodes of one job, on the loopback interface.
class NodesTest < NodesCase
  def test_ranks_of_two_nodes
    port = free_port
    results = pair(*shell(SAY), flags: [["--nproc-per-node=2"], ["--nproc-per-node=3"]], port: port).map(&:finish)
    results.each { |result| assert_code 0, result }
    lines = results.map { |result| result.out.lines.map(&:split).sort }
    master = lines[0][0][9]
    assert_equal port.to_s, master # of the endpoint: the only port that a firewall need let through
    expected = [
      2.times.map { |i| [i, i, 5, 2, 0, 2, i, 5, "127.0.0.1", master, "my-job"].map(&:to_s) },
      3.times.map { |i| [i + 2, i, 5, 3, 1, 2, i + 2, 5, "127.0.0.1", master, "my-job"].map(&:to_s) }
    ]
    assert_equal expected, lines
    results.each { |result| assert_empty result.err }
  end

  def test_nodes_without_ranks_number_themselves
    port = free_port
    runs = 3.times.map { node(nil, *shell(SAY), port: port, nodes: 3) }
    results = runs.map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal [%w[0 0 3 1 0 3], %w[1 0 3 1 1 3], %w[2 0 3 1 2 3]], results.map { |result| result.out.split.first(6) }.sort
  end

  def test_the_static_rendezvous
    port = free_port
    runs = [1, 0].map do |rank|
      start("--nnodes=2", "--node-rank=#{rank}", "--master-addr=127.0.0.1", "--master-port=#{port}", *shell(SAY))
    end
    results = runs.map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal [%w[1 0 2 1 1 2 1 2 127.0.0.1] + [port.to_s, "none"], %w[0 0 2 1 0 2 0 2 127.0.0.1] + [port.to_s, "none"]],
      results.map { |result| result.out.split }
  end

  def test_workers_of_all_nodes_reach_the_store
    code = 'require "socket"; TCPSocket.new(ENV["MASTER_ADDR"], ENV["MASTER_PORT"].to_i).close; puts "ok"'
    results = pair("-e", code).map(&:finish)
    results.each { |result| assert_equal "ok\n", result.out }
  end

  def test_a_failure_on_one_node_ends_the_other
    [0, 1].each do |failing|
      results = pair(*marking("#{MARK}.#{failing}\n[ $RANK = #{failing} ] || exec sleep 600\nawait #{1 - failing}.0.#{failing}\nexit 6")).map(&:finish)
      results.each { |result| assert_code 1, result }
      assert_match(/FAILED: rank #{failing}, exit code 6/, results[failing].err)
      assert_match(/FAILED elsewhere: rank #{failing} on node #{failing}: exit code 6/, results[1 - failing].err)
    end
  end

  def test_a_node_that_is_done_waits_for_the_others_end
    # The other one fails once the first is no process any more.
    code = <<~SH
      [ $RANK = 1 ] || { echo $$ > "$MARKS/pid.new"; mv "$MARKS/pid.new" "$MARKS/pid"; exit; }
      await pid
      while kill -0 "$(cat "$MARKS/pid")" 2> /dev/null; do sleep 0.02; done
      exit 6
    SH
    results = pair(*marking(code)).map(&:finish)
    results.each { |result| assert_code 1, result }
  end

  def test_a_signal_on_one_node_ends_the_other
    runs = pair(*shell("echo ready; exec sleep 60"))
    runs.each { |run| run.await(/ready/) }
    runs[1].signal(:INT)
    results = runs.map(&:finish)
    assert_code 130, results[1]
    assert_code 1, results[0]
    assert_match(/node 1 was stopped by SIGINT/, results[0].err)
  end

  def test_a_node_that_vanishes_is_noticed
    @leaves_files = true
    runs = pair(*shell("echo ready; exec sleep 60"), flags: [["--rdzv-conf=heartbeat_timeout=2"]] * 2)
    runs.each { |run| run.await(/ready/) }
    runs[1].vanish
    runs[1].finish
    result = runs[0].finish
    assert_code 1, result
    assert_match(/node 1 is lost: its torchrun is gone, or has been silent for 2 s \(/, result.err)
  end

  def test_a_host_that_vanishes_is_noticed
    @leaves_files = true
    runs = pair(*shell("echo ready; exec sleep 60"))
    runs.each { |run| run.await(/ready/) }
    runs[0].vanish
    runs[0].finish
    result = runs[1].finish
    assert_code 1, result
    assert_match(/the torchrun that hosts the rendezvous at 127\.0\.0\.1:\d+ is lost/, result.err)
  end

  def test_a_node_that_was_stopped_for_too_long
    runs = pair(*shell("echo ready; exec sleep 60"), flags: [["--rdzv-conf=heartbeat_timeout=3"]] * 2)
    runs.each { |run| run.await(/ready/) }
    agent = runs[1].agent
    Process.kill(:STOP, agent)
    result = runs[0].finish
    assert_code 1, result
    assert_match(/node 1 is lost: its torchrun is gone, or has been silent for 3 s \(/, result.err)
    Process.kill(:CONT, agent)
    result = runs[1].finish
    assert_code 1, result
    assert_match(/node 1 is lost|hosts the rendezvous at \S+ is lost/, result.err)
  end

  # What a worker says of its failure is shown on other nodes, and on its own, without what a terminal would act on.
  def test_a_failure_elsewhere_sends_no_control_characters
    error = '{"message": {"message": "Boom: \\u001b]0;owned\\u0007\\u001b[2J\\r\\u009b31m", "extraInfo": {"timestamp": 1, "py_callstack": "at \\u001b[5mline"}}}'
    code = "if [ $RANK = 1 ]; then printf '%s' '#{error}' > \"$TORCHELASTIC_ERROR_FILE\"; exit 3; fi; exec sleep 60"
    results = pair(*shell(code)).map(&:finish)
    results.each do |result|
      assert_code 1, result
      assert_match(/(?:: |^ +)Boom: \?\]0;owned\?\?\[2J\?\?31m\n/, result.err)
      assert_match(/at \?\[5mline\n/, result.err)
      assert_empty result.err.force_encoding("UTF-8").scan(/[[:cntrl:]&&[^\n\t]]/)
    end
  end

  def test_all_nodes_restart_together
    code = ['echo "$RANK $TORCHELASTIC_RESTART_COUNT"', MARK, "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0",
      "[ $RANK = 1 ] || exec sleep 600", "await 0.0", "exit 1"].join("\n")
    results = pair(*marking(code), flags: [["--max-restarts=2"]] * 2).map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal ["0 0\n0 1\n", "1 0\n1 1\n"], results.map(&:out)
  end

  def test_a_missing_node
    result = node(0, "--rdzv-conf=join_timeout=1", *shell("echo no"), port: free_port).finish
    assert_code 1, result
    assert_empty result.out
    assert_match(/only 1 of the 2 nodes came to 127\.0\.0\.1:\d+ within 1 s: node rank 1 has not come; here: node 0 \(\S+ pid \d+\);/, result.err)
  end

  def test_a_host_that_is_not_there
    port = free_port
    result = node(1, "--rdzv-conf=join_timeout=1", *shell("echo no"), port: port).finish
    assert_code 1, result
    assert_match(/127\.0\.0\.1:#{port}/, result.err)
  end

  def test_a_signal_while_waiting
    run = node(0, REPORTS, *shell("echo no"), port: free_port)
    run.await(/waiting at .* for 1 of 2 nodes/, stream: :err)
    run.signal(:INT)
    result = run.finish
    assert_code 130, result
    assert_empty result.out
  end

  def test_two_nodes_of_the_same_rank
    port = free_port
    first, second = [0, 1].map { |rank| node(rank, REPORTS, *shell("echo no"), port: port, nodes: 3) }
    first.await(/node rank 2 has not come; here: .*pid #{second.pid}/, stream: :err)
    third = node(1, *shell("echo no"), port: port, nodes: 3).finish
    assert_code 1, third
    assert_match(/--node-rank=1 is taken already by \S+ pid #{second.pid}/, third.err)
    [first, second].each { |run| run.signal(:INT) }
    [first, second].each(&:finish)
  end

  def test_nodes_that_disagree
    runs = pair(*shell("exit 0"), flags: [["--max-restarts=1"], []])
    result = runs[1].finish
    assert_code 1, result
    assert_match(/started with --nnodes=2 --max-restarts=1 .*, this node with --nnodes=2 --max-restarts=0 /, result.err)
    runs[0].signal(:TERM)
    runs[0].finish
  end

  # How long a silent node lives, and a leader's lease, is one number for all.
  def test_nodes_that_disagree_on_silence
    runs = pair(*shell("exit 0"), flags: [[], ["--rdzv-conf=heartbeat_timeout=7"]])
    result = runs[1].finish
    assert_code 1, result
    assert_match(/started with .*heartbeat_timeout=30, this node with .*heartbeat_timeout=7; expected the same/, result.err)
    runs[0].signal(:TERM)
    runs[0].finish
  end

  # No other node can come for it, so nobody need wait for one.
  def test_a_static_node_leaves_before_the_start
    port = free_port
    runs = [0, 1].map do |rank|
      start("--nnodes=3", "--node-rank=#{rank}", "--master-addr=127.0.0.1", "--master-port=#{port}", REPORTS, *shell("echo no"))
    end
    runs[0].await(/node rank 2 has not come; here: .*pid #{runs[1].pid}/, stream: :err)
    runs[1].signal(:INT)
    assert_code 130, runs[1].finish
    result = runs[0].finish
    assert_code 1, result
    assert_match(/was stopped by SIGINT/, result.err)
    assert_empty result.out
  end

  def test_an_endpoint_in_use
    TCPServer.open("127.0.0.1", 0) do |server|
      result = node(0, *shell("echo no"), port: server.addr[1]).finish
      assert_code 1, result
      assert_match(/127\.0\.0\.1:#{server.addr[1]}/, result.err)
      assert_match(/in use/, result.err)
    end
  end
end
