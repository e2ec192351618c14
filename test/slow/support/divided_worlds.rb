# frozen_string_literal: true

# For `ruby -r`: the worlds of the tests of test/ruby are divided between two hosts, the namespace in which the program
# runs, whose address is DIVIDED_ADDRESS, and that of the file DIVIDED_NAMESPACE: the second half of the ranks go there.
require "fiddle"
require_relative "../../ruby/test_helper"

module DividedWorlds
  SETNS = Fiddle::Function.new(Fiddle.dlopen(nil)["setns"], [Fiddle::TYPE_INT, Fiddle::TYPE_INT], Fiddle::TYPE_INT)
  ANY_KIND = 0

  def world(size, start_method: :fork, timeout: 30)
    Timeout.timeout(Worlds::LIMIT) do
      Worlds::Distributed.fork_world(size, host: ENV.fetch("DIVIDED_ADDRESS"), start_method: start_method) do |rank, port|
        DividedWorlds.leave if rank >= (size + 1) / 2
        Worlds::Distributed.init_process_group("gloo", timeout: timeout)
        begin
          yield rank, port
        ensure
          Worlds::Distributed.destroy_process_group
        end
      end
    end
  end

  def self.leave
    File.open(ENV.fetch("DIVIDED_NAMESPACE")) do |file|
      raise "setns: #{Fiddle.last_error}" unless SETNS.call(file.fileno, ANY_KIND).zero?
    end
  end
end

Worlds.prepend(DividedWorlds)
Minitest::Test.prepend(DividedWorlds)
