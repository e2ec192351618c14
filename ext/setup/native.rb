# frozen_string_literal: true

require "digest"
require "etc"
require "fileutils"
require_relative "cache"
require_relative "console"
require_relative "gems"

module Setup
  # Builds libtddp, its modules, torchrun and the C tests with CMake, then the Ruby extension.
  #
  # A stamp beside each build holds a digest of what went in (names, sizes, times); while it stands, neither
  # cmake nor make is started.
  module Native
    PREFIX = File.join(ROOT, "lib/torch_ddp/native")
    EXTENSION = File.join(ROOT, "lib/torch_ddp/ext.so")
    LIBRARY_SOURCES = %w[CMakeLists.txt include/**/*.h src/**/*.{c,cc,h,cmake,map,txt}].freeze
    TEST_SOURCES = %w[test/{c,bench,gpu}/**/*.{c,cc,h} test/{c,bench,gpu}/**/CMakeLists.txt].freeze
    EXTENSION_SOURCES = %w[ext/Rakefile ext/torch_ddp/*.{rb,c,cc,h} include/**/*.h].freeze
    CURE = "the compiler's message in the log; `rake clean` starts afresh"

    module_function

    # @param libtorch [Libtorch]
    def compile(libtorch)
      cmake("native", libtorch: libtorch, install: PREFIX)
      extension(libtorch)
    end

    # Configures and builds one build folder, build/<name>.
    #
    # @param options [Hash] CMake cache variables
    # @return [String] the build folder
    def cmake(name, libtorch: nil, install: nil, options: {})
      folder = File.join(ROOT, "build", name)
      settings = settings_for(libtorch, install, options)
      built(folder, LIBRARY_SOURCES + TEST_SOURCES, settings.join(" "), install && File.join(install, "lib/libtddp.so")) do
        FileUtils.rm_rf(folder) if foreign?(folder)
        Console.step("compile #{name}: configuring", "cmake", "-S", ROOT, "-B", folder, *settings, log: "cmake-#{name}",
          cure: "`rake setup` installs what CMake did not find")
        Console.step("compile #{name}: building on #{Etc.nprocessors} cores", "cmake", "--build", folder, "-j",
          Etc.nprocessors.to_s, log: "cmake-#{name}", env: ccache, cure: CURE)
        if install
          Console.step("compile #{name}: installing to #{install.delete_prefix("#{ROOT}/")}", "cmake", "--install", folder,
            log: "cmake-#{name}", cure: CURE)
        end
      end
      folder
    end

    def extension(libtorch)
      folder = File.join(ROOT, "build/extension")
      built(folder, EXTENSION_SOURCES, libtorch.key, EXTENSION) do
        FileUtils.mkdir_p(folder)
        FileUtils.rm_f(Dir.glob("**/Makefile", base: folder).map { |path| File.join(folder, path) }) # made with other options, perhaps
        Console.step("compile extension", *Gems.exec("rake", "--rakefile", "ext/Rakefile", "compile", "--", "--with-tddp-dir=#{PREFIX}",
          "--with-torch-dir=#{libtorch.prefix}"), env: ccache.merge("MAKE" => make), log: "extension", cure: CURE)
      end
    end

    # For rake-compiler, which runs it through a shell.
    def make
      compilers = ccache? ? RbConfig::CONFIG.slice("CC", "CXX").map { |name, program| "#{name}='ccache #{program}'" } : []
      ["make", "-j#{Etc.nprocessors}", *compilers].join(" ")
    end

    def clean
      FileUtils.rm_rf([File.join(ROOT, "build"), PREFIX, EXTENSION])
    end

    # Runs the block unless `folder` was built of just these sources and settings before.
    def built(folder, patterns, settings, product)
      stamp = File.join(folder, "built")
      wanted = fingerprint(patterns, settings)
      return if File.file?(stamp) && File.read(stamp) == wanted && (product.nil? || File.file?(product))

      FileUtils.rm_f(stamp)
      yield
      File.write(stamp, wanted)
    end

    def fingerprint(patterns, settings)
      sum = Digest::SHA256.new << settings << RUBY_DESCRIPTION
      Dir.glob(patterns, base: ROOT).sort.each do |path|
        stat = File.stat(File.join(ROOT, path))
        sum << "#{path} #{stat.size} #{stat.mtime.to_r}\n"
      end
      sum.hexdigest
    end

    # One cache for all checkouts: paths within a checkout count relative to it, so a clean clone finds what another compiled.
    def ccache
      {"CCACHE_DIR" => Cache.path("ccache"), "CCACHE_BASEDIR" => ROOT, "CCACHE_NOHASHDIR" => "1", "CCACHE_MAXSIZE" => "4G",
       "CCACHE_SLOPPINESS" => "pch_defines,time_macros"}
    end

    def settings_for(libtorch, install, options)
      values = {"TDDP_TESTS" => "ON", "TDDP_TORCH" => libtorch ? "ON" : "OFF", "TDDP_WERROR" => ENV["CI"] ? "ON" : "OFF"}
      values["TDDP_LIBTORCH"] = libtorch.prefix if libtorch
      values["CMAKE_INSTALL_PREFIX"] = install if install
      ["-G", generator, *values.merge(options).map { |name, value| "-D#{name}=#{value}" }, *launcher]
    end

    # Make takes several seconds to see that there is nothing to do.
    def generator
      SystemPackages.program?("ninja") ? "Ninja" : "Unix Makefiles"
    end

    # @return [Array<String>] options of cmake
    def launcher
      ccache? ? %w[-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache] : []
    end

    def ccache?
      SystemPackages.program?("ccache")
    end

    # CMake refuses a build folder that came along when the checkout was moved or copied, or that is another generator's.
    def foreign?(folder)
      cache = File.join(folder, "CMakeCache.txt")
      return false unless File.file?(cache)

      text = File.read(cache)
      ["CMAKE_HOME_DIRECTORY:INTERNAL=#{ROOT}\n", "CMAKE_GENERATOR:INTERNAL=#{generator}\n"].any? { |line| !text.include?(line) }
    end
  end
end
