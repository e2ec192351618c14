# frozen_string_literal: true

require_relative "../launch/launch_case"
require_relative "partner"

# Our workers under PyTorch's torchrun, of 1.13 or 2.x.
class PythonTorchrunTest < LaunchCase
  include Partner

  WORKER = <<~RUBY
    require "torch/distributed"
    distributed = Torch::Distributed
    attempt = Integer(ENV.fetch("TORCHELASTIC_RESTART_COUNT"))
    distributed.init_process_group("gloo", timeout: 30)
    sum = distributed.all_reduce(Torch.tensor([distributed.get_rank + 1.0])).item.to_i
    if attempt < Integer(ARGV.first)
      distributed.barrier
      exit 3 if distributed.get_rank == 1
      sleep
    end
    store = (ENV["TORCHELASTIC_USE_AGENT_STORE"] == "True") ? "the agent's" : "rank 0's"
    $stdout.write("rank \#{distributed.get_rank} of \#{distributed.get_world_size}, sum \#{sum}, attempt \#{attempt}, store \#{store}\\n")
    distributed.destroy_process_group
  RUBY

  def setup
    super
    # Its torchrun leaves its own folders behind.
    @leaves_files = true
  end

  def environment(extra = {})
    super({"BUNDLE_GEMFILE" => "#{ROOT}/Gemfile", "RUBYOPT" => "-rbundler/setup", "OMP_NUM_THREADS" => "1", "GLOO_SOCKET_IFNAME" => "lo"}.merge(extra))
  end

  # Runs Python's torchrun with workers in Ruby.
  def workers(*flags, failures: 0, env: {})
    start(*@python.drop(1), *Partner.torchrun(@folder), *flags, "--no_python", RbConfig.ruby, *ruby(WORKER, failures), command: [@python.first], env: env)
      .finish
  end

  # With the launcher's name for each before it.
  def lines(result)
    assert_code 0, result
    result.out.scan(/rank \d of .*/).sort
  end

  def test_in_the_launchers_own_store
    result = workers("--nproc_per_node=2", "--max_restarts=1", "--master_addr=127.0.0.1", "--master_port=#{free_port}", failures: 1)
    skip "PyTorch #{@version} here is built without libuv, which its torchrun wants for its store" if result.err.include?("without libuv")
    assert_equal 2.times.map { |rank| "rank #{rank} of 2, sum 3, attempt 1, store the agent's" }, lines(result)
  end

  def test_in_a_store_of_rank_0
    result = workers("--nproc_per_node=3", "--max_restarts=1", *Partner.in_a_file(@folder), failures: 1, env: Partner::FILE_ENVIRONMENT)
    assert_equal 3.times.map { |rank| "rank #{rank} of 3, sum 6, attempt 1, store rank 0's" }, lines(result)
  end

  def test_a_failure_is_in_its_report
    result = workers("--nproc_per_node=2", *Partner.in_a_file(@folder), failures: 1, env: Partner::FILE_ENVIRONMENT)
    assert_code 1, result
    assert_match(/exitcode\s*: 3/, result.err)
    assert_match(/rank\s*: 1 \(local_rank: 1\)/, result.err)
  end
end
