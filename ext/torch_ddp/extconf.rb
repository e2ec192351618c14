# frozen_string_literal: true

# Configures the Ruby extension: C files over libtddp's headers, and tensor_bridge.cc, the one C++ file, which
# reads torch-rb's tensors and so needs the very Rice that torch-rb was compiled with.

if ARGV.include?("--help")
  puts <<~HELP
    Usage: ruby extconf.rb [options]
      --with-tddp-dir=PREFIX   an installed libtddp (PREFIX/lib, PREFIX/include); without it the bundled
                               sources are built with CMake and installed into the gem
      --with-torch-dir=PREFIX  where libtorch is; else the variable LIBTORCH, else /usr
      --with-gloo-dir=PREFIX   where Gloo is (PREFIX/include, PREFIX/lib), which the bundled sources are built with;
                               --with-gloo-include=DIR and --with-gloo-lib=DIR name these two alone
      --with-cuda-include=DIR  where CUDA's headers are, for the bundled sources and a libtorch for CUDA
      --enable-werror          warnings are errors; for this library's own developers
      --help                   this text
    The backend mpi is built where there is an mpicc, or for the MPI whose compiler the variable MPICC names.
    Those of every extension are heeded as well: --with-cflags, --with-cxxflags, --with-ldflags, --with-opt-dir and so on.

    torch-rb has to go with the libtorch that is found. For the one found here, in this order:
  HELP
  begin
    require_relative "libtorch"
    libtorch = Setup::Libtorch.find
    puts libtorch.install_commands.map { |line| "  #{line}" }, "  gem install ./torch-ddp-VERSION.gem -- --with-torch-dir=#{libtorch.prefix}"
  rescue Setup::Libtorch::NotFound => e
    puts "  #{e.message}"
  end
  exit
end

require_relative "platform"
obstacle = Setup::Platform.obstacle and abort obstacle

require "etc"
require "fileutils"
require "mkmf"
require "open3"
require_relative "libtorch"

# Finds what the extension is compiled against.
class ExtensionConfig
  GEM_ROOT = File.expand_path("../..", __dir__)
  # What the build of the bundled sources is given, and no other.
  BUNDLED = %w[--with-gloo-dir --with-gloo-include --with-gloo-lib --with-cuda-include].freeze
  OPTIONS = [*BUNDLED, "--with-tddp-dir", "--with-torch-dir", "--enable-werror", "--disable-werror"].freeze
  # What mkmf itself looks at.
  MKMF = /\A--(?:with-(?:(?:c|cxx|cpp|ld|dld|opt|debug|warn)flags|arch-flag|opt-(?:dir|include|lib)|make-prog|verbose)|(?:en|dis)able-shared)\z/

  attr_reader :libtorch

  def initialize(torch_dir)
    @libtorch = Setup::Libtorch.find(torch_dir)
    warn @libtorch.warning if @libtorch.warning
  end

  # Ends with a message if an option has no effect: mkmf takes any.
  #
  # @param arguments [Array<String>]
  def self.check(arguments)
    names = arguments.map { |argument| argument.split("=", 2).first.to_s.tr("_", "-") }.grep(/\A--(?:with|without|enable|disable)-/)
    unknown = names.reject { |name| OPTIONS.include?(name) || MKMF.match?(name) }
    abort "#{unknown.join(", ")}: expected #{OPTIONS.join(", ")}, or one of mkmf's own options" if unknown.any?

    idle = names & BUNDLED
    abort "#{idle.join(", ")}: has no effect with --with-tddp-dir, whose libtddp is built already" if names.include?("--with-tddp-dir") && idle.any?
  end

  # @return [String] the include folder of the Rice that torch-rb was compiled with
  def rice_include
    torch_rb = spec("torch-rb", @libtorch.torch_rb)
    version = rice_seen_by(torch_rb) || @libtorch.rice
    rice = spec("rice", version)
    puts "torch-rb #{torch_rb.version} with rice #{rice.version}, libtorch #{@libtorch.version} in #{@libtorch.prefix}"
    File.join(rice.gem_dir, "include")
  end

  # Builds the bundled libtddp and installs it into the gem. The precompiled gem has it: only what links Gloo and libtorch is built there.
  #
  # @return [String] the prefix
  def build_bundled
    abort "cmake was not found: libtddp is built with it (Debian: apt-get install cmake)" unless find_executable("cmake")
    prefix = File.join(GEM_ROOT, "lib/torch_ddp/native")
    folder = File.join(Dir.pwd, "native-build")
    core = precompiled?(prefix) ? ["-DTDDP_CORE=#{prefix}"] : []
    run "cmake", "-S", GEM_ROOT, "-B", folder, "-DTDDP_TESTS=OFF", "-DTDDP_TORCH=ON", "-DCMAKE_BUILD_TYPE=Release",
      "-DTDDP_LIBTORCH=#{@libtorch.prefix}", "-DCMAKE_INSTALL_PREFIX=#{prefix}", *core, *given
    run "cmake", "--build", folder, "-j", Etc.nprocessors.to_s
    run "cmake", "--install", folder
    FileUtils.rm_rf(folder)
    prefix
  end

  private

  # The options that were given, as CMake's.
  def given
    values = {"GLOO_INCLUDE_DIR" => gloo_include, "GLOO_LIBRARY" => gloo_library, "TDDP_CUDA_INCLUDE_DIR" => with_config("cuda-include"),
              "TDDP_WERROR" => ("ON" if enable_config("werror")), "CMAKE_PREFIX_PATH" => with_config("opt-dir")&.tr(":", ";"),
              "CMAKE_C_FLAGS" => flags("cflags"), "CMAKE_CXX_FLAGS" => flags("cxxflags"),
              "CMAKE_SHARED_LINKER_FLAGS" => with_config("ldflags"), "CMAKE_MODULE_LINKER_FLAGS" => with_config("ldflags"),
              "CMAKE_EXE_LINKER_FLAGS" => with_config("ldflags")}
    values.compact.map { |name, value| "-D#{name}=#{value}" }
  end

  # CMake has no variable of its own for the preprocessor's.
  def flags(name)
    both = [with_config("cppflags"), with_config(name)].compact.join(" ")
    both unless both.empty?
  end

  def gloo_include
    dir = with_config("gloo-include") || (prefix = with_config("gloo-dir")) && File.join(prefix, "include") or return
    header = File.join(dir, "gloo/transport/tcp/device.h")
    File.file?(header) ? File.expand_path(dir) : abort("--with-gloo-include (or -dir): #{header} is not there; expected Gloo's headers")
  end

  def gloo_library
    dir = with_config("gloo-lib") || (prefix = with_config("gloo-dir")) && File.join(prefix, "lib") or return
    file = %w[so dylib a].map { |type| File.join(dir, "libgloo.#{type}") }.find { |path| File.file?(path) }
    file ? File.expand_path(file) : abort("--with-gloo-lib (or -dir): libgloo is not in #{dir}; expected Gloo's library")
  end

  # Within a bundle the bundle's choice, else the version that goes with this libtorch.
  def spec(name, version)
    Gem.loaded_specs[name] || Gem::Specification.find_by_name(name, version)
  rescue Gem::MissingSpecError
    abort "#{name} #{version} is not installed; libtorch #{@libtorch.version} needs it. Run these, then try again:\n  " +
      @libtorch.install_commands.join("\n  ")
  end

  # The precompiled gem is the one that has no sources of the core.
  def precompiled?(prefix)
    return false if File.directory?(File.join(GEM_ROOT, "src/base"))

    out, status = Open3.capture2e(File.join(prefix, "bin/torchrun"), "--version")
    status.success? or refuse_precompiled(out)
  rescue SystemCallError => e # also where its dynamic loader is missing
    refuse_precompiled(e.message)
  end

  def refuse_precompiled(reason)
    abort "this torch-ddp was compiled for x86-64 Linux with glibc 2.36 or newer, and does not run here: #{reason.strip}\n" \
      "Install the file that has no platform in its name, torch-ddp-VERSION.gem, which is compiled here"
  end

  # torch-rb's build log names the Rice that it was compiled with, also if others were installed later.
  def rice_seen_by(torch_rb)
    log = File.join(torch_rb.extension_dir, "gem_make.out")
    File.read(log).scrub[%r{/rice-(\d+(?:\.\d+)+)/}, 1] if File.file?(log)
  end

  def run(*command)
    puts command.join(" ")
    system(*command) or abort "#{command.first} failed: see its messages above. It needs a C++ compiler, make, libtorch and " \
      "Gloo (Debian: apt-get install g++ make libtorch-dev libgloo-dev)"
  end
end

ExtensionConfig.check(ARGV)
begin
  config = ExtensionConfig.new(with_config("torch-dir"))
rescue Setup::Libtorch::NotFound => e
  abort e.message
end
libtorch = config.libtorch
# As system folders: warnings are for this extension's own code.
system_includes = [config.rice_include, *libtorch.include_dirs, *RbConfig::CONFIG.values_at("rubyhdrdir", "rubyarchhdrdir")]
tddp = with_config("tddp-dir") || config.build_bundled
tddp = File.expand_path(tddp)
unless File.file?(File.join(tddp, "include/tddp.h"))
  abort "--with-tddp-dir=#{tddp}: include/tddp.h is not there; expected the prefix that libtddp was installed to"
end

$INCFLAGS << " -I#{tddp}/include" << system_includes.map { |dir| " -isystem #{dir}" }.join
strict = " -Werror" if enable_config("werror")
# Ruby gives every method its receiver, which many don't need.
$CFLAGS << " -std=gnu11 -Wall -Wextra -Wno-unused-parameter -fvisibility=hidden#{strict}"
# Ruby's header includes <cstdbool>, of which gcc 16 warns although it is a system header's.
$CXXFLAGS << " -std=c++#{libtorch.cxx_standard} -D_GLIBCXX_USE_CXX11_ABI=1 -Wno-deprecated-declarations -Wno-cpp -fvisibility=hidden#{strict}"
# RubyGems copies the library into its folder of extensions, so it finds libtddp both beside itself and where it
# was installed.
$LDFLAGS << " -L#{tddp}/lib -L#{libtorch.lib_dir} -Wl,-rpath,'$$ORIGIN/native/lib' -Wl,-rpath,#{tddp}/lib" \
  " -Wl,-rpath,#{libtorch.lib_dir}"
$libs = append_library($libs, "c10")
$libs = append_library($libs, "torch_cpu")
$libs = append_library($libs, "tddp_torch")
$libs = append_library($libs, "tddp")
$libs += " -lstdc++"

create_makefile("torch_ddp/ext")

# mkmf knows the extension's own headers only.
File.open("Makefile", "a") do |file|
  file.puts "", "$(OBJS): #{Dir[File.join(tddp, "include/**/*.h")].join(" ")}"
end
