# frozen_string_literal: true

require "ipaddr"
require "socket"
require "zlib"
require_relative "task"

module Torch
  module Distributed
    module Schedulers
      # A process of Open MPI's `mpirun`, up to 4 (ORTE) or from 5 on (PRRTE).
      #
      # @api private
      class OpenMPI < Task
        SIGN = "OMPI_COMM_WORLD_RANK"
        COMMAND = "mpirun"
        SETTING = "mpirun -x MASTER_ADDR=HOST"

        # @return [OpenMPI, nil]
        def self.find(env)
          new(env) unless env[SIGN].to_s.empty? && env["OMPI_COMM_WORLD_SIZE"].to_s.empty?
        end

        def launcher
          "Open MPI's mpirun"
        end

        # The name is unique to each mpirun, and each of its jobs.
        def master_port
          name = @env["PMIX_NAMESPACE"] || @env["OMPI_MCA_ess_base_jobid"] || @env["OMPI_MCA_orte_hnp_uri"]
          name ? port_of(Zlib.crc32(name)) : Rendezvous::DEFAULT_PORT
        end

        private

        def read
          @rank = number(SIGN)
          @world_size = number("OMPI_COMM_WORLD_SIZE")
          @local_rank = number_if_set("OMPI_COMM_WORLD_LOCAL_RANK")
          @local_world_size = number_if_set("OMPI_COMM_WORLD_LOCAL_SIZE")
        end

        # Rank 0 runs where mpirun does, unless mpirun's own host takes no part: rank 0 itself knows that.
        def host_of_rank_zero
          if (uri = @env["OMPI_MCA_orte_hnp_uri"])
            elsewhere! if rank.zero? && @env.fetch("OMPI_MCA_orte_local_daemon_uri", uri) != uri
            reachable(addresses(uri)) || unknown_host("there is no address in OMPI_MCA_orte_hnp_uri #{uri.inspect}")
          elsif (host = @env["PMIX_NAMESPACE"].to_s[/\Aprte(?:run)?-(.+)-\d+@\d+\z/, 1])
            elsewhere! if rank.zero? && @env.fetch("PMIX_HOSTNAME", host) != host
            host
          else
            unknown_host("it left neither OMPI_MCA_orte_hnp_uri nor a PMIX_NAMESPACE that names its host")
          end
        end

        def elsewhere!
          unknown_host("mpirun runs on another host than rank 0")
        end

        # Of "7.0;tcp://192.0.2.1,10.0.0.1:3400;tcp6://[2001:db8::1]:3401" the three.
        def addresses(uri)
          uri.scan(%r{tcp6?://([^;]+):\d+}).flat_map { |(list)| list.delete("[]").split(",") }
        end

        # A host with several networks has an address in each: one of a network that this host is in as well.
        def reachable(list)
          networks = Socket.getifaddrs.filter_map { |each| network(each) }
          list.find { |text| networks.any? { |network| network.include?(IPAddr.new(text)) } } || list.first
        rescue IPAddr::Error
          list.first
        end

        def network(interface)
          return unless interface.addr&.ip? && interface.netmask&.ip?

          IPAddr.new(interface.addr.ip_address[/\A[^%]+/]).mask(interface.netmask.ip_address[/\A[^%]+/])
        end
      end

      # A process of Hydra's `mpiexec`: MPICH's, Intel's and others'.
      #
      # @api private
      class Hydra < Task
        SIGN = "PMI_RANK"
        COMMAND = "mpiexec"
        SETTING = "mpiexec -genv MASTER_ADDR HOST"

        # @return [Hydra, nil]
        def self.find(env)
          new(env) unless env[SIGN].to_s.empty? && env["PMI_SIZE"].to_s.empty?
        end

        def launcher
          "MPICH's mpiexec"
        end

        # It leaves no name of the job. On one host all its processes have the same proxy, each in a session of its own.
        def master_port
          proxy = proxy_pid if local_world_size == world_size
          proxy ? port_of(proxy) : Rendezvous::DEFAULT_PORT
        end

        private

        def read
          @rank = number(SIGN)
          @world_size = number("PMI_SIZE")
          @local_rank = number_if_set("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
          @local_world_size = number_if_set("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
        end

        # The parent of the session's first process, which may be a shell between.
        def proxy_pid
          leader = Process.getsid
          return Process.ppid if leader == Process.pid

          File.read("/proc/#{leader}/status")[/^PPid:\s*(\d+)/, 1]&.to_i
        rescue SystemCallError
          nil
        end

        def host_of_rank_zero
          unknown_host("it names no hosts")
        end
      end
    end
  end
end
