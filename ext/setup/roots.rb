# frozen_string_literal: true

require "etc"
require_relative "../torch_ddp/libtorch"
require_relative "system_packages"

module Setup
  # A Debian in a folder of its own, made once by mmdebstrap and kept in the cache: its name there is a digest of
  # its packages. What it needs of the running system is mounted in a mount namespace that ends with each command.
  class Root
    # Seconds that making it may take.
    LIMIT = 1200
    SOURCE = "/root/torch-ddp"
    # Mounts directories, then the shell becomes the command in the root.
    ENTER = <<~SHELL
      set -e
      mount -t proc proc "$1/proc"
      mount --rbind /dev "$1/dev"
      cd "$1"
      exec chroot "$@"
    SHELL

    # @param name [String] the folder in the cache that it is kept in
    # @param packages [Array<String>]
    # @param suite [String] the Debian it is of; 13 is trixie
    # @param options [Array<String>] further options of mmdebstrap
    # @param surplus [Array<String>] patterns of files that the packages bring and nothing here uses
    def initialize(name, packages, suite: "trixie", options: [], surplus: [])
      @name = name
      @packages = packages
      @suite = suite
      @options = options
      @surplus = surplus
      @key = Digest::SHA256.hexdigest(packages.join(" "))[0, 12]
    end

    # @return [String] where it is or will be
    def folder
      Cache.path(@name, @key)
    end

    # @return [String, nil] why there can be no such root here
    def obstacle
      return "making a root folder needs root" unless Process.uid.zero?
      return "unshare was not found" unless SystemPackages.program?("unshare")

      out, status = Open3.capture2e("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt")
      return "mounts are not permitted here: #{out.strip}" unless status.success?

      "mmdebstrap could not be installed" unless SystemPackages.available?(SystemPackages::DEBIAN13, why: "makes a Debian's root")
    end

    # Makes it if it is not in the cache.
    #
    # @return [String, nil] why it could not be made
    def make
      log = "mmdebstrap-#{@name}"
      Cache.make(folder) do |unfinished|
        Console.step("Debian #{@suite} root for #{@name}: mmdebstrap, about two minutes, kept in #{folder}", *mmdebstrap(unfinished),
          log: log, limit: LIMIT, cure: "check the network and the Debian mirror")
        FileUtils.rm_f(Dir.glob(@surplus, base: unfinished).map { |path| File.join(unfinished, path) })
      end
      nil
    rescue Failure => e
      Console.say(e.message)
      "mmdebstrap could not make it, see build/log/#{log}.log"
    end

    # Holds it, with the present sources inside.
    def using
      Cache.locked("#{folder}.run") do
        %w[/etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt].each { |path| copy(path, path) if File.file?(path) }
        copy_sources
        yield
      end
    end

    # @return [Array<String>] what runs a command inside; without one, what to put before it
    def enter(*command)
      ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", folder, *command]
    end

    # The environment inside: proxies and certificates as here, nothing else of this shell.
    def environment(more = {})
      passed = ENV.select { |name, _| name.match?(/\A(https?_proxy|no_proxy|SSL_CERT_\w+|CI|BUNDLE_SSL\w*|BUNDLE_MIRROR\w*)\z/i) }
      ENV.keys.to_h { |name| [name, nil] }.merge(passed, "HOME" => "/root", "LANG" => "C.UTF-8",
        "PATH" => "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **more)
    end

    private

    # It takes the mirror from its own default. What it mounts in the root ends with it, also where it is ended: removing the folder
    # would go on into /proc and /sys otherwise.
    def mmdebstrap(*options, into)
      ["unshare", "--mount", "--propagation", "private",
        "mmdebstrap", "--variant=apt", *@options, *options, "--include=#{@packages.join(",")}", @suite, into]
    end

    # Writes only what changed, so that the build inside keeps its products. Files of ours that are gone here are removed there.
    def copy_sources
      wanted = SourceFiles.all
      wanted.each { |path| copy(File.join(ROOT, path), File.join(SOURCE, path)) }
      list = File.join(folder, SOURCE, ".bundle/copied-files")
      before = File.file?(list) ? File.readlines(list, chomp: true) : []
      FileUtils.rm_f((before - wanted).map { |path| File.join(folder, SOURCE, path) })
      Cache.write(list, wanted.map { |path| "#{path}\n" }.join)
    end

    # Copies a file unless it is the same inside. A link inside is replaced: here it would name a file outside.
    def copy(from, path)
      to = File.join(folder, path)
      return if File.file?(to) && !File.symlink?(to) && FileUtils.identical?(from, to) && File.stat(from).mode == File.stat(to).mode

      FileUtils.mkdir_p(File.dirname(to))
      FileUtils.rm_f(to)
      FileUtils.cp(from, to)
      File.chmod(File.stat(from).mode, to)
    end
  end

  # A root with the same sources and tests on another Debian. It keeps the gems, compiled inside, and the last build's products.
  class Debian < Root
    PACKAGES = (%w[ca-certificates procps rake ruby ruby-bundler] + SystemPackages::BUILD + SystemPackages::LIBTORCH +
      SystemPackages::PYTORCH).sort.freeze
    RESULTS = "#{SOURCE}/build/results.jsonl"

    # Seconds. Tests that have not ended then count as not run.
    LIMIT = 3600

    # A leg's work: copies the present sources and runs quick tests inside.
    #
    # @param tests [Tests]
    # @param leg [String] what it is called
    # @param legs [Array<Symbol>] those to run inside
    # @param c_files [Array<String>] patterns of the files that decide how the C tests end
    # @return [Boolean] whether all passed
    def run(tests, leg, legs, c_files)
      if (reason = obstacle || make || unready)
        return tests.skip(leg, reason)
      end

      c = Unchanged.new("#{leg}/c", c_files, @key, *@packages)
      if (reason = c.reason)
        tests.skip("#{leg}/c", reason)
        legs -= [:c]
      end
      results = File.join(folder, RESULTS)
      status = using { run_inside(leg, legs, results) }
      passed = tests.adopt(leg, results, status, LIMIT)
      c.passed! if passed && legs.include?(:c)
      passed
    end

    private

    # @return [String, nil] why tests that fail inside would say nothing about these sources
    def unready
    end

    def run_inside(leg, legs, results)
      FileUtils.rm_f(results)
      Console.run(*rake("test"), log: leg, limit: LIMIT, show: true,
        env: environment("TDDP_RESULTS" => RESULTS, "TDDP_LEGS" => legs.join(","), "TDDP_TEST_SLOTS" => "3")).first
    end

    # @return [Array<String>] what runs a task of the copied Rakefile
    def rake(task)
      enter("sh", "-c", 'cd "$1" && mkdir -p build && exec rake "$2"', "sh", SOURCE, task)
    end
  end

  # Debian 13: libtorch 2.6, torch-rb 0.19.1, Ruby 3.3.
  class Debian13 < Debian
    def initialize
      super("debian13", PACKAGES)
    end
  end

  # Debian unstable, with the newest libtorch, PyTorch, Ruby and compiler that Debian has.
  #
  # Its archive changes every day. A root is kept for each set of versions of what the tests are about, so it stays as it is until one
  # of these changes, and what they passed with is known. What is wrong with the archive, or with a libtorch that no torch-rb goes
  # with yet, is no failure of these sources.
  class Unstable < Debian
    # A mirror may be weeks behind. The signatures are checked all the same.
    OPTIONS = ["--aptopt=Acquire::Check-Valid-Until \"false\""].freeze
    # Packages, and how a root's name shows them.
    DECISIVE = {"libtorch-dev" => "libtorch", "g++" => "g++", "ruby" => "ruby"}.freeze

    def initialize
      super("unstable", PACKAGES, suite: "unstable", options: OPTIONS)
      @packages_key = @key
    end

    def obstacle
      super || look_up
    end

    # Runs a task of the present Rakefile inside, with ARGS.
    #
    # @param task [String]
    # @raise [Failure] if there can be no such root here, or the task failed
    def run_task(task)
      if (reason = obstacle || make)
        raise Failure, "step failed: Debian unstable\n  #{reason}"
      end

      status = using { system(environment("ARGS" => ENV["ARGS"]), *rake(task)) }
      raise Failure, "step failed: rake #{task} in #{folder}\n  likely cure: its messages are above" unless status
    end

    # Its compiler is newer than CI's own, and may warn of more.
    def environment(more = {})
      super({"CI" => nil, **more})
    end

    private

    # Finds out which root is meant: that of what is newest, or the last one that was made while the archive is broken or out of reach.
    #
    # @return [String, nil] why there is none
    def look_up
      return unless @key == @packages_key

      newest = ask || kept
      @key = newest if newest
      "Debian unstable has no such set of packages at present, see build/log/mmdebstrap-simulate.log" unless newest
    end

    def ask
      Console.say "asking Debian unstable's archive what is newest ..."
      status, output = Console.run(*mmdebstrap("--simulate", "--verbose", File::NULL), log: "mmdebstrap-simulate", limit: LIMIT)
      return unless status&.success?

      versions = DECISIVE.map { |package, name| "#{name}-#{output[/^Inst #{Regexp.escape(package)} \((?:\d+:)?(\d+\.\d+)/, 1]}" }
      [@packages_key, *versions].join("-")
    end

    def kept
      path = Dir.glob(Cache.path(@name, "#{@packages_key}-*/")).reject { |each| each.end_with?(".unfinished/") }.max_by { |each| File.mtime(each) }
      return unless path

      Console.say "Debian unstable's archive is broken or out of reach, see build/log/mmdebstrap-simulate.log: going on with #{path}"
      File.basename(path)
    end

    def unready
      libtorch = @key[/libtorch-([\d.]+)/, 1]
      warning = Libtorch.versions_for(libtorch)[:warning]
      return warning if warning

      status, = using { Console.run(*rake("setup"), log: "unstable-setup", env: environment, limit: LIMIT) }
      "torch-rb does not go with what Debian unstable has at present, see build/log/unstable-setup.log" unless status&.success?
    end
  end

  # Compiles against CUDA, in a Debian 13 root that has it but no GPU: the NCCL module, compared with the
  # libraries' own headers, and the shim with a libtorch for CUDA. Then runs the C tests of both, and one with the real
  # libraries, which checks their failures without a GPU.
  #
  # The root takes minutes to make and the shim minutes to compile, so this is done only if a file that it depends
  # on has changed since it last passed.
  class CUDA
    PACKAGES = %w[ca-certificates cmake g++ libnccl-dev libtorch-cuda-dev make nvidia-cuda-dev pkgconf procps].freeze
    # CUDA and NCCL are not among Debian's free software; what needs them is in contrib.
    # cuDNN, which libtorch's package depends on, would be fetched from its vendor when it is installed, after agreeing to its license.
    # Nothing is linked with it, so this is declined.
    OPTIONS = ["--components=main,contrib,non-free,non-free-firmware",
      "--essential-hook=echo nvidia-cudnn nvidia-cudnn/question select I Decline | chroot \"$1\" debconf-set-selections"].freeze
    # More than half of what is unpacked: libraries to be linked statically, and the packages themselves.
    SURPLUS = %w[usr/lib/**/*_static*.a var/cache/apt/archives/*.deb].freeze

    # What is built and tested, and the files that define how.
    FILES = %w[
      CMakeLists.txt include/**/*.h src/**/CMakeLists.txt src/backend/*.{c,h} src/backend/{cuda,fake,nccl}/*.{c,h}
      src/torch/**/*.{cc,h,cmake,map} test/c/CMakeLists.txt test/c/*.{c,h} test/c/{backend,nccl,real,standin}/*.{c,h}
      test/c/group/*.h ext/setup/roots.rb
    ].freeze
    SETTINGS = %w[-DCMAKE_BUILD_TYPE=RelWithDebInfo -DTDDP_WERROR=ON -DTDDP_TESTS=ON -DTDDP_GLOO=OFF -DTDDP_TORCH=ON
      -DTDDP_CUDA=ON -DTDDP_NCCL_HEADERS=ON].freeze
    ROOMS = %w[backend nccl real].freeze
    BUILD = "#{Root::SOURCE}/build/cuda"

    # Seconds. A build that has not ended then counts as not run.
    LIMIT = 1500

    # @param root [Root] for tests, another one
    # @param files [Array<String>] patterns, likewise
    def initialize(root: Root.new("cuda", PACKAGES, options: OPTIONS, surplus: SURPLUS), files: FILES)
      @root = root
      @files = files
    end

    # The leg's work.
    #
    # @param tests [Tests]
    def run(tests)
      tests.unless_unchanged("cuda", @files, @root.folder) do
        if (reason = @root.obstacle || @root.make)
          next tests.skip("cuda", reason)
        end

        @root.using do
          tests.check("cuda/build", optional: true) { build } &&
            tests.ctest("cuda", BUILD, env: @root.environment("TDDP_TEST_REAL" => "1"), wrapper: @root.enter, only: ["-R", "^(#{ROOMS.join("|")})/"])
        end
      end
    end

    private

    def build
      inside("configuring", "cmake", "-S", Root::SOURCE, "-B", BUILD, *SETTINGS, cure: "the packages of #{self.class} in ext/setup/roots.rb")
      inside("building on #{Etc.nprocessors} cores", "cmake", "--build", BUILD, "-j", Etc.nprocessors.to_s, "--target", *targets,
        cure: "the compiler's message in the log")
    end

    def inside(title, *command, cure:)
      Console.step("compile against CUDA: #{title}", *@root.enter(*command), env: @root.environment, log: "cuda-build", limit: LIMIT, cure: cure)
    end

    def targets
      tests = Dir.glob(ROOMS.map { |room| "test/c/#{room}/*_test.c" }, base: ROOT).map do |path|
        "test_#{path[%r{([^/]+)/[^/]+\z}, 1]}_#{File.basename(path, "_test.c")}"
      end
      %w[tddp tddp_backend_nccl tddp_torch standin_cudart standin_nccl] + tests.sort
    end
  end
end
