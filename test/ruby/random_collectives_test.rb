# frozen_string_literal: true

require_relative "test_helper"
require_relative "random_collectives"

# Random programs over the whole of Ruby's collectives. TDDP_COLLECTIVES_SEED begins with another seed than the usual
# one, TDDP_COLLECTIVES says how many programs a world has, TDDP_COLLECTIVES_ONLY which of their operations are run.
class RandomCollectivesTest < Minitest::Test
  PROGRAMS = Integer(ENV.fetch("TDDP_COLLECTIVES", "12"))
  FIRST = Integer(ENV.fetch("TDDP_COLLECTIVES_SEED", "1"))
  ONLY = ENV["TDDP_COLLECTIVES_ONLY"]&.split(",")&.map { |number| Integer(number) }
  MOST_TRIES = 24

  (2..4).each do |size|
    define_method(:"test_programs_on_#{size}_ranks") { check(size, FIRST + 1000 * size) }
  end

  def check(size, first)
    first = FIRST if ENV["TDDP_COLLECTIVES_SEED"]
    seed, said = failure_of(size, (first...first + PROGRAMS).to_a, ONLY)
    return pass unless seed

    numbers, said = ONLY ? [ONLY, said] : shrunk(size, seed, said)
    program = RandomCollectives.new(seed, size, only: numbers)
    flunk <<~TEXT
      #{said}
      #{size} ranks, groups #{program.groups}, operations:
      #{program.operations.map { |operation| "  #{operation}" }.join("\n")}
      again: TDDP_COLLECTIVES_SEED=#{seed} TDDP_COLLECTIVES=1 TDDP_COLLECTIVES_ONLY=#{numbers.join(",")} -n #{name}
    TEXT
  end

  # Runs programs one after the other in one world.
  #
  # @return [Array(Integer, String), nil] the seed of the first that fails, and what is wrong
  def failure_of(size, seeds, only = nil)
    at = Tempfile.new("seed")
    said = world(size, timeout: 20) do |rank|
      seeds.each do |seed|
        File.write(at.path, seed.to_s) if rank.zero?
        # Ranks that differ in what they have seen go on alike: the next program begins when all have said.
        wrong = [nil] * size
        Distributed.all_gather_object(wrong, RandomCollectives::Rank.new(RandomCollectives.new(seed, size, only: only), rank).run)
        break [seed, wrong.compact.first] if wrong.any?
      end.then { |found| found if found != seeds }
    end
    said.first
  rescue Distributed::Error, Timeout::Error => e
    [Integer(File.read(at.path)), "#{e.class}: #{e.message}"]
  ensure
    at&.close!
  end

  # Leaves out halves, quarters and so on of a program's operations as long as it fails all the same.
  #
  # @return [Array(Array<Integer>, String)] the numbers of those that are left, and what is wrong then
  def shrunk(size, seed, said)
    numbers = RandomCollectives.new(seed, size).operations.map(&:number)
    tries = 0
    width = (numbers.size + 1) / 2
    while width.positive?
      at = 0
      while at < numbers.size && tries < MOST_TRIES
        fewer = numbers[0...at] + (numbers[at + width..] || [])
        tries += 1
        _, text = failure_of(size, [seed], fewer)
        if text
          numbers, said = fewer, text
        else
          at += width
        end
      end
      width = (width > 1) ? (width + 1) / 2 : 0
    end
    [numbers, said]
  end
end
