# frozen_string_literal: true

require "tmpdir"
require_relative "libtorch_archive"
require_relative "native"

module Setup
  # Proves that the gem file alone installs and runs: built, installed into an empty GEM_HOME and used from there; and again with a
  # libtorch of the shape of pytorch.org's archives.
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
        file = File.join(folder, "torch-ddp.gem")
        script = File.join(folder, "script.rb")
        File.write(script, SCRIPT)
        copy_compiled_gems
        step("building the gem file", "gem", "build", "torch-ddp.gemspec", "--output", file, chdir: ROOT)
        try("an empty GEM_HOME", file, script, @gems.libtorch.prefix)
        archive = LibtorchArchive.make(File.join(folder, "libtorch"), @gems.libtorch)
        try("the same, with a libtorch as its archives have it", file, script, archive)
        check_search_path(File.join(archive, "lib"))
      end
    end

    private

    def step(title, *command, cure: "the message in the log", chdir: @folder, **options)
      Console.step("gem: #{title}", *command, env: environment, log: "gem", cure: cure, chdir: chdir, **options)
    end

    def try(where, file, script, libtorch)
      step("installing it into #{where}", "gem", "install", "--local", "--no-document", "--force", file, "--", "--with-torch-dir=#{libtorch}",
        cure: "the log names the build's own log")
      step("its torchrun starts two processes that use it", File.join(@home, "bin/torchrun"), "--standalone", "--nproc-per-node=2", script,
        limit: 120)
    end

    # Debian's libraries are found anyway, those of an archive only where the gem's look for them.
    def check_search_path(folder)
      %w[ext.so native/lib/libtddp_torch.so].each do |name|
        library = Dir.glob(File.join(@home, "gems/torch-ddp-*/lib/torch_ddp", name)).first.to_s
        out, = Open3.capture2e("readelf", "--dynamic", library)
        next if out[/RUNPATH.*\[(.*)\]/, 1].to_s.split(":").include?(folder)

        raise Failure, "step failed: gem: #{name} does not look for libtorch in #{folder}\n#{out}"
      end
    end

    def copy_compiled_gems
      from = File.join(@gems.path, "ruby", RbConfig::CONFIG["ruby_version"])
      names = "{torch-rb-#{@gems.libtorch.torch_rb},rice-#{@gems.libtorch.rice}}"
      Dir.glob("{gems/#{names},extensions/*/*/#{names},specifications/#{names}.gemspec}", base: from).each do |path|
        FileUtils.mkdir_p(File.dirname(File.join(@home, path)))
        FileUtils.cp_r(File.join(from, path), File.join(@home, path), preserve: true)
      end
    end

    # Nothing of this checkout or its bundle may be reached. The compiler cache finds what was compiled before, wherever the gem's folder is.
    def environment
      Gems.clean_environment.merge(Native.ccache, "CCACHE_BASEDIR" => @folder, "GEM_HOME" => @home, "GEM_PATH" => @home,
        "RUBYLIB" => nil, "LIBTORCH" => nil, "OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1")
    end
  end
end
