# frozen_string_literal: true

# What a launcher costs: two workers that exit at once, started by torchrun, by a plain fork and exec, and by Python's
# torchrun. The contestants take turns, so that whatever else the machine does falls on all of them. The plain start's
# median is taken off the launchers' own.
#
#   ruby test/bench/launch/launch.rb --rounds 10 --json
#
# Memory is taken while two workers sleep, of the launcher's processes without the workers: PSS (what it shares with others counts in
# part), and the peak of the resident set of each process, added up (what they share counts in each).
#
# PYTHON names the interpreter that has torch (Debian: python3-torch and /usr/bin/python3). With the root folder of `rake test:debian13`
# in the cache, its PyTorch runs as well.

require "json"
require "open3"
require "optparse"
require_relative "../../../ext/setup/roots"

ROOT = File.expand_path("../../..", __dir__)
OPTIONS = {rounds: 10, runs: 5}
OptionParser.new do |opts|
  opts.on("--rounds N", Integer, "rounds, in each of which Python's torchrun runs once (#{OPTIONS[:rounds]})")
  opts.on("--runs N", Integer, "runs of torchrun and of the plain start in a round (#{OPTIONS[:runs]})")
  opts.on("--torchrun PATH", "the binary (lib/torch_ddp/native/bin/torchrun)")
  opts.on("--plain PATH", "the plain start (build/native/bench/bench_plain_start)")
  opts.on("--[no-]python", "beside Python's torchrun (yes)")
  opts.on("--json", "print the figures as JSON too")
end.parse!(into: OPTIONS)

# One way to start two workers.
class Contestant
  LIMIT = 60
  # As at a user's: what a bundle or a launcher around this put there is not.
  ENVIRONMENT = %w[RUBYOPT RUBYLIB BUNDLE_GEMFILE OMP_NUM_THREADS].to_h { |name| [name, nil] }.merge("TORCHELASTIC_ERROR_FILE" => nil)

  attr_reader :title, :version, :seconds, :pss, :peak

  # @param command [Proc] what starts a worker's command: its words in, the whole command out
  def initialize(title, version, env: {}, &command)
    @title = title
    @version = version
    @env = ENVIRONMENT.merge(env)
    @command = command
    @seconds = []
    @pss = []
    @peak = []
  end

  def time
    started = now
    status = ended(launch("/bin/true"))
    @seconds << (now - started)
    raise "#{title} failed: #{status}" unless status.success?
  end

  # Two workers sleep for so long that both are seen.
  def memory
    pid = launch("/bin/sleep", "0.5")
    stop = now + LIMIT
    sleep 0.002 until sleepers(pid).size == 2 || now > stop
    sleep 0.1
    own = family(pid).reject { |member| sleeping?(member) }
    @pss << own.sum { |member| kilobytes(member, "smaps_rollup", "Pss") }
    @peak << own.sum { |member| kilobytes(member, "status", "VmHWM") }
    @processes = own.size
    status = ended(pid)
    raise "#{title} failed: #{status}" unless status.success?
  end

  def median(list)
    sorted = list.sort
    (sorted[(sorted.size - 1) / 2] + sorted[sorted.size / 2]) / 2.0
  end

  def milliseconds
    median(seconds) * 1000
  end

  # Milliseconds within which this part of the runs was done.
  def within(part)
    seconds.sort[((seconds.size - 1) * part).round] * 1000
  end

  def figures(plain)
    {"version" => version, "runs" => seconds.size, "median_ms" => milliseconds.round(2), "fastest_ms" => within(0).round(2),
     "p90_ms" => within(0.9).round(2), "beyond_plain_ms" => (milliseconds - plain.milliseconds).round(2),
     "pss_mib" => (median(pss) / 1024.0).round(2), "peak_rss_sum_mib" => (median(peak) / 1024.0).round(2), "processes" => @processes}
  end

  private

  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC)
  end

  def launch(*worker)
    Process.spawn(@env, *@command.call(worker), in: File::NULL, out: File::NULL, err: File::NULL)
  end

  def ended(pid)
    Process.wait2(pid).last
  end

  # This process and what descends from it.
  def family(pid)
    parents = Dir.children("/proc").grep(/\A\d+\z/).to_h do |name|
      [name.to_i, File.read("/proc/#{name}/stat").rpartition(")").last.split[1].to_i]
    rescue SystemCallError
      [0, 0]
    end
    found = [pid]
    found.each { |member| found.concat(parents.select { |_, parent| parent == member }.keys) }
    found
  end

  def sleeping?(pid)
    File.read("/proc/#{pid}/cmdline").start_with?("/bin/sleep")
  rescue SystemCallError
    false
  end

  def sleepers(pid)
    family(pid).select { |member| sleeping?(member) }
  end

  def kilobytes(pid, file, name)
    File.read("/proc/#{pid}/#{file}")[/^#{name}:\s+(\d+)/, 1].to_i
  rescue SystemCallError
    0
  end
end

# Python's torchrun, in the forms in which Debian's builds start workers.
module PythonTorchrun
  # The maps of streams are what PyTorch 1.13 on Python 3.11 can read: without them it ends with an AttributeError. The interval
  # is what later ones have by themselves.
  OLD = %w[--standalone --monitor_interval=0.1 --redirects=0:1 --tee=0:1 --nproc_per_node=2 --no_python].freeze
  # Debian's builds since 2.0 have no libuv, without which PyTorch's store does not start: the nodes meet through a file.
  NEW = %w[--rdzv-backend=c10d --rdzv-conf=store_type=file,is_host=1 --rdzv-id=bench --nproc-per-node=2 --no-python].freeze
  RUN = %w[-m torch.distributed.run].freeze
  # Seen in the other root as well.
  FOLDER = "/dev/shm/bench-launch-#{Process.pid}"

  module_function

  def all
    [here, debian13].compact
  end

  def here
    python = ENV.fetch("PYTHON", "/usr/bin/python3")
    version = version(python) or return warn("#{python} has no torch: install python3-torch, or name another interpreter with PYTHON=...")
    contestant("Python's torchrun", version, [python])
  end

  # In a mount namespace that lasts as long as this program; it is entered anew for each run, which takes some ms.
  def debian13
    root = Setup::Debian13.new.folder
    return unless Process.uid.zero? && File.directory?(root)

    reader, writer = IO.pipe
    holder = Process.spawn("unshare", "--mount", "--propagation", "private", "sh", "-c",
      'mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && echo ready && exec sleep 86400', "sh", root, out: writer)
    writer.close
    at_exit { Process.kill(:KILL, holder) }
    return warn("the Debian 13 root cannot be entered") unless reader.gets

    enter = ["nsenter", "--mount=/proc/#{holder}/ns/mnt", "chroot", root, "python3"]
    version = version(*enter)
    contestant("Python's torchrun (Debian 13)", version, enter) if version
  end

  def version(*python)
    out, status = Open3.capture2(*python, "-c", "import torch, platform; print(f'PyTorch {torch.__version__}, Python {platform.python_version()}')",
      err: File::NULL)
    out.strip if status.success?
  end

  def contestant(title, version, python)
    number = 0
    Contestant.new(title, version, env: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE" => "1", "TMPDIR" => FOLDER}) do |worker|
      form = version.match?(/PyTorch 1\./) ? OLD : [*NEW, "--rdzv-endpoint=#{FOLDER}/#{number += 1}"]
      [*python, *RUN, *form, *worker]
    end
  end
end

torchrun = OPTIONS[:torchrun] || File.join(ROOT, "lib/torch_ddp/native/bin/torchrun")
plain_start = OPTIONS[:plain] || File.join(ROOT, "build/native/bench/bench_plain_start")
[torchrun, plain_start].each { |path| abort "#{path} is not built: rake bench:launch builds it" unless File.executable?(path) }

Dir.mkdir(PythonTorchrun::FOLDER)
at_exit { FileUtils.rm_rf(PythonTorchrun::FOLDER) }
kernel = File.read("/proc/sys/kernel/osrelease").strip
plain = Contestant.new("fork and exec", "kernel #{kernel}") { |worker| [plain_start, "2", *worker] }
ours = Contestant.new("torchrun", Open3.capture2(torchrun, "--version").first.strip) { |worker| [torchrun, "--nproc-per-node=2", "--no-ruby", *worker] }
pythons = (OPTIONS[:python] == false) ? [] : PythonTorchrun.all

# The first run of each reads its files from the disk.
[plain, ours, *pythons].each do |contestant|
  contestant.time
  contestant.seconds.clear
end
OPTIONS[:rounds].times do |round|
  OPTIONS[:runs].times { |run| (run + round).even? ? [plain, ours].each(&:time) : [ours, plain].each(&:time) }
  pythons.each(&:time)
  [plain, ours].each(&:memory)
  pythons.each(&:memory) if round < 3
end

figures = [plain, ours, *pythons].to_h { |contestant| [contestant.title, contestant.figures(plain)] }
puts "two workers that exit at once, #{OPTIONS[:rounds]} rounds; milliseconds, and MiB of the launcher's own processes", "",
  " " * 30 + ["median", "fastest", "90 %", "beyond", "PSS", "peak RSS"].map { |name| name.rjust(10) }.join + "  proc  runs"
figures.each do |title, of|
  puts format("%-30s %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f %5d %5d   %s", title,
    *of.values_at("median_ms", "fastest_ms", "p90_ms", "beyond_plain_ms", "pss_mib", "peak_rss_sum_mib", "processes", "runs", "version"))
end
puts JSON.generate(figures) if OPTIONS[:json]
