# frozen_string_literal: true

require "open3"
require_relative "launch_case"

# torchrun --check: the program that it runs as the workers, on this host. What is slow and what is not is figures_test.c's.
class CheckTest < LaunchCase
  PROGRAM = File.join(File.dirname(BINARY.to_s), "torchrun-check")
  SPEED = /[\d.]+ [kMGT]?B\/s/
  TIME = /[\d.]+ (?:us|ms|s)/
  MEMORY = /[\d.]+ MiB resident at its peak; most for rank \d, ([\d.]+) MiB/

  def check(*flags, **options)
    skip "torchrun-check is not built" unless File.executable?(PROGRAM)
    run_torchrun("--check", *flags, **options)
  end

  # On a machine that does much else a link may be slow indeed: then torchrun has to say so.
  def assert_verdict(result)
    if result.out.include?("verdict: good, no link is slow\n")
      assert_code 0, result
      assert_empty result.err
    else
      assert_code 1, result
      verdict = result.out[/^verdict: \d+ slow links?; the slowest is rank \d \(.+\) to rank \d \(.+\): #{SPEED}, .+$/o]
      assert verdict, result.out
      assert_includes result.err, verdict
    end
  end

  def test_two_ranks
    result = check
    assert_verdict result
    assert_match(/\A2 ranks on 1 host, over shm\n\nstore +#{TIME} to set and get a key; slowest for rank [01], #{TIME}\nmemory +#{MEMORY}\nbarrier +#{TIME}\n/o, result.out)
    assert_operator result.out[/^memory +#{MEMORY}$/o, 1].to_f, :>, 16 # MiB that are reduced at the end
    ["4 KiB", "1 MiB", "16 MiB"].each { |size| assert_match(/^all_reduce  #{size} (in #{TIME}, #{SPEED}|left out: .+)$/, result.out) }
    assert_match(/^ +0 +- +#{SPEED}[ !]  #{Socket.gethostname}\n +1 +#{SPEED}[ !] +-   #{Socket.gethostname}$/, result.out)
    assert_match(/^on one host +2 links, median #{SPEED} and #{TIME}; slowest #{SPEED}, rank/o, result.out)
  end

  def test_three_ranks_meet_each_other
    result = check("--nproc-per-node=3")
    assert_verdict result
    assert_match(/^on one host +6 links/, result.out)
    assert_equal 6, result.out.lines.grep(/^ +\d .*- /).join.scan(SPEED).size
  end

  def test_one_rank_alone
    result = check("--nproc-per-node=1")
    assert_code 0, result
    assert_match(/\A1 rank on 1 host, over gloo\n\nstore .+\nmemory +#{MEMORY}\n\n/o, result.out)
    assert_includes result.out, "verdict: good; one rank has no links to measure\n"
  end

  def test_what_fails_is_told
    result = check("--nproc-per-node=2", env: {"TDDP_SHM" => "0", "TDDP_BACKEND_PATH" => @folder, "GLOO_SOCKET_IFNAME" => "no-such-interface"})
    assert_code 1, result
    assert_match(/torchrun-check: rank [01]: .*no-such-interface/, result.err)
  end

  def test_the_program_is_for_torchrun
    skip "torchrun-check is not built" unless File.executable?(PROGRAM)
    out, status = Open3.capture2e({"MASTER_ADDR" => nil, "RANK" => nil}, PROGRAM)
    assert_equal 1, status.exitstatus
    assert_equal "torchrun-check: MASTER_ADDR is not set: expected an address; start it by torchrun --check\n", out
    out, status = Open3.capture2e({"MASTER_ADDR" => "::1", "MASTER_PORT" => "80000"}, PROGRAM)
    assert_equal 1, status.exitstatus
    assert_includes out, "MASTER_PORT is 80000: expected a number from 1 to 65535"
  end

  def test_a_torchrun_without_it
    FileUtils.cp(BINARY, "#{@folder}/torchrun")
    out, status = Open3.capture2e(PLAIN, "#{@folder}/torchrun", "--check")
    assert_equal 1, status.exitstatus
    assert_includes out, "torchrun: --check: #{File.realpath(@folder)}/torchrun-check: No such file or directory; "
  end
end
