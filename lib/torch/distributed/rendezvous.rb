# frozen_string_literal: true

require "socket"
require "uri"

module Torch
  module Distributed
    # Determines store, rank and world size from an `init_method` and the environment.
    #
    # @api private
    module Rendezvous
      DEFAULT_PORT = 29_500

      # Where and as whom a process joins. `store` is ours to close if `owned`; `scope` names what several
      # groups of one process on the same store have in common, nil where a store serves one group only.
      Place = Struct.new(:store, :rank, :world_size, :owned, :scope, keyword_init: true)

      class << self
        # @return [String] the address by which processes of this host reach each other: ::1 where the loopback interface has no IPv4
        def loopback
          TCPServer.new("127.0.0.1", 0).close
          "127.0.0.1"
        rescue SystemCallError
          "::1"
        end

        # @return [Place]
        def meet(init_method, store: nil, rank: nil, world_size: nil, **options)
          rank = integer("rank:", rank)
          world_size = integer("world_size:", world_size)
          return given(store, rank, world_size) if store

          case init_method.to_s
          when "env://", "" then from_env(rank, world_size, **options)
          when %r{\Atcp://} then from_tcp(init_method.to_s, rank, world_size, **options)
          when %r{\Afile://} then from_file(init_method.to_s, rank, world_size, **options)
          else
            raise ArgumentError, "init_method: expected env://, tcp://host:port or file:///path, got #{init_method.inspect}"
          end
        end

        # @return [Integer, nil] nil where the variable is not set
        # @raise [ArgumentError] naming the variable and its value
        def env_integer(name)
          integer(name, ENV[name]) if ENV.key?(name)
        end

        private

        def integer(name, value)
          return if value.nil?

          Integer(value)
        rescue ArgumentError, TypeError
          raise ArgumentError, "#{name} expected a whole number, got #{value.inspect}"
        end

        def given(store, rank, world_size)
          raise TypeError, "store: expected a Torch::Distributed::Store, got #{store.inspect}" unless store.is_a?(Store)

          check_rank(rank, world_size, "rank: and world_size: are needed with store:")
          Place.new(store: store, rank: rank, world_size: world_size, owned: false, scope: store)
        end

        def from_env(rank, world_size, **options)
          task = task_beside(rank, world_size)
          place = task ? task.variables : {}
          rank ||= env_integer("RANK") || integer("RANK", place["RANK"])
          world_size ||= env_integer("WORLD_SIZE") || integer("WORLD_SIZE", place["WORLD_SIZE"])
          check_rank(rank, world_size, unknown_place)
          task = nil unless task && [task.rank, task.world_size] == [rank, world_size]
          address = ENV["MASTER_ADDR"] || task&.master_addr || loopback
          raise ArgumentError, "MASTER_ADDR is empty: expected the host of rank 0" if address.empty?

          made = task&.master_port unless ENV.key?("MASTER_PORT")
          port = check_port("MASTER_PORT", env_integer("MASTER_PORT") || made || DEFAULT_PORT)
          publish(task, address, port) if task
          # Under torchrun the launcher serves the store, and it outlives restarts of the workers.
          return join_agent(address, port, rank, world_size, **options) if ENV["TORCHELASTIC_USE_AGENT_STORE"] == "True"

          serve(address, port, rank, world_size, **options)
        rescue NetworkError => e
          raise unless made && e.status == :TDDP_ADDRESS_IN_USE

          raise e, "#{e.message}; #{task.launcher} gives no port, and this one was made from the job's number: set MASTER_PORT to a " \
            "free one, the same on all ranks"
        end

        # What a scheduler says where PyTorch's own variables leave something open. One of the two that says who this
        # process is does not go with the other from elsewhere, unless both sources agree.
        def task_beside(rank, world_size)
          return if %w[RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LOCAL_RANK].all? { |name| ENV.key?(name) }

          task = Schedulers.task or return
          given = {"RANK" => rank || env_integer("RANK"), "WORLD_SIZE" => world_size || env_integer("WORLD_SIZE")}
          said = {"RANK" => task.rank, "WORLD_SIZE" => task.world_size}
          return task if given.compact.size != 1 || said.merge(given.compact) == said

          name = given.compact.keys.first
          other = (said.keys - [name]).first
          raise ArgumentError, "#{name} is #{given[name]}, but #{other} is not set, and #{task.launcher}, which started this process, " \
            "says #{name} #{said[name]} and #{other} #{said[other]}: set both, or neither"
        end

        # Scripts read these, LOCAL_RANK above all.
        def publish(task, address, port)
          task.variables.merge("MASTER_ADDR" => address, "MASTER_PORT" => port.to_s).each { |name, value| ENV[name] ||= value }
        end

        def unknown_place
          ["init_method env:// reads RANK and WORLD_SIZE, which torchrun sets: RANK is #{ENV.fetch("RANK", "not set")}, " \
            "WORLD_SIZE is #{ENV.fetch("WORLD_SIZE", "not set")}; nor is this #{Schedulers::LOOKED_FOR}", Schedulers.obstacle].compact.join(". ")
        end

        def from_tcp(text, rank, world_size, **options)
          uri, query = parse(text)
          raise ArgumentError, "init_method #{text}: expected tcp://host:port" if uri.hostname.to_s.empty? || !uri.port

          rank ||= integer("rank in #{text}:", query["rank"])
          world_size ||= integer("world_size in #{text}:", query["world_size"])
          check_rank(rank, world_size, "init_method #{text} needs rank: and world_size:, as arguments or as ?rank=0&world_size=2")
          serve(uri.hostname, check_port("port in #{text}:", uri.port), rank, world_size, **options)
        end

        def from_file(text, rank, world_size, timeout:, **)
          uri, query = parse(text)
          path = URI::DEFAULT_PARSER.unescape(uri.path.to_s)
          unless uri.host.to_s.empty? && path.length > 1
            raise ArgumentError, "init_method #{text}: expected file:/// and an absolute path"
          end

          rank ||= integer("rank in #{text}:", query["rank"])
          world_size ||= integer("world_size in #{text}:", query["world_size"])
          check_rank(rank, world_size, "init_method #{text} needs rank: and world_size:, as arguments or as ?rank=0&world_size=2")
          store = FileStore.new(path, world_size, timeout: timeout)
          Place.new(store: store, rank: rank, world_size: world_size, owned: true)
        end

        def serve(address, port, rank, world_size, timeout:, wait_for_workers:)
          store = TCPStore.new(address, port, world_size, rank.zero?, wait_for_workers: wait_for_workers, timeout: timeout)
          Place.new(store: store, rank: rank, world_size: world_size, owned: true)
        end

        def join_agent(address, port, rank, world_size, timeout:, wait_for_workers:)
          store = TCPStore.new(address, port, world_size, false, wait_for_workers: wait_for_workers, timeout: timeout)
          # After a restart the keys of the attempt before are still there.
          attempt = env_integer("TORCHELASTIC_RESTART_COUNT") || 0
          store = PrefixStore.new("/worker/attempt_#{attempt}", store)
          Place.new(store: store, rank: rank, world_size: world_size, owned: true, scope: "#{address}:#{port}/#{attempt}")
        end

        def parse(text)
          uri = URI.parse(text)
          [uri, URI.decode_www_form(uri.query.to_s).to_h]
        rescue URI::Error, ArgumentError => e
          raise ArgumentError, "init_method #{text}: #{e.message}"
        end

        def check_port(name, port)
          return port if port.between?(1, 65_535)

          raise ArgumentError, "#{name} expected a port from 1 to 65535, got #{port}"
        end

        def check_rank(rank, world_size, hint)
          raise ArgumentError, "rank is not known. #{hint}" if rank.nil?
          raise ArgumentError, "world size is not known. #{hint}" if world_size.nil?
          raise ArgumentError, "world size #{world_size}: expected 1 or more" if world_size < 1
          return if rank.between?(0, world_size - 1)

          raise ArgumentError, "rank #{rank} is outside the world: expected 0 to #{world_size - 1} (world size #{world_size})"
        end
      end
    end
  end
end
