# frozen_string_literal: true

require "json"
require_relative "support/elastic_case"

# Real training over hosts that come and go: it ends as if nothing had been, from its checkpoints.
class ElasticTrainingTest < ElasticCase
  ROOT = File.expand_path("../..", __dir__)
  SCRIPT = File.join(ROOT, "examples/elastic/train.rb")
  CONF = "--rdzv-conf=last_call_timeout=1,heartbeat_timeout=3"

  # All ranks see the folder, as they do on a shared file system.
  def training(*more)
    [SCRIPT, "--checkpoint", File.join(@folder, "checkpoints"), "--checkpoint-every", "5", *more]
  end

  def all_output(runs)
    runs.map(&:out).join
  end

  # Until the newest checkpoint is one that so many ranks have saved.
  def await_saved(ranks)
    eventually("a checkpoint saved by #{ranks} ranks") do
      newest = Dir[File.join(@folder, "checkpoints/*/manifest.json")].max
      newest && JSON.parse(File.read(newest)).dig("content", "world_size") == ranks
    rescue Errno::ENOENT
      false # an old one, which is removed just now
    end
  end

  def test_nodes_join_leave_and_are_lost
    hosts(3)
    worker = training("--epochs", "8", "--pause", "0.1")
    runs = Array.new(2) { |host| node(host, CONF, "--max-restarts=2", nnodes: "1:3", worker: worker) }
    runs[0].await(/^2 ranks, restart 0: starting afresh$/)
    runs[0].await(/^epoch 1: .* 2 ranks$/)
    runs << node(2, CONF, "--max-restarts=2", nnodes: "1:3", worker: worker)
    runs[0].await(/^3 ranks, restart 0: going on after \d+ points of epoch \d+, saved by 2 ranks$/)
    await_saved(3)
    runs[1].signal(:INT)
    assert_code 130, runs[1].finish
    runs[0].await(/^2 ranks, restart 0: going on after \d+ points of epoch \d+, saved by 3 ranks$/)
    await_saved(2)
    crash(2)
    runs[2].finish
    runs[0].await(/^1 rank, restart 0: going on after \d+ points of epoch \d+, saved by 2 ranks$/)
    result = runs[0].finish
    assert_code 0, result
    # Every epoch was ended, in order, and had all its points however many ranks shared them.
    epochs = result.out.scan(/^epoch (\d+): loss [\d.]+, (\d+) points/).map { |pair| pair.map(&:to_i) }
    assert_equal [*1..8], epochs.map(&:first).uniq
    epochs.each { |_, points| assert_includes 2000..2010, points }
    assert_match(/^accuracy [\d.]+ %$/, result.out)
  end

  def test_a_worker_that_is_killed
    hosts(2)
    worker = training("--epochs", "3", "--pause", "0.05")
    runs = Array.new(2) { |host| node(host, CONF, "--max-restarts=2", nnodes: "2", worker: worker) }
    runs[0].await(/^epoch 1: /)
    victim = @hosts.processes(1).find { |pid| command_line(pid).include?("ruby") && command_line(pid).include?("train.rb") && !command_line(pid).include?("--nnodes") }
    assert victim
    Process.kill(:KILL, victim)
    runs[0].await(/^2 ranks, restart 1: going on after \d+ points of epoch \d, saved by 2 ranks$/)
    runs.each { |run| assert_code 0, run.finish }
    assert_match(/^accuracy [\d.]+ %$/, all_output(runs))
  end

  def test_on_one_machine
    result = run_torchrun("--nproc-per-node=2", *training("--epochs", "20"))
    assert_code 0, result
    assert_operator result.out[/^accuracy ([\d.]+) %$/, 1].to_f, :>, 95
    # With another number of ranks it goes on, here at the end.
    result = run_torchrun("--nproc-per-node=3", *training("--epochs", "21"))
    assert_match(/\A3 ranks, restart 0: going on after 0 points of epoch 21, saved by 2 ranks\nepoch 21: .* 3 ranks\n/, result.out)
  end

  def test_mistakes
    out, status = Open3.capture2e(RbConfig.ruby, SCRIPT, "--pause", "-1")
    refute status.success?
    assert_equal "train.rb: --pause -1.0: expected 0 or more (--help lists the options)\n", out
  end
end
