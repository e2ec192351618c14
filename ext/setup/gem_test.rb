# frozen_string_literal: true

require "fileutils"
require "tmpdir"
require_relative "console"
require_relative "gems"
require_relative "native"

module Setup
  # Proves that the gem file alone installs and runs: built, installed into an empty GEM_HOME and used from there.
  #
  # Compiling torch-rb again would prove nothing about this gem and take minutes, so the compiled torch-rb and
  # rice of the cache are put into that GEM_HOME first, as `gem install` of them would have done.
  class GemTest
    SCRIPT = <<~RUBY
      require "torch/distributed"
      Torch::Distributed.init_process_group("gloo")
      tensor = Torch.ones(3) * (Torch::Distributed.get_rank + 1)
      Torch::Distributed.all_reduce(tensor)
      raise "all_reduce gave \#{tensor.to_a}" unless tensor.to_a == [3.0, 3.0, 3.0]

      Torch::Distributed.destroy_process_group
      home = ENV.fetch("GEM_HOME")
      ours = File.readlines("/proc/self/maps").filter_map { |line| line[%r{/\\S*tddp\\S*|/\\S*torch_ddp\\S*}] }.uniq
      raise "not loaded from the gem: \#{ours}" unless ours.size >= 3 && ours.all? { |path| path.start_with?(home) }

      puts "rank \#{ENV.fetch("RANK")} of \#{ENV.fetch("WORLD_SIZE")} is right"
    RUBY

    def initialize(gems)
      @gems = gems
    end

    # @raise [Failure]
    def run
      Dir.mktmpdir("torch-ddp-gem") do |folder|
        @folder = folder
        @home = File.join(folder, "home")
        gem_file = build
        seed
        install(gem_file)
        use
      end
    end

    private

    def build
      file = File.join(@folder, "torch-ddp.gem")
      Console.step("gem: building the gem file", "gem", "build", "torch-ddp.gemspec", "--output", file, env: environment,
        log: "gem", cure: "the message in the log")
      file
    end

    def seed
      abi = RbConfig::CONFIG["ruby_version"]
      from = File.join(@gems.path, "ruby", abi)
      names = ["torch-rb-#{@gems.libtorch.torch_rb}", "rice-#{@gems.libtorch.rice}"]
      names.each do |name|
        Dir.glob("{gems/#{name},extensions/*/*/#{name},specifications/#{name}.gemspec}", base: from).each do |path|
          FileUtils.mkdir_p(File.dirname(File.join(@home, path)))
          FileUtils.cp_r(File.join(from, path), File.join(@home, path), preserve: true)
        end
      end
    end

    def install(gem_file)
      Console.step("gem: installing it into an empty GEM_HOME", "gem", "install", "--local", "--no-document", gem_file, "--",
        "--with-torch-dir=#{@gems.libtorch.prefix}", env: environment, chdir: @folder, log: "gem",
        cure: "the log names the build's own log")
    end

    def use
      script = File.join(@folder, "script.rb")
      File.write(script, SCRIPT)
      Console.step("gem: its torchrun starts two processes that use it", File.join(@home, "bin/torchrun"), "--standalone",
        "--nproc-per-node=2", script, env: environment, chdir: @folder, log: "gem", limit: 120, cure: "the message in the log")
    end

    # Nothing of this checkout or its bundle may be reached.
    def environment
      Gems.clean_environment.merge("GEM_HOME" => @home, "GEM_PATH" => @home, "RUBYLIB" => nil, "LIBTORCH" => nil,
        "OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1", **compiler_cache)
    end

    # CMake takes it from these; what was compiled before is found wherever the gem's folder is.
    def compiler_cache
      return {} unless Native.ccache?

      {"CMAKE_C_COMPILER_LAUNCHER" => "ccache", "CMAKE_CXX_COMPILER_LAUNCHER" => "ccache", **Native.ccache, "CCACHE_BASEDIR" => @folder}
    end
  end
end
