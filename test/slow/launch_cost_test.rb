# frozen_string_literal: true

require "json"
require "minitest/autorun"
require "open3"
require "rbconfig"
require "tmpdir"

# The memory that torchrun takes for itself, by the benchmark that also tells the time (`rake bench:launch`): two workers that exit at once.
class LaunchCostTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  BINARY = [ENV["TDDP_TORCHRUN"], "#{ROOT}/lib/torch_ddp/native/bin/torchrun", "#{ROOT}/build/native/bin/torchrun"]
    .compact.find { |path| File.executable?(path) }
  BENCH = "test/bench/launch"

  def test_two_workers_that_exit_at_once
    skip "torchrun is not built: rake compile, or TDDP_TORCHRUN=/path" unless BINARY
    figures = Dir.mktmpdir do |dir|
      plain = File.join(dir, "plain_start")
      assert system("cc", "-O2", "-D_GNU_SOURCE", "-o", plain, File.join(ROOT, BENCH, "plain_start.c"))
      out, status = Open3.capture2e(RbConfig.ruby, File.join(ROOT, BENCH, "launch.rb"), "--torchrun", BINARY, "--plain", plain, "--no-python",
        "--rounds", "4", "--json")
      assert status.success?, out
      JSON.parse(out.lines.last)
    end
    ours = figures.fetch("torchrun")
    assert_operator ours["pss_mib"], :<=, 5, figures
    assert_operator ours["peak_rss_sum_mib"], :<=, 5, figures
  end
end
