# frozen_string_literal: true

require "etc"
require "rbconfig"
require "socket"
require "tempfile"
require_relative "outcome"
require_relative "worker"

module Torch
  module Distributed
    # The processes of one {Launching#fork_world}: starts them, reads their results, and ends them.
    #
    # @api private
    class World
      # Seconds between SIGTERM and SIGKILL, between looks at processes whose pipe says nothing, and for a cause
      # to arrive after a consequence of it.
      GRACE = 3
      LOOK = 0.5
      CAUSE = 1
      private_constant :GRACE, :LOOK, :CAUSE

      def initialize(size, host, method, call, block)
        @size = size
        @host = host
        @method = method
        @call = call
        @block = block
        @workers = []
      end

      # @return [Array] the block's values by rank
      def run
        @reserved = bind_port
        @listener = bind_port.tap { |socket| socket.listen(Socket::SOMAXCONN) }
        @port, @store_port = [@reserved, @listener].map { |socket| socket.local_address.ip_port }
        # Otherwise each fork would sweep this process' garbage, which copies the pages that it lies on.
        GC.start(full_mark: false) if @method == :fork
        @size.times { |rank| start(rank) }
        host_store
        listen
        raise failure.error if failure

        @workers.map(&:value)
      ensure
        begin
          finish
        ensure
          @store&.close
          close_sockets
        end
      end

      private

      # Binds a port without listening on it: the system assigns it to no other process, and a rank may listen on it.
      def bind_port
        address = Addrinfo.tcp(@host, 0)
        socket = Socket.new(address.afamily, :STREAM)
        socket.setsockopt(:SOCKET, :REUSEADDR, true)
        socket.bind(address)
        socket
      rescue SocketError, SystemCallError => e
        socket&.close
        raise NetworkError, "host: #{@host} is no address of this machine: #{e.message}"
      end

      # Serves the ranks' store. Called after the last fork, since a server has a thread; ranks that connect earlier
      # wait in the listener's queue.
      def host_store
        # An exception from another thread comes when the store is ours to close, or before it is made.
        Thread.handle_interrupt(Object => :never) do
          listener, @listener = @listener, nil
          @store = TCPStore.new(@host, 0, nil, true, master_listen_fd: listener)
        end
      end

      def close_sockets
        [@reserved, @listener].compact.each(&:close)
      end

      def start(rank)
        reader, writer = IO.pipe(binmode: true)
        # An exception from another thread must not come between a worker's start and its entry here: the worker would never be ended.
        Thread.handle_interrupt(Object => :never) do
          pid = (@method == :fork) ? fork_worker(rank, reader, writer) : spawn_worker(rank, writer)
          @workers << Worker.new(rank, pid, reader)
        end
      ensure
        writer&.close
        reader&.close unless @workers.last&.reader.equal?(reader)
      end

      def fork_worker(rank, reader, writer)
        pid = Process.fork do
          Outcome.report(writer) do
            become_worker(reader)
            Thread.handle_interrupt(Object => :immediate) do
              Distributed.send(:run_forked, rank, @size, @host, @port, @store_port, &@block)
            end
          end
        end
        set_group(pid)
        pid
      end

      # In the child.
      def become_worker(reader)
        set_group(0)
        %w[INT TERM].each { |name| Signal.trap(name, "DEFAULT") }
        reader.close
        @workers.each { |worker| worker.reader.close }
        close_sockets
      end

      # A group of its own, so that what a worker starts ends with it. Both sides set it: the second one fails.
      def set_group(pid)
        Process.setpgid(pid, pid)
      rescue Errno::EACCES, Errno::ESRCH
        nil
      end

      def spawn_worker(rank, writer)
        script, arguments = Spawned.command(@call)
        results = Spawned.results_file
        env = Spawned.environment(@call, writer.fileno, results.fileno)
        env.update(SPAWN_RANK_ENV_KEY => rank.to_s, SPAWN_WORLD_SIZE_ENV_KEY => @size.to_s, SPAWN_PORT_ENV_KEY => @port.to_s,
          SPAWN_STORE_PORT_ENV_KEY => @store_port.to_s)
        env["OMP_NUM_THREADS"] ||= [Etc.nprocessors / @size, 1].max.to_s unless ENV.key?("OMP_NUM_THREADS")
        Process.spawn(env, RbConfig.ruby, script, *arguments, :pgroup => true, writer => writer, results => results)
      rescue SystemCallError => e
        raise SystemError, "rank #{rank} could not be started: #{e.message}"
      ensure
        results&.close
      end

      # Until all are done, or one has failed and the cause is known.
      def listen
        deadline = nil
        until @workers.all?(&:done?)
          look_at_pipes(deadline ? 0.05 : LOOK)
          @workers.each(&:poll)
          next unless failure
          return if failure.cause?

          deadline ||= now + CAUSE
          return if now > deadline
        end
      end

      # Until something arrives. A process that closed its pipe is about to end, of which there is no event.
      def look_at_pipes(seconds)
        ending = @workers.any? { |worker| worker.reader.closed? && !worker.done? }
        readers = @workers.map(&:reader).reject(&:closed?)
        IO.select(readers, nil, nil, ending ? 0.005 : seconds)
      end

      # @return [Worker, nil] the one whose failure explains the others'
      def failure
        failed = @workers.select(&:failed?)
        failed.find(&:cause?) || failed.first
      end

      def finish
        @workers.each { |worker| worker.signal(:TERM) unless worker.done? }
        deadline = now + GRACE
        until @workers.each(&:poll).all?(&:done?) || now > deadline
          look_at_pipes(0.05)
        end
      ensure
        # What the workers left behind in their process groups goes too.
        @workers.each { |worker| worker.signal(:KILL) }
        @workers.each(&:wait)
      end

      def now
        Process.clock_gettime(Process::CLOCK_MONOTONIC)
      end
    end
  end
end
