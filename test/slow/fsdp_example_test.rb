# frozen_string_literal: true

require "minitest/autorun"
require_relative "example_programs"

# A model that fits sharded, and not otherwise.
class FsdpExampleTest < Minitest::Test
  include ExamplePrograms

  PROGRAM = "fsdp/train.rb"

  def test_it_fits_sharded
    out = torchrun(4, PROGRAM, "--steps", "4")
    assert_match(/^no_shard .* no$/, out)
    assert_match(/^full_shard .* yes$/, out)
    losses = out.scan(/^step \d+: loss ([\d.]+)$/).flatten.map { |text| Float(text) }
    assert_equal 4, losses.size
    assert_operator losses.last, :<, losses.first
    estimated = out[/^full_shard .* ([\d.]+) +yes$/, 1].to_f
    assert_in_delta estimated, out[/tensors took at most (\d+) MiB/, 1].to_f, 0.1 * estimated
  end

  def test_it_runs_out_of_memory_otherwise
    out = torchrun(4, PROGRAM, "--steps", "4", "--strategy", "no_shard", status: 1)
    assert_match(/can't allocate memory/, out)
    refute_match(/^step/, out)
  end

  def test_mistakes
    assert_refused(/--width 0: expected a number from 1 up/, PROGRAM, "--width", "0")
    assert_refused(/--strategy some/, PROGRAM, "--strategy", "some")
    assert_match(/--limit MIB/, run_ruby(PROGRAM, "--help"))
  end
end
