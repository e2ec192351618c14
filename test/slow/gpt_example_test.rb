# frozen_string_literal: true

require "minitest/autorun"
require_relative "example_programs"

# The GPT in several ways, and after the loss of a worker.
class GptExampleTest < Minitest::Test
  include ExamplePrograms

  PROGRAM = "gpt/train.rb"
  SMALL = %w[--width 32 --depth 4 --heads 4 --length 16 --batch-size 8 --report-every 5 --sample 4].freeze

  def losses(out)
    out.scan(/^step +(\d+): loss ([\d.]+)/).to_h { |step, loss| [step.to_i, loss.to_f] }
  end

  def test_every_way_trains_alike
    expected = losses(torchrun(1, PROGRAM, *SMALL, "--steps", "10"))
    assert_equal [5, 10], expected.keys
    assert_operator expected[10], :<, expected[5]
    [%w[--tp 2 --pp 2], %w[--dp 2 --tp 2 --shard full_shard], %w[--dp 2 --pp 2 --checkpoint-ratio 0.5 --schedule gpipe]].each do |ways|
      out = torchrun(4, PROGRAM, *SMALL, "--steps", "10", "--microbatches", "4", *ways)
      losses(out).each { |step, loss| assert_in_delta expected[step], loss, 0.002, out }
      assert_match(/^tensors took at most \d+, \d+, \d+, \d+ MiB on ranks 0 to 3$/, out)
    end
    mixed = losses(torchrun(2, PROGRAM, *SMALL, "--steps", "10", "--dp", "2", "--dtype", "bfloat16"))
    assert_in_delta expected[10], mixed[10], 0.05
  end

  def test_a_worker_is_killed_and_it_goes_on_also_with_other_dimensions
    Dir.mktmpdir do |dir|
      kept = ["--checkpoint", dir, "--checkpoint-every", "5", *SMALL]
      expected = losses(torchrun(1, PROGRAM, *SMALL, "--steps", "30"))
      out = kill_one(4, "--tp", "2", "--pp", "2", "--microbatches", "4", "--steps", "25", *kept)
      assert_match(/^going on after step \d+, saved by 4 processes$/, out)
      assert_in_delta expected[25], losses(out)[25], 0.005, out
      out = torchrun(2, PROGRAM, "--dp", "2", "--shard", "full_shard", "--steps", "30", *kept)
      assert_match(/^going on after step 25, saved by 4 processes$/, out)
      assert_in_delta expected[30], losses(out)[30], 0.005, out
    end
  end

  def test_mistakes
    assert_refused(/--tp 0: expected a number from 1 up/, PROGRAM, "--tp", "0")
    assert_refused(/--batch-size 3: expected a multiple of --dp 2/, PROGRAM, "--batch-size", "3", "--dp", "2")
    assert_match(/--checkpoint-ratio R/, run_ruby(PROGRAM, "--help"))
    assert_match(/mesh: .*8.*4|mesh: .*4.*8/, torchrun(4, PROGRAM, *SMALL, "--dp", "8", status: 1))
  end

  private

  def children(pid)
    File.read("/proc/#{pid}/task/#{pid}/children").split.map(&:to_i)
  end

  # Kills a worker once there is a checkpoint.
  #
  # @return [String] all that was printed
  def kill_one(processes, *arguments)
    command = ["bundle", "exec", "torchrun", "--standalone", "--max-restarts=1", "--nproc-per-node=#{processes}", example(PROGRAM), *arguments]
    Open3.popen2e(GEMFILE, *command, chdir: ROOT) do |_, out, ended|
      printed = +""
      printed << out.readline until printed.match?(/^step +10:/)
      agent = children(ended.pid).first
      Process.kill(:KILL, children(agent).last)
      printed << out.read
      assert ended.value.success?, printed
      printed
    end
  end
end
