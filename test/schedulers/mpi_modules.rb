# frozen_string_literal: true

require "fileutils"
require "open3"
require "tmpdir"

# The MPIs that are here, and the module "mpi" compiled for each of them.
module MPIModules
  ROOT = File.expand_path("../..", __dir__)
  NATIVE = "#{ROOT}/lib/torch_ddp/native"
  ROOT_MAY = Process.uid.zero? ? ["--allow-run-as-root"] : []
  # Debian has these names whichever of both is the default. The last: what starts a program on N processes.
  KINDS = {
    "openmpi" => ["mpicc.openmpi", ["mpirun.openmpi", *ROOT_MAY, "--oversubscribe", "--bind-to", "none", "--mca", "oob_tcp_if_include", "lo",
      "--mca", "btl", "self,vader", "-n"]],
    "mpich" => ["mpicc.mpich", ["mpiexec.hydra", "-n"]]
  }.freeze

  module_function

  # @return [String, nil] why there is no such MPI
  def obstacle(kind)
    compiler, (launcher, *) = KINDS.fetch(kind)
    missing = [compiler, launcher].reject { |program| system("sh", "-c", "command -v #{program}", out: File::NULL, err: File::NULL) }
    missing << "mpi.h for it" if missing.empty? && !system("echo '#include <mpi.h>' | #{compiler} -E -xc - -o #{File::NULL}", err: File::NULL)
    "not installed: #{missing.join(", ")} (Debian's lib#{kind}-dev; rake test:schedulers installs it)" if missing.any?
  end

  # @return [String] the folder of a kind's module; made once for all tests
  def folder(kind)
    @folders ||= {}
    @folders[kind] ||= Dir.mktmpdir("mpi-#{kind}").tap do |folder|
      Minitest.after_run { FileUtils.rm_rf(folder) }
      compile(kind, "-fvisibility=hidden", "-I#{ROOT}/include", "-I#{ROOT}/src", *Dir["#{ROOT}/src/backend/mpi/*.c"], "-o",
        "#{folder}/tddp_backend_mpi.so", "-L#{NATIVE}/lib", "-ltddp", "-ldl", "-Wl,-rpath,#{NATIVE}/lib")
    end
  end

  # A shared library.
  def compile(kind, *arguments)
    command = [KINDS.fetch(kind).first, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared", *arguments]
    said, status = Open3.capture2e(*command)
    raise "#{command.join(" ")}\n#{said}" unless status.success?
  end
end
