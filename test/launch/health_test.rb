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

  def test_the_state_while_a_job_runs_fails_and_runs_again
    run = start("--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=j1", "--health-check-port=0", *shell(<<~SH))
      trap 'until [ -e #{@folder}/end ]; do sleep 0.05; done; exit 0' TERM
      echo "ready $TORCHELASTIC_RESTART_COUNT ${TORCHELASTIC_HEALTH_CHECK_PORT-none}"
      until [ -e #{@folder}/go$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.05; done
      [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
      [ $RANK = 0 ] || exit 3
      #{IDLE}
    SH
    port = port_of(run)
    run.await(/(ready 0 none\n){2}/)
    status, state = ask(port)
    assert_equal [200, true, false, "running", 2, 0], [status, *state.values_at("healthy", "hangs", "state", "world_size", "restart")]
    assert_equal [[0, "running"], [1, "running"]], state["workers"].map { |worker| worker.values_at("rank", "state") }
    assert(state["workers"].all? { |worker| marked.include?(worker["pid"]) })
    File.write("#{@folder}/go0", "")
    eventually("the failure") { ask(port).first == 503 }
    state = ask(port).last
    assert_equal [false, "ending workers", "told to end", "exit code 3"],
      [*state.values_at("healthy", "state"), *state["workers"].map { |worker| worker["state"] }]
    File.write("#{@folder}/end", "")
    run.await(/(ready 1 none\n){2}/)
    status, state = ask(port, "/healthz")
    assert_equal [200, true, 1, 1], [status, *state.values_at("healthy", "restart", "max_restarts")]
    assert_match(%r{\AHTTP/1.1 404 }, raw(port, "GET / HTTP/1.1\r\n\r\n"))
    assert_match(%r{\AHTTP/1.1 405 }, raw(port, "POST /health HTTP/1.1\r\n\r\n"))
    assert_match(%r{\AHTTP/1.1 400 }, raw(port, "\x16\x03\x01\x00"))
    assert_match(%r{\AHTTP/1.1 431 |\Areset\z}, raw(port, "GET /health HTTP/1.1\r\n#{"a: b\r\n" * 1000}"))
    File.write("#{@folder}/go1", "")
    assert_code 0, run.finish
  end

  def test_a_port_from_the_environment_and_one_in_use
    TCPServer.open("127.0.0.1", 0) do |taken|
      result = run_torchrun(*shell("exit 0"), env: {"TORCHELASTIC_HEALTH_CHECK_PORT" => taken.addr[1].to_s})
      assert_code 1, result
      assert_match(/torchrun: --health-check-port: .*#{taken.addr[1]}/, result.err)
    end
    assert_match(/--health-check-port=70000: expected/, run_torchrun("--health-check-port=70000", *shell("exit 0")).err)
  end

  # Nodes that wait for others are healthy.
  def test_the_state_while_nodes_are_waited_for
    run = start("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{free_port}", "--rdzv-id=j2", "--health-check-port=0", *shell("exit 0"))
    status, state = ask(port_of(run))
    assert_equal [200, "waiting for nodes", []], [status, *state.values_at("state", "workers")]
    run.signal(:TERM)
    assert_code 143, run.finish
  end
end
