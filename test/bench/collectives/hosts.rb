# frozen_string_literal: true

require_relative "../../slow/support/namespaces"

module Collectives
  # Hosts on this machine, over which a partner's ranks are spread: network namespaces, between which all goes through
  # the kernel's network.
  class Hosts
    # @param count [Integer]
    # @param rate [String, nil] of each host's network, in either direction, as tc has it ("10gbit"); nil: as fast as it goes
    # @raise [RuntimeError] if there can be none here
    def initialize(count, rate = nil)
      @count = count
      @network = Namespaces.new(count)
      limit(rate) if rate
    end

    # @return [Integer] the host of a rank: the first have the first ones
    def of(rank, ranks)
      rank * @count / ranks
    end

    # @return [Array<String>] what to put before a command that is to run there
    def command(host)
      @network.command(host)
    end

    # How mpirun, on the first host, starts ranks on all: by a program in place of ssh.
    def mpi_options(ranks)
      places = Array.new(ranks) { |rank| of(rank, ranks) }.tally.map { |host, slots| "#{@network.ipv4(host)}:#{slots}" }
      shell = "#{File.join(__dir__, "host_shell.sh")} #{@network.prefix}"
      network = %w[btl_tcp_if_include oob_tcp_if_include].flat_map { |name| ["--mca", name, "eth0"] }
      ["--host", places.join(","), "--mca", "plm_rsh_agent", shell, *network]
    end

    def remove
      @network.remove
    end

    private

    # At each end of each cable, towards the host and from it.
    def limit(rate)
      @count.times do |host|
        {host => "eth0", "switch" => "port#{host}"}.each do |place, device|
          command = ["ip", "netns", "exec", @network.name(place), "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
          system(*command) or raise "no network of the rate #{rate} can be made here (Debian: iproute2, the kernel's module sch_tbf)"
        end
      end
    end
  end
end
