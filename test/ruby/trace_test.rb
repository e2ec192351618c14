# frozen_string_literal: true

require_relative "test_helper"
require "json"
require "stringio"
require "torch_ddp/trace"

# TDDP_TRACE from Ruby, and torchtrace on what it wrote.
class TraceTest < Minitest::Test
  def in_folder(&block)
    Dir.mktmpdir(&block)
  end

  def events(folder, rank)
    JSON.parse(File.read(File.join(folder, "trace_rank_#{rank}.json")))
  end

  def spans(folder, rank, lane)
    events(folder, rank).select { |event| event["ph"] == "X" && event["cat"] == lane }
  end

  def command(*arguments)
    out = StringIO.new
    err = StringIO.new
    status = TorchDDP::Trace::Command.new(out: out, err: err).run(arguments)
    [status, out.string, err.string]
  end

  # A file as ranks write it.
  def write(folder, rank, list, host: "b12", offset: 5_000_000_000, tail: "]\n")
    heading = {ph: "M", pid: rank, tid: 0, name: "tddp", args: {rank: rank, host: host, wall_offset_ns: offset}}
    spans = list.map { |lane, name, start, finish| {ph: "X", pid: rank, tid: 1, ts: start, dur: finish - start, cat: lane, name: name} }
    File.write(File.join(folder, "trace_rank_#{rank}.json"), "[\n" + [heading, *spans].map { |event| JSON.generate(event) }.join(",\n") + "\n#{tail}")
  end

  def test_operations_and_spans_of_each_rank
    in_folder do |folder|
      before = Process.clock_gettime(Process::CLOCK_MONOTONIC, :microsecond)
      values = with_env("TDDP_TRACE" => File.join(folder, "made")) do
        world(2) do |rank|
          group = Distributed.new_group([0, 1])
          value = Distributed.trace("load", file: "a \"b\".txt") { 7 }
          Distributed.all_reduce(Torch.ones(1000))
          Distributed.broadcast(Torch.ones(3, dtype: :float64), src: 0, group: group)
          rank.zero? ? Distributed.send(Torch.ones(5), dst: 1) : Distributed.recv(Torch.ones(5), src: 0)
          [value, Distributed.tracing?]
        end
      end
      after = Process.clock_gettime(Process::CLOCK_MONOTONIC, :microsecond)
      assert_equal [[7, true]] * 2, values
      2.times do |rank|
        made = File.join(folder, "made")
        load = spans(made, rank, "training").first
        assert_equal ["load", {"file" => "a \"b\".txt"}, rank], load.values_at("name", "args", "pid")
        assert_operator load["ts"], :>=, before
        assert_operator load["ts"] + load["dur"], :<=, after
        operations = spans(made, rank, "communication")
        args = operations.find { |event| event["name"] == "all_reduce" }["args"]
        assert_equal [1, 4000, "float32", "default_pg"], args.values_at("sequence", "bytes", "dtype", "group")
        assert_operator args["queued_us"], :>=, 0
        broadcast = operations.find { |event| event["name"] == "broadcast" }["args"]
        assert_equal [24, "float64", 0], broadcast.values_at("bytes", "dtype", "root")
        refute_equal "default_pg", broadcast["group"]
        message = operations.find { |event| event["name"] == ["send", "recv"][rank] }["args"]
        assert_equal [20, 1 - rank], message.values_at("bytes", "peer")
        heading = events(made, rank).first["args"]
        assert_equal [rank, Socket.gethostname], heading.values_at("rank", "host")
        wall = load["ts"] * 1000 + heading["wall_offset_ns"]
        assert_in_delta Time.now.to_f, wall / 1e9, 60
      end
    end
  end

  def test_what_json_cannot_say_is_shown_as_text
    in_folder do |folder|
      with_env("TDDP_TRACE" => folder) do
        world(1) do
          Distributed.trace("odd \xff", loss: Float::NAN, count: 3) { 1 }
          Distributed.trace("bytes", text: "\xff", name: "a\0b") { 1 }
        end
      end
      first, second = spans(folder, 0, "training")
      assert_equal ["odd \ufffd", {"loss" => "NaN", "count" => "3"}], first.values_at("name", "args")
      assert_equal ["\ufffd", "ab"], second["args"].values_at("text", "name")
    end
  end

  def test_steps_of_optimizers
    in_folder do |folder|
      with_env("TDDP_TRACE" => folder) do
        alone do
          parameter = Torch::NN::Parameter.new(Torch.ones(2))
          parameter.grad = Torch.ones(2)
          Torch::Optim::SGD.new([parameter], lr: 0.1).step
          later = Class.new(Torch::Optim::Adam)
          self.class.const_set(:Later, later)
          self.class.class_eval "class Later; def step(closure = nil) = super; end", __FILE__, __LINE__
          later.new([parameter]).step
          assert_raises(ZeroDivisionError) { later.new([parameter]).step(-> { 1 / 0 }) }
        end
        parameter = Torch::NN::Parameter.new(Torch.ones(2))
        Torch::Optim::SGD.new([parameter], lr: 0.1).step
      end
      classes = spans(folder, 0, "training").map { |event| [event["name"], event["args"]["class"]] }
      assert_equal [["optimizer", "Torch::Optim::SGD"], ["optimizer", "TraceTest::Later"], ["optimizer", "TraceTest::Later"]], classes
    end
  end

  def train_steps(count)
    parameters = Array.new(2) { Torch::NN::Parameter.new(Torch.ones(2)).tap { |parameter| parameter.grad = Torch.ones(2) } }
    first, second = parameters.map { |parameter| Torch::Optim::SGD.new([parameter], lr: 0.1) }
    (1..count).map do |number|
      Distributed.trace("batch #{number}") { Distributed.all_reduce(Torch.ones(1)) }
      first.step
      Distributed.tracing?.tap { second.step }
    end
  end

  # A step ends with that of the first optimizer.
  def test_the_steps_that_are_asked_for
    in_folder do |folder|
      {"2..3" => [2, 3], "2" => [2], "4.." => [4, 5], "7..9" => []}.each do |asked, steps|
        made = File.join(folder, asked)
        tracing = with_env("TDDP_TRACE" => made, "TDDP_TRACE_STEPS" => asked) { alone { train_steps(5) } }
        assert_equal (1..5).map { |step| steps.include?(step + 1) || (asked == "4.." && step == 5) }, tracing
        names = spans(made, 0, "training").map { |event| event["name"] }
        expected = steps.flat_map { |step| ["optimizer", "batch #{step}", "optimizer"] }
        assert_equal((asked == "4..") ? expected + ["optimizer"] : expected, names)
        assert_equal steps.size, spans(made, 0, "communication").size
      end
    end
  end

  def test_steps_that_are_none
    in_folder do |folder|
      %w[3..1 0..2 ten 1...3].each do |asked|
        made = File.join(folder, asked)
        said = with_env("TDDP_TRACE" => made, "TDDP_TRACE_STEPS" => asked) { capture_io { alone {} }.last }
        assert_includes said, "no trace: TDDP_TRACE_STEPS=#{asked.inspect}: expected steps, as in 100..110"
        refute_path_exists made
      end
    end
  end

  def test_data_parallel_training
    in_folder do |folder|
      with_env("TDDP_TRACE" => folder) do
        world(2) do |rank|
          model = Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(300, 300))
          optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.01)
          data = Torch::Utils::Data::TensorDataset.new(Torch.rand(40, 300))
          Torch::Utils::Data::DistributedDataLoader.new(data, batch_size: 5, num_workers: rank).each do |(input)|
            optimizer.zero_grad
            model.call(input).sum.backward
            optimizer.step
          end
          nil
        end
      end
      status, out, err = command(folder)
      assert_equal [0, ""], [status, err]
      assert_equal "rank forward backward wait optimizer data communication hidden in all".split, out.lines.first.split
      2.times do |rank|
        names = spans(folder, rank, "training").map { |event| event["name"] }
        assert_equal [4] * 4, names.tally.values_at("forward", "backward", "wait", "optimizer")
        assert_operator names.count("data"), :>=, 4
        memory = spans(folder, rank, "training").select { |event| event["name"] == "optimizer" }.map { |event| event["args"] }
        # The model's gradients, which its group holds, at least.
        memory.each { |args| assert_operator 300 * 301 * 4, :<=, args["current_bytes"] }
        memory.each { |args| assert_operator args["current_bytes"], :<=, args["peak_bytes"] }
        refute_includes(events(folder, rank).filter_map { |event| event.dig("args", "name") }, "training (2)")
      end
    end
  end

  def test_nothing_is_traced_unless_asked
    in_folder do |folder|
      alone do
        refute Distributed.tracing?
        assert_equal 3, Distributed.trace("x") { 3 }
      end
      assert_empty Dir.children(folder)
    end
    assert_raises(ArgumentError) { Distributed.trace("x") }
  end

  def test_a_second_group_goes_on_and_a_restart_is_apart
    in_folder do |folder|
      with_env("TDDP_TRACE" => folder, "TORCHELASTIC_RESTART_COUNT" => "0") do
        2.times { |time| alone { Distributed.trace("group #{time}") {} } }
      end
      with_env("TDDP_TRACE" => folder, "TORCHELASTIC_RESTART_COUNT" => "2") { alone { Distributed.trace("again") {} } }
      assert_equal ["group 0", "group 1"], spans(folder, 0, "training").map { |event| event["name"] }
      assert_equal ["again"], spans(File.join(folder, "attempt_2"), 0, "training").map { |event| event["name"] }
    end
  end

  def test_a_folder_that_cannot_be_keeps_nobody_from_training
    with_env("TDDP_TRACE" => "/proc/self/nowhere") do
      _, said = capture_io { alone { assert_equal 1, Distributed.trace("x") { 1 } } }
      assert_match(%r{\Atorch-ddp: no trace: .*/proc/self/nowhere}, said)
    end
  end

  def test_a_program_that_ends_by_itself_or_by_an_error
    in_folder do |folder|
      code = <<~RUBY
        Torch::Distributed.init_process_group("gloo", store: Torch::Distributed::HashStore.new, rank: ARGV[0].to_i, world_size: 1 + ARGV[0].to_i) if ARGV[0] == "0"
        Torch::Distributed.trace("all") { fork { Torch::Distributed.trace("child") {} }.then { |pid| Process.wait(pid) } }
        begin
          Torch::Distributed.trace("failing") { raise "boom" }
        rescue
          raise
        end
      RUBY
      _, err, status = ruby(code, "0", env: {"TDDP_TRACE" => folder})
      assert_includes err, "boom"
      refute status.success?
      assert_equal %w[all failing], spans(folder, 0, "training").map { |event| event["name"] }
    end
  end

  def test_the_table
    in_folder do |folder|
      base = 25_000_000_000.0
      at = ->(lane, name, start, finish) { [lane, name, base + start, base + finish] }
      write(folder, 0, [at["training", "forward", 0, 1000], at["training", "backward", 1000, 4000], at["training", "wait", 3500, 4000],
        at["communication", "all_reduce", 1500, 2500], at["communication", "all_reduce", 2000, 3900], at["training", "optimizer", 4000, 4500]])
      write(folder, 1, [at["training", "forward", 0, 900], at["training", "backward", 900, 4000], at["communication", "all_reduce", 3900, 4400]])
      status, out, err = command(folder)
      assert_equal [0, ""], [status, err]
      lines = out.lines.map(&:split)
      assert_equal %w[rank forward backward wait optimizer communication hidden in all], lines[0]
      assert_equal "0 1.0 ms 3.0 ms 500 us 500 us 2.4 ms 2.0 ms (83 %) 4.5 ms".split, lines[1]
      assert_equal "1 900 us 3.1 ms - - 500 us 100 us (20 %) 4.4 ms".split, lines[2]
      _, out, = command("--json", folder)
      assert_equal [2400.0, 2000.0], JSON.parse(out)["ranks"][0].values_at("communication", "hidden")
    end
  end

  def test_one_trace_of_all
    in_folder do |folder|
      write(folder, 1, [["training", "forward", 1000.5, 1001.5]])
      write(folder, 0, [["training", "forward", 1000.0, 1002.0]])
      write(folder, 2, [["training", "forward", 500.0, 502.0]], host: "b13", offset: 5_000_500_000)
      merged = File.join(folder, "merged.json")
      status, out, = command("-o", merged, folder)
      assert_equal 0, status
      assert_includes out, "#{merged} is for chrome://tracing"
      events = JSON.parse(File.read(merged))["traceEvents"].select { |event| event["ph"] == "X" }
      assert_equal [[0, 1000.0], [1, 1000.5], [2, 1000.0]], events.map { |event| event.values_at("pid", "ts") }
      assert_equal 4, Dir.children(folder).size
    end
  end

  def test_what_is_damaged_is_left_out
    in_folder do |folder|
      write(folder, 0, [["training", "forward", 0, 1000]], tail: ",\n{\"ph\": \"X\", \"pid\": 0, \"ts\": 5, \"na")
      status, out, err = command(folder, "-o", File.join(folder, "m.json"))
      assert_equal 0, status
      assert_includes out, "1.0 ms"
      assert_match(/trace_rank_0.json: 1 damaged lines left out/, err)
      assert_equal 2, JSON.parse(File.read(File.join(folder, "m.json")))["traceEvents"].size
      File.write(File.join(folder, "trace_rank_0.json"), "\xff\xfe nothing\n")
      assert_equal 2, command(folder)[0]
    end
  end

  def test_mistakes
    in_folder do |folder|
      assert_match(/no trace_rank_N.json there/, command(folder)[2])
      assert_match(/missing argument: FOLDER or FILE/, command[2])
      assert_equal 0, command("--help")[0]
      write(folder, 0, [["training", "forward", 0, 1000]])
      FileUtils.mkdir(File.join(folder, "b"))
      write(File.join(folder, "b"), 0, [])
      assert_match(/rank 0 wrote .* and /, command(folder, File.join(folder, "b"))[2])
      assert_match(/cannot write/, command(folder, "-o", File.join(folder, "no/m.json"))[2])
      write(folder, 1, [["training", "forward", 9e6, 9e6 + 5]])
      assert_match(/trace_rank_0.json seems to be of another run/, command(folder)[2])
    end
  end
end
