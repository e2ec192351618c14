# frozen_string_literal: true

require_relative "gems"
require_relative "system_packages"

module Setup
  # Builds libtddp, its modules, torchrun and the C tests with CMake, then the Ruby extension.
  #
  # A stamp in each build folder holds a digest of what the build was made of. While it is the same, neither cmake nor make is started.
  module Native
    BUILD = File.join(ROOT, "build/native")
    PREFIX = File.join(ROOT, "lib/torch_ddp/native")
    EXTENSION = File.join(ROOT, "lib/torch_ddp/ext.so")
    SOURCES = %w[CMakeLists.txt include/**/*.h src/**/*.{c,cc,h,cmake,map,txt} test/{c,bench,fuzz,gpu}/**/{*.{c,cc,h},CMakeLists.txt}].freeze
    EXTENSION_SOURCES = %w[ext/Rakefile ext/torch_ddp/*.{rb,c,cc,h} include/**/*.h].freeze
    CURE = "the compiler's message in the log; `rake clean` starts afresh"

    module_function

    # @param libtorch [Libtorch]
    def compile(libtorch)
      cmake("native", libtorch: libtorch, targets: %w[install], product: File.join(PREFIX, "lib/libtddp.so"),
        options: {"CMAKE_INSTALL_PREFIX" => PREFIX})
      extension(libtorch)
    end

    # Configures and builds one build folder, build/<name>.
    #
    # @param options [Hash] CMake cache variables
    # @return [String] the build folder
    def cmake(name, libtorch: nil, targets: [], product: nil, options: {})
      folder = File.join(ROOT, "build", name)
      settings = settings_for(libtorch, options)
      built(folder, SOURCES, [*settings, mpi].join(" "), product) do
        FileUtils.rm_rf(folder) if foreign?(folder)
        configure(folder, *settings)
        build(folder, *targets)
      end
      folder
    end

    def configure(folder, *settings)
      name = File.basename(folder)
      # Make takes several seconds to see that there is nothing to do. A folder that is there keeps its generator.
      generator = SystemPackages.program?("ninja") ? {"CMAKE_GENERATOR" => "Ninja"} : {}
      log = "cmake-#{name}"
      # Of an MPI it would keep what it found first.
      Console.step("compile #{name}: configuring", "cmake", "-S", ROOT, "-B", folder, "-UMPI_*", *settings, log: log,
        env: ccache.merge(generator), cure: "`rake setup` installs what CMake did not find")
      Console.say(*File.readlines(File.join(LOG_DIR, "#{log}.log")).grep(/\A-- backend mpi/).last(1).map { |line| line.sub("--", " ") })
    end

    # The command of an MPI's compiler, as it shows it itself: once there is an MPI, or another, the backend mpi is built for it.
    #
    # @return [String, nil]
    def mpi
      Open3.capture2e(ENV.fetch("MPICC", "mpicc"), "-show").first
    rescue SystemCallError
      nil
    end

    # Builds targets, or all of them, in a folder that is configured.
    def build(folder, *targets)
      name = File.basename(folder)
      Console.step("compile #{name}: building on #{Etc.nprocessors} cores", "cmake", "--build", folder, "-j", Etc.nprocessors.to_s,
        *(["--target", *targets] if targets.any?), log: "cmake-#{name}", env: ccache, cure: CURE)
    end

    def extension(libtorch)
      folder = File.join(ROOT, "build/extension")
      built(folder, EXTENSION_SOURCES, "#{libtorch.key} #{werror?}", EXTENSION) do
        FileUtils.rm_f(Dir.glob("**/Makefile", base: folder).map { |path| File.join(folder, path) }) # perhaps made with other options
        Console.step("compile extension", *Gems.exec("rake", "--rakefile", "ext/Rakefile", "compile", "--", "--with-tddp-dir=#{PREFIX}",
          "--with-torch-dir=#{libtorch.prefix}", *("--enable-werror" if werror?)), env: ccache.merge("MAKE" => make), log: "extension", cure: CURE)
      end
    end

    # For rake-compiler, which runs it through a shell.
    def make
      compilers = RbConfig::CONFIG.slice("CC", "CXX").map { |name, program| "#{name}='ccache #{program}'" }
      ["make", "-j#{Etc.nprocessors}", *(compilers if ccache.any?)].join(" ")
    end

    def clean
      FileUtils.rm_rf([File.join(ROOT, "build"), PREFIX, EXTENSION])
    end

    # Runs the block unless `folder` was built of just these sources and settings before.
    def built(folder, patterns, settings, product)
      stamp = File.join(folder, "built")
      wanted = SourceFiles.digest(Dir.glob(patterns, base: ROOT).sort, settings + RUBY_DESCRIPTION)
      return if File.file?(stamp) && File.read(stamp) == wanted && (product.nil? || File.file?(product))

      FileUtils.rm_f(stamp)
      yield
      Cache.write(stamp, wanted)
    end

    # One ccache for all checkouts: paths within a checkout count relative to it, so a new clone finds what another compiled.
    #
    # @return [Hash] environment of commands that compile
    def ccache
      return {} unless SystemPackages.program?("ccache")

      {"CMAKE_C_COMPILER_LAUNCHER" => "ccache", "CMAKE_CXX_COMPILER_LAUNCHER" => "ccache", "CCACHE_DIR" => Cache.path("ccache"),
       "CCACHE_BASEDIR" => ROOT, "CCACHE_NOHASHDIR" => "1", "CCACHE_MAXSIZE" => "4G", "CCACHE_SLOPPINESS" => "pch_defines,time_macros"}
    end

    # Whether warnings are errors: in CI, whose compilers' warnings are known. Elsewhere a newer one may warn of more.
    def werror?
      !ENV["CI"].nil?
    end

    def settings_for(libtorch, options)
      values = {"TDDP_TESTS" => "ON", "TDDP_TORCH" => libtorch ? "ON" : "OFF", "TDDP_WERROR" => werror? ? "ON" : "OFF"}
      values["TDDP_LIBTORCH"] = libtorch.prefix if libtorch
      values.merge(options).map { |name, value| "-D#{name}=#{value}" }
    end

    # CMake refuses a build folder that was moved or copied along with the checkout.
    def foreign?(folder)
      cache = File.join(folder, "CMakeCache.txt")
      File.file?(cache) && !File.read(cache).include?("CMAKE_HOME_DIRECTORY:INTERNAL=#{ROOT}\n")
    end
  end
end
