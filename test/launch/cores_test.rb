# frozen_string_literal: true

require "fiddle"
require_relative "launch_case"

# --numa-binding on this machine, whatever it is; made-up machines are in test/c/launch/binding_test.c.
class CoresTest < LaunchCase
  def needs_hwloc
    Fiddle.dlopen("libhwloc.so.15")
  rescue Fiddle::DLError
    skip "libhwloc is not installed (Debian: libhwloc15)"
  end

  # For each worker the CPUs that it may use and its OMP_NUM_THREADS, by rank.
  def workers(*flags, **options)
    code = "echo $RANK $(grep Cpus_allowed_list /proc/self/status | cut -f2) $OMP_NUM_THREADS"
    result = run_torchrun(*flags, *shell(code), **options)
    assert_code 0, result
    result.out.lines.sort.map { |line| line.split.then { |_rank, list, threads| [expand(list), threads.to_i] } }
  end

  # [0, 1, 2, 4] of "0-2,4".
  def expand(list)
    list.split(",").flat_map { |part| Range.new(*part.split("-").then { |from, to| [from.to_i, (to || from).to_i] }).to_a }
  end

  def allowed
    expand(File.read("/proc/self/status")[/^Cpus_allowed_list:\s+(\S+)/, 1])
  end

  # The lists of allowed CPUs that are one core each.
  def cores
    allowed.group_by do |cpu|
      File.read("/sys/devices/system/cpu/cpu#{cpu}/topology/thread_siblings_list")
    rescue SystemCallError
      cpu
    end.values
  end

  def test_nothing_is_bound_where_that_is_not_asked
    workers("--nproc-per-node=2").each { |cpus, _threads| assert_equal allowed, cpus }
    workers("--nproc-per-node=2", "--numa-binding=none").each { |cpus, _threads| assert_equal allowed, cpus }
  end

  def test_each_worker_has_cores_of_its_own
    needs_hwloc
    skip "one core only" if cores.size < 2
    first, second = workers("--nproc-per-node=2", "--numa-binding=cores")
    assert_empty first[0] & second[0]
    assert_equal allowed, (first[0] + second[0]).sort
    cores.each { |core| assert_includes [[], core], core & first[0], "a core is divided" }
    [first, second].each { |cpus, threads| assert_includes 1..cpus.size, threads }
  end

  def test_every_kind_stays_within_what_is_allowed
    needs_hwloc
    %w[node socket exclusive core-complex cores].each do |kind|
      workers("--numa-binding=#{kind}").each do |cpus, threads|
        refute_empty cpus
        assert_empty cpus - allowed, kind
        assert_includes 1..cpus.size, threads, kind
      end
    end
  end

  def test_a_mask_that_torchrun_was_started_with_is_kept
    needs_hwloc
    cpu = allowed.last
    found = workers("--nproc-per-node=2", "--numa-binding=node", command: ["taskset", "-c", cpu.to_s, BINARY])
    assert_equal [[[cpu], 1], [[cpu], 1]], found
  end

  def test_more_workers_than_cores
    needs_hwloc
    count = cores.size + 1
    result = run_torchrun("--nproc-per-node=#{count}", "--numa-binding=cores", *shell("echo started"))
    assert_code 1, result
    assert_empty result.out
    assert_match(/--numa-binding=cores: #{cores.size} usable cores on this machine for #{count} workers; expected at least one each/, result.err)
  end

  def test_without_hwloc
    File.write("#{@folder}/libhwloc.so.15", "")
    result = run_torchrun("--numa-binding=node", *shell("echo started"), env: {"LD_LIBRARY_PATH" => @folder})
    assert_code 1, result
    assert_empty result.out
    assert_match(/--numa-binding needs hwloc 2 \(Debian: apt install libhwloc15\): /, result.err)
    assert_code 0, run_torchrun(*shell("echo started"), env: {"LD_LIBRARY_PATH" => @folder})
  end

  # Restarted workers are bound as the first were.
  def test_after_a_restart
    needs_hwloc
    skip "one core only" if cores.size < 2
    code = "echo $TORCHELASTIC_RESTART_COUNT $RANK $(grep Cpus_allowed_list /proc/self/status | cut -f2); [ $TORCHELASTIC_RESTART_COUNT = 1 ]"
    result = run_torchrun("--nproc-per-node=2", "--numa-binding=cores", "--max-restarts=1", *shell(code))
    assert_code 0, result
    found = result.out.lines.map(&:split)
    second = found.select { |restart, _rank, _list| restart == "1" }
    assert_equal 2, second.size
    first = second.find { |_restart, rank, _list| rank == "0" }.last
    found.select { |_restart, rank, _list| rank == "0" }.each { |_restart, _rank, list| assert_equal first, list }
  end
end
