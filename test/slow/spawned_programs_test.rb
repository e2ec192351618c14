# frozen_string_literal: true

require_relative "../ruby/test_helper"

# Whole programs that start processes by running themselves again, up to the call.
class SpawnedProgramsTest < Minitest::Test
  def spawning(program)
    Dir.mktmpdir do |folder|
      File.write(File.join(folder, "program.rb"), "require \"torch/distributed\"\n" + program)
      capture_ruby(File.join(folder, "program.rb"), "argument")
    end
  end

  def test_a_program_finds_the_turn_of_its_loop
    out, err, status = spawning(<<~RUBY)
      first = Torch::Distributed.fork_world(2) { |rank| [rank, Process.pid] }
      results = [1, 2].map do |size|
        Torch::Distributed.fork_world(size, start_method: :spawn) { |rank, _| [rank, size, ARGV, first] }
      end
      puts [results.flatten(1).map { |result| result[0..2] }, results.flatten(1).all? { |result| result[3] == first }].inspect
    RUBY
    assert_equal "", err
    assert status.success?
    assert_equal '[[[0, 1, ["argument"]], [0, 2, ["argument"]], [1, 2, ["argument"]]], true]', out.chomp
  end

  # A fresh value in each run of the program, before its calls and between them, does not keep one from its call.
  def test_a_program_that_sets_its_environment
    out, err, status = spawning(<<~RUBY)
      require "securerandom"
      results = [1, 2].flat_map do |size|
        ENV["RUN_ID"] = SecureRandom.hex
        Torch::Distributed.fork_world(1, start_method: :spawn) { size }
      end
      ENV["TMPDIR"] = Dir.pwd + "/" + SecureRandom.hex
      puts Torch::Distributed.run(processes: 2, device: "cpu") { |ctx| [results, ctx.world_size] }.inspect
    RUBY
    assert_equal "", err
    assert status.success?
    assert_equal "[[1, 2], 2]", out.chomp
  end

  # One that steers its processes by the environment; what fails in them; and one that does not come to its call.
  def test_a_program_and_its_environment
    out, err, status = spawning(<<~RUBY)
      turns = ENV["TURN"] ? [ENV["TURN"]] : %w[a b]
      results = turns.map do |turn|
        ENV["TURN"] = turn
        Torch::Distributed.fork_world(1, start_method: :spawn) { |rank, _| (turn == "a") ? [turn, turns] : raise("in the worker") }
      rescue Torch::Distributed::WorkerError => e
        e.message.lines.first.sub(/process \\d+/, "process N").chomp
      ensure
        ENV.delete("TURN")
      end
      puts results.inspect
      $stdout.flush
      exit if ENV[Torch::Distributed::SPAWN_ENV_KEY]
      Torch::Distributed.fork_world(1, start_method: :spawn) { 1 }
    RUBY
    assert_equal '[[["a", ["a"]]], "rank 0 (process N) failed: RuntimeError: in the worker"]', out.lines.first.chomp
    refute status.success?
    assert_match(/rank 0 \(process \d+\) ended with status 0 before the block's value came/, err)
  end
end
