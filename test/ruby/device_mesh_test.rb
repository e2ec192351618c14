# frozen_string_literal: true

require_relative "test_helper"

class DeviceMeshTest < Minitest::Test
  Mesh = Distributed::DeviceMesh
  Layout = Distributed::MeshLayout

  def sum(group, number)
    Distributed.all_reduce(Torch.tensor([number], dtype: :int64), group: group).item
  end

  # --- numbers alone -----------------------------------------------------------------------------

  def test_a_layout_of_three_dimensions
    layout = Layout.of([[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]], 12)
    assert_equal [2, 2, 3], layout.shape
    assert_equal [[0, 0, 0], [0, 1, 1], [1, 1, 2], nil], [0, 4, 11, 12].map { |rank| layout.coordinate(rank) }
    assert_equal [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]], layout.lines([0])
    assert_equal [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]], layout.lines([1])
    assert_equal [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], layout.lines([2])
    assert_equal [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]], layout.lines([0, 1])
    assert_equal [(0..11).to_a], layout.lines([0, 1, 2])
    assert_equal [[1, 2], [7, 8]].map { |a, b| [a, b] }, Layout.of([[1, 2], [7, 8]], 9).nested
    assert_equal [[3, 4, 5], [9, 10, 11]], layout.slice([[0], [2]], 4).nested
    assert_equal [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], layout.slice([[0, 1], [2]], 7).nested
  end

  def test_layouts_that_are_wrong
    {
      [[0, 1], [2]] => /same size/, [] => /empty/, [[], []] => /empty/, [0, 0] => /rank 0 is there 2 times/, [0, 4] => /ranks from 0 to 3 .*got 4/,
      [0, nil] => /got nil/, [0, "1"] => /got "1"/, [[0], 1] => /same size/, 5 => /nested Arrays.*got 5/, [-1] => /got -1/
    }.each do |mesh, text|
      assert_match text, failure { Layout.of(mesh, 4) }&.last.to_s, mesh.inspect
    end
  end

  # --- meshes ------------------------------------------------------------------------------------

  def test_eight_in_three_dimensions
    said = world(8) do |rank|
      mesh = Distributed.init_device_mesh(:cpu, [2, 2, 2], mesh_dim_names: %w[dp cp tp])
      here = {
        what: [mesh.device_type, mesh.ndim, mesh.shape, mesh.size, mesh.size(1), mesh.size("tp"), mesh.mesh_dim_names, mesh.get_rank],
        place: [mesh.get_coordinate, mesh.get_local_rank(0), mesh.get_local_rank("cp"), mesh.get_local_rank(:tp)],
        groups: mesh.get_all_groups.map(&:ranks),
        sums: %w[dp cp tp].map { |name| sum(mesh.get_group(name), rank) },
        slices: [mesh["dp"].mesh, mesh["dp", "tp"].mesh, mesh["dp", "tp"].get_coordinate, mesh[%i[cp tp]]["tp"].mesh],
        same: [mesh["dp"].equal?(mesh[:dp]), mesh["cp", "tp"]["tp"].equal?(mesh["tp"]), mesh["dp", "tp"].get_group("tp").equal?(mesh.get_group(2)),
          mesh["dp", "cp", "tp"].equal?(mesh), mesh["dp"].get_group.description],
        before: Distributed.get_pg_count
      }
      flat = mesh["dp", "cp"].flatten
      here[:flat] = [flat.mesh, flat.mesh_dim_names, flat.get_local_rank, sum(flat.get_group, rank), flat.equal?(mesh["dp_cp"]),
        mesh["dp_cp", "tp"].mesh, mesh["dp_cp", "tp"].get_group("dp_cp").equal?(flat.get_group)]
      all = mesh._flatten("all")
      here[:all] = [all.size, all.get_group.equal?(Distributed.default_process_group), mesh["dp", "cp"].flatten("again").get_group.equal?(flat.get_group)]
      here[:after] = Distributed.get_pg_count
      here
    end
    said.each_with_index do |here, rank|
      dp, cp, tp = rank.digits(2).then { |digits| Array.new(3) { |at| digits[2 - at] || 0 } }
      assert_equal ["cpu", 3, [2, 2, 2], 8, 2, 2, %w[dp cp tp], rank], here[:what]
      assert_equal [[dp, cp, tp], dp, cp, tp], here[:place]
      lines = [[rank % 4, rank % 4 + 4], [dp * 4 + tp, dp * 4 + 2 + tp], [rank / 2 * 2, rank / 2 * 2 + 1]]
      assert_equal lines, here[:groups]
      assert_equal lines.map(&:sum), here[:sums]
      across = [[cp * 2, cp * 2 + 1], [4 + cp * 2, 5 + cp * 2]]
      assert_equal [lines[0], across, [dp, tp], lines[2]], here[:slices]
      assert_equal [true, true, true, true, "mesh_dp"], here[:same]
      flat = [0, 2, 4, 6].map { |even| even + tp }
      assert_equal [flat, ["dp_cp"], dp * 2 + cp, flat.sum, true, [[0, 1], [2, 3], [4, 5], [6, 7]], true], here[:flat]
      assert_equal [8, true, true], here[:all]
      assert_equal [4, 5], [here[:before], here[:after]]
    end
  end

  def test_ranks_in_an_order_of_ones_own
    said = world(4) do |rank|
      mesh = Mesh.new("cpu", Torch.tensor([[3, 1], [0, 2]], dtype: :int64), mesh_dim_names: [:rows, :columns])
      gathered = Torch.zeros(2, dtype: :int64)
      Distributed.all_gather_into_tensor(gathered, Torch.tensor([rank]), group: mesh.get_group("columns"))
      [mesh.mesh, mesh.get_coordinate, mesh.get_all_groups.map { |group| [group.ranks, group.rank] }, gathered.to_a, mesh.inspect]
    end
    places = {3 => [0, 0], 1 => [0, 1], 0 => [1, 0], 2 => [1, 1]}
    said.each_with_index do |(mesh, coordinate, groups, gathered, text), rank|
      assert_equal [[3, 1], [0, 2]], mesh
      assert_equal places[rank], coordinate
      assert_equal [[[[3, 0], [1, 2]][coordinate[1]], coordinate[0]], [mesh[coordinate[0]], coordinate[1]]], groups
      assert_equal mesh[coordinate[0]], gathered
      assert_equal "#<Torch::Distributed::DeviceMesh cpu rows=2 columns=2 [[3, 1], [0, 2]]>", text
    end
  end

  def test_a_mesh_of_some_of_the_processes
    said = world(3) do |rank|
      mesh = Distributed.init_device_mesh("cpu", [2], mesh_dim_names: ["dp"])
      inside = mesh.get_coordinate
      group = mesh.get_group
      here = [inside, mesh.get_local_rank, Distributed.get_rank(group), mesh.size]
      here << (inside ? [sum(group, rank), mesh["dp"].equal?(mesh), mesh.flatten("data").get_group.equal?(group)] : failure { mesh["other"] }&.first)
      here << (inside ? nil : failure { mesh.flatten("data") })
    end
    assert_equal [[[0], 0, 0, 2, [1, true, true], nil], [[1], 1, 1, 2, [1, true, true], nil]], said.take(2)
    assert_equal [nil, -1, -1, 2, "ArgumentError"], said[2].take(5)
    assert_match(/global rank 2 is not in #<.*\[0, 1\]>/, said[2][5][1])
  end

  # The group of all is used where it will do; without a group the mesh makes it.
  def test_one_dimension_of_all_is_the_default_group
    said = Distributed.fork_world(2) do |rank|
      mesh = Distributed.init_device_mesh(:cpu, [2])
      tall = Mesh.new(:cpu, [[0], [1]])
      turned = Mesh.new(:cpu, [1, 0])
      [mesh.get_group.equal?(Distributed.default_process_group), tall.get_group(0).equal?(mesh.get_group), tall.get_group(1).ranks,
        turned.get_group.ranks, turned.get_local_rank, mesh == Mesh.new(:cpu, [0, 1]), mesh == turned, sum(turned.get_group, rank + 1)]
    ensure
      Distributed.destroy_process_group
    end
    said.each_with_index { |here, rank| assert_equal [true, true, [rank], [1, 0], 1 - rank, true, false, 3], here }
  end

  def test_of_groups_that_are_there
    said = world(4) do |rank|
      rows, = Distributed.new_subgroups(2)
      columns, = Distributed.new_subgroups_by_enumeration([[0, 2], [1, 3]])
      count = Distributed.get_pg_count
      one = Mesh.from_group(rows, :cpu, mesh_dim_names: ["tp"])
      both = Mesh.from_group([columns, rows], "cpu", [[0, 1], [2, 3]], mesh_dim_names: %w[dp tp])
      [one.mesh, one.get_group.equal?(rows), both.get_coordinate, both.get_group("dp").equal?(columns), both["tp"].get_group.equal?(rows),
        both["tp"] == one, sum(both["dp"].get_group, rank), Distributed.get_pg_count - count,
        failure { Mesh.from_group([rows, columns], "cpu", [[0, 1], [2, 3]]) }&.last, failure { Mesh.from_group([rows, columns], "cpu") }&.last,
        failure { Mesh.from_group(rows, "cpu", [[0, 1], [2, 3]]) }&.last, failure { Mesh.from_group(7, "cpu") }&.last]
    end
    said.each_with_index do |(row, *here), rank|
      assert_equal [rank / 2 * 2, rank / 2 * 2 + 1], row
      assert_equal [true, [rank / 2, rank % 2], true, true, true, rank % 2 * 2 + 2, 0], here.take(7)
      assert_match(/along dimension 0 global rank #{rank} is in \[\d, \d\], expected the ranks of its group, \[\d, \d\]/, here[7])
      assert_match(/mesh: expected the ranks of 2 groups, got nil/, here[8])
      assert_match(/mesh: expected 1 dimensions, one for each group, got 2/, here[9])
      assert_match(/group: expected a Torch::Distributed::ProcessGroup, got 7/, here[10])
    end
  end

  def test_wrong_arguments_are_named
    alone do
      mesh = Distributed.init_device_mesh("cpu", [1, 1], mesh_dim_names: %w[a b])
      {
        /device_type: .*without a number, got "cpu:0"/ => -> { Distributed.init_device_mesh("cpu:0", [1]) },
        /mesh_shape: expected an Array of sizes from 1, got 1/ => -> { Distributed.init_device_mesh("cpu", 1) },
        /mesh_shape: .*got \[1, 0\]/ => -> { Distributed.init_device_mesh("cpu", [1, 0]) },
        /got 1 in a mesh of 1x2 = 2 processes/ => -> { Distributed.init_device_mesh("cpu", [1, 2]) },
        /mesh_dim_names: expected 2, one for each dimension, got \["a"\]/ => -> { Distributed.init_device_mesh("cpu", [1, 1], mesh_dim_names: ["a"]) },
        /mesh_dim_names: expected different names/ => -> { Distributed.init_device_mesh("cpu", [1, 1], mesh_dim_names: %w[a a]) },
        /mesh_dim_names: expected an Array of names, got "ab"/ => -> { Distributed.init_device_mesh("cpu", [1, 1], mesh_dim_names: "ab") },
        /nested Arrays.*got nil/ => -> { Mesh.new("cpu", nil) },
        /get_group: expected a dimension.* has 2/ => -> { mesh.get_group },
        /get_local_rank: expected a dimension/ => -> { mesh.get_local_rank },
        /dimension 2: expected 0 to 1 or "a", "b"/ => -> { mesh.get_group(2) },
        /dimension "c": expected 0 to 1 or "a", "b"/ => -> { mesh.size("c") },
        /mesh\["c"\]: expected names of its dimensions, "a", "b"/ => -> { mesh["c"] },
        /mesh\["b", "a"\]: expected dimensions that follow each other/ => -> { mesh["b", "a"] },
        /mesh\[\]: expected at least one name/ => -> { mesh[] },
        /it has none: give mesh_dim_names/ => -> { Mesh.new("cpu", [0])["a"] },
        /flatten needs a mesh with names/ => -> { Mesh.new("cpu", [0]).flatten },
        /"b" is the name of other dimensions/ => -> { mesh.flatten("b") }
      }.each { |text, call| assert_match text, failure(&call)&.last.to_s }
      assert_equal 0, mesh.get_local_rank(-1)
    end
  end

  def test_ranks_that_disagree_are_told
    said = world(2) do |rank|
      [failure { Mesh.new(:cpu, rank.zero? ? [[0], [1]] : [[1], [0]]) }, failure { Mesh.new(:cpu, [[0, 1]], mesh_dim_names: rank.zero? ? %w[a b] : %w[b a]) },
        failure { Mesh.new(:cpu, rank.zero? ? [5] : [0, 1]) }]
    end
    said.each_with_index do |(meshes, names, wrong), rank|
      assert_match(/MismatchError.*DeviceMesh.*DeviceMesh/, meshes.join(" "))
      assert_match(/MismatchError.*\["(a", "b|b", "a)"\].*\["(a", "b|b", "a)"\]/, names.join(" "))
      assert_match(rank.zero? ? /ArgumentError mesh: .*got 5/ : /MismatchError global rank 0 could not take part in DeviceMesh: mesh: .*got 5/, wrong.join(" "))
    end
  end

  def test_meshes_as_keys
    alone do
      first, second = Array.new(2) { Distributed.init_device_mesh(:cpu, [1, 1], mesh_dim_names: %w[a b]) }
      assert_equal first, second
      assert_equal 1, {first => 1}[second]
      refute_equal first, Distributed.init_device_mesh(:cpu, [1, 1], mesh_dim_names: %w[a c])
      refute_equal first, Distributed.init_device_mesh(:cpu, [1], mesh_dim_names: %w[a])
      refute_equal first, "cpu"
      assert_equal "#<Torch::Distributed::DeviceMesh cpu 1x1 [[0]]>", Mesh.new(:cpu, [[0]]).to_s
    end
  end
end
