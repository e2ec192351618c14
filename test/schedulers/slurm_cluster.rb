# frozen_string_literal: true

require "etc"
require "fileutils"
require "open3"
require "socket"
require "tmpdir"
require_relative "../held_ports"

# A Slurm of this machine alone, from Debian's packages, in a folder of its own: munged, slurmctld and a slurmd for each
# of its two nodes, which are this machine under two names. All listen on ports of their own and end with it.
class SlurmCluster
  include HeldPorts

  PROGRAMS = %w[munged slurmctld slurmd srun sbatch scancel scontrol squeue sinfo].freeze
  LIMIT = 60

  class Failure < StandardError
  end

  # @return [String, nil] why there can be none
  def self.obstacle
    missing = PROGRAMS.reject { |name| program(name) }
    return "not installed: #{missing.join(", ")} (Debian's slurm-wlm and munge; rake test:schedulers installs them)" if missing.any?

    "slurmd has to run as root" unless Process.uid.zero?
  end

  # Servers are often not in a user's PATH.
  def self.program(name)
    [*ENV["PATH"].split(":"), "/usr/sbin", "/sbin"].map { |folder| File.join(folder, name) }.find { |path| File.executable?(path) }
  end

  # One for all tests of a run.
  #
  # @return [SlurmCluster]
  def self.shared
    raise @failure if @failure

    @shared ||= new.tap do |cluster|
      Minitest.after_run { cluster.stop }
      cluster.start
    end
  rescue Failure => e
    raise @failure = e
  end

  attr_reader :nodes

  def initialize
    @folder = Dir.mktmpdir("slurm-test")
    File.chmod(0o755, @folder)
    @name = Socket.gethostname[/\A[^.]+/]
    # Slurm wants the machine's own name first.
    @nodes = [@name, "localhost"].uniq
    @pids = {}
  end

  def start
    write_configuration
    run("munged", "--foreground", "--force", "--num-threads=2", "--socket=#{path("munge.socket")}", "--key-file=#{path("munge.key")}",
      "--pid-file=#{path("munged.pid")}", "--log-file=#{path("munged.log")}", "--seed-file=#{path("munge.seed")}")
    await("munged's socket") { File.socket?(path("munge.socket")) }
    run("slurmctld", "-D", "-f", configuration)
    @nodes.each { |node| run("slurmd", "-D", "-f", configuration, "-N", node, as: "slurmd-#{node}") }
    await("#{@nodes.size} idle nodes") { idle? }
  end

  # @return [Boolean] whether no job is running, nor ending
  def idle?
    ask("sinfo", "-h", "-N", "-o", "%t").split == ["idle"] * @nodes.size
  end

  # @return [Hash{String => String}] what Slurm's commands need
  def environment
    {"SLURM_CONF" => configuration, "PATH" => "#{ENV["PATH"]}:/usr/sbin"}
  end

  # @return [String] what one of Slurm's commands says
  def ask(*command)
    out, status = Open3.capture2e(environment, *command)
    status.success? ? out : ""
  end

  # Ends all jobs.
  def cancel
    ask("scancel", "--full", "--user=#{Etc.getpwuid.name}")
  end

  def stop
    cancel if @pids.key?("slurmctld")
    @pids.keys.reverse_each { |name| finish(@pids.delete(name)) }
    release_ports
    FileUtils.rm_rf(@folder)
  end

  private

  def path(name)
    File.join(@folder, name)
  end

  def configuration
    path("slurm.conf")
  end

  def run(program, *arguments, as: program)
    log = path("#{as}.out")
    @pids[as] = Process.spawn({"SLURM_CONF" => configuration}, self.class.program(program), *arguments, in: File::NULL, out: log,
      err: %i[child out], pgroup: true)
  end

  def finish(pid)
    Process.kill(:TERM, pid)
    stop = now + 5
    until Process.wait(pid, Process::WNOHANG)
      return Process.kill(:KILL, pid) && Process.wait(pid) if now > stop

      sleep 0.02
    end
  rescue Errno::ESRCH, Errno::ECHILD
    nil
  end

  def await(wanted)
    stop = now + LIMIT
    until yield
      raise Failure, "waited #{LIMIT} s for #{wanted}\n#{logs}" if now > stop

      sleep 0.05
    end
  end

  def logs
    Dir.glob(path("*.{out,log}")).map { |file| "#{File.basename(file)}:\n#{File.read(file)}" }.join("\n")
  end

  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC)
  end

  def write_configuration
    File.binwrite(path("munge.key"), Random.bytes(128))
    File.chmod(0o600, path("munge.key"))
    Dir.mkdir(path("state"))
    control, *ports = Array.new(1 + @nodes.size) { held_port }
    @nodes.each { |node| Dir.mkdir(path("spool-#{node}")) }
    # More cores than there are: what runs here waits for the others, and hardly computes.
    nodes = @nodes.zip(ports).map { |node, port| "NodeName=#{node} NodeHostname=#{@name} NodeAddr=127.0.0.1 Port=#{port} CPUs=16 State=UNKNOWN" }
    File.write(configuration, <<~CONF)
      ClusterName=test
      SlurmctldHost=#{@name}(127.0.0.1)
      SlurmctldPort=#{control}
      AuthType=auth/munge
      AuthInfo=socket=#{path("munge.socket")}
      CredType=cred/munge
      SlurmUser=#{Etc.getpwuid.name}
      StateSaveLocation=#{path("state")}
      SlurmdSpoolDir=#{path("spool-%n")}
      SlurmctldPidFile=#{path("slurmctld.pid")}
      SlurmdPidFile=#{path("slurmd-%n.pid")}
      SlurmdParameters=config_overrides
      SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
      ProctrackType=proctrack/linuxproc
      TaskPlugin=task/none
      SelectType=select/cons_tres
      SelectTypeParameters=CR_Core
      MpiDefault=none
      ReturnToService=2
      KillWait=5
      MailProg=/bin/true
      #{nodes.join("\n")}
      PartitionName=main Nodes=#{@nodes.join(",")} Default=YES MaxTime=INFINITE State=UP
    CONF
  end
end
