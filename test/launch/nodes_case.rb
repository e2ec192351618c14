# frozen_string_literal: true

require_relative "launch_case"

# Tests of nodes wait far more than they work: several at once.
Minitest.parallel_executor = Minitest::Parallel::Executor.new(4)

# Several torchruns as the nodes of one job, on the loopback interface.
class NodesCase < LaunchCase
  parallelize_me!

  # Quick enough for tests, and patient enough for a busy machine.
  CONF = "heartbeat_timeout=2,last_call_timeout=1"

  # A node of a job that meets at one port; without a rank it takes one that is free.
  def node(rank, *flags, port:, nodes: 2, **options)
    start("--nnodes=#{nodes}", *("--node-rank=#{rank}" if rank), "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{port}",
      "--rdzv-id=my-job", *flags, **options)
  end

  # The other node is started first: it must wait for the host.
  def pair(*arguments, flags: [[], []], port: free_port)
    runs = [1, 0].map { |rank| node(rank, *flags[rank], *arguments, port: port) }
    runs.reverse
  end

  # Waits until somebody hosts the rendezvous there.
  def await_host(port)
    eventually("somebody to listen at port #{port}") do
      TCPSocket.new("127.0.0.1", port).close
      true
    rescue SystemCallError
      false
    end
  end

  # Lines about what is waited for come soon, so that tests see who has come.
  REPORTS = "--rdzv-conf=report_interval=1"

  # Of a worker's script: says that it runs, to those who await it.
  MARK = ': > "$MARKS/$RANK.$TORCHELASTIC_RESTART_COUNT"'
  AWAIT = 'await() { while [ ! -e "$MARKS/$1" ]; do sleep 0.02; done; }'

  # Workers that have a folder for marks.
  def marking(code)
    shell("MARKS='#{@folder}'\n#{AWAIT}\n#{code}")
  end

  # A file for which workers wait before they end.
  def go
    @go ||= File.join(@folder, "go")
  end

  # Workers that do as the class's WAIT says until the file is there.
  def wait_for_go
    shell(self.class::WAIT, go)
  end

  # Lets the workers of these nodes end, well.
  def finish_all(runs)
    FileUtils.touch(go)
    runs.map(&:finish).each { |result| assert_code 0, result }
  end

  # As if a node's machine had lost its power.
  def lose(run)
    @leaves_files = true
    run.vanish
    run.finish
  end

  SAY = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $TORCHELASTIC_RUN_ID"'
end
