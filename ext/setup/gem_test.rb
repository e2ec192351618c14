# frozen_string_literal: true

require "tmpdir"
require_relative "gem_files"
require_relative "libtorch_archive"

module Setup
  # Proves that either gem file alone, and a git repository in a Gemfile, install and run: each is installed into an empty GEM_HOME and
  # used from there; the sources also with a libtorch of the shape of pytorch.org's archives.
  #
  # Compiling torch-rb again would prove nothing about this gem and take minutes, so the compiled torch-rb and rice of the cache are put
  # there first, as `gem install` of them would have done.
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
      files = GemFiles.new
      Dir.mktmpdir("torch-ddp-gem") do |folder|
        @folder = folder
        File.write(File.join(folder, "script.rb"), SCRIPT)
        install("source", files.source)
        install_precompiled(files.native) if GemFiles.native?
        install_from_git
        install_beside_archive(files.source)
      end
    end

    private

    def install(name, file, libtorch = @gems.libtorch.prefix)
      fill_home(name)
      step("installing #{File.basename(file)} into a GEM_HOME of its own", "gem", "install", "--local", "--no-document", file, "--",
        "--with-torch-dir=#{libtorch}", cure: "the log names the build's own log")
      check_backends
      use(File.join(@home, "bin/torchrun"))
    end

    def check_backends
      expected = ["gloo", *("mpi" if Native.mpi), "nccl", *("ucx" if SystemPackages.missing(SystemPackages::UCX).empty?)]
      found = Dir.glob(File.join(@home, "gems/torch-ddp-*/lib/torch_ddp/native/lib/tddp_backend_*.so")).map { |path| path[/backend_(\w+)\.so/, 1] }.sort
      raise Failure, "step failed: gem: it has the backends #{found}, expected #{expected}" unless found == expected
    end

    # The core that is installed is the very one of the file.
    def install_precompiled(file)
      install("native", file)
      core = "#{GemFiles::NATIVE}/lib/libtddp.so"
      installed = Dir.glob(File.join(@home, "gems/*/#{core}"))
      return if installed.size == 1 && FileUtils.identical?(installed[0], File.join(GemFiles::FOLDER, "stage", core))

      raise Failure, "step failed: #{File.basename(file)}: its #{core} is not what was installed: #{installed}"
    end

    # Debian's libraries are found anyway, those of an archive only where the gem's look for them.
    def install_beside_archive(file)
      archive = LibtorchArchive.make(File.join(@folder, "libtorch"), @gems.libtorch)
      install("archive", file, archive)
      %w[ext.so native/lib/libtddp_torch.so].each do |name|
        library = Dir.glob(File.join(@home, "gems/torch-ddp-*/lib/torch_ddp", name)).first.to_s
        out, = Open3.capture2e("readelf", "--dynamic", library)
        next if out[/RUNPATH.*\[(.*)\]/, 1].to_s.split(":").include?(File.join(archive, "lib"))

        raise Failure, "step failed: gem: #{name} does not look for libtorch in #{archive}/lib\n#{out}"
      end
    end

    # As a user's Gemfile has it. Without a source for gems, Bundler takes those that are installed.
    def install_from_git
      fill_home("git")
      repository = make_repository
      app = File.join(@folder, "app")
      FileUtils.mkdir_p(app)
      File.write(File.join(app, "Gemfile"), <<~RUBY)
        gem "torch-ddp", git: "file://#{repository}"
        gem "torch-rb", "#{@gems.libtorch.torch_rb}"
        gem "rice", "#{@gems.libtorch.rice}"
      RUBY
      step("installing it from git by a Gemfile", *Gems::BUNDLE, "install", chdir: app, cure: "the log names the build's own log")
      use(*Gems.exec("torchrun"), chdir: app)
    end

    # @return [String] a repository with what the gem has, and its gemspec
    def make_repository
      repository = File.join(@folder, "repository")
      [*GemFiles.specification.files, "torch-ddp.gemspec"].each do |path|
        FileUtils.mkdir_p(File.dirname(File.join(repository, path)))
        FileUtils.cp(File.join(ROOT, path), File.join(repository, path), preserve: true)
      end
      git = %w[git -c user.name=test -c user.email=test@localhost]
      step("a repository of it", "sh", "-ec", '"$@" init -q; "$@" add --all; "$@" commit -q -m sources', "sh", *git, chdir: repository)
      repository
    end

    def use(*torchrun, **options)
      step("its torchrun has a version", *torchrun, "--version", **options)
      step("its torchrun starts two processes that use it", *torchrun, "--standalone", "--nproc-per-node=2",
        File.join(@folder, "script.rb"), limit: 120, **options)
    end

    def step(title, *command, cure: "the message in the log", chdir: @folder, **options)
      Console.step("gem: #{title}", *command, env: environment, log: "gem", cure: cure, chdir: chdir, **options)
    end

    def fill_home(name)
      @home = File.join(@folder, name)
      from = File.join(@gems.path, "ruby", RbConfig::CONFIG["ruby_version"])
      names = "{torch-rb-#{@gems.libtorch.torch_rb},rice-#{@gems.libtorch.rice}}"
      Dir.glob("{gems/#{names},extensions/*/*/#{names},specifications/#{names}.gemspec}", base: from).each do |path|
        FileUtils.mkdir_p(File.dirname(File.join(@home, path)))
        FileUtils.cp_r(File.join(from, path), File.join(@home, path), preserve: true)
      end
    end

    # Nothing of this checkout or its bundle may be reached. The compiler cache finds what was compiled before, wherever the gem's
    # folder is.
    def environment
      Gems.clean_environment.merge(Native.ccache, "CCACHE_BASEDIR" => @folder, "GEM_HOME" => @home, "GEM_PATH" => @home,
        "BUNDLE_USER_HOME" => File.join(@folder, "bundler"), "RUBYLIB" => nil, "LIBTORCH" => nil,
        "OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1")
    end
  end
end
