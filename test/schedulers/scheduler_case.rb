# frozen_string_literal: true

require_relative "../launch/launch_case"

# A test in which a scheduler or its launcher starts processes.
class SchedulerCase < LaunchCase
  TRAIN = "#{ROOT}/examples/slurm/train.rb"

  # Meets the others and tells who it is, in one write.
  JOIN = <<~RUBY
    require "torch/distributed"
    distributed = Torch::Distributed
    distributed.init_process_group("gloo", timeout: 30)
    sum = distributed.all_reduce(Torch.tensor([distributed.get_rank + 1.0])).item.to_i
    names = %w[RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR]
    $stdout.write(["sum \#{sum}", *ENV.values_at(*names), ENV["MASTER_PORT"]].join(" ") + "\\n")
    distributed.destroy_process_group
  RUBY

  # This bundle's gems, for processes that know nothing of it.
  def environment(extra = {})
    super({"BUNDLE_GEMFILE" => "#{ROOT}/Gemfile", "RUBYOPT" => "-rbundler/setup", "OMP_NUM_THREADS" => "1", "GLOO_SOCKET_IFNAME" => "lo"}.merge(extra))
  end

  # A Ruby script in the test's folder, as a command.
  def script(code, *arguments)
    [RbConfig.ruby, *ruby(code, *arguments)]
  end

  def run_command(*command, limit: LIMIT, **options)
    start(*command.drop(1), command: [command.first], **options).finish(limit: limit)
  end

  # Lines that workers of JOIN wrote, each as its words, whatever a launcher put before it: mpirun gives its processes a
  # terminal, where torchrun names its workers.
  def joined(result)
    assert_code 0, result
    result.out.scan(/sum (.*)/).map { |(words)| words.split }.sort_by { |words| words[1].to_i }
  end
end
