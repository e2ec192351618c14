# frozen_string_literal: true

require_relative "../ruby/test_helper"

# A rank is killed while the others are in an operation that it does not come to, whichever that is: each of them says who
# it was, long before the operation's time is over.
class LostRanksTest < Minitest::Test
  LARGE = 2_000_000

  # What the others do: their rank, who is left, and the one that is lost.
  OPERATIONS = {
    all_reduce: ->(_, _, _) { Torch::Distributed.all_reduce(Torch.ones(3)) },
    large_all_reduce: ->(_, _, _) { Torch::Distributed.all_reduce(Torch.ones(LARGE)) },
    waited_for: ->(_, _, _) { Torch::Distributed.all_reduce(Torch.ones(3), async_op: true).wait },
    coalesced: ->(_, _, _) { Torch::Distributed.coalescing_manager { Torch::Distributed.all_reduce(Torch.ones(3)) } },
    reduce: ->(_, others, _) { Torch::Distributed.reduce(Torch.ones(3), dst: others.first) && Torch::Distributed.barrier },
    broadcast: ->(_, _, lost) { Torch::Distributed.broadcast(Torch.ones(3), src: lost) },
    all_gather: ->(_, _, _) { Torch::Distributed.all_gather(Array.new(3) { Torch.ones(3) }, Torch.ones(3)) },
    gather: ->(_, _, _) { Torch::Distributed.gather_object(1, dst: 1) && Torch::Distributed.barrier },
    scatter: ->(_, _, lost) { Torch::Distributed.scatter(Torch.ones(3), src: lost) },
    reduce_scatter: ->(_, _, _) { Torch::Distributed.reduce_scatter_tensor(Torch.ones(1), Torch.ones(3)) },
    all_to_all: ->(_, _, _) { Torch::Distributed.all_to_all_single(Torch.ones(3), Torch.ones(3)) },
    barrier: ->(_, _, _) { Torch::Distributed.barrier },
    monitored_barrier: ->(_, _, _) { Torch::Distributed.monitored_barrier(wait_all_ranks: true) },
    objects: ->(_, _, _) { Torch::Distributed.all_gather_object({a: 1}) },
    recv: ->(_, _, lost) { Torch::Distributed.recv(Torch.ones(3), src: lost) },
    recv_of_another: ->(rank, others, _) { Torch::Distributed.recv(Torch.ones(3), src: (others - [rank]).first) },
    recv_of_any: ->(_, _, _) { Torch::Distributed.recv(Torch.ones(3)) },
    irecv: ->(_, _, lost) { Torch::Distributed.irecv(Torch.ones(3), src: lost).wait },
    send: ->(_, _, lost) { Torch::Distributed.send(Torch.ones(LARGE), dst: lost) },
    new_group: ->(_, others, _) { Torch::Distributed.new_group(others) },
    device_mesh: ->(_, _, _) { Torch::Distributed.init_device_mesh("cpu", [3]) }
  }.freeze

  # Rank 0 hosts the store.
  [0, 2].each do |victim|
    OPERATIONS.each do |name, operation|
      define_method(:"test_rank_#{victim}_is_lost_in_#{name}") do
        said = without(victim, within: true) { |rank, others| operation.call(rank, others, victim) }
        said.each do |(kind, text), pid|
          assert_equal "Torch::Distributed::PeerLostError", kind, text
          assert_match(/rank #{victim} \(host .*, pid #{pid}\)/, text)
        end
      end
    end
  end
end
