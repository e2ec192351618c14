# frozen_string_literal: true

require_relative "../common/text_table"
require_relative "contestant"

# The rounds of compare_ddp.rb, and its tables.
class Comparison
  MIB = 1024.0 * 1024
  MEMORY_BATCH = 8
  MEMORY_STEPS = 6
  MEMORY_TURNS = 3
  # What is timed: a program with its plain or its fused optimizer.
  Entry = Struct.new(:program, :fused)
  # How it is run: so many processes at the same time that know nothing of each other, or so many ranks with
  # DistributedDataParallel.
  Setting = Struct.new(:ranks, :ddp) do
    def to_s
      one, many = ddp ? %w[rank ranks] : %w[process processes]
      "#{ranks} #{(ranks == 1) ? one : many}"
    end
  end
  # What a step on several ranks may lose, in percent of a process alone and of as many processes that work at the same
  # time, and how many times PyTorch's images there are to be.
  MOST_LOST = 10
  LEAST_TIMES = 1.5
  # The programs' forms of DDP whose memory is compared with one process of the same program.
  VIEWS = {true => "gradients in buckets", false => "gradients apart"}.freeze

  # @param programs [Hash{String => Array<String>}] titles and commands
  # @param say [#call] takes lines of progress
  def initialize(programs, options, say)
    @programs = programs
    @options = options
    @say = say
    @settings = [false, true].product([1, *options[:ranks]].uniq).map { |ddp, ranks| Setting.new(ranks, ddp) }
      .select { |setting| !setting.ddp || options[:ranks].include?(setting.ranks) }
    @entries = programs.keys.product([false, true]).map { |pair| Entry.new(*pair) }
    @turns = Hash.new { |hash, key| hash[key] = [] }
    @forms = {}
    @memory = {}
    @contestants = {}
    programs.each do |title, command|
      options[:ranks].each { |ranks| @contestants[[title, ranks]] = Contestant.new(title, command, ranks, limit: options[:limit], kept: true) }
    end
    @versions = programs.keys.to_h { |title| [title, @contestants[[title, options[:ranks].first]].version] }
  end

  def close
    @contestants.each_value(&:close)
    @contestants.clear
  end

  # Each round gives every program one turn at every model, batch size and setting.
  def time_steps
    cases = @options[:models].product(@options[:batch_sizes])
    @options[:rounds].times do |round|
      cases.each do |model, batch|
        order = order(model, batch).merge(warmup: @options[:warmup], steps: steps(model, batch))
        # The first program finds the machine as the case before left it, so the rounds alternate.
        @settings.product(@entries.rotate(round)) { |setting, entry| turn(model, batch, setting, entry, order) }
      end
      @say.call("round #{round + 1} of #{@options[:rounds]} done")
    end
  end

  # In fresh processes, so that nothing is left of other models: how much memory is held where what is freed goes
  # back to the system, and the most that a process takes as it is usually run.
  def measure_memory
    close
    @options[:memory_models].each do |model|
      @programs.keys.product([[1, true], [2, true], [2, false]]) do |title, (ranks, view)|
        held, usual = [true, false].map { |counted| memory(model, title, ranks, view, counted) }
        @memory[[model, title, ranks, view]] = held.merge(usual.slice("peak"))
      end
      @say.call("memory of #{model} measured")
    end
  end

  # @return [Array<String>] what was compared
  def heading
    ["torch-ddp on #{@versions["torch-ddp"]} (Ruby #{RUBY_VERSION}) and #{@versions["PyTorch"]}, #{@options[:optimizer]}, one thread a rank, " \
      "#{Etc.nprocessors} cores",
      "median of #{@options[:rounds]} turns; the batch is a rank's; lost: how much longer a step takes than in one process of the same program",
      "all of them, single processes and PyTorch too, keep the memory that they free, by one setting of malloc (#{Contestant::KEPT.values.first})"]
  end

  # @return [String]
  def step_table
    alone, *more = @settings
    headers = ["Model", "Batch", "Program", "Optimizer", "#{alone} ms", "images/s", *more.flat_map { |setting| ["#{setting} ms", "images/s", "lost %"] }]
    rows = each_case.map do |model, batch, entry|
      times = @settings.to_h { |setting| [setting, median(model, batch, setting, entry)] }
      [model, batch, entry.program, optimizer(entry), ms(times[alone]), per_second(batch, 1, times[alone]),
        *more.flat_map { |setting| [ms(times[setting]), per_second(batch, setting.ranks, times[setting]), lost(times[alone], times[setting])] }]
    end
    TextTable.format(headers, rows)
  end

  # @return [String] what the first program's ranks lose, and their images beside the second's
  def goal_table
    title, other = @programs.keys
    rows = @options[:models].product(@options[:batch_sizes], [false, true], @options[:ranks] - [1]).map do |model, batch, fused, ranks|
      together, beside, alone = [Setting.new(ranks, true), Setting.new(ranks, false), Setting.new(1, false)].map do |setting|
        median(model, batch, setting, Entry.new(title, fused))
      end
      times = 1 / ratio(model, batch, Setting.new(ranks, true), fused)
      [model, batch, fused ? "fused" : "plain", ranks, lost(alone, together), lost(beside, together), format("%.2f", times),
        (together <= beside * (1 + MOST_LOST / 100.0) && times >= LEAST_TIMES) ? "yes" : "no"]
    end
    headers = ["Model", "Batch", "Optimizer", "Ranks", "lost to 1 process %", "to as many processes %", "images/s, times #{other}'s", "reached"]
    "#{TextTable.format(headers, rows)}\n" \
      "reached: at most #{MOST_LOST} % longer than in as many single processes at the same time, at least #{LEAST_TIMES} times #{other}'s images/s"
  end

  # @return [String] the time of a step of the first program in parts of the second's; below 1 it is the faster
  def ratio_table
    title, other = @programs.keys
    headers = ["#{title} / #{other}", "Batch", *[false, true].flat_map { |fused|
      @settings.map { |setting| "#{fused ? "fused" : "plain"}, #{setting}" }
    }]
    rows = @options[:models].product(@options[:batch_sizes]).map do |model, batch|
      [model, batch, *[false, true].flat_map { |fused|
        @settings.map { |setting| format("%.2f", ratio(model, batch, setting, fused)) }
      }]
    end
    TextTable.format(headers, rows)
  end

  # @return [String]
  def memory_table
    headers = ["Model", "Gradients MiB", "Program", "DistributedDataParallel", "1 process +MiB", "a rank +MiB", "gradients held", "peak RSS MiB"]
    rows = @options[:memory_models].product(@programs.keys, VIEWS.keys).map do |model, title, view|
      alone, rank = @memory.values_at([model, title, 1, true], [model, title, 2, view])
      [model, mib(alone["gradients"]), title, VIEWS[view], mib(alone["growth"]), mib(rank["growth"]),
        format("%.2f", copies(alone, rank)), mib(rank["peak"])]
    end
    "#{TextTable.format(headers, rows)}\n" \
      "+MiB: memory that training adds to the model's, batch #{MEMORY_BATCH}; gradients held: 1 and what a rank adds beyond one process, in gradients"
  end

  # @return [Hash] all of it for JSON
  def figures
    steps = @turns.map do |(model, batch, setting, entry), turns|
      {model: model, batch: batch, program: entry.program, optimizer: optimizer(entry), ranks: setting.ranks, ddp: setting.ddp,
       milliseconds: median(model, batch, setting, entry), turns: turns}
    end
    memory = @memory.map { |(model, title, ranks, view), answer| {model: model, program: title, ranks: ranks, gradients_in_buckets: view}.merge(answer) }
    {versions: @versions.merge("Ruby" => RUBY_VERSION), cores: Etc.nprocessors, options: @options.slice(:rounds, :seconds, :steps, :warmup, :optimizer),
     steps: steps, memory: memory}
  end

  private

  def memory(model, title, ranks, view, counted)
    contestant = Contestant.new(title, @programs.fetch(title), ranks, limit: @options[:limit], counted: counted)
    order = order(model, MEMORY_BATCH).merge(memory: true, ddp: ranks > 1, view: view, steps: MEMORY_STEPS)
    # One after the other in the same process; single ones are off by some MiB now and then.
    answers = Array.new(counted ? MEMORY_TURNS : 1) { contestant.do(order) }
    answers.sort_by { |answer| answer["growth"] }[answers.size / 2]
  ensure
    contestant&.close
  end

  def order(model, batch)
    {model: model, batch: batch, optimizer: @options[:optimizer]}
  end

  # As many steps as fill a turn, the same for all: found with the second program's single process.
  def steps(model, batch)
    return @options[:steps] if @options[:steps]

    @steps ||= {}
    @steps[[model, batch]] ||= begin
      answer = @contestants[[@programs.keys.last, @options[:ranks].first]].do(order(model, batch).merge(warmup: 3, steps: 5))
      (1000 * @options[:seconds] / answer["median"]).round.clamp(5, 2000)
    end
  end

  def turn(model, batch, setting, entry, order)
    answer = @contestants[[entry.program, setting.ranks]].do(order.merge(fused: entry.fused, ddp: setting.ddp))
    @forms[entry] = answer["form"] if answer["form"]
    @turns[[model, batch, setting, entry]] << answer.slice("mean", "median")
  end

  # The mean of a turn has the collector's pauses in it, as training has; the median is that of the turns.
  def median(model, batch, setting, entry)
    means = @turns[[model, batch, setting, entry]].map { |turn| turn["mean"] }.sort
    (means[(means.size - 1) / 2] + means[means.size / 2]) / 2
  end

  def ratio(model, batch, setting, fused)
    ours, theirs = @programs.keys.map { |title| median(model, batch, setting, Entry.new(title, fused)) }
    ours / theirs
  end

  def copies(alone, rank)
    1 + (rank["growth"] - alone["growth"]) / alone["gradients"].to_f
  end

  def each_case
    @options[:models].product(@options[:batch_sizes], @entries)
  end

  def optimizer(entry)
    return "plain" unless entry.fused

    @forms.fetch(entry, "fused: true")
  end

  def ms(value)
    format("%.2f", value)
  end

  def per_second(batch, ranks, milliseconds)
    (1000 * batch * ranks / milliseconds).round
  end

  def lost(alone, together)
    format("%.0f", 100 * (together / alone - 1))
  end

  def mib(bytes)
    format("%.1f", bytes / MIB)
  end
end
