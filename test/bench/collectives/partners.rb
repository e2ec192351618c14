# frozen_string_literal: true

require "etc"
require "open3"
require "rbconfig"

module Collectives
  ROOT = File.expand_path("../../..", __dir__)

  # What is measured in one run of a partner: its results' name, their title, and the memory.
  Series = Struct.new(:name, :title, :memory)

  # Someone whose collectives are measured.
  class Partner
    OPERATIONS = %w[all_reduce broadcast all_gather reduce_scatter all_to_all reduce gather scatter barrier ping_pong].freeze
    DTYPES = %w[float32 float64 float16 bfloat16 int32 int64 uint8].freeze

    attr_reader :name, :series, :environment

    # @param name [String]
    # @param series [Array<Series>]
    # @param environment [Hash] beside Job's own
    # @param obstacle [#call] takes the number of ranks; why it is not there, or nil
    # @param only [Array<String>, nil] the only operations it has
    # @yieldparam ranks [Integer]
    # @yieldparam hosts [Hosts, nil]
    # @yieldreturn [Array<(Integer, Array<String>)>] what starts it: ranks and commands
    def initialize(name, series, environment: {}, obstacle: ->(_ranks) {}, only: nil, &commands)
      @name = name
      @series = series
      @environment = environment
      @obstacle = obstacle
      @only = only
      @commands = commands
    end

    def commands(ranks, hosts = nil)
      @commands.call(ranks, hosts)
    end

    def obstacle(ranks)
      @obstacle.call(ranks)
    end

    # @return [Boolean] whether it is worth asking
    def offers?(operation)
      @only.nil? || @only.include?(operation)
    end
  end

  # All partners there might be.
  module Partners
    PYTHON = ENV.fetch("PYTHON", "/usr/bin/python3")

    module_function

    # @param build [String] a build folder of CMake with the programs in bench/
    # @param backend [String, nil] ours: "gloo", above which shared memory lies, or "shm" alone; nil: what is built
    # @return [Array<Partner>]
    def all(build, backend = nil)
      @build = build
      @backend = backend || (gloo? ? "gloo" : "shm")
      [ours, gloo, mpi, floor, openmpi, pytorch, ruby, deepspeed]
    end

    def ours
      series = [Series.new("ours", "ours, registered", "registered"), Series.new("ours-any", "ours, any", "any")]
      native("ours", series, {"TDDP_SHM" => "1"}, @backend)
    end

    def gloo
      native("gloo", [Series.new("gloo", "plain Gloo", "any")], {"TDDP_SHM" => "0"}, "gloo",
        obstacle: ->(_ranks) { "the Gloo backend is not built" unless gloo? })
    end

    # Ours over the MPI that is beside it here.
    def mpi
      program = program("tddp")
      obstacle = ->(_ranks) { missing(program) || ("the MPI backend is not built" unless mpi?) || no_mpirun }
      Partner.new("mpi", [Series.new("mpi", "ours over MPI", "any")], environment: {"TDDP_BACKEND_PATH" => File.join(@build, "lib"), "TDDP_SHM" => "0"},
        obstacle: obstacle) do |ranks, hosts|
        mpirun(ranks, hosts, "sh", "-c", 'RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} exec "$0" "$@"', program, "mpi")
      end
    end

    def floor
      program = program("floor")
      Partner.new("floor", [Series.new("floor", "floor", "any")], only: %w[all_reduce],
        obstacle: ->(ranks) { (ranks == 2) ? missing(program) : "it has two ranks" }) { [[0, [program]]] }
    end

    def openmpi
      program = program("mpi")
      obstacle = ->(_ranks) { no_mpirun || missing(program, "install libopenmpi-dev and build again") }
      Partner.new("openmpi", [Series.new("openmpi", "OpenMPI", "any")], obstacle: obstacle) { |ranks, hosts| mpirun(ranks, hosts, program) }
    end

    def pytorch
      probe = "import sys, torch.distributed as d; sys.exit(not d.is_gloo_available()) if hasattr(d, 'is_gloo_available') else 0"
      obstacle = lambda do |_ranks|
        "#{PYTHON} has no torch with Gloo: install python3-torch, or set PYTHON" unless system(PYTHON, "-c", probe, out: File::NULL, err: File::NULL)
      end
      Partner.new("pytorch", [Series.new("pytorch", "PyTorch Gloo", "any")], obstacle: obstacle) do |ranks|
        each_rank(ranks, [PYTHON, File.join(__dir__, "pytorch.py")])
      end
    end

    def ruby
      series = [Series.new("ruby", "Ruby, registered", "registered"), Series.new("ruby-any", "Ruby, any", "any")]
      obstacle = ->(_ranks) { "the extension is not built: rake compile" unless File.exist?(File.join(ROOT, "lib/torch_ddp/ext.so")) }
      environment = {"TDDP_SHM" => "1", "BENCH_BACKEND" => @backend, "BUNDLE_GEMFILE" => File.join(ROOT, "Gemfile")}
      Partner.new("ruby", series, environment: environment, obstacle: obstacle) do |ranks|
        each_rank(ranks, [RbConfig.ruby, "-rbundler/setup", "-I#{File.join(ROOT, "lib")}", File.join(__dir__, "ruby_partner.rb")])
      end
    end

    def deepspeed
      program = program("deepspeed")
      Partner.new("deepspeed", [Series.new("deepspeed", "DeepSpeed", "any")], only: %w[all_reduce],
        obstacle: ->(_ranks) { missing(program, "set DEEPSPEED_DIR to a checkout of theirs and build again") }) do |ranks|
        each_rank(ranks, [program])
      end
    end

    def native(name, series, environment, backend, obstacle: ->(_ranks) {})
      program = program("tddp")
      environment = environment.merge("TDDP_BACKEND_PATH" => File.join(@build, "lib"))
      Partner.new(name, series, environment: environment, obstacle: ->(ranks) { missing(program) || obstacle.call(ranks) }) do |ranks|
        each_rank(ranks, [program, backend])
      end
    end

    def each_rank(ranks, command)
      Array.new(ranks) { |rank| [rank, command] }
    end

    def launcher
      %w[mpirun.openmpi mpirun].find { |name| which(name) }
    end

    def no_mpirun
      "there is no mpirun: install openmpi-bin" unless launcher
    end

    def mpirun(ranks, hosts, *command)
      [[0, [launcher, *mpi_options(launcher), *hosts&.mpi_options(ranks), "-np", ranks.to_s, *command]]]
    end

    def mpi_options(launcher)
      version, = Open3.capture2e(launcher, "--version")
      return [] unless version.match?(/Open MPI|OpenRTE/)

      ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    end

    def gloo?
      File.exist?(File.join(@build, "lib/tddp_backend_gloo.so"))
    end

    def mpi?
      File.exist?(File.join(@build, "lib/tddp_backend_mpi.so"))
    end

    def program(name)
      File.join(@build, "bench/bench_collectives_#{name}")
    end

    def missing(program, cure = "build the target bench_collectives")
      "#{File.basename(program)} is not built: #{cure}" unless File.executable?(program)
    end

    def which(name)
      ENV["PATH"].split(":").any? { |folder| File.executable?(File.join(folder, name)) }
    end
  end
end
