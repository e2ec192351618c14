# frozen_string_literal: true

require_relative "../../launch/etcd_cluster"
require_relative "../../launch/launch_case"
require_relative "namespaces"

# Jobs of several hosts, which are network namespaces. The workers write what they see to one file each host has a
# part of; the machine's clock is the same for all of them, so the times can be compared.
class ElasticCase < LaunchCase
  # One worker's life in the journal: when it began, and its last sign of life.
  Life = Struct.new(:key, :host, :rank, :world_size, :group_rank, :nodes, :local_rank, :restarts, :began, :last, keyword_init: true)

  # Says once who it is, then writes the time twenty times a second, until the file `stop` is there.
  WORKER = <<~SH
    key="$(hostname)-$$-$TORCHELASTIC_RESTART_COUNT-$RANK-$(date +%s%N)"
    echo "$key $(hostname) $RANK $WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $LOCAL_RANK $TORCHELASTIC_RESTART_COUNT $(date +%s.%N)" >> "$JOURNAL/lives"
    while [ ! -e "$JOURNAL/stop" ]; do
      date +%s.%N >> "$JOURNAL/beat-$key"
      if [ -e "$JOURNAL/fail-$(hostname)" ]; then rm -f "$JOURNAL/fail-$(hostname)"; exit 9; fi
      sleep 0.05
    done
  SH

  PORT = 29_400
  ETCD_PORTS = [2379, 2380].freeze

  def setup
    super
    skip Namespaces.obstacle if Namespaces.obstacle
    @journal = File.join(@folder, "journal")
    Dir.mkdir(@journal)
    # A host or an agent that is killed may leave its private folder.
    @leaves_files = true
  end

  def teardown
    super
  ensure
    @cluster&.remove
    @hosts&.remove
  end

  # @return [Namespaces] this test's hosts
  def hosts(count, **options)
    @hosts = Namespaces.new(count, **options)
  end

  # Starts torchrun on a host.
  def on(host, *arguments, env: {}, **options)
    start(*arguments, command: [*@hosts.command(host), BINARY], env: {"JOURNAL" => @journal}.merge(env), **options)
  end

  # An etcd with a member on each of some hosts, where the nodes that follow meet.
  def etcd_on(*members)
    skip EtcdCluster.obstacle if EtcdCluster.obstacle
    @cluster = EtcdCluster.new(members.map { |host| [address(host), *ETCD_PORTS] }, commands: members.map { |host| @hosts.command(host) })
  end

  # A node of a job that meets in the test's etcd, or else at the first host's port 29400.
  def node(host, *flags, nnodes:, worker: shell(WORKER), **options)
    meeting = @cluster ? ["etcd", @cluster.endpoints] : ["c10d", "#{address(0)}:#{PORT}"]
    on(host, "--nnodes=#{nnodes}", "--rdzv-backend=#{meeting[0]}", "--rdzv-endpoint=#{meeting[1]}", "--rdzv-id=elastic", *flags, *worker, **options)
  end

  # As when a host loses its power: nothing of it lives to say so. The network is cut first, so that no farewell of the
  # kernel's passes.
  def crash(host)
    @hosts.cut(host)
    kill_all(host)
  end

  # All processes at once, on a network that goes on: the kernel closes their connections. They are stopped first, so that
  # no torchrun sees its worker's end and tells the other hosts.
  def kill_all(host)
    signal_all(host, :STOP)
    signal_all(host, :KILL)
  end

  # Children first: a stopped process whose parent is killed before it is continued by the kernel, with SIGHUP.
  def signal_all(host, name)
    @hosts.processes(host).sort.reverse_each do |pid|
      Process.kill(name, pid)
    rescue Errno::ESRCH
      nil
    end
  end

  def address(host)
    @hosts.ipv4(host)
  end

  # Lets all workers end well.
  def stop_workers
    File.write(File.join(@journal, "stop"), "")
  end

  # The workers of one host fail once.
  def fail_on(host)
    File.write(File.join(@journal, "fail-#{@hosts.host_name(host)}"), "")
  end

  # @return [Array<Life>] all workers that ever ran, in the order of their beginning
  def lives
    File.readlines(File.join(@journal, "lives")).filter_map do |line|
      key, host, rank, world_size, group_rank, nodes, local_rank, restarts, began = line.split
      next unless began

      Life.new(key: key, host: host, rank: rank.to_i, world_size: world_size.to_i, group_rank: group_rank.to_i, nodes: nodes.to_i,
        local_rank: local_rank.to_i, restarts: restarts.to_i, began: began.to_f, last: last_beat(key) || began.to_f)
    end.sort_by(&:began)
  rescue Errno::ENOENT
    []
  end

  def last_beat(key)
    File.foreach(File.join(@journal, "beat-#{key}")).map(&:to_f).max
  rescue Errno::ENOENT
    nil
  end

  def wall
    Process.clock_gettime(Process::CLOCK_REALTIME)
  end

  # Waits until workers with this world size run on these hosts, begun at or after `since`, and returns them by host. All of them are
  # alive, and their ranks are those of one world.
  def await_world(size, on:, since: 0.0, limit: LIMIT)
    names = on.map { |host| @hosts.host_name(host) }
    found = eventually(-> { "a world of #{size} on #{names.join(", ")}; #{situation}" }, limit: limit) do
      now = wall
      living = lives.select { |life| life.began >= since && life.last > now - 0.6 }
      living if living.map(&:host).uniq.sort == names.sort && living.size == size && living.all? { |life| life.world_size == size } &&
        living.map(&:rank).sort == [*0...size]
    end
    found.group_by(&:host).transform_keys { |name| names.index(name).then { |at| on[at] } }
  end

  def situation
    told = @runs.map.with_index { |run, at| "-- torchrun #{at}:\n#{run.out}#{run.err}" }
    "workers: #{lives.last(8).map(&:to_h)}\n#{told.join("\n")}"
  end

  # The one world that runs when all is well ends it.
  def finish_all(*runs)
    stop_workers
    runs.each { |run| assert_code 0, run.finish }
  end

  # No two lives of different worlds overlap, up to the time between two signs of life.
  def refute_together(some, others)
    some.product(others).each do |one, other|
      overlap = [one.last, other.last].min - [one.began, other.began].max
      assert_operator overlap, :<=, 0.0, "together for #{overlap.round(2)} s: #{one.to_h} and #{other.to_h}"
    end
  end
end
