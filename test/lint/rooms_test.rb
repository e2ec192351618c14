# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "tmpdir"

# The structure's laws: which room may include which, headers that stand alone, what the libraries export
# and link, and how long files and functions may grow. Nothing here needs torch.
class RoomsTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)

  # Each room may include private headers of itself and of these.
  MAY_INCLUDE = {
    "base" => %w[],
    "net" => %w[base],
    "store" => %w[base net],
    "backend" => %w[base net store],
    "group" => %w[base net store backend],
    "flat" => %w[base],
    "reducer" => %w[base flat],
    "sharder" => %w[base flat],
    "hooks" => %w[base backend],
    "torch" => %w[],
    "launch" => %w[base net store],
    "check" => %w[]
  }.freeze

  # The same between the folders of a room that has several with a life of their own.
  MAY_INCLUDE_WITHIN = {
    "backend/arith" => %w[], "backend/delegate" => %w[], "backend/fake" => %w[], "backend/shm" => %w[backend/arith], "backend/coll" => %w[], "backend/hosts" => %w[backend/arith backend/shm],
    "backend/gloo" => %w[], "backend/staging" => %w[], "backend/cuda" => %w[], "backend/nccl" => %w[backend/cuda],
    "backend/mpi" => %w[], "backend/ucx" => %w[],
    "torch/tensor" => %w[], "torch/autograd" => %w[torch/tensor], "torch/checkpoint" => %w[torch/autograd torch/tensor],
    "torch/function" => %w[torch/autograd torch/tensor], "torch/offload" => %w[torch/autograd torch/tensor],
    "torch/ddp" => %w[torch/autograd torch/checkpoint torch/tensor], "torch/data_parallel" => %w[torch/autograd torch/tensor],
    "torch/fsdp" => %w[torch/autograd torch/checkpoint torch/tensor],
    "torch/optim" => %w[torch/tensor], "torch/nn" => %w[torch/autograd torch/tensor]
  }.freeze

  # Public headers, each with those it may include: the same law, seen from outside.
  PUBLIC = {
    "export.h" => %w[], "version.h" => %w[export.h], "status.h" => %w[export.h], "wait.h" => %w[status.h],
    "log.h" => %w[export.h], "heap.h" => %w[export.h], "memory_stats.h" => %w[export.h], "buffer.h" => %w[status.h], "store.h" => %w[wait.h],
    "op.h" => %w[export.h], "observation.h" => %w[status.h], "backend.h" => %w[buffer.h observation.h op.h store.h], "meeting.h" => %w[store.h], "work.h" => %w[buffer.h op.h wait.h],
    "group.h" => %w[buffer.h op.h store.h work.h], "flat.h" => %w[buffer.h],
    "trace.h" => %w[status.h], "recorder.h" => %w[group.h], "comm_hook.h" => %w[flat.h group.h],
    "hooks.h" => %w[comm_hook.h], "reducer.h" => %w[comm_hook.h group.h], "torch.h" => %w[reducer.h], "sharder.h" => %w[flat.h group.h],
    "torch_fsdp.h" => %w[sharder.h torch.h],
    "torch_optim.h" => %w[torch.h], "torch_nn.h" => %w[torch.h], "torch_collectives.h" => %w[torch.h], "torch_parallel.h" => %w[torch.h], "torch_rng.h" => %w[status.h],
    "torch_linear.h" => %w[torch.h], "torch_memory.h" => %w[memory_stats.h status.h],
    "torch_checkpoint.h" => %w[torch.h], "torch_offload.h" => %w[torch.h], "torch_function.h" => %w[torch.h], "torch_backward.h" => %w[torch.h], "file.h" => %w[wait.h], "call.h" => %w[backend.h], "transport.h" => %w[backend.h], "delegate.h" => %w[backend.h], "cuda.h" => %w[status.h]
  }.freeze

  # What <tddp.h> leaves out: what backends are made of, helpers of programs that train, and the headers of libtddp_torch.
  APART = /\A(backend|call|cuda|delegate|file|heap|meeting|observation|torch.*|transport)\.h\z/

  LONGEST_FILE = 500
  LONGEST_FUNCTION = 80

  def sources(pattern)
    Dir[File.join(ROOT, pattern)].sort
  end

  def includes(file)
    File.readlines(file).filter_map { |line| line[/\A\s*#\s*include\s+["<]([^">]+)/, 1] }
  end

  def test_every_room_is_in_the_law
    assert_equal MAY_INCLUDE.keys.sort, Dir.children(File.join(ROOT, "src")).reject { |name| name.include?(".") }.sort
  end

  def test_rooms_include_only_what_stands_beneath_them
    wrong = MAY_INCLUDE.flat_map do |room, beneath|
      sources("src/#{room}/**/*.{c,cc,h}").flat_map do |file|
        others = includes(file).filter_map { |name| name[%r{\A([a-z]+)/}, 1] if MAY_INCLUDE.key?(name[%r{\A([a-z]+)/}, 1]) }
        # libtorch's own headers begin with torch/ as well; a room's private header is a file of ours.
        others.reject! { |other| other == "torch" && room == "torch" }
        (others - [room] - beneath).map { |other| "#{file.delete_prefix(ROOT + "/")} includes #{other}/" }
      end
    end
    assert_empty wrong
  end

  def test_folders_of_a_room_include_only_what_stands_beneath_them
    wrong = MAY_INCLUDE_WITHIN.flat_map do |folder, beneath|
      sources("src/#{folder}/**/*.{c,cc,h}").flat_map do |file|
        others = includes(file).map { |name| File.dirname(name) }.select { |name| MAY_INCLUDE_WITHIN.key?(name) }
        (others - [folder] - beneath).map { |other| "#{file.delete_prefix(ROOT + "/")} includes #{other}/" }
      end
    end
    assert_empty wrong
  end

  def test_every_folder_of_the_shim_is_in_the_law
    folders = Dir.glob("*/", base: File.join(ROOT, "src/torch")).map { |name| "torch/#{name.chomp("/")}" }
    assert_equal MAY_INCLUDE_WITHIN.keys.grep(%r{\Atorch/}).sort, folders.sort
  end

  def test_only_the_shim_and_the_bridge_see_libtorch
    files = sources("src/**/*.{c,cc,h}") + sources("ext/**/*.{c,cc,h}")
    seeing = files.select { |file| includes(file).any? { |name| name.match?(%r{\A(ATen|c10|torch/)}) } }
    assert_empty seeing.map { |file| file.delete_prefix("#{ROOT}/") }.grep_v(%r{\Asrc/torch/|\Aext/torch_ddp/tensor_bridge\.cc\z})
  end

  def test_public_headers_include_only_what_stands_beneath_them
    assert_equal PUBLIC.keys.sort, sources("include/tddp/*.h").map { |file| File.basename(file) }.sort
    PUBLIC.each do |name, beneath|
      found = includes(File.join(ROOT, "include/tddp", name)).filter_map { |header| header[%r{\Atddp/(.+)}, 1] }
      assert_empty found - beneath, "<tddp/#{name}>"
    end
  end

  def test_the_umbrella_has_what_applications_need
    found = includes(File.join(ROOT, "include/tddp.h")).map { |header| header.delete_prefix("tddp/") }
    assert_equal (PUBLIC.keys - %w[export.h]).grep_v(APART).sort, found
    assert_empty found.flat_map { |header| PUBLIC.fetch(header) }.grep(APART)
  end

  def test_public_headers_know_nothing_of_ruby
    assert_empty sources("include/**/*.h").select { |file| File.read(file).match?(/\b(ruby|gvl|gems?)\b/i) }
  end

  def test_public_headers_stand_alone_in_c_and_in_cpp
    headers = PUBLIC.keys.map { |name| "tddp/#{name}" } + ["tddp.h"]
    headers.product([%w[gcc -std=c11 -xc], %w[g++ -std=c++17 -xc++]]) do |header, compiler|
      out, status = Open3.capture2e(*compiler, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only",
        "-I#{ROOT}/include", "-", stdin_data: "#include <#{header}>\nint main(void) { return 0; }\n")
      assert status.success?, "#{compiler.first} #{header}:\n#{out}"
    end
  end

  def test_files_stay_readable
    long = sources("{src,ext,include,lib,examples,test}/**/*.{c,cc,h,rb}").filter_map do |file|
      lines = File.foreach(file).count
      "#{file.delete_prefix(ROOT + "/")}: #{lines} lines" if lines > LONGEST_FILE
    end
    assert_empty long, "look for the second thing hiding in them"
  end

  # clang-format puts a function's opening and closing braces in the first column.
  def test_functions_stay_readable
    long = sources("{src,ext}/**/*.{c,cc}").flat_map do |file|
      start = nil
      File.foreach(file).with_index(1).filter_map do |line, number|
        start = number if line.start_with?("{")
        next unless line.start_with?("}") && start

        length = number - start
        start = nil
        "#{file.delete_prefix(ROOT + "/")}:#{number}: #{length} lines" if length > LONGEST_FUNCTION
      end
    end
    assert_empty long
  end

  def native(path)
    file = File.join(ROOT, "lib/torch_ddp/native", path)
    skip "#{path} is not built: rake compile" unless File.exist?(file)
    file
  end

  def exported(library)
    out, status = Open3.capture2("nm", "-D", "--defined-only", library)
    assert status.success?
    out.lines.map { |line| line.split.last.sub(/@.*/, "") }
  end

  def needed(binary)
    out, status = Open3.capture2("readelf", "-d", binary)
    assert status.success?
    out.scan(/NEEDED.*\[(.+?)\]/).flatten
  end

  def test_libtddp_exports_tddp_only_and_links_libc_alone
    library = native("lib/libtddp.so")
    assert_empty exported(library).grep_v(/\Atddp_/)
    assert_empty needed(library).grep_v(/\A(libc|libm|ld-linux.*)\.so/)
  end

  def test_modules_export_their_query_only
    names = Dir["#{native("lib")}/tddp_backend_*.so"].map { |path| path[/backend_(\w+)\.so/, 1] }
    assert_empty %w[gloo nccl] - names
    names.each do |name|
      # What UCX's constructor is to find first; see src/backend/ucx/process.c.
      others = (name == "ucx") ? ["ucm_set_global_opts"] : []
      assert_equal ["tddp_backend_query", *others], exported(native("lib/tddp_backend_#{name}.so"))
    end
  end

  def test_nothing_links_nccl_or_cuda
    %w[lib/libtddp.so lib/tddp_backend_nccl.so].each { |path| assert_empty needed(native(path)).grep(/nccl|cuda/) }
  end

  def test_the_shim_exports_tddp_only
    assert_empty exported(native("lib/libtddp_torch.so")).grep_v(/\Atddp_/)
  end

  def test_torchrun_links_libc_alone
    assert_empty needed(native("bin/torchrun")).grep_v(/\A(libc|ld-linux.*)\.so/)
  end

  def test_the_check_is_a_program_like_any_user_s
    headers = sources("src/check/*.{c,h}").flat_map { |file| includes(file) }
    assert_empty headers.grep(%r{/}) - ["check/check.h", "sys/resource.h"] - PUBLIC.keys.map { |name| "tddp/#{name}" }
    assert_includes headers, "tddp.h"
    assert_empty needed(native("bin/torchrun-check")).grep_v(/\A(libtddp|libc|ld-linux.*)\.so/)
  end
end
