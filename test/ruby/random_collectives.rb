# frozen_string_literal: true

# Programs of collectives drawn from a seed, and what each must leave behind, in plain Ruby.
#
# Operation n of a program depends on the seed and n alone: the same on every rank, and the same when others are left
# out. What a rank chooses for itself (how its tensors lie, when it waits) is drawn from its rank as well.
class RandomCollectives
  KINDS = %i[all_reduce all_reduce_coalesced coalescing_manager reduce broadcast barrier all_gather all_gather_into_tensor gather
    gather_into_tensor scatter reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single messages].freeze
  REDUCING = %i[all_reduce all_reduce_coalesced coalescing_manager reduce reduce_scatter reduce_scatter_tensor].freeze
  # Whose parts are one tensor, or lists whose tensors are alike.
  EVEN = %i[all_gather_into_tensor gather_into_tensor reduce_scatter_tensor].freeze

  INTEGERS = %i[uint8 int8 int16 int32 int64].freeze
  FLOATS = %i[float16 bfloat16 float32 float64].freeze
  COMPLEX = %i[complex64 complex128].freeze
  OPS = {
    **INTEGERS.to_h { |dtype| [dtype, %i[sum product min max band bor bxor]] },
    **FLOATS.to_h { |dtype| [dtype, %i[sum avg product min max premul_sum]] },
    **COMPLEX.to_h { |dtype| [dtype, %i[sum product avg]] },
    bool: %i[sum product min max]
  }.freeze
  COMBINED = {
    sum: :sum.to_proc, avg: ->(all) { all.sum.fdiv(all.size) }, premul_sum: :sum.to_proc, product: ->(all) { all.inject(:*) },
    min: :min.to_proc, max: :max.to_proc, band: ->(all) { all.inject(:&) }, bor: ->(all) { all.inject(:|) },
    bxor: ->(all) { all.inject(:^) }
  }.freeze
  # What a mean of three is rounded by, on the way and at last; all else is exact.
  SLACK = Hash.new(1e-12).merge(float16: 0.01, bfloat16: 0.05, float32: 1e-5, complex64: 1e-5).freeze

  Operation = Struct.new(:number, :kind, :group, :dtype, :op, :root, :shapes, :messages, keyword_init: true) do
    def to_s
      "#{number}: #{kind} of #{dtype}#{", #{op}" if op}, group #{group}, root #{root}, #{messages ? "from, to: #{messages}" : "shapes #{shapes}"}"
    end
  end

  attr_reader :seed, :groups, :operations

  # @param world_size [Integer]
  # @param count [Integer] operations
  # @param only [Array<Integer>, nil] the numbers of those that are run
  def initialize(seed, world_size, count: 14, only: nil)
    @seed = seed
    random = random(0)
    everybody = (0...world_size).to_a
    @groups = [everybody] + Array.new(random.rand(2)) { everybody.sample(1 + random.rand(world_size), random: random).sort }
    @operations = Array.new(count) { |number| draw(number, random(1, number)) }
    @operations.select! { |operation| only.include?(operation.number) } if only
  end

  def random(*names)
    Random.new([seed, *names].inject(7) { |all, each| (all * 1_000_003 + each) & 0xffff_ffff_ffff })
  end

  # @return [Float, nil] a rank's factor of a weighted sum
  def factor(operation, rank)
    [0.5, 1.0, 2.0, -1.0][(operation.number + rank) % 4] if operation.op == :premul_sum
  end

  # @param rank [Integer] within the group
  # @return [Array<Integer>] what it gives as a part: numbers that every dtype holds, with all that becomes of them
  def values(operation, rank, part, count)
    Array.new(count) do |i|
      value = (rank * 5 + part * 3 + i * 7 + operation.number) % 3 + 1
      (operation.dtype == :bool) ? value % 2 : value
    end
  end

  # @return [Array<Numeric>] a part of all ranks of the group, combined
  def reduced(operation, part, count)
    size = groups[operation.group].size
    columns = Array.new(size) { |rank| values(operation, rank, part, count).map { |value| value * (factor(operation, rank) || 1) } }
    combined = count.zero? ? [] : columns.transpose.map { |column| COMBINED.fetch(operation.op).call(column) }
    (operation.dtype == :bool) ? combined.map { |value| value.clamp(0, 1) } : combined
  end

  private

  def draw(number, random)
    group = random.rand(groups.size)
    size = groups[group].size
    kind = KINDS.sample(random: random)
    kind = :barrier if kind == :messages && size == 1
    dtype = OPS.keys.sample(random: random)
    op = OPS.fetch(dtype).sample(random: random) if REDUCING.include?(kind)
    Operation.new(number: number, kind: kind, group: group, dtype: dtype, op: op, root: random.rand(size),
      shapes: draw_shapes(kind, size, random), messages: (draw_messages(size, random) if kind == :messages))
  end

  # Of part r towards rank r, in [giver][part] order for all_to_all.
  def draw_shapes(kind, size, random)
    columns = 1 + random.rand(4)
    even = EVEN.include?(kind) || random.rand(2).zero?
    same = draw_shape(columns, random)
    Array.new(size) { Array.new(size) { even ? same : draw_shape(columns, random) } }
  end

  def draw_shape(columns, random)
    [[0, 1, 2, 3, 5, 9].sample(random: random), columns]
  end

  def draw_messages(size, random)
    Array.new(1 + random.rand(4)) { (0...size).to_a.sample(2, random: random) }
  end
end

# A program's operations on one rank.
class RandomCollectives::Rank
  Distributed = Torch::Distributed
  SENTINEL = 77
  LAYOUTS = %i[plain shared rows columns transposed strided].freeze

  # Memory and the part of it that an operation is given; `initial` is what the memory held before the operation.
  Place = Struct.new(:memory, :view, :initial, :expected)

  def initialize(program, rank)
    @program = program
    @rank = rank
    @own = program.random(2, rank)
    @pending = []
    @groups = program.groups.map.with_index { |ranks, i| i.zero? ? nil : Distributed.new_group(ranks) }
  end

  # @return [String, nil] what is wrong
  def run
    @program.operations.each do |operation|
      members = @program.groups[operation.group]
      next unless members.include?(@rank)

      @operation = operation
      @me = members.index(@rank)
      @size = members.size
      @places = []
      # What lies alike on all ranks is coalesced alike.
      @layouts = (operation.kind == :coalescing_manager) ? @program.random(3, operation.number) : @own
      work = start(@groups[operation.group], async = @own.rand(2).zero?)
      @pending << [operation, async ? [*work].compact : [], @places]
      finish_some
    end
    finish(@pending.shift) until @pending.empty?
    @wrong
  ensure
    @groups.compact.each { |group| Distributed.destroy_process_group(group) unless Distributed::GroupMember::NON_GROUP_MEMBER.equal?(group) }
  end

  private

  def finish_some
    finish(@pending.delete_at(@own.rand(@pending.size))) while @pending.size > @own.rand(5)
  end

  def finish((operation, works, places))
    works.shuffle(random: @own).each(&:wait)
    places.each_with_index do |place, i|
      wrong = difference(operation, place)
      @wrong ||= "rank #{@rank}, #{operation}: tensor #{i} of #{places.size}: #{wrong}" if wrong
    end
  end

  # --- tensors ---

  # A tensor of this shape that lies as this rank likes, with a part's values in it.
  # @param written [Boolean] whether a result comes into it
  def tensor(shape, values = nil)
    memory, view = lay(shape, LAYOUTS.sample(random: @layouts))
    memory.fill!((@operation.dtype == :bool) ? 1 : SENTINEL)
    write(view.call(memory), values, shape) if values
    @places << Place.new(memory, view, memory.clone)
    view.call(memory)
  end

  # What must stand in the tensor made last, or in all those of a list.
  def expect(values, place = @places.last)
    place.expected = values
  end

  def lay(shape, layout)
    rows, columns = shape
    dtype = @operation.dtype
    zeros = ->(*sizes) { Torch.zeros(*sizes).to(dtype) }
    whole = ->(memory) { memory }
    case layout
    when :shared
      # Whatever group the memory is of, any operation takes it.
      [Distributed.empty_shared(rows, columns, dtype: dtype), whole]
    when :rows then [zeros.call(rows + 3, columns), ->(memory) { memory.narrow(0, 2, rows) }]
    when :columns then [zeros.call(rows, columns + 2), ->(memory) { memory.narrow(1, 1, columns) }]
    when :transposed then [zeros.call(columns, rows), ->(memory) { memory.transpose(0, 1) }]
    when :strided then [zeros.call(rows, columns, 2), ->(memory) { memory.select(2, 1) }]
    else [zeros.call(rows, columns), whole]
    end
  end

  def write(view, values, shape)
    view.copy!(Torch.tensor(values, dtype: :float64).reshape(shape).to(@operation.dtype)) unless values.empty?
  end

  def numbers(tensor, dtype)
    return [] if tensor.numel.zero?

    tensor.to(RandomCollectives::COMPLEX.include?(dtype) ? :complex128 : :float64).to_a.flatten
  end

  # All of the memory is looked at: what lies beside a tensor belongs to others.
  def difference(operation, place)
    view = place.view.call(place.memory)
    got = numbers(view, operation.dtype)
    wanted = place.expected || numbers(place.view.call(place.initial), operation.dtype)
    slack = (operation.op == :avg) ? RandomCollectives::SLACK[operation.dtype] : 0
    unless got.size == wanted.size && got.zip(wanted).all? { |a, b| (a - b).abs <= slack }
      return "#{got.first(12)} where #{wanted.first(12)} was expected"
    end

    view.copy!(place.view.call(place.initial)) if view.numel.positive?
    "memory beside it was changed" unless numbers(place.memory, operation.dtype) == numbers(place.initial, operation.dtype)
  end

  def values(part, count, rank: @me)
    @program.values(@operation, rank, part, count)
  end

  def elements(shape)
    shape.inject(:*)
  end

  def given(shape, part)
    tensor(shape, values(part, elements(shape)))
  end

  def received(shape, rank, part)
    tensor(shape).tap { expect(values(part, elements(shape), rank: rank)) }
  end

  # Reduced in place.
  def summed(shape, part)
    given(shape, part).tap { expect(@program.reduced(@operation, part, elements(shape))) }
  end

  # --- operations ---

  def start(group, async)
    send(@operation.kind, @operation.shapes, {group: group, async_op: async})
  end

  def reduction
    factor = @program.factor(@operation, @me)
    {op: factor ? Distributed::ReduceOp.premul_sum(factor) : @operation.op}
  end

  # A root goes by its number among all ranks or in the group.
  def root(name)
    return {"group_#{name}": @operation.root} if @own.rand(2).zero?

    {"#{name}": @program.groups[@operation.group][@operation.root]}
  end

  def root?
    @me == @operation.root
  end

  def all_reduce(shapes, options)
    Distributed.all_reduce(summed(shapes[0][0], 0), **reduction, **options)
  end

  def all_reduce_coalesced(shapes, options)
    Distributed.all_reduce_coalesced(shapes[0].each_with_index.map { |shape, part| summed(shape, part) }, **reduction, **options)
  end

  def coalescing_manager(shapes, options)
    tensors = shapes[0].each_with_index.map { |shape, part| summed(shape, part) }
    manager = Distributed.coalescing_manager(group: options[:group], async_ops: options[:async_op]) do
      tensors.each { |tensor| Distributed.all_reduce(tensor, group: options[:group], **reduction) }
    end
    manager if options[:async_op]
  end

  def reduce(shapes, options)
    tensor = root? ? summed(shapes[0][0], 0) : given(shapes[0][0], 0)
    Distributed.reduce(tensor, **root(:dst), **reduction, **options)
  end

  def broadcast(shapes, options)
    tensor = root? ? given(shapes[0][0], 0) : received(shapes[0][0], @operation.root, 0)
    Distributed.broadcast(tensor, **root(:src), **options)
  end

  def barrier(_shapes, options)
    Distributed.barrier(**options)
  end

  def all_gather(shapes, options)
    list = Array.new(@size) { |rank| received(shapes[0][0], rank, 0) }
    Distributed.all_gather(list, given(shapes[0][0], 0), **options)
  end

  # The tensors of all ranks, end to end.
  def joined(shape)
    tensor([shape[0] * @size, shape[1]]).tap { expect(Array.new(@size) { |rank| values(0, elements(shape), rank: rank) }.flatten) }
  end

  def all_gather_into_tensor(shapes, options)
    Distributed.all_gather_into_tensor(joined(shapes[0][0]), given(shapes[0][0], 0), **options)
  end

  def gather(shapes, options)
    list = Array.new(@size) { |rank| received(shapes[0][0], rank, 0) } if root?
    Distributed.gather(given(shapes[0][0], 0), list, **root(:dst), **options)
  end

  def gather_into_tensor(shapes, options)
    Distributed.gather_into_tensor(root? ? joined(shapes[0][0]) : nil, given(shapes[0][0], 0), **root(:dst), **options)
  end

  def scatter(shapes, options)
    list = Array.new(@size) { |part| given(shapes[0][0], part) } if root?
    Distributed.scatter(received(shapes[0][0], @operation.root, @me), list, **root(:src), **options)
  end

  def reduced_here(shape)
    tensor(shape).tap { expect(@program.reduced(@operation, @me, elements(shape))) }
  end

  def reduce_scatter(shapes, options)
    list = shapes[0].each_with_index.map { |_, part| given(shapes[0][0], part) }
    Distributed.reduce_scatter(reduced_here(shapes[0][0]), list, **reduction, **options)
  end

  def reduce_scatter_tensor(shapes, options)
    shape = shapes[0][0]
    input = tensor([shape[0] * @size, shape[1]], Array.new(@size) { |part| values(part, elements(shape)) }.flatten)
    Distributed.reduce_scatter_tensor(reduced_here(shape), input, **reduction, **options)
  end

  def all_to_all(shapes, options)
    inputs = shapes[@me].each_with_index.map { |shape, part| given(shape, part) }
    outputs = Array.new(@size) { |rank| received(shapes[rank][@me], rank, @me) }
    Distributed.all_to_all(outputs, inputs, **options)
  end

  def all_to_all_single(shapes, options)
    columns = shapes[0][0][1]
    gives = shapes[@me].map(&:first)
    gets = shapes.map { |row| row[@me].first }
    input = tensor([gives.sum, columns], gives.each_with_index.flat_map { |rows, part| values(part, rows * columns) })
    output = tensor([gets.sum, columns])
    expect(gets.each_with_index.flat_map { |rows, rank| values(@me, rows * columns, rank: rank) })
    Distributed.all_to_all_single(output, input, gets, gives, **options)
  end

  # Waited for later in any case: a rank may be told to receive what another sends last.
  def messages(shapes, options)
    shape = shapes[0][0]
    group = options[:group]
    numbered = @operation.messages.each_with_index.select { |ends, _| ends.include?(@me) }
    works = numbered.map do |(from, to), number|
      if from == @me
        Distributed.isend(given(shape, number), group: group, tag: number, group_dst: to)
      else
        Distributed.irecv(received(shape, from, number), group: group, tag: number, group_src: from)
      end
    end
    return works if options[:async_op]

    works.each(&:wait)
  end
end
