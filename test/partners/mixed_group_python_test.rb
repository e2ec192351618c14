# frozen_string_literal: true

require "minitest/autorun"
require "timeout"
require "torch/distributed"
require_relative "partner"

# A rank of PyTorch's own in a group of ours: the two wait for each other in one store, in different ways.
class MixedGroupPythonTest < Minitest::Test
  include Partner

  Distributed = Torch::Distributed
  SCRIPT = <<~PYTHON
    import datetime, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
  PYTHON

  # Either may host the store; PyTorch's wait as long as they were told, so that one is ended. Debian's newer ones have no libuv, and
  # yet ask for it.
  def test_a_rank_of_pytorch_is_named_at_once
    [0, 1].each do |ours|
      port = Distributed.free_port
      place = {"MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => port.to_s, "WORLD_SIZE" => "2", "USE_LIBUV" => "0"}
      pid = Process.spawn(place.merge("RANK" => (1 - ours).to_s), *@python, "-c", SCRIPT, %i[out err] => File::NULL)
      await_store(port, pid) if ours == 1 # to import torch takes as long as it takes
      error = assert_raises(Distributed::MismatchError) do
        Distributed.init_process_group("gloo", init_method: "tcp://127.0.0.1:#{port}", rank: ours, world_size: 2, timeout: 50)
      end
      assert_match(/rank #{1 - ours} of group "default_pg" is a process of PyTorch, which has begun to meet the others in the store at/, error.message)
    ensure
      Process.kill(:KILL, pid)
      Process.wait(pid)
    end
  end

  # Until a process listens on the port; nothing connects to it for that.
  def await_store(port, pid)
    listens = /^\s*\d+: \h+:#{format("%04X", port)} \h+:0000 0A /
    until %w[tcp tcp6].any? { |kind| File.read("/proc/net/#{kind}").match?(listens) }
      flunk "PyTorch's process has ended" if File.read("/proc/#{pid}/stat")[/\) (\S)/, 1] == "Z"
      sleep 0.05
    end
  end
end
