# frozen_string_literal: true

require_relative "../launch/launch_case"

# --monitor without a terminal, where it speaks every ten seconds.
class MonitorLinesTest < LaunchCase
  def test_a_line_every_ten_seconds
    result = run_torchrun("--monitor", "--nproc-per-node=2", "--rdzv-id=job7", *shell("echo hello; sleep 11"), limit: 30)
    assert_code 0, result
    assert_equal "hello\nhello\n", result.out
    worker = /rank \d running (-|\d+%) \d+ MiB/
    assert_match(/\Atorchrun: job7: running, 0:00:10, round 0, restart 0 of 0; #{worker}; #{worker}\n\z/, result.err)
  end
end
