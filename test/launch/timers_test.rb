# frozen_string_literal: true

require "json"
require_relative "launch_case"

# Workers' timers: requests in TORCHELASTIC_TIMER_FILE, a worker that is ended, and what is reported.
class TimersTest < LaunchCase
  # Starts a timer, of the shell itself or another process, that has expired.
  def request(scope, time: 5, pid: "$$", signal: 9)
    %(echo "{\\"version\\": 1, \\"pid\\": #{pid}, \\"scope_id\\": \\"#{scope}\\", \\"expiration_time\\": #{time}, ) +
      %(\\"signal\\": #{signal}}" > "$TORCHELASTIC_TIMER_FILE")
  end

  def test_a_worker_whose_timer_expires_is_ended_and_reported
    result = run_torchrun("--nproc-per-node=2", "--max-restarts=1", "--report-file=#{@folder}/report.json", *shell(<<~SH))
      [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
      [ $RANK = 1 ] && #{request("load a batch")}
      [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 600
    SH
    assert_code 0, result
    assert_match(/^torchrun: rank 1 \(pid \d+\): its timer "load a batch" has expired: ending it$/, result.err)
    assert_match(/^  signal    : killed by SIGKILL\n  error_file: none: torchrun ended the worker, because its timer expired\n  message   : the timer "load a batch" expired$/, result.err)
    failures = JSON.parse(File.read("#{@folder}/report.json"))["attempts"].fetch(0)["failures"]
    assert_equal [[1, -9, 'the timer "load a batch" expired']], failures.map { |failure| failure.values_at("rank", "exitcode", "message") }
  end

  # Nor does one of a process that is no worker, nor noise; and the pipe is gone when torchrun has ended.
  def test_a_timer_that_is_stopped_ends_nobody
    result = run_torchrun("--log-dir=#{@folder}/logs", *shell(<<~SH))
      #{request("torchrun's own", pid: "$PPID")}
      sh -c '#{request("a child")}; exec sleep 600' &
      child=$!
      echo noise > "$TORCHELASTIC_TIMER_FILE"
      #{request("mine", time: 99_999_999_999)}
      #{request("mine", time: -1)}
      kill -0 $child && kill $child && echo "$TORCHELASTIC_TIMER_FILE"
    SH
    assert_code 0, result
    assert_match(%r{\A#{@temporary}/torchrun_\w+/timers\n\z}, result.out)
    refute_match(/timer/, result.err)
  end

  # A signal of the worker's choice, whose handler says why in the error file.
  def test_a_signal_that_the_worker_handles
    result = run_torchrun(*shell(<<~SH))
      trap 'echo "{\\"message\\": \\"stuck at step 7\\"}" > $TORCHELASTIC_ERROR_FILE; exit 4' TERM
      #{request("step", signal: 15)}
      #{IDLE}
    SH
    assert_code 1, result
    assert_match(/^  exitcode  : 4 /, result.err)
    assert_match(/^  message   : stuck at step 7$/, result.err)
  end
end
