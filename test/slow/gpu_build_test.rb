# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "tmpdir"

# test/gpu/run on a machine with a compiler and no cmake: what it builds there runs, with stand-ins for CUDA and NCCL.
class GPUBuildTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)

  def command(*words)
    out, status = Open3.capture2e(*words, chdir: ROOT)
    assert status.success?, out
    out
  end

  def test_the_compiler_alone_is_enough
    Dir.mktmpdir do |dir|
      command("bash", "-c", ". test/gpu/build.sh && build_with_cc \"$1\"", "sh", dir)
      out = command("test/gpu/run", "--stand-ins", "--build", dir, "--out", File.join(dir, "out"))
      %w[operations failures].each { |part| assert_match(/^- passed: #{part}, /, out) }
      assert_match(/^- a rank is killed amid operations: after \d+\.\d+ s .* TDDP_PEER_LOST/, out)
      assert_match(/^with stand-ins: \d+ passed, 0 failed, \d not run, /, out)
      log = File.read(File.join(dir, "out/log.txt"))
      %w[two_ranks data_that_another_stream_writes a_rank_that_is_late_is_a_timeout].each { |name| assert_match(/^ok #{name} /, log) }
    end
  end
end
