# frozen_string_literal: true

require "json"
require "net/http"
require_relative "launch_case"

# --health-check-port: the state of a job over HTTP.
class HealthTest < LaunchCase
  def port_of(run)
    run.await(/health check on port \d+/, stream: :err)[/\d+/].to_i
  end

  # @return [Array(Integer, Hash)] the status and the state
  def ask(port, path = "/health")
    answer = Net::HTTP.get_response("127.0.0.1", path, port)
    [answer.code.to_i, (JSON.parse(answer.body) unless answer.body.empty?)]
  end

  def raw(port, bytes)
    TCPSocket.open("127.0.0.1", port) do |socket|
      socket.write(bytes)
      socket.read
    rescue Errno::ECONNRESET
      "reset"
    end
  end

  # The workers fail twice, and wait for a file before each step. A job that restarts is healthy.
  def test_the_state_while_a_job_runs_fails_restarts_and_fails_for_good
    run = start("--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=j1", "--health-check-port=0", *shell(<<~SH))
      trap 'until [ -e #{@folder}/end$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.05; done; exit 0' TERM
      echo "ready $TORCHELASTIC_RESTART_COUNT ${TORCHELASTIC_HEALTH_CHECK_PORT-none}"
      until [ -e #{@folder}/go$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.05; done
      [ $RANK = 0 ] || exit 3
      #{IDLE}
    SH
    port = port_of(run)
    run.await(/(ready 0 none\n){2}/)
    status, state = ask(port)
    assert_equal [200, true, "running", "j1", 2, 0, 1], [status, *state.values_at("healthy", "state", "run_id", "world_size", "restart", "max_restarts")]
    assert_equal [[0, "running"], [1, "running"]], state["workers"].map { |worker| worker.values_at("rank", "state") }
    assert(state["workers"].all? { |worker| marked.include?(worker["pid"]) })
    [["restarting", 200, true], ["stopping", 503, false]].each_with_index do |(name, code, healthy), round|
      File.write("#{@folder}/go#{round}", "")
      status, state = eventually("the failure") { ask(port).then { |answer| answer if answer.last["state"] != "running" } }
      assert_equal [code, healthy, name, round], [status, *state.values_at("healthy", "state", "restart")]
      assert_equal ["stopping", "exit code 3"], state["workers"].map { |worker| worker["state"] }
      File.write("#{@folder}/end#{round}", "")
      run.await(/(ready 1 none\n){2}/)
    end
    assert_code 1, run.finish
  end

  def test_what_else_is_asked
    run = start("--health-check-port=0", *shell("until [ -e go ]; do sleep 0.05; done"))
    port = port_of(run)
    silent = Array.new(40) { TCPSocket.open("127.0.0.1", port) } # keep nobody out
    assert_equal 200, ask(port, "/healthz").first
    assert_match(%r{\AHTTP/1.1 200 }, raw(port, "GET / HTTP/1.1\r\n\r\n"))
    assert_match(%r{\AHTTP/1.1 200 |\Areset\z}, raw(port, "GET /health HTTP/1.1\r\n#{"a: b\r\n" * 1000}"))
    assert_match(%r{\AHTTP/1.1 200 OK\r\n.*\r\n\r\n\z}m, raw(port, "HEAD /health HTTP/1.1\r\n\r\n"))
    File.write("#{@folder}/go", "")
    assert_code 0, run.finish
  ensure
    silent&.each(&:close)
  end

  # Addresses of this host on which `port` listens.
  def listeners(port)
    File.readlines("/proc/net/tcp").map(&:split).select { |line| line[1].end_with?(format(":%04X", port)) && line[3] == "0A" }.map { |line| line[1][/\h+/] }
  end

  def test_others_reach_it_only_at_an_address_that_was_given
    {"0" => "0100007F", "0.0.0.0:0" => "00000000", "127.0.0.2:0" => "0200007F"}.each do |given, address|
      run = start("--health-check-port=#{given}", *shell("until [ -e go#{given} ]; do sleep 0.05; done"))
      assert_equal [address], listeners(port_of(run))
      File.write("#{@folder}/go#{given}", "")
      assert_code 0, run.finish
    end
  end

  # Who looks after the job is told; the job itself does not depend on it.
  def test_a_port_in_use_costs_the_health_check_alone
    TCPServer.open("127.0.0.1", 0) do |taken|
      result = run_torchrun(*shell("echo fine"), env: {"TORCHELASTIC_HEALTH_CHECK_PORT" => taken.addr[1].to_s})
      assert_code 0, result
      assert_equal "fine\n", result.out
      assert_match(/\Atorchrun: --health-check-port: cannot listen on 127.0.0.1:#{taken.addr[1]}: .*; the job runs without a health check\n\z/, result.err)
    end
  end

  def test_wrong_places_are_refused
    %w(70000 host:80 127.0.0.1 127.0.0.1:x :80 [::1 -1).each do |value|
      result = run_torchrun("--health-check-port=#{value}", *shell("exit 0"))
      assert_code 2, result
      assert_match(/--health-check-port=#{Regexp.escape(value)}: expected \[ADDRESS:\]PORT/, result.err)
    end
  end

  # Nodes that wait for others are healthy.
  def test_the_state_while_nodes_are_waited_for
    run = start("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{free_port}", "--rdzv-id=j2", "--health-check-port=0", *shell("exit 0"))
    status, state = ask(port_of(run))
    assert_equal [200, "joining", []], [status, *state.values_at("state", "workers")]
    run.signal(:TERM)
    assert_code 143, run.finish
  end

  # Done, while the last lines wait for a reader.
  def test_the_state_once_the_job_is_done
    reader, writer = IO.pipe
    run = start("--health-check-port=0", *shell("head -c 200000 /dev/zero"), out: writer)
    writer.close
    port = port_of(run)
    state = eventually("the end") { ask(port).then { |_, found| found if found["state"] == "done" } }
    assert_equal [true, ["done"]], [state["healthy"], state["workers"].map { |worker| worker["state"] }]
    assert_equal 200_000, reader.read.size
    assert_code 0, run.finish
  ensure
    reader&.close
  end
end
