# frozen_string_literal: true

require_relative "test_helper"

# Random programs: epochs in any form of loop over a sampler or a loader, other loops within and between them, a state after any batch or after an
# epoch, and a program that goes on from data. What both were given together is what a program without an end between is given. More of them with
# TDDP_RANDOM_CASES, others with TDDP_RANDOM_SEED.
class RandomResumingTest < Minitest::Test
  Data = Torch::Utils::Data
  Loader = Data::DistributedDataLoader
  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1"))
  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "200"))
  EPOCHS = 3

  # How a program goes through an epoch: each yields what it is given.
  WAYS = {
    "each" => ->(data, &block) { data.each(&block) },
    "each_with_index" => ->(data, &block) { data.each_with_index { |each, _| block.call(each) } },
    "each.with_index" => ->(data, &block) { data.each.with_index { |each, _| block.call(each) } },
    "map" => ->(data, &block) { data.map(&block) },
    "lazy" => ->(data, &block) { data.lazy.map { |each| each }.each(&block) },
    "zip" => ->(data, &block) { data.zip(1..) { |each, _| block.call(each) } },
    "zip with itself" => ->(data, &block) { data.zip(data) { |each, _| block.call(each) } },
    "next" => ->(data, &block) { data.each.then { |batches| loop { block.call(batches.next) } } }
  }.freeze

  # Loops beside the one that trains.
  LOOKS = {
    "first" => ->(data) { data.first },
    "first(2)" => ->(data) { data.first(2) },
    "to_a" => ->(data) { data.to_a },
    "lazy.first" => ->(data) { data.lazy.select { true }.first(1) },
    "an exception" => ->(data) { data.each { raise IndexError } rescue nil }, # standard:disable Style/RescueModifier
    "a throw" => ->(data) { catch(:out) { data.each { throw :out } } },
    "each within each" => ->(data) { data.each { data.each { break } && break } },
    "an Enumerator that is left" => ->(data) { data.each.next },
    "a thread" => ->(data) { Thread.new { data.first }.join }
  }.freeze

  # What a case iterates over, made anew for each program.
  Case = Struct.new(:seed, :size, :batch, :kind, :shuffle, :drop_last, :workers, :replicas, :rank, :names_epochs, :way, :resumed_way, :look, :cut) do
    def self.random(seed)
      random = Random.new(seed)
      kind = %i[sampler loader plain batches].sample(random: random)
      replicas = random.rand(1..3)
      new(seed, random.rand(1..20), random.rand(1..5), kind, random.rand(2) == 1, random.rand(3).zero?, [0, 0, 1, 2].sample(random: random),
        replicas, random.rand(replicas), random.rand(2) == 1, *Array.new(2) { WAYS.keys.sample(random: random) }, [nil, *LOOKS.keys].sample(random: random),
        random.rand)
    end

    # @return [#each, #state_dict] and what has set_epoch
    def make
      sampler = Data::DistributedSampler.new(size, num_replicas: replicas, rank: rank, shuffle: shuffle, seed: seed, drop_last: replicas > 1 && drop_last)
      return sampler if kind == :sampler

      options = {collate_fn: ->(examples) { examples }, num_workers: workers}
      case kind
      when :loader then Loader.new((0...size).to_a, batch_size: batch, sampler: sampler, drop_last: drop_last, **options)
      when :plain then Loader.new((0...size).to_a, batch_size: batch, sampler: (0...size).to_a.reverse, drop_last: drop_last, **options)
      else Loader.new((0...size).to_a, batch_sampler: (0...size).each_slice(batch).to_a.reverse, **options)
      end
    end

    # What is after an end of one program and before the beginning of the next: nothing, one of the batches, or an epoch's end.
    def place(whole)
      epoch = [(cut * EPOCHS).to_i, EPOCHS - 1].min
      [epoch, ((cut * EPOCHS - epoch) * (whole[epoch].size + 2)).to_i - 1]
    end
  end

  # @param stop [Array, nil] epoch, and how many batches of it: that many are given when the state is taken; -1: when the epoch is finished
  # @return [Array] what the program was given by epoch, and the state it took
  def train(data, one, epochs, way, stop: nil)
    state = nil
    given = epochs.map do |epoch|
      data.set_epoch(epoch) if one.names_epochs
      had = []
      finished = catch(:stop) do
        WAYS.fetch(way).call(data) do |batch|
          had << batch
          look(data, one) if one.look && had.size.odd?
          if stop == [epoch, had.size]
            state = data.state_dict
            throw :stop
          end
        end
        true
      end
      state = data.state_dict if finished && stop == [epoch, -1]
      return [[*given, had], state] if state

      had
    end
    [given, state]
  end

  # A program that goes through Enumerators has its own loop between theirs; so a look must end before it there.
  def look(data, one)
    return if one.way == "next" && !["first", "lazy.first", "a throw", "an exception"].include?(one.look)

    LOOKS.fetch(one.look).call(data)
  end

  def check(one)
    whole = EPOCHS.times.map do |epoch|
      data = one.make
      data.set_epoch(epoch) if one.names_epochs
      data.to_a
    end
    epoch, batches = one.place(whole)
    batches = -1 if batches.zero? || batches > whole[epoch].size
    state = nil
    first = one.make
    given = []
    (0..epoch).each do |each|
      had, state = train(first, one, [each], one.way, stop: [epoch, batches])
      given.concat(had)
    end
    assert state, "no state was taken at #{[epoch, batches]}"
    second = one.make
    second.load_state_dict(Marshal.load(Marshal.dump(state)))
    rest, = train(second, one, ((batches == -1) ? epoch + 1 : epoch)...EPOCHS, one.resumed_way)
    assert_equal whole.flatten(1), given.flatten(1) + rest.flatten(1)
    assert_equal EPOCHS + ((batches == -1) ? 0 : 1), given.size + rest.size
    assert_equal whole.last, rest.last unless rest.size <= 1
  end

  def test_a_program_that_goes_on_is_given_what_one_without_an_end_is
    CASES.times do |i|
      one = Case.random(SEED + i)
      check(one)
    rescue Minitest::Assertion, StandardError => e
      flunk "run it again with TDDP_RANDOM_SEED=#{SEED + i} TDDP_RANDOM_CASES=1: #{one}\n#{e.class}: #{e.message}\n#{e.backtrace.first(4).join("\n")}"
    end
  end
end
