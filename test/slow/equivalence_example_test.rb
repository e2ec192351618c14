# frozen_string_literal: true

require "minitest/autorun"
require_relative "example_programs"

# The demonstration that one process and several make the same updates.
class EquivalenceExampleTest < Minitest::Test
  include ExamplePrograms

  PROGRAM = "equivalence/main.rb"

  def assert_equal_losses(out, steps)
    rows = table(out, "step |")
    assert_equal (1..steps).map(&:to_s), rows.map(&:first)
    rows.each do |_, *losses|
      assert_equal 3, losses.size, out
      losses.each { |loss| assert_in_delta Float(losses.first), Float(loss), 1e-9, out }
    end
    assert_operator Float(rows.last[1]), :>, 0, out
  end

  def test_sgd_and_the_padded_sharding
    out = run_ruby(PROGRAM, "--compare", "--no_shuffle", "--num_examples", "9", "--batch_size", "6")
    assert_equal [["1", "x1 x3 x5", "x2 x4 x6"], ["2", "x7 x9", "x8 x1"]], table(out, "iteration |")
    assert_equal_losses(out, 6)
    assert_match(/sgd, learning rate 1, DDP 2/, out)
    assert_match(/^step \| +one process \| +DataParallel/, out)
  end

  def test_adam_and_the_sharding_that_drops_the_rest
    out = run_ruby(PROGRAM, "--compare", "--no-shuffle", "--drop-last", "--opt", "adam", "--lr", "0.1", "--epochs", "4",
      "--num_examples", "9", "--batch_size", "6")
    assert_equal [["1", "x1 x3 x5", "x2 x4 x6"], ["2", "x7", "x8"]], table(out, "iteration |")
    assert_match(/^left out: x9$/, out)
    assert_equal_losses(out, 8)
  end

  def test_shuffled_with_three_processes_under_torchrun
    out = torchrun(3, PROGRAM, "--compare", "--num_examples", "20", "--batch_size", "6", "--opt", "adam", "--dim", "7", "--epochs", "2")
    shards = table(out, "iteration |")
    assert_equal 4, shards.size
    drawn = shards.flat_map { |row| row.drop(1) }.flat_map(&:split)
    assert_equal 21, drawn.size
    assert_equal (1..20).map { |i| "x#{i}" }.sort, drawn.uniq.sort
    assert_equal_losses(out, 8)
  end

  def test_it_says_when_the_forms_differ
    out = run_ruby(PROGRAM, "--compare", "--opt", "adam", "--eps", "0.5", status: 1)
    assert_match(/differ by more than rounding .* with --eps 0 they are equal/, out)
  end

  def test_mistakes_are_one_line
    assert_refused(/--batch_size 5: expected a multiple of the 2 processes/, PROGRAM, "--compare", "--batch_size", "5")
    assert_refused(/invalid argument: --opt rprop/, PROGRAM, "--opt", "rprop")
    assert_refused(/--gpus 1,1: a device is named twice/, PROGRAM, "--gpus", "1,1")
    assert_refused(/--num-examples 0: expected a number from 1 up/, PROGRAM, "--num-examples", "0")
    assert_refused(/--gpus 0: expected one for each of the 2 processes/, PROGRAM, "--gpus", "0",
      env: {"RANK" => "0", "WORLD_SIZE" => "2", "LOCAL_RANK" => "0", "LOCAL_WORLD_SIZE" => "2"})
    assert_match(/--drop_last/, run_ruby(PROGRAM, "--help"))
  end
end
