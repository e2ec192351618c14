# frozen_string_literal: true

require_relative "../launch/launch_case"

# Whatever of a job is killed, whenever: no process, no file and no port of it is left.
#
# KILL_SEED repeats a run, KILLS sets how many there are.
class LaunchKillsTest < LaunchCase
  SEED = Integer(ENV.fetch("KILL_SEED") { Random.new_seed & 0xffff_ffff })
  KILLS = Integer(ENV.fetch("KILLS", "200"))

  # A worker with a child in its group, one in a session of its own, and a daemon that nobody waits for and that ignores what it can.
  WORKER = <<~SH
    echo "$MASTER_PORT"
    sleep 30 &
    setsid sleep 30 &
    (setsid sh -c 'trap "" TERM INT HUP QUIT; sleep 30 & while :; do sleep 1; done' > /dev/null 2>&1 &)
    wait
  SH

  # What is done to the victim, in this order; a pause stands between.
  DEEDS = {
    kill: %i[KILL], term: %i[TERM], int: %i[INT], stop_and_kill: %i[STOP KILL], stop_continue_kill: %i[STOP CONT KILL],
    stop_and_term: %i[STOP TERM CONT]
  }.freeze
  ROLES = %i[front front agent agent worker grandchild].freeze

  # What torchrun must say when this happens to it alone; a worker's end is a failure of the job.
  CODES = {kill: 137, stop_and_kill: 137, stop_continue_kill: 137, term: 143, stop_and_term: 143, int: 130}.freeze

  def children(pid)
    File.read("/proc/#{pid}/task/#{pid}/children").split.map(&:to_i)
  rescue SystemCallError
    []
  end

  def comm(pid)
    File.read("/proc/#{pid}/comm").chomp
  rescue SystemCallError
    ""
  end

  # The process that has the workers: torchrun itself at the very beginning.
  def agent(run)
    children(run.pid).find { |pid| comm(pid) == "torchrun-agent" } || run.pid
  end

  # Each leads a session; what one of them has forked does not as long as it has this name: so the session is looked at first.
  def workers(run)
    children(agent(run)).select { |pid| session(pid) == pid && comm(pid).start_with?("worker-") }
  end

  def session(pid)
    File.read("/proc/#{pid}/stat").rpartition(")").last.split[3].to_i
  rescue SystemCallError
    0
  end

  def victim(run, role, random)
    case role
    when :front then run.pid
    when :agent then agent(run)
    when :worker then workers(run).sample(random: random)
    # torchrun's child is its agent, which has no name of its own at first.
    when :grandchild then (marked - [run.pid] - children(run.pid) - workers(run)).sample(random: random)
    end
  end

  # @return [Boolean] whether the victim lived
  def hit(pid, names)
    names.each_with_index do |name, at|
      sleep 0.01 unless at.zero?
      Process.kill(name, pid)
    end
    true
  rescue Errno::ESRCH
    false
  end

  def refute_listening(port)
    TCPSocket.new("127.0.0.1", port).close
    flunk "port #{port} still listens"
  rescue Errno::ECONNREFUSED
    pass
  end

  def assert_nothing_left(what)
    eventually(-> { "no process to be left: #{what}: #{marked.map { |pid| "#{pid} #{command_line(pid)} (#{state(pid)})" }}" }) { marked.empty? }
    assert_empty Dir.children(@temporary), "#{what}: files are left"
  end

  # One job and what befalls it.
  def one_kill(number, random)
    role = ROLES.sample(random: random)
    deed = DEEDS.keys.sample(random: random)
    pause = [random.rand(0.02), random.rand(0.1), 0.05 + random.rand(0.1)].sample(random: random)
    what = "kill #{number} of seed #{SEED}: #{deed} for #{role} after #{(pause * 1000).round} ms"
    run = start("--nproc-per-node=2", "--shutdown-timeout=0.1", *@worker)
    sleep pause
    pid = victim(run, role, random)
    struck = pid && hit(pid, DEEDS.fetch(deed))
    # A job that goes on without the victim is ended as usual.
    run.signal(:TERM) unless struck && %i[front agent].include?(role)
    result = run.finish
    told = "#{what} (pid #{pid || "none"})\n#{result.out}#{result.err}"
    # Which of the two is first is not told when a worker's end and the signal come together.
    expected = (struck && %i[front agent].include?(role)) ? [CODES.fetch(deed)] : [1, 143]
    assert_includes expected, result.code, told
    assert_nothing_left(told)
    refute_listening(result.out[/\A\d+$/].to_i) if result.out.match?(/\A\d+$/)
  ensure
    @runs.clear
  end

  def test_many_kills_leave_nothing
    puts "seed #{SEED}"
    random = Random.new(SEED)
    @worker = shell(WORKER)
    KILLS.times { |number| one_kill(number, random) }
  end

  # Nobody is left who could look for what left its session: the workers themselves go, by the kernel's own doing.
  def test_torchrun_and_its_agent_killed_at_once
    @leaves_files = true
    worker = shell(WORKER)
    5.times do
      run = start("--nproc-per-node=2", *worker)
      run.await(/(\d+\n){2}/)
      own = [run.pid, agent(run)].uniq
      had = workers(run)
      assert_equal 2, had.size
      Process.kill(:KILL, *own)
      result = run.finish
      assert_code 137, result
      eventually("the workers #{had} to be gone") { (marked & had).empty? }
      # A shell may be about to fork when it is looked for.
      eventually("what they had started to be gone") { marked.each { |pid| hit(pid, %i[KILL]) }.empty? }
    end
  end
end
