# frozen_string_literal: true

require "etc"
require_relative "launch_case"

class CommandLineTest < LaunchCase
  def test_help_and_version
    help = run_torchrun("--help")
    assert_code 0, help
    assert_includes help.out, "--nproc-per-node=N|auto|cpu|gpu"
    assert_empty help.err
    assert_equal help.out, run_torchrun("-h").out
    version = File.read("#{ROOT}/include/tddp/version.h")[/"(.+)"/, 1]
    assert_equal "torchrun (torch-ddp) #{version}\n", run_torchrun("--version").out
  end

  def test_an_unknown_flag
    result = run_torchrun("--nproc-per-nod=2", "train.rb")
    assert_code 2, result
    assert_equal "torchrun: unknown flag --nproc-per-nod; did you mean --nproc-per-node? see torchrun --help\n", result.err
  end

  def test_wrong_values
    {
      ["--nproc-per-node=two"] => "torchrun: --nproc-per-node=two: expected a number from 1 to 4096, auto, cpu or gpu\n",
      ["--nnodes=1:3"] => "torchrun: --nnodes=1:3: nodes that come and go need --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT\n",
      ["--nnodes=2", "--node-rank=2", "--master-addr=h"] => "torchrun: --node-rank=2: expected 0 to 1, since --nnodes=2\n",
      ["--master-port=70000"] => "torchrun: --master-port=70000: expected a number from 0 to 65535\n",
      ["--rdzv-backend=etcd"] => "torchrun: --rdzv-backend=etcd: expected static or c10d\n",
      ["--max-restarts"] => "torchrun: --max-restarts=a.rb: expected a number from 0 to 1000000\n"
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
    assert_match(/not executable; chmod \+x/, result.err)
    File.chmod(0o755, "#{@folder}/plain")
    result = run_torchrun("--no-ruby", "./plain")
    assert_code 1, result
    assert_match(/not a program; a script needs a first line/, result.err)
  end

  def test_a_port_in_use_is_named_at_once
    TCPServer.open("127.0.0.1", 0) do |server|
      port = server.addr[1]
      result = run_torchrun("--master-port=#{port}", *shell("echo started"))
      assert_code 1, result
      assert_empty result.out
      assert_match(/127\.0\.0\.1:#{port}/, result.err)
      assert_match(/in use/, result.err)
      assert_operator result.seconds, :<, 3
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
    assert_equal ["2\n"], count("--nproc-per-node=gpu", env: {"CUDA_VISIBLE_DEVICES" => "0,3"})
    assert_equal ["3\n"], count("--nproc-per-node=auto", env: {"CUDA_VISIBLE_DEVICES" => "0,1,2"})
    assert_equal ["#{Etc.nprocessors}\n"], count("--nproc-per-node=auto", env: {"CUDA_VISIBLE_DEVICES" => ""})
    result = run_torchrun("--nproc-per-node=gpu", "a.rb", env: {"CUDA_VISIBLE_DEVICES" => ""})
    assert_code 1, result
    assert_match(/--nproc-per-node=gpu: no GPU here \(CUDA_VISIBLE_DEVICES=""\); expected at least one/, result.err)
  end

  def test_defaults_from_the_environment
    assert_equal ["2\n"], count(env: {"PET_NPROC_PER_NODE" => "2"})
    assert_equal ["1\n"], count("--nproc-per-node=1", env: {"PET_NPROC_PER_NODE" => "2"})
    result = run_torchrun("a.rb", env: {"PET_NNODES" => "x"})
    assert_code 2, result
    assert_equal "torchrun: PET_NNODES=x: expected a number of nodes from 1 to 65536, or MIN:MAX\n", result.err
  end

  def test_ruby_scripts_code_and_arguments
    result = run_torchrun("--nproc-per-node=2", *ruby('puts [ENV["RANK"], RbConfig.ruby, ARGV.inspect].join(" ")', "--nproc-per-node=7", "r${local_rank}"))
    assert_code 0, result
    expected = 2.times.map { |rank| "#{rank} #{RbConfig.ruby} [\"--nproc-per-node=7\", \"r#{rank}\"]\n" }
    assert_equal expected, result.out.lines.sort
    result = run_torchrun("-e", 'puts [ENV["RANK"], ARGV.inspect].join(" ")', "-x", "y")
    assert_equal "0 [\"-x\", \"y\"]\n", result.out
  end

  def test_python_scripts
    skip "python3 is not installed" unless system("command -v python3 > /dev/null")
    File.write("#{@folder}/train.py", "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])")
    assert_equal "0 ['--lr', '1']\n", run_torchrun("train.py", "--lr", "1").out
    assert_equal "-u train.py\n", run_torchrun("train.py", env: {"PYTHON_EXEC" => "echo"}).out
  end

  def test_it_starts_in_milliseconds
    program = shell("exit 0")
    fastest = 5.times.map { run_torchrun("--nproc-per-node=2", *program).seconds }.min
    assert_operator fastest, :<, 0.25
  end
end
