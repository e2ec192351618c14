# frozen_string_literal: true

require "etc"
require "json"
require "open3"
require_relative "../launch/launch_case"

# Every flag that --help lists, by what it does: spelt with dashes and with underscores, and as a PET_* variable. A new flag
# without a test fails.
class LaunchFlagsTest < LaunchCase
  SAY = 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK $GROUP_RANK/$GROUP_WORLD_SIZE $ROLE_NAME $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID $TORCHELASTIC_RESTART_COUNT"'

  # Flags that are no setting of a job and have no variable, or a letter alone.
  BARE = %w[e help version check print-completion].freeze

  # The ways of giving a flag, as arguments and environment; true: a switch.
  def spellings(name, value)
    with = ->(text) { (value == true) ? ["--#{text}"] : ["--#{text}=#{value}"] }
    words = (value == true) ? [] : [["--#{name}", value.to_s]]
    arguments = [with.call(name), with.call(name.tr("-", "_")), *words]
    arguments.uniq.map { |given| [given, {}] } + [[[], {"PET_#{name.upcase.tr("-", "_")}" => (value == true) ? "1" : value.to_s}]]
  end

  # Runs torchrun with the flag in each spelling.
  def each_run(name, value, *rest, code: 0, env: {}, **options)
    spellings(name, value).map do |given, variables|
      result = run_torchrun(*given, *rest, env: variables.merge(env), **options)
      assert_code code, result
      yield result
      result
    end
  end

  # Two nodes; the flag is for both.
  def each_pair(name, value, *rest)
    spellings(name, value).each do |given, variables|
      port = free_port
      flags = {"--nnodes" => 2, "--rdzv-backend" => "c10d", "--rdzv-endpoint" => "127.0.0.1:#{port}", "--rdzv-id" => "flags"}
        .except("--#{name}").map { |flag, of| "#{flag}=#{of}" }
      runs = [0, 1].map { |rank| start(*flags, *given, *("--node-rank=#{rank}" unless name == "node-rank"), *rest, env: variables) }
      results = runs.map(&:finish)
      results.each { |result| assert_code 0, result }
      yield results.map { |result| result.out.split }
    end
  end

  def said(result)
    result.out.lines(chomp: true).sort
  end

  CHECKS = {}

  def self.flag(name, &block)
    CHECKS[name] = block
    define_method(:"test_#{name.tr("-", "_")}", &block)
  end

  flag("nproc-per-node") { each_run("nproc-per-node", 3, *shell(SAY)) { |result| assert_equal %w[0/3 1/3 2/3], said(result).map { |line| line[/\S+/] } } }

  flag("health-check-port") do
    each_run("health-check-port", 0, *shell("exit 0")) { |result| assert_match(/^torchrun: health check on port \d+$/, result.err) }
  end

  flag("standalone") do
    elsewhere = %w[--rdzv-backend=c10d --rdzv-endpoint=192.0.2.1:1 --rdzv-id=x]
    each_run("standalone", true, *elsewhere, *shell(SAY)) { |result| assert_match(/ 127\.0\.0\.1:\d+ /, result.out) }
  end

  flag("e") { assert_equal "2\n", run_torchrun("-e", "puts 1 + 1").out }

  flag("module") do
    FileUtils.mkdir_p(File.join(@folder, "lib/deep"))
    File.write(File.join(@folder, "lib/deep/tool.rb"), "puts [:tool, *ARGV].join(' ')")
    each_run("module", true, "deep/tool", "a", env: {"RUBYLIB" => File.join(@folder, "lib")}) { |result| assert_equal "tool a\n", result.out }
    assert_equal "tool\n", run_torchrun("-m", "deep/tool", env: {"RUBYLIB" => File.join(@folder, "lib")}).out
  end

  %w[no-ruby no-python].each do |name|
    flag(name) { each_run(name, true, "/bin/echo", "plain") { |result| assert_equal "plain\n", result.out } }
  end

  flag("role") { each_run("role", "trainer", *shell(SAY)) { |result| assert_match(/ trainer /, result.out) } }

  flag("virtual-local-rank") do
    each_run("virtual-local-rank", true, "--nproc-per-node=2", *shell('echo "$RANK $LOCAL_RANK"')) { |result| assert_equal ["0 0", "1 0"], said(result) }
  end

  flag("numa-binding") do
    skip "one core cannot be shared" if Etc.nprocessors < 2
    each_run("numa-binding", "cores", "--nproc-per-node=2", *shell("grep Cpus_allowed_list /proc/self/status")) do |result|
      assert_equal 2, said(result).uniq.size, result.out
    end
  end

  flag("nnodes") { each_pair("nnodes", 2, *shell(SAY)) { |worlds| assert_equal %w[0/2 1/2], worlds.map { |words| words[2] } } }

  flag("node-rank") do
    spellings("node-rank", 1).each do |given, variables|
      flags = ["--nnodes=2", "--master-addr=127.0.0.1", "--master-port=#{free_port}"]
      runs = [start(*flags, "--node-rank=0", *shell(SAY)), start(*flags, *given, *shell(SAY), env: variables)]
      assert_equal ["0/2", "1/2"], runs.map { |run| run.finish.out.split[2] }
    end
  end

  flag("master-addr") { each_run("master-addr", "127.0.0.1", *shell(SAY)) { |result| assert_match(/ 127\.0\.0\.1:\d+ /, result.out) } }

  flag("master-port") do
    port = free_port
    each_run("master-port", port, *shell(SAY)) { |result| assert_match(/:#{port} /, result.out) }
  end

  flag("local-addr") do
    each_pair("local-addr", "127.0.0.1", *shell(SAY)) { |worlds| worlds.each { |words| assert_match(/\A127\.0\.0\.1:/, words[4]) } }
  end

  flag("rdzv-backend") { each_pair("rdzv-backend", "c10d", *shell(SAY)) { |worlds| assert_equal %w[0/2 1/2], worlds.map(&:first) } }

  flag("rdzv-endpoint") do
    port = free_port
    each_pair("rdzv-endpoint", "127.0.0.1:#{port}", *shell(SAY)) { |worlds| assert_equal %w[0/2 1/2], worlds.map(&:first) }
  end

  flag("rdzv-id") { each_pair("rdzv-id", "my-name", *shell(SAY)) { |worlds| worlds.each { |words| assert_equal "my-name", words[5] } } }

  flag("rdzv-conf") do
    each_run("rdzv-conf", "join_timeout=1", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=x", "--node-rank=0", "--rdzv-endpoint=127.0.0.1:#{free_port}",
      *shell(SAY), code: 1) { |result| assert_match(/within 1 s/, result.err) }
  end

  flag("max-restarts") do
    each_run("max-restarts", 1, *shell("#{SAY}; [ $TORCHELASTIC_RESTART_COUNT = 1 ]")) { |result| assert_equal %w[0 1], said(result).map { |line| line[/\S+\z/] }.sort }
  end

  flag("shutdown-timeout") do
    worker = shell("trap '' TERM; if [ $RANK = 1 ]; then until [ -e deaf ]; do sleep 0.05; done; exit 3; fi; : > deaf; #{IDLE}")
    each_run("shutdown-timeout", 0.2, "--nproc-per-node=2", *worker, code: 1) do |result|
      assert_match(/rank 0 \(pid \d+\) did not end within 0.2 s/, result.err)
      File.delete("#{@folder}/deaf")
    end
  end

  flag("signals-to-handle") do
    spellings("signals-to-handle", "SIGUSR1,SIGTERM").each do |given, variables|
      run = start(*given, *shell("trap 'echo got; exit 0' USR1; echo ready; #{IDLE}"), env: variables)
      run.await(/ready/)
      run.signal(:USR1)
      result = run.finish
      assert_code 128 + Signal.list["USR1"], result
      assert_includes result.out, "got"
    end
  end

  flag("report-file") do
    file = File.join(@folder, "report.json")
    each_run("report-file", file, *shell("exit 5"), code: 1) do
      assert_match(/\b5\b/, JSON.generate(JSON.parse(File.read(file))))
      File.delete(file)
    end
  end

  # What lies in the attempt's folder of the only run in this log folder; the folder is emptied.
  def logged(folder)
    files = Dir.glob(File.join(folder, "*/attempt_0/**/*")).select { |path| File.file?(path) }
    found = files.to_h { |path| [path[%r{attempt_0/(.+)}, 1], File.read(path)] }
    FileUtils.rm_rf(folder)
    found
  end

  TWICE = "echo out $RANK; echo err $RANK >&2"

  flag("log-dir") do
    logs = File.join(@folder, "logs")
    each_run("log-dir", logs, "--redirects=3", *shell(TWICE)) do |result|
      assert_equal({"0/stdout.log" => "out 0\n", "0/stderr.log" => "err 0\n"}, logged(logs).slice("0/stdout.log", "0/stderr.log"))
      assert_empty result.out
    end
  end

  flag("redirects") do
    logs = File.join(@folder, "logs")
    each_run("redirects", "0:1,1:2", "--log-dir=#{logs}", "--nproc-per-node=2", *shell(TWICE)) do |result|
      assert_equal({"0/stdout.log" => "out 0\n", "1/stderr.log" => "err 1\n"}, logged(logs).reject { |name, _| name.end_with?("json") })
      assert_equal ["out 1"], said(result)
    end
    assert_code 0, run_torchrun("-r", "1", "--log-dir=#{logs}", *shell(TWICE))
    assert_equal "out 0\n", logged(logs)["0/stdout.log"]
  end

  flag("tee") do
    logs = File.join(@folder, "logs")
    each_run("tee", "1", "--log-dir=#{logs}", "--nproc-per-node=2", *shell(TWICE)) do |result|
      assert_equal %W[out\ 0\n out\ 1\n], logged(logs).values_at("0/stdout.log", "1/stdout.log")
      assert_equal ["[default0]:out 0", "[default1]:out 1"], said(result)
    end
    assert_code 0, run_torchrun("-t", "3", "--log-dir=#{logs}", *shell(TWICE))
    assert_equal "err 0\n", logged(logs)["0/stderr.log"]
  end

  flag("log-line-prefix-template") do
    each_run("log-line-prefix-template", "<${role_name}.${rank}.${local_rank}>", "--nproc-per-node=2", *shell("echo line")) do |result|
      assert_equal ["<default.0.0>line", "<default.1.1>line"], said(result)
    end
  end

  flag("local-ranks-filter") { each_run("local-ranks-filter", "1,2", "--nproc-per-node=4", *shell("echo $RANK")) { |result| assert_equal %w[1 2], said(result) } }

  {"stdout" => "", "stderr" => " >&2"}.each do |stream, direction|
    flag("duplicate-#{stream}-filters") do
      logs = File.join(@folder, "logs")
      worker = shell("echo apple#{direction}; echo pear#{direction}; echo a,b#{direction}")
      each_run("duplicate-#{stream}-filters", "apple,a,,b", "--log-dir=#{logs}", *worker) do
        assert_equal "apple\na,b\n", logged(logs)["filtered_#{stream}.log"].gsub(/^\[\w+\]:/, "")
      end
    end
  end

  flag("check") do
    checker = File.join(File.dirname(BINARY), "torchrun-check")
    skip "#{checker} is not built" unless File.executable?(checker)
    result = run_torchrun("--check", env: {"TDDP_BACKEND_PATH" => "#{ROOT}/lib/torch_ddp/native/lib"})
    verdict = result.out[/^verdict: .+/]
    assert verdict, result.out
    # On a machine that does much else a link may be slow indeed (check_test.rb).
    assert_code(verdict.start_with?("verdict: good") ? 0 : 1, result)
  end

  {"monitor-interval" => "0.5", "start-method" => "fork", "event-log-handler" => "null", "logs-specs" => "default"}.each do |name, value|
    flag(name) { each_run(name, value, *shell("echo fine")) { |result| assert_equal "fine\n", result.out } }
  end

  flag("run-path") { each_run("run-path", true, *ruby("puts :fine")) { |result| assert_equal "fine\n", result.out } }

  flag("print-completion") do
    %w[bash zsh fish].each do |name|
      result = run_torchrun("--print-completion", name)
      assert_code 0, result
      assert_includes result.out, "nproc-per-node"
      next unless system("sh", "-c", "command -v #{name}", out: File::NULL)

      out, status = Open3.capture2e(name, "-n", stdin_data: result.out)
      assert status.success?, "#{name}: #{out}"
    end
  end

  flag("pass-local-rank-arg") { assert_equal "x --local-rank=0\n", run_torchrun("--pass-local-rank-arg", *shell('echo "$@"', "x")).out }

  flag("help") { assert_equal run_torchrun("--help").out, run_torchrun("-h").out }

  flag("version") { assert_match(/\Atorchrun \(torch-ddp\) \d+\.\d+\.\d+\n\z/, run_torchrun("--version").out) }

  def test_every_flag_of_the_help_has_a_test
    listed = run_torchrun("--help").out.lines.flat_map { |line| line[/\A  (-\S.*?)(?:\s{2,}|$)/, 1].to_s.scan(/(?<![\w-])--?([a-z][a-z-]*)/).flatten }
    listed = listed.uniq.reject { |name| name.size == 1 && name != "e" }
    assert_operator listed.size, :>, 35
    assert_equal listed.sort, CHECKS.keys.sort
  end

  # Choices outside the list, and values that are none, are refused before anything starts.
  def test_wrong_values_are_refused
    wrong = {"nproc-per-node" => "0", "nnodes" => "3:2", "node-rank" => "x", "master-port" => "70000", "rdzv-backend" => "etcd-v2", "rdzv-conf" => "nonsense=1",
             "rdzv-endpoint" => "a:99999", "max-restarts" => "-1", "shutdown-timeout" => "long", "signals-to-handle" => "SIGNOT", "redirects" => "4", "tee" => "0:9",
             "local-ranks-filter" => "a", "numa-binding" => "moon", "monitor-interval" => "never", "start-method" => "clone",
             "event-log-handler" => "mine", "logs-specs" => "other", "print-completion" => "csh", "standalone" => "perhaps"}
    wrong.each do |name, value|
      result = run_torchrun("--#{name}=#{value}", *shell("echo started"))
      assert_code 2, result
      assert_empty result.out
      assert_match(/\Atorchrun: .*#{name}.*\n\z/, result.err)
    end
  end

  # A variable that is wrong is told by its own name.
  def test_a_wrong_variable
    result = run_torchrun(*shell("echo no"), env: {"PET_NPROC_PER_NODE" => "many"})
    assert_code 2, result
    assert_match(/PET_NPROC_PER_NODE/, result.err)
  end
end
