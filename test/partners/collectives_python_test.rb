# frozen_string_literal: true

require "minitest/autorun"
require "json"
require "open3"
require "timeout"
require "tmpdir"
require "torch/distributed"
require_relative "partner"

# Our operations beside those of PyTorch's gloo: the same rows, on the same values, by three ranks each. What PyTorch
# does comes out the same here, bit for bit; what it refuses is not looked at.
class CollectivesPythonTest < Minitest::Test
  include Partner

  Distributed = Torch::Distributed
  SCRIPT = File.expand_path("collectives_partner.py", __dir__)
  SIZE = 3
  LIMIT = 60

  # How many rows of each kind PyTorch 1.13 does, and later ones as well.
  DONE = {
    "all_reduce" => 205, "reduce" => 40, "broadcast" => 7, "all_gather" => 8, "gather" => 7, "scatter" => 8, "all_to_all_single" => 8,
    "all_to_all_single_uneven" => 8, "ring" => 11, "any_source" => 11, "all_gather_object" => 1, "gather_object" => 1,
    "broadcast_object_list" => 1, "scatter_object_list" => 1, "all_reduce_coalesced" => 1, "some_of_the_ranks" => 1
  }.freeze

  # PyTorch 2.6 takes any operation here, and adds.
  ALWAYS_ADDS = /\Areduce_scatter_tensor (?!SUM )/

  # The rows of one rank. Their names, and what they do, are those of collectives_partner.py.
  class Rows
    D = Distributed
    DTYPES = {
      "uint8" => :uint8, "int8" => :int8, "int16" => :int16, "int32" => :int32, "int64" => :int64, "bool" => :bool, "float16" => :float16,
      "bfloat16" => :bfloat16, "float32" => :float32, "float64" => :float64, "complex64" => :complex64
    }.freeze
    WHOLE = %w[uint8 int8 int16 int32 int64].freeze
    OPS = %w[SUM AVG PRODUCT MIN MAX BAND BOR BXOR].freeze
    SHAPES = [[0], [], [1], [3, 5], [2, 1, 129]].freeze
    MOVES = %i[broadcast all_gather all_gather_into_tensor gather scatter all_to_all_single all_to_all_single_uneven all_to_all ring
      any_source].freeze
    OTHERS = %i[all_gather_object gather_object broadcast_object_list scatter_object_list all_reduce_coalesced some_of_the_ranks].freeze

    def initialize(rank)
      @rank = rank
    end

    # @return [Hash] each row's values, or the text of what it was refused with
    def run
      said = {}
      OPS.product(DTYPES.keys) do |op, dtype|
        SHAPES.each { |shape| said["all_reduce #{op} #{dtype} #{shape}"] = values { all_reduce(op, dtype, shape) } }
        %i[reduce reduce_scatter_tensor reduce_scatter].each { |name| said["#{name} #{op} #{dtype}"] = values { __send__(name, op, dtype) } }
      end
      DTYPES.each_key do |dtype|
        MOVES.each { |name| said["#{name} #{dtype}"] = values { __send__(name, dtype) } }
      end
      OTHERS.each { |name| said[name.to_s] = {"values" => __send__(name)} }
      said
    end

    private

    def values
      {"values" => yield.map { |each| plain(each) }}
    rescue Torch::Distributed::Error, ArgumentError => e
      {"refused" => e.message}
    end

    def plain(tensor)
      complex = %i[complex64 complex128].include?(tensor.dtype)
      (complex ? tensor : tensor.to(:float64)).flatten.to_a.map { |number| complex ? number.real : number }
    end

    def tensor(shape, dtype, salt = 0)
      numbers = Array.new(shape.inject(1, :*)) { |i| (@rank * 5 + i * 3 + salt) % 5 + 1 }
      numbers.map! { |number| (dtype == "bool") ? number % 2 : (number - 3) * 0.25 } unless WHOLE.include?(dtype)
      Torch.tensor(numbers, dtype: :float64).to(DTYPES.fetch(dtype)).reshape(shape)
    end

    def empty(shape, dtype)
      Torch.zeros(shape).to(DTYPES.fetch(dtype))
    end

    def each_rank(&block)
      Array.new(SIZE, &block)
    end

    def all_reduce(op, dtype, shape)
      [D.all_reduce(tensor(shape, dtype), op: op)]
    end

    def reduce(op, dtype)
      mine = D.reduce(tensor([7], dtype), dst: 1, op: op)
      (@rank == 1) ? [mine] : []
    end

    def reduce_scatter_tensor(op, dtype)
      mine = empty([2, 3], dtype)
      D.reduce_scatter_tensor(mine, tensor([2 * SIZE, 3], dtype), op: op)
      [mine]
    end

    def reduce_scatter(op, dtype)
      mine = empty([5], dtype)
      D.reduce_scatter(mine, each_rank { |other| tensor([5], dtype, other) }, op: op)
      [mine]
    end

    def broadcast(dtype)
      [D.broadcast(tensor([3, 5], dtype), src: SIZE - 1)]
    end

    def all_gather(dtype)
      list = each_rank { empty([2, 3], dtype) }
      D.all_gather(list, tensor([2, 3], dtype))
      list
    end

    def all_gather_into_tensor(dtype)
      mine = empty([2 * SIZE, 3], dtype)
      D.all_gather_into_tensor(mine, tensor([2, 3], dtype))
      [mine]
    end

    def gather(dtype)
      list = each_rank { empty([4], dtype) } if @rank == 1
      D.gather(tensor([4], dtype), list, dst: 1)
      list || []
    end

    def scatter(dtype)
      mine = empty([4], dtype)
      list = each_rank { |other| tensor([4], dtype, other) } if @rank == SIZE - 1
      D.scatter(mine, list, src: SIZE - 1)
      [mine]
    end

    def all_to_all_single(dtype)
      mine = empty([SIZE, 3], dtype)
      D.all_to_all_single(mine, tensor([SIZE, 3], dtype))
      [mine]
    end

    def all_to_all_single_uneven(dtype)
      gives = each_rank { |other| @rank * other }
      mine = empty([gives.sum, 2], dtype)
      D.all_to_all_single(mine, tensor([gives.sum, 2], dtype), gives, gives)
      [mine]
    end

    def all_to_all(dtype)
      list = each_rank { empty([3], dtype) }
      D.all_to_all(list, each_rank { |other| tensor([3], dtype, other) })
      list
    end

    def ring(dtype)
      mine = empty([3], dtype)
      D.batch_isend_irecv([
        D::P2POp.new(D.method(:isend), tensor([3], dtype), (@rank + 1) % SIZE),
        D::P2POp.new(D.method(:irecv), mine, (@rank - 1) % SIZE)
      ]).each(&:wait)
      [mine]
    end

    def any_source(dtype)
      mine = tensor([3], dtype)
      D.send(mine, dst: 1, tag: 5) if @rank == 0
      return [] unless @rank == 1

      source = D.recv(mine, tag: 5)
      raise "received from #{source}" unless source == 0

      [mine]
    end

    def all_gather_object
      D.all_gather_object({"rank" => @rank, "text" => "x" * @rank * 100})
    end

    def gather_object
      D.gather_object([@rank, nil, 0.5], dst: 1)
    end

    def broadcast_object_list
      D.broadcast_object_list((@rank == 2) ? [@rank, "é" * 10, {"a" => [@rank]}] : [nil, nil, nil], src: 2)
    end

    def scatter_object_list
      objects = [nil]
      D.scatter_object_list(objects, each_rank { |other| {"for" => other} }, src: 0)
      objects
    end

    def all_reduce_coalesced
      tensors = [[3], [2, 2]].map { |shape| tensor(shape, "float32") }
      D.all_reduce_coalesced(tensors)
      tensors.map { |each| plain(each) }
    end

    def some_of_the_ranks
      group = D.new_group([SIZE - 1, 0])
      return [] if D.get_rank(group) < 0

      mine = D.broadcast(tensor([3], "float32"), src: SIZE - 1, group: group)
      [D.get_rank(group), D.get_world_size(group), plain(mine)]
    end
  end

  def python_rows
    Dir.mktmpdir do |folder|
      out, errors, status = run_python(SCRIPT, SIZE.to_s, File.join(folder, "meet"), env: {"GLOO_SOCKET_IFNAME" => "lo"}, limit: LIMIT)
      assert status.success?, errors
      rows = JSON.parse(out.lines.last)
      skip "#{rows} (#{@version})" if rows.is_a?(String)
      rows
    end
  end

  def our_rows
    Timeout.timeout(LIMIT) do
      Distributed.fork_world(SIZE) do |rank|
        Distributed.init_process_group("gloo", timeout: 30)
        Rows.new(rank).run.tap { Distributed.destroy_process_group }
      end
    end
  end

  NAMES = <<~PYTHON
    import inspect, json
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel
    functions = [name for name, value in vars(torch.distributed).items() if inspect.isroutine(value) and not name.startswith("_")]
    print(json.dumps([functions, list(inspect.signature(DistributedDataParallel.__init__).parameters)]))
  PYTHON

  # But for those on several GPUs of one process, which PyTorch has given up.
  def test_pytorch_s_collectives_and_arguments_are_there
    out, errors, status = run_python("-c", NAMES)
    assert status.success?, errors
    functions, parameters = JSON.parse(out.lines.last)
    collectives = functions.grep(/gather|reduce|scatter|broadcast|all_to_all|send|recv|barrier/).grep_v(/_multigpu\z/)
    assert_operator collectives.size, :>=, 20
    assert_empty(collectives.reject { |name| Distributed.respond_to?(name) })
    known = assert_raises(ArgumentError) { Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(1, 1), nonsense: 1) }.message
    assert_operator parameters.size, :>=, 10
    assert_empty(parameters.drop(2).reject { |name| known.include?(" #{name}:") })
  end

  def test_what_pytorch_does_comes_out_the_same
    theirs = Thread.new { python_rows }
    theirs.report_on_exception = false
    ours = our_rows
    done = Hash.new(0)
    theirs.value.each_with_index do |rows, rank|
      assert_equal rows.keys, ours[rank].keys
      rows.each do |name, row|
        next if row.key?("refused") || name.match?(ALWAYS_ADDS)

        assert_equal row, ours[rank][name], "rank #{rank}, #{name}"
        done[name[/\w+/]] += 1 if rank.zero?
      end
    end
    DONE.each { |kind, count| assert_operator done[kind], :>=, count, "#{kind} with PyTorch #{@version}" }
  end
end
