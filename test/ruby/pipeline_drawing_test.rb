# frozen_string_literal: true

require "minitest/autorun"
require "json"
require "tmpdir"
require_relative "../../ext/setup/pipeline_drawing"

# `rake pipeline:svg`: schedules as they are planned, and as traces have them.
class PipelineDrawingTest < Minitest::Test
  def draw(*arguments)
    Dir.mktmpdir do |folder|
      file = File.join(folder, "out.svg")
      capture_io { Setup::PipelineDrawing.new.run(*arguments, "--output", file) }
      File.read(file)
    end
  end

  def titles(svg)
    svg.scan(%r{<title>(.*?)</title>}).flatten
  end

  def test_planned
    svg = draw("--schedule", "gpipe", "--ranks", "2", "--micro-batches", "3")
    assert_equal "gpipe, 2 ranks, 3 micro-batches: bubble 25.0 %", svg[%r{<text[^>]*>(.*?)</text>}, 1]
    assert_equal %w[0F0 0F1 0F2 0B0 0B1 0B2 1F0 1F1 1F2 1B0 1B1 1B2], titles(svg)
    # Forward from 0, 24 wide; the first rank's backward begins when the second has done five.
    boxes = svg.scan(/<rect x="([\d.]+)" y="\d+" width="([\d.]+)"/).map { |pair| pair.map(&:to_f) }
    assert_equal [[64, 24], [88, 24], [112, 24], [208, 48], [256, 48], [304, 48]], boxes.first(6)
    assert_equal 2 * 2 * 4 * 2, titles(draw("--schedule", "interleaved", "--ranks", "2", "--micro-batches", "4")).size
    assert_equal 3 * 4 * 8, titles(draw("--schedule", "zero_bubble")).size
  end

  # The last step of each rank.
  def test_traced
    Dir.mktmpdir do |folder|
      [%w[F0 B0], %w[F0 B0]].each_with_index do |names, rank|
        events = (names * 2).each_with_index.map do |name, i|
          {ph: "X", cat: "pipeline", name: name, ts: 10 * i + rank, dur: 5, args: {stage: rank}}
        end
        events << {ph: "X", cat: "training", name: "optimizer", ts: 0, dur: 1}
        File.write(File.join(folder, "trace_rank_#{rank}.json"), JSON.generate(events))
      end
      svg = draw("--trace", folder)
      assert_equal %w[0F0 0B0 1F0 1B0], titles(svg)
      assert_equal "the last step in #{folder}: bubble 37.5 %", svg[%r{<text[^>]*>(.*?)</text>}, 1]
    end
  end

  def test_mistakes
    {
      %w[--schedule dapple] => "invalid argument: --schedule dapple", %w[--ranks 0] => "--ranks 0: expected a number from 1 up",
      %w[--trace /nowhere] => "--trace /nowhere: expected a folder with files trace_rank_*.json",
      %w[--schedule interleaved --ranks 2 --micro-batches 5] =>
        "n_microbatches: expected a multiple of 2, since 2 ranks with several stages take them in 2 rounds, got 5"
    }.each { |arguments, text| assert_equal text, assert_raises(Setup::Failure) { Setup::PipelineDrawing.new.run(*arguments) }.message }
  end
end
