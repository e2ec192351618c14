# frozen_string_literal: true

require "pty"
require_relative "launch_case"

# What workers write comes out whole.
class OutputTest < LaunchCase
  def test_lines_of_sixteen_workers_never_mix
    code = <<~RUBY
      rank = ENV["RANK"]
      300.times do |i|
        line = "\#{rank}:\#{i}:" + rank[-1] * (i * 7 % 500)
        # In pieces, as a program without line buffering writes.
        $stdout.syswrite(line[0, line.size / 2])
        $stdout.syswrite(line[line.size / 2..] + "\\n")
        $stderr.syswrite("err \#{rank} \#{i}\\n") if i % 10 == 0
      end
    RUBY
    result = run_torchrun("--nproc-per-node=16", *ruby(code))
    assert_code 0, result
    lines = result.out.lines(chomp: true)
    assert_equal 16 * 300, lines.size
    lines.each { |line| assert_match(/\A(\d+):(\d+):(\d)*\z/, line) }
    by_rank = lines.group_by { |line| line[/\A\d+/].to_i }
    16.times do |rank|
      expected = 300.times.map { |i| "#{rank}:#{i}:" + rank.to_s[-1] * (i * 7 % 500) }
      assert_equal expected, by_rank[rank]
    end
    assert_equal 16 * 30, result.err.lines.grep(/\Aerr \d+ \d+\n\z/).size
  end

  def test_lines_of_megabytes_and_bytes_of_any_kind
    code = <<~RUBY
      $stdout.binmode
      $stdout.write(ENV["RANK"] * 3_000_000 + "\\n")
      $stdout.write((0..255).to_a.pack("C*").delete("\\n") + "\\n")
    RUBY
    result = run_torchrun("--nproc-per-node=2", *ruby(code))
    assert_code 0, result
    lines = result.out.b.lines
    binary = "#{(0..255).to_a.pack("C*").delete("\n")}\n".b
    assert_equal ["#{"0" * 3_000_000}\n", "#{"1" * 3_000_000}\n"].map(&:b), lines.select { |line| line.size > 1000 }.sort
    assert_equal [binary, binary], lines.select { |line| line.size <= 1000 }
  end

  def test_a_missing_newline
    result = run_torchrun("--nproc-per-node=2", *shell("printf end$RANK"))
    assert_equal %w[end0 end1], result.out.lines(chomp: true).sort
    assert result.out.end_with?("\n")
    assert_equal "end0", run_torchrun(*shell("printf end$RANK")).out
  end

  def test_a_lone_workers_bytes_pass_at_once
    run = start(*shell("printf prompt; read line; exit 0"), stdin: (reader, writer = IO.pipe).first)
    reader.close
    run.await(/prompt/)
    writer.puts "x"
    assert_code 0, run.finish
  ensure
    writer&.close
  end

  def test_lines_pass_while_workers_run
    run = start("--nproc-per-node=2", *shell("echo hello $RANK; #{IDLE}"))
    run.await(/hello 0/)
    run.await(/hello 1/)
    run.signal(:TERM)
    run.finish
  end

  def test_standard_output_and_error_stay_apart
    result = run_torchrun("--nproc-per-node=2", *shell("echo out; echo err >&2"))
    assert_equal "out\nout\n", result.out
    assert_equal "err\nerr\n", result.err
  end

  def test_both_streams_into_one_pipe
    reader, writer = IO.pipe
    run = start("--nproc-per-node=4", *ruby('200.times { |i| $stdout.syswrite("o" * 700 + "\n"); $stderr.syswrite("e" * 700 + "\n") }'),
      out: writer, err: writer)
    writer.close
    lines = reader.read.lines(chomp: true)
    run.finish
    assert_equal ["e" * 700, "o" * 700], lines.uniq.sort
    assert_equal 1600, lines.size
  ensure
    reader&.close
  end

  def test_a_file_as_standard_output
    path = "#{@folder}/log"
    File.open(path, "w") { |file| start("--nproc-per-node=2", *shell("echo $RANK; echo x$RANK"), out: file).finish }
    assert_equal %w[0 1 x0 x1], File.readlines(path, chomp: true).sort
  end

  NOISE = "while :; do echo yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; done"

  # Nobody reads: workers must wait, but signals must not.
  def test_a_full_pipe_holds_workers_up_but_not_signals
    reader, writer = IO.pipe
    run = start("--nproc-per-node=2", *shell(NOISE), out: writer)
    writer.close
    agent = eventually("the agent") { run.agent }
    # Once all sleep, several times in a row: the workers in their writes, the agent until somebody reads.
    eventually("all to wait") { Array.new(5) { (marked - [run.pid]).map { |pid| state(pid) }.uniq }.uniq == [%w[S]] && marked.size == 4 }
    memory = File.read("/proc/#{agent}/status")[/VmRSS:\s+(\d+)/, 1].to_i
    assert_operator memory, :<, 30_000, "kB" unless File.binread(BINARY).include?("__asan_init")
    run.signal(:TERM)
    result = run.finish
    assert_code 143, result
  ensure
    reader&.close
  end

  # Clients that are none, each of which torchrun's store drops with a line.
  def send_garbage(port, count)
    count.times do
      TCPSocket.open("127.0.0.1", port) do |socket|
        socket.write("\xff" * 8)
        socket.read
      rescue Errno::ECONNRESET
        nil
      end
    end
  end

  # @return [Integer] how many bytes it took
  def fill_pipe(writer)
    [4096, 1].sum do |size|
      taken = 0
      loop { taken += writer.write_nonblock("." * size) }
    rescue IO::WaitWritable
      taken
    end
  end

  # A pipe that is full holds up neither the store's thread nor the workers, and no line of torchrun's is lost
  # before there are many.
  def test_lines_about_strangers_wait_for_the_reader_of_standard_error
    reader, writer = IO.pipe
    filled = fill_pipe(writer)
    run = start("--nproc-per-node=2", *shell("echo port $MASTER_PORT; until [ -e go ]; do sleep 0.05; done; echo bye $RANK; until [ -e end ]; do sleep 0.05; done"), err: writer)
    writer.close
    send_garbage(run.await(/port \d+/)[/\d+/].to_i, 15)
    File.write("#{@folder}/go", "")
    2.times { |rank| run.await(/bye #{rank}/) }
    assert_equal filled, reader.read(filled).size
    lines = Timeout.timeout(LIMIT) { Array.new(15) { reader.gets } }
    lines.each { |line| assert_match(/\Atorchrun: dropped client 127\.0\.0\.1:\d+: /, line) }
    File.write("#{@folder}/end", "")
    assert_code 0, run.finish
    assert_empty reader.read
  ensure
    reader&.close
  end

  # Nor do such lines, which nobody ever reads, keep torchrun from its end; there are few of them and a count.
  def test_lines_about_strangers_do_not_hold_up_the_end
    reader, writer = IO.pipe
    filled = fill_pipe(writer)
    run = start("--nproc-per-node=2", *shell("echo port $MASTER_PORT; until [ -e go ]; do sleep 0.05; done; echo bye"), err: writer)
    writer.close
    send_garbage(run.await(/port \d+/)[/\d+/].to_i, 300)
    File.write("#{@folder}/go", "")
    assert_code 0, run.finish
    assert_equal 2, run.out.scan("bye").size
    assert_equal filled, reader.read.size
  ensure
    reader&.close
  end

  def test_a_reader_that_goes_away_ends_the_job
    reader, writer = IO.pipe
    run = start("--nproc-per-node=2", *shell(NOISE), out: writer)
    writer.close
    reader.readpartial(100)
    reader.close
    assert_code 141, run.finish
  end

  def test_all_is_delivered_to_a_slow_reader
    reader, writer = IO.pipe
    run = start("--nproc-per-node=2", *ruby('20_000.times { |i| puts [ENV["RANK"], i, "z" * 80].join(" ") }'), out: writer)
    writer.close
    lines = []
    while (line = reader.gets)
      lines << line
      sleep 0.1 if (lines.size % 10_000).zero?
    end
    assert_code 0, run.finish
    assert_equal 40_000, lines.size
    assert_equal (0...20_000).to_a, lines.grep(/\A1 /).map { |text| text.split[1].to_i }
  ensure
    reader&.close
  end

  def test_a_full_disk_is_said_once_and_ends_nobody
    File.open("/dev/full", "w") do |full|
      run = start("--nproc-per-node=2", *shell("for i in 1 2 3; do echo lost; sleep 0.1; done; echo kept >&2"), out: full)
      result = run.finish
      assert_code 0, result
      assert_equal 2, result.err.scan("kept\n").size
      assert_equal 1, result.err.scan("torchrun: standard output: No space left on device").size
    end
  end

  # As people use it: output on the terminal, Ctrl-C from its keyboard.
  def test_a_terminal
    command = [BINARY, "--nproc-per-node=2", *shell("trap 'echo stopped $RANK; exit 0' INT; echo ready; #{IDLE}")]
    PTY.spawn(environment, *command) do |reader, writer, pid|
      text = +""
      pump = Thread.new do
        loop { text << reader.readpartial(4096) }
      rescue Errno::EIO, EOFError
        # The terminal closes with its last process.
      end
      eventually("both workers") { text.scan("ready").size == 2 }
      writer.write("\x03")
      _, status = Timeout.timeout(LIMIT) { Process.wait2(pid) }
      pump.join(LIMIT)
      assert_equal 130, status.exitstatus
      assert_equal ["stopped 0", "stopped 1"], text.scan(/stopped \d/).sort
    end
  end

  def test_closed_standard_descriptors
    result = run_torchrun("exec #{BINARY} #{shell("echo fine >&2").join(" ")} >&- <&-", command: %w[sh -c])
    assert_code 0, result
    assert_equal "fine\n", result.err
  end

  # A file that a worker opens must not become its standard input.
  def test_a_worker_has_a_standard_input_in_any_case
    result = run_torchrun("exec #{BINARY} #{shell("readlink /proc/$$/fd/0").join(" ")} <&-", command: %w[sh -c])
    assert_code 0, result
    assert_equal "/dev/null\n", result.out
  end

  # Whoever was handed a worker's output by another way than by birth is not torchrun's to end.
  def test_a_stranger_with_a_workers_output_does_not_keep_torchrun
    path = "#{@folder}/handed"
    server = UNIXServer.new(path)
    run = start(*ruby("require 'socket'; UNIXSocket.open('#{path}') { |to| to.send_io($stdout); to.read(1) }"), out: File.open(File::NULL, "w"))
    worker = server.accept
    output = worker.recv_io
    writers = Array.new(2) { Process.spawn("yes", out: output, err: File::NULL) }
    output.close
    worker.close
    assert_code 0, run.finish
    assert_equal [13, 13], writers.map { |pid| Timeout.timeout(LIMIT) { Process.wait2(pid).last.termsig } }
    writers.clear
  ensure
    writers&.each { |pid| Process.kill(:KILL, pid) && Process.wait(pid) }
    server&.close
  end
end
