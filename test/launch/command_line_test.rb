# frozen_string_literal: true

require "etc"
require "open3"
require_relative "launch_case"

class CommandLineTest < LaunchCase
  def test_help_and_version
    help = run_torchrun("--help")
    assert_code 0, help
    assert_includes help.out, "--nproc-per-node=N|auto|cpu|gpu"
    assert_empty help.err
    assert_equal help.out, run_torchrun("-h").out
    version = File.read("#{ROOT}/include/tddp/version.h")[/TDDP_VERSION "(.+)"/, 1]
    assert_equal "torchrun (torch-ddp) #{version}\n", run_torchrun("--version").out
  end

  def test_an_unknown_flag
    result = run_torchrun("--nproc-per-nodes=2", "train.rb")
    assert_code 2, result
    assert_equal "torchrun: unknown flag --nproc-per-nodes; flags of the script stand after it; see torchrun --help\n", result.err
  end

  def test_wrong_values
    {
      ["--nproc-per-node=two"] => "torchrun: --nproc-per-node=two: expected N|auto|cpu|gpu, from 1 to 4096; see torchrun --help\n",
      ["--nnodes=1:3"] => "torchrun: --nnodes=1:3 needs --rdzv-backend=c10d (or etcd) and --rdzv-endpoint=HOST:PORT, as nodes come and go\n",
      ["--nnodes=2", "--node-rank=2", "--master-addr=h"] => "torchrun: --node-rank=2: expected 0 to 1, since --nnodes=2\n",
      ["--master-port=70000"] => "torchrun: --master-port=70000: expected PORT, from 0 to 65535; see torchrun --help\n",
      ["--rdzv-backend=zeus"] => "torchrun: --rdzv-backend=zeus: expected static|c10d|etcd; see torchrun --help\n",
      ["--max-restarts"] => "torchrun: --max-restarts=a.rb: expected N, from 0 to 1000000; see torchrun --help\n"
    }.each do |flags, text|
      result = run_torchrun(*flags, "a.rb")
      assert_code 2, result
      assert_equal text, result.err
    end
    assert_code 2, run_torchrun
  end

  def test_a_missing_script_starts_nothing
    result = run_torchrun("--nproc-per-node=2", "nowhere.rb")
    assert_code 1, result
    assert_equal "torchrun: script nowhere.rb: No such file or directory\n", result.err
    result = run_torchrun("--no-ruby", "no-such-program")
    assert_code 1, result
    assert_match(/\Atorchrun: program no-such-program: not found in PATH/, result.err)
    result = run_torchrun(@folder)
    assert_match(/is a directory/, result.err)
  end

  def test_a_program_that_cannot_run
    File.write("#{@folder}/plain", "text")
    result = run_torchrun("--no-ruby", "./plain")
    assert_code 1, result
    assert_match(/program \.\/plain: Permission denied; chmod \+x/, result.err)
    File.chmod(0o755, "#{@folder}/plain")
    result = run_torchrun("--no-ruby", "./plain")
    assert_code 1, result
    assert_match(/not a program; a script needs a first line/, result.err)
    File.write("#{@folder}/plain", "#!/no/such/interpreter\n")
    result = run_torchrun("--no-ruby", "./plain")
    assert_code 1, result
    assert_match(%r{cannot run ./plain: what runs it is not there: the interpreter that a script's first line names}, result.err)
  end

  # Scripts pass variables on that may be empty.
  def test_values_that_may_be_empty
    result = run_torchrun("--rdzv-endpoint=", "--local-ranks-filter=", "--rdzv-conf=", *shell("echo $RANK"))
    assert_equal "0\n", result.out
    assert_empty result.err
  end

  def test_a_port_in_use_is_named
    TCPServer.open("127.0.0.1", 0) do |server|
      port = server.addr[1]
      result = run_torchrun("--master-port=#{port}", *shell("echo started"))
      assert_code 1, result
      assert_empty result.out
      assert_match(/127\.0\.0\.1:#{port}/, result.err)
      assert_match(/in use/, result.err)
    end
  end

  def test_a_given_port_is_the_workers
    port = free_port
    result = run_torchrun("--master-port=#{port}", *shell("echo $MASTER_ADDR $MASTER_PORT"))
    assert_equal "127.0.0.1 #{port}\n", result.out
  end

  def count(*flags, env: {})
    run_torchrun(*flags, *shell("echo $LOCAL_WORLD_SIZE"), env: env).out.lines.uniq
  end

  def test_processes_can_be_counted
    assert_equal ["3\n"], count("--nproc-per-node=3")
    assert_equal ["#{Etc.nprocessors}\n"], count("--nproc_per_node", "cpu")
    assert_equal ["#{Etc.nprocessors}\n"], count("--nproc-per-node=auto", env: {"CUDA_VISIBLE_DEVICES" => ""})
    result = run_torchrun("--nproc-per-node=gpu", "a.rb", env: {"CUDA_VISIBLE_DEVICES" => ""})
    assert_code 1, result
    assert_match(/--nproc-per-node=gpu: no GPU here \(CUDA_VISIBLE_DEVICES=""/, result.err)
  end

  # The variable alone makes no GPU: as in PyTorch there is none without its driver.
  def test_gpus_that_do_not_exist
    skip "this machine has GPUs" if Dir.glob("/dev/{nvidia[0-9]*,dxg,nvhost-gpu}").any?
    visible = {"CUDA_VISIBLE_DEVICES" => "0,3"}
    assert_equal ["#{Etc.nprocessors}\n"], count("--nproc-per-node=auto", env: visible)
    result = run_torchrun("--nproc-per-node=gpu", "a.rb", env: visible)
    assert_code 1, result
    assert_match(/--nproc-per-node=gpu: no GPU here \(there are no more device files such as \/dev\/nvidia0\); expected at least one/, result.err)
  end

  def test_defaults_from_the_environment
    assert_equal ["2\n"], count(env: {"PET_NPROC_PER_NODE" => "2"})
    assert_equal ["1\n"], count("--nproc-per-node=1", env: {"PET_NPROC_PER_NODE" => "2"})
    result = run_torchrun("a.rb", env: {"PET_NNODES" => "x"})
    assert_code 2, result
    assert_equal "torchrun: PET_NNODES=x: expected N|MIN:MAX, from 1 to 65536; see torchrun --help\n", result.err
  end

  def test_ruby_scripts_code_and_arguments
    result = run_torchrun("--nproc-per-node=2", *ruby('puts [ENV["RANK"], RbConfig.ruby, ARGV.inspect].join(" ")', "--nproc-per-node=7", "r${local_rank}"))
    assert_code 0, result
    expected = 2.times.map { |rank| "#{rank} #{RbConfig.ruby} [\"--nproc-per-node=7\", \"r#{rank}\"]\n" }
    assert_equal expected, result.out.lines.sort
    result = run_torchrun("-e", 'puts [ENV["RANK"], ARGV.inspect].join(" ")', "-x", "y")
    assert_equal "0 [\"-x\", \"y\"]\n", result.out
    assert_equal "0 of 1\n", run_torchrun("-c", 'puts [ENV["RANK"], ENV["WORLD_SIZE"]].join(" of ")').out
    script, = ruby("")
    assert_equal "-- #{script} --lr\n", run_torchrun(script, "--lr", env: {"TDDP_RUBY" => "echo"}).out
  end

  # As the last argument, behind those that the user wrote.
  def test_the_local_rank_as_an_argument
    result = run_torchrun("--nproc-per-node=2", "--pass-local-rank-arg", *ruby("puts ARGV.inspect", "--lr", "1"))
    assert_code 0, result
    assert_equal 2.times.map { |rank| "[\"--lr\", \"1\", \"--local-rank=#{rank}\"]\n" }, result.out.lines.sort
    assert_equal "[]\n", run_torchrun(*ruby("puts ARGV.inspect")).out
  end

  def test_python_scripts
    skip "python3 is not installed" unless system("command -v python3 > /dev/null")
    File.write("#{@folder}/train.py", "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])")
    assert_equal "0 ['--lr', '1']\n", run_torchrun("train.py", "--lr", "1").out
    assert_equal "-u train.py\n", run_torchrun("train.py", env: {"PYTHON_EXEC" => "echo"}).out
  end

  def module_file(path, text = 'puts [$0 == __FILE__, File.basename($0), ENV["RANK"], ARGV.inspect].join(" ")')
    FileUtils.mkdir_p(File.dirname("#{@folder}/#{path}"))
    File.write("#{@folder}/#{path}", text)
  end

  def test_a_library_as_the_program
    module_file("lib/my_gem/train_step.rb")
    expected = "true train_step.rb 0 [\"-x\", \"r0\"]\n"
    result = run_torchrun("-m", "my_gem/train_step", "-x", "r${local_rank}")
    assert_equal ["", expected], [result.err, result.out]
    assert_equal expected, run_torchrun("my_gem/train_step", "-x", "r0", env: {"PET_MODULE" => "1"}).out
    module_file("here.rb")
    assert_equal "true here.rb 0 []\n", run_torchrun("--module", "here").out
    module_file("far/away.rb")
    assert_equal "true away.rb 0 []\n", run_torchrun("-m", "away", env: {"RUBYLIB" => "#{@folder}/far"}).out
    program = run_torchrun("-m", "erb", "--version")
    assert_code 0, program
    assert_match(/\d\.\d/, program.out + program.err)
  end

  def test_a_library_that_is_nowhere
    result = run_torchrun("-m", "no_such/library")
    assert_code 1, result
    assert_includes result.err, "torchrun: -m no_such/library: no gem has such a program, and the load path, ./lib and " \
      "the current folder have no no_such/library.rb\n"
  end

  def test_local_ranks_that_are_not_there
    result = run_torchrun("--nproc-per-node=2", "--tee=0:3,2:1", *shell("exit 0"))
    assert_code 2, result
    assert_equal "torchrun: --tee names local rank 2: expected 0 to 1, since this node runs 2 workers\n", result.err
    result = run_torchrun("--nproc-per-node=xpu", "a.rb")
    assert_code 2, result
    assert_includes result.err, "--nproc-per-node=xpu: "
  end

  def completion(shell)
    result = run_torchrun("--print-completion", shell)
    assert_code 0, result
    assert_empty result.err
    result.out
  end

  def test_completion_names_every_flag
    long = run_torchrun("--help").out.scan(/(?:^  |, )--([a-z-]+)/).flatten
    assert_operator long.size, :>, 35
    %w[bash zsh fish].each do |shell|
      text = completion(shell)
      long.each { |name| assert_match(/^--#{name}=?\t/, text.sub("'--", "'\n--")) }
    end
    assert_code 2, run_torchrun("--print-completion=ksh")
  end

  def test_completion_that_is_not_installed
    FileUtils.cp(BINARY, "#{@folder}/torchrun")
    out, status = Open3.capture2e(PLAIN, "#{@folder}/torchrun", "--print-completion", "zsh")
    assert_equal 1, status.exitstatus
    assert_match(%r{\Atorchrun: --print-completion: #{File.realpath(@folder)}/\.\./share/zsh/site-functions/_torchrun: No such file or directory; }, out)
  end

  SYNTAX = {"bash" => %w[bash -n], "zsh" => %w[zsh -n], "fish" => %w[fish --no-execute]}.freeze

  SYNTAX.each do |shell, check|
    define_method(:"test_what_#{shell}_says_of_its_completion") do
      skip "#{shell} is not installed" unless system("command -v #{shell} > /dev/null")
      path = "#{@folder}/completion"
      File.write(path, completion(shell))
      output, status = Open3.capture2e(*check, path)
      assert status.success?, output
      assert_empty output
    end
  end

  # What bash would offer for a command line that is split as it splits it, the cursor at its end.
  def offered(*words)
    script = 'source "$1"; shift; COMP_WORDS=(torchrun "$@"); COMP_CWORD=$#; _torchrun; printf "%s\n" "${COMPREPLY[@]}"'
    output, status = Open3.capture2e("bash", "-c", script, "bash", @completion, *words, chdir: @folder)
    assert status.success?, output
    output.lines(chomp: true)
  end

  def test_completion_in_bash
    skip "bash is not installed" unless system("command -v bash > /dev/null")
    @completion = "#{@folder}/completion"
    File.write(@completion, completion("bash"))
    File.write("#{@folder}/train.rb", "")
    Dir.mkdir("#{@folder}/logs")
    assert_equal %w[--node-rank= --no-ruby --no-python --nnodes= --nproc-per-node= --numa-binding=].sort, offered("--n").sort
    assert_equal %w[--nproc-per-node=], offered("--nproc_p")
    assert_equal %w[auto cpu gpu], offered("--nproc-per-node", "=", "")
    assert_equal %w[auto cpu gpu], offered("--nproc-per-node", "=")
    assert_equal %w[cpu], offered("--nproc_per_node", "c")
    assert_equal %w[c10d], offered("--standalone", "--rdzv-backend", "=", "c")
    assert_equal %w[0 1 2 3], offered("--tee", "=", "0", ":", "")
    assert_equal %w[logs], offered("--log-dir", "l")
    assert_equal %w[train.rb], offered("--nproc-per-node", "=", "2", "tr")
    assert_equal %w[train.rb], offered("--rdzv-endpoint", "=", "::", "1", "tr")
    assert_equal %w[train.rb], offered("train.rb", "tr")
    assert_equal [""], offered("train.rb", "--n")
  end
end
