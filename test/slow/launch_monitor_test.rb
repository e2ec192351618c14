# frozen_string_literal: true

require_relative "../launch/launch_case"

# --monitor without a terminal, where it speaks every ten seconds.
class MonitorLinesTest < LaunchCase
  def test_a_line_every_ten_seconds
    run = start("--monitor", "--nproc-per-node=2", "--rdzv-id=job7", *shell("echo hello; until [ -e go ]; do sleep 0.1; done"))
    run.await(/^torchrun: job7: .*\n/, stream: :err)
    File.write("#{@folder}/go", "")
    result = run.finish
    assert_code 0, result
    assert_equal "hello\nhello\n", result.out
    worker = /rank \d running (-|\d+%) \d+ MiB/
    assert_match(/\A(torchrun: job7: running, 0:\d\d:\d\d, round 0, restart 0 of 0; #{worker}; #{worker}\n)+\z/, result.err)
    refute_match(/running, 0:00:0/, result.err)
  end
end
