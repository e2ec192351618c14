# frozen_string_literal: true

require_relative "launch_case"

# However torchrun or one of its two processes dies, nobody of the job is left, and nobody else is touched.
class OrphansTest < LaunchCase
  # Processes that a worker started end with it: those in its group, and those that left it.
  def test_grandchildren_are_ended
    code = <<~SH
      sleep 60 &
      setsid sleep 61 > /dev/null 2>&1 &
      setsid sh -c 'trap "" TERM INT; while :; do sleep 1; done' &
      sleep 0.2
      echo ready
    SH
    {"exit 0" => 0, "exit 1" => 1, "kill -9 $$" => 1}.each do |ending, code_of_torchrun|
      result = run_torchrun("--nproc-per-node=2", *shell("#{code}\n#{ending}"))
      assert_code code_of_torchrun, result
      assert_operator result.seconds, :<, 2.5
      assert_empty marked
    end
  end

  def test_children_from_before_are_left_alone
    # The shell starts a child and then becomes torchrun.
    run = start("sleep 2 & exec #{BINARY} #{shell("sleep 60 & exit 0").join(" ")}", command: %w[sh -c], out: File::NULL, err: File::NULL)
    result = run.finish
    assert_code 0, result
    left = marked
    assert_equal 1, left.size
    assert_includes File.read("/proc/#{left.first}/cmdline"), "sleep"
    Process.kill(:KILL, left.first)
  end
end
