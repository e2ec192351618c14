# frozen_string_literal: true

require_relative "support/elastic_case"

# torchrun --check between hosts: one of them sends slowly, and has to be named.
class LaunchCheckTest < ElasticCase
  PROGRAM = File.join(File.dirname(BINARY.to_s), "torchrun-check")
  HOSTS = 3

  def setup
    super
    skip "torchrun-check is not built" unless File.executable?(PROGRAM)
    skip "tc is not installed (Debian: iproute2)" unless system("command -v tc > /dev/null")
    hosts(HOSTS)
  end

  def shape(host, *how)
    out, status = Open3.capture2e("tc", "-n", @hosts.name(host), "qdisc", "replace", "dev", "eth0", "root", *how)
    skip "tc cannot limit a link here: #{out.strip}" unless status.success?
  end

  # @return [Array] what each host's torchrun came to
  def check
    flags = ["--nnodes=#{HOSTS}", "--rdzv-backend=c10d", "--rdzv-endpoint=#{address(0)}:#{PORT}", "--rdzv-id=check", "--check"]
    runs = Array.new(HOSTS) { |host| on(host, *flags, "--node-rank=#{host}", "--local-addr=#{address(host)}") }
    runs.map { |run| run.finish }
  end

  # All links are slow enough for their limits, and not the cores that the hosts share, to say how slow.
  def test_a_host_that_sends_slowly_is_named
    HOSTS.times { |host| shape(host, "tbf", "rate", (host == 1) ? "20mbit" : "100mbit", "burst", "64kb", "latency", "200ms") }
    results = check
    assert_code 1, results.first
    assert_match(/^3 ranks on 3 hosts$/, results.first.out)
    assert_match(/^verdict: 2 slow links; the slowest is rank 1 \(node-b\) to rank [02] \(node-[ac]\): [\d.]+ MB\/s, /, results.first.out)
    assert_match(/^between hosts +6 links/, results.first.out)
    results.drop(1).each { |result| refute_includes result.out, "verdict" }
  end
end
