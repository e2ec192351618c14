# frozen_string_literal: true

require_relative "test_helper"
require_relative "documented"

# The C of docs/c-api.md and docs/backend.md: compiled against the library as it is installed, and run.
class DocsCTest < Minitest::Test
  include Worlds
  include Documented

  NATIVE = File.expand_path("../../lib/torch_ddp/native", __dir__)
  FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I#{NATIVE}/include"].freeze
  LIBRARY = ["-L#{NATIVE}/lib", "-ltddp", "-Wl,-rpath,#{NATIVE}/lib"].freeze

  # @return [Array<String>] the blocks of a page in a language
  def blocks_of(page, language)
    Documented.text(page).scan(/^```#{language}\n(.*?)^```$/m).flatten
  end

  def command(*words, env: {})
    out, status = Open3.capture2e(env, *words)
    assert status.success?, "#{words.join(" ")}:\n#{out}"
    out
  end

  def test_other_pages_have_none
    assert_equal %w[docs/backend.md docs/c-api.md], Documented::PAGES.select { |page| blocks_of(page, "c").any? }
  end

  # The first block is a program that ends with one of the others; what it prints follows each.
  def test_programs_of_the_c_api
    program, *runs = blocks_of("docs/c-api.md", "c")
    outputs = blocks_of("docs/c-api.md", "text")
    assert_equal [5, 5], [runs.size, outputs.size]
    Dir.mktmpdir do |dir|
      runs.zip(outputs).each_with_index do |(run, output), at|
        File.write("#{dir}/job.c", program + run)
        command("cc", *FLAGS, "#{dir}/job.c", "-o", "#{dir}/job#{at}", *LIBRARY)
        found = command("#{NATIVE}/bin/torchrun", "--standalone", "--no-python", "--nproc-per-node=2", "#{dir}/job#{at}")
        assert_equal output.lines.sort, found.lines.sort
      end
    end
  end

  # Runs the block with the documented backend where libtddp looks for it.
  def with_backend
    source, = blocks_of("docs/backend.md", "c")
    Dir.mktmpdir do |dir|
      File.write("#{dir}/kv.c", source)
      command("cc", *FLAGS, "-O2", "-shared", "-fPIC", "#{dir}/kv.c", "-o", "#{dir}/tddp_backend_kv.so", *LIBRARY)
      before = ENV["TDDP_BACKEND_PATH"]
      ENV["TDDP_BACKEND_PATH"] = dir
      yield
    ensure
      ENV["TDDP_BACKEND_PATH"] = before
    end
  end

  def sums_by(backend, rank, size)
    Distributed.init_process_group(backend, timeout: LIMIT)
    values = Torch.arange(40).to(:float32) / 7 + rank * 1.3
    found = %i[sum avg max product].map { |op| values.clone.tap { |each| Distributed.all_reduce(each, op: op) }.to_a }
    whole = Torch.tensor([rank, -rank])
    Distributed.all_reduce(whole)
    last = Torch.tensor([rank * 10]).tap { |each| Distributed.broadcast(each, src: size - 1) }
    [found, whole.to_a, last.to_a, Distributed.all_gather(Torch.tensor([rank * 1.5, 2.0])).map(&:to_a)]
  ensure
    Distributed.destroy_process_group
  end

  # A group of the same name after the first has results of its own.
  def test_the_documented_backend_has_the_results_of_gloo
    with_backend do
      [1, 3].each do |size|
        found = Distributed.fork_world(size) { |rank| %w[gloo kv kv].map { |backend| sums_by(backend, rank, size) } }
        found.each do |gloo, *kv|
          kv.each do |sums|
            assert_equal gloo.drop(1), sums.drop(1)
            gloo[0].flatten.zip(sums[0].flatten) { |expected, value| assert_in_delta expected, value, 1e-6 * expected.abs }
          end
        end
        assert_equal [[0, 0], [3, -3]][size / 2], found[0][1][1]
        assert_equal 1, found.map { |each| each[1] }.uniq.size, "bits differ between ranks"
      end
    end
  end

  def test_training_over_the_documented_backend
    program = code("init_process_group(\"kv\")")
    parameters = with_backend do
      Distributed.fork_world(2) do |rank|
        here = binding
        net = MyModel.new
        {net: net, x: Torch.ones(2, 4) * (rank + 1)}.each { |name, value| here.local_variable_set(name, value) }
        here.eval(program)
        Distributed.destroy_process_group
        net.parameters.map { |parameter| parameter.grad.to_a }
      end
    end
    assert_equal parameters[0], parameters[1]
    assert_equal [2.0, 2.0, 2.0], parameters[0].last # of the bias: a sum over two rows, on both ranks
  end

  def test_failures_of_the_documented_backend
    with_backend do
      done = Event.new
      found = Distributed.fork_world(2) do |rank|
        Distributed.init_process_group("kv", timeout: LIMIT)
        x = Torch.ones(1)
        different = value_or_failure { rank.zero? ? Distributed.barrier : Distributed.all_reduce(x) }
        Distributed.destroy_process_group

        Distributed.init_process_group("kv", timeout: rank.zero? ? 0.3 : LIMIT)
        late = rank.zero? ? value_or_failure { Distributed.barrier }.tap { done.set } : done.wait
        [different, late]
      ensure
        Distributed.destroy_process_group
      end
      found.each { |different, _| assert_match(/MismatchError.*rank 0 runs barrier \(operation 1\)/, different.inspect) }
      assert_match(/TimeoutError.*kv: waited for rank 1/, found[0][1].inspect)
    end
  end
end
