# frozen_string_literal: true

require_relative "nodes_case"

# Jobs whose nodes come and go: --nnodes=MIN:MAX, and what a lost node means to a job of fixed size.
class ElasticTest < NodesCase
  # Says its place, and ends when the world is as large as the argument says.
  UNTIL = 'echo "$RANK of $WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT"; [ $WORLD_SIZE = $1 ] || exec sleep 60'
  # Says its place; ends when the file of the argument is there.
  WAIT = 'echo "$RANK of $WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT"; while [ ! -e $1 ]; do sleep 0.05; done'

  def elastic(*arguments, port:, nodes: "1:2", rank: nil, **options)
    node(rank, "--rdzv-conf=#{CONF}", *arguments, port: port, nodes: nodes, **options)
  end

  # Runs nodes until each of them has said its place, in the order given.
  def gather(count, *arguments, **options)
    runs = []
    count.times { |i| runs << elastic(*arguments, **options).tap { await_host(options[:port]) if i == 0 } }
    runs.each { |run| run.await(/of #{count} restart 0/) }
    runs
  end

  def test_a_node_joins
    port = free_port
    workers = shell(UNTIL, 2)
    first = elastic(*workers, port: port)
    first.await(/0 of 1 restart 0/)
    second = elastic(*workers, port: port)
    results = [first, second].map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal ["0 of 1 restart 0\n0 of 2 restart 0\n", "1 of 2 restart 0\n"], results.map(&:out)
    assert_match(/restarting workers after a membership change/, results[0].err)
  end

  def test_the_last_call
    started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    result = elastic(*shell(UNTIL, 1), port: free_port).finish
    assert_code 0, result
    assert_operator Process.clock_gettime(Process::CLOCK_MONOTONIC) - started, :>=, 1
  end

  def test_all_there_at_once_need_no_last_call
    port = free_port
    workers = shell(UNTIL, 2)
    runs = 2.times.map { node(nil, "--rdzv-conf=last_call_timeout=600", *workers, port: port, nodes: "1:2") }
    runs.map(&:finish).each { |result| assert_code 0, result }
  end

  %i[INT TERM].each do |signal|
    define_method(:"test_a_node_leaves_by_#{signal}") do
      port = free_port
      first, second = gather(2, *shell(UNTIL, 1), port: port)
      second.signal(signal)
      result = second.finish
      assert_code 128 + Signal.list[signal.to_s], result
      result = first.finish
      assert_code 0, result
      assert_equal "0 of 2 restart 0\n0 of 1 restart 0\n", result.out
      assert_match(/node 1 was stopped by SIG#{signal}/, result.err)
    end
  end

  def test_a_node_is_lost_and_another_comes_in_its_place
    port = free_port
    first, second = gather(2, *wait_for_go, port: port)
    lose(second)
    first.await(/0 of 1 restart 0/)
    third = elastic(*wait_for_go, port: port)
    third.await(/1 of 2 restart 0/)
    first.await(/0 of 2 restart 0\n0 of 1 restart 0\n0 of 2 restart 0/)
    FileUtils.touch(go)
    [first, third].map(&:finish).each { |result| assert_code 0, result }
    assert_match(/node 1 .*is lost: its torchrun is gone/, first.err)
  end

  def test_too_few_nodes_wait_for_others
    port = free_port
    first, second = gather(2, *wait_for_go, port: port, nodes: "2:3")
    second.signal(:INT)
    assert_code 130, second.finish
    first.await(/was stopped by SIGINT/, stream: :err)
    third = elastic(*wait_for_go, port: port, nodes: "2:3")
    third.await(/1 of 2 restart 0/)
    FileUtils.touch(go)
    results = [first, third].map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal "0 of 2 restart 0\n" * 2, results[0].out
  end

  def test_too_few_nodes_do_not_wait_for_ever
    port = free_port
    first, second = gather(2, "--rdzv-conf=#{CONF},join_timeout=1", *wait_for_go, port: port, nodes: "2:3")
    second.signal(:INT)
    second.finish
    result = first.finish
    assert_code 1, result
    assert_match(/within 1 s/, result.err)
  end

  def test_a_failure_costs_a_restart_and_a_change_none
    port = free_port
    code = 'echo "$RANK of $WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS"
      [ $WORLD_SIZE = 2 ] || exec sleep 600
      [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
      [ $RANK = 1 ] || { : > "$MARKS/0"; exec sleep 600; }
      await 0
      exit 3'
    workers = marking(code)
    first = elastic("--max-restarts=1", *workers, port: port)
    first.await(/0 of 1/)
    second = elastic("--max-restarts=1", *workers, port: port)
    results = [first, second].map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal ["0 of 1 restart 0 of 1\n0 of 2 restart 0 of 1\n0 of 2 restart 1 of 1\n", "1 of 2 restart 0 of 1\n1 of 2 restart 1 of 1\n"],
      results.map(&:out)
    assert_match(/FAILED: rank 1, exit code 3/, results[1].err)
    assert_match(/restart 1 of 1/, results[1].err)
  end

  def test_a_failure_without_restarts_ends_an_elastic_job
    port = free_port
    code = [UNTIL.split(";").first, MARK, "[ $RANK = 1 ] || exec sleep 600", "await 0.0", "exit 3"].join("\n")
    runs = gather(2, *marking(code), port: port)
    results = runs.map(&:finish)
    results.each { |result| assert_code 1, result }
    assert_equal 1, results[1].err.scan("exit code 3").size
    assert_match(/FAILED elsewhere: rank 1 on node 1.*exit code 3/, results[0].err)
  end

  def test_a_spare_takes_a_free_place
    port = free_port
    first, second = gather(2, *wait_for_go, port: port)
    spare = elastic(*wait_for_go, port: port)
    spare.await(/spare|place/, stream: :err)
    assert_empty spare.out
    second.signal(:INT)
    second.finish
    spare.await(/1 of 2 restart 0/)
    FileUtils.touch(go)
    [first, spare].map(&:finish).each { |result| assert_code 0, result }
  end

  def test_a_spare_ends_with_the_job
    port = free_port
    runs = gather(2, *wait_for_go, port: port)
    spare = elastic(*wait_for_go, port: port)
    spare.await(/spare|place/, stream: :err)
    FileUtils.touch(go)
    [*runs, spare].map(&:finish).each { |result| assert_code 0, result }
    assert_empty spare.out
  end

  def test_a_node_too_many
    port = free_port
    runs = [node(0, *wait_for_go, port: port), node(1, *wait_for_go, port: port)]
    runs.each { |run| run.await(/of 2/) }
    result = node(nil, "--rdzv-conf=is_host=0", *wait_for_go, port: port).finish
    assert_code 1, result
    assert_match(/has its 2 nodes already/, result.err)
    FileUtils.touch(go)
    runs.map(&:finish).each { |each| assert_code 0, each }
  end

  def test_a_job_of_fixed_size_waits_for_another_node_if_a_restart_is_left
    port = free_port
    first, second = gather(2, "--max-restarts=1", *wait_for_go, port: port, nodes: 2)
    lose(second)
    third = elastic("--max-restarts=1", *wait_for_go, port: port, nodes: 2)
    third.await(/1 of 2 restart 1/)
    first.await(/0 of 2 restart 1/)
    FileUtils.touch(go)
    [first, third].map(&:finish).each { |result| assert_code 0, result }
  end

  def test_ranks_stay
    port = free_port
    ranks = [2, 0, 1]
    runs = ranks.map { |rank| elastic("--rdzv-conf=#{CONF},is_host=#{(rank == 2) ? 1 : 0}", *wait_for_go, port: port, nodes: "2:3", rank: rank) }
    runs.zip(ranks) { |run, rank| run.await(/#{rank} of 3/) }
    runs[1].signal(:INT)
    runs[1].finish
    # Of two nodes none can be 2; the other one stays what it is.
    runs[0].await(/0 of 2/)
    runs[2].await(/1 of 2/)
    back = elastic("--rdzv-conf=#{CONF},is_host=0", *wait_for_go, port: port, nodes: "2:3", rank: 0)
    back.await(/0 of 3/)
    runs[0].await(/2 of 3.*0 of 2.*2 of 3/m)
    runs[2].await(/1 of 3.*1 of 2.*1 of 3/m)
    FileUtils.touch(go)
    [back, runs[0], runs[2]].map(&:finish).each { |result| assert_code 0, result }
  end

  def test_a_worker_that_only_lost_its_peer_costs_nothing_when_a_node_is_lost
    port = free_port
    path = File.join(@folder, "peer.rb")
    File.write(path, <<~RUBY)
      require "json"
      puts "\#{ENV["RANK"]} of \#{ENV["WORLD_SIZE"]} restart \#{ENV["TORCHELASTIC_RESTART_COUNT"]}"
      $stdout.flush
      exit if ENV["WORLD_SIZE"] == "1"
      sleep 0.02 until File.exist?(ARGV[0])
      details = {"timestamp" => Time.now.to_i.to_s, "consequence" => "1"}
      File.write(ENV["TORCHELASTIC_ERROR_FILE"], JSON.dump("message" => {"message" => "lost", "extraInfo" => details}))
      exit 1
    RUBY
    first, second = gather(2, path, go, port: port)
    Process.kill(:STOP, second.agent)
    FileUtils.touch(go)
    first.await(/0 of 1 restart 0/)
    lose(second)
    assert_code 0, first.finish
  end

  # What it does with its old place concerns nobody; as a newcomer it changes the round once.
  def test_a_node_that_was_stopped_comes_back
    port = free_port
    runs = gather(3, *wait_for_go, port: port, nodes: "1:3")
    last = runs.find { |run| run.out.start_with?("2 of 3") }
    others = runs - [last]
    last.signal(:STOP)
    Process.kill(:STOP, last.agent)
    others.each { |run| run.await(/of 2 restart 0/) }
    Process.kill(:CONT, last.agent)
    last.signal(:CONT)
    runs.each { |run| run.await(/of 3 .*of 3 restart 0/m) }
    FileUtils.touch(go)
    results = runs.map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal %w[2 2], last.out.scan(/^(\d) of 3/).flatten
    others.each { |run| assert_equal %w[3 2 3], run.out.scan(/of (\d)/).flatten }
    assert_match(/node 2 is lost: /, last.err)
  end

  def test_the_host_leaves_and_the_job_ends
    port = free_port
    first, second = gather(2, *wait_for_go, port: port)
    first.signal(:INT)
    assert_code 130, first.finish
    result = second.finish
    assert_code 1, result
    assert_match(/node 0 was stopped by SIGINT, and with it the coordinator; a job with --rdzv-backend=etcd/, result.err)
  end
end
