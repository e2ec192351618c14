# frozen_string_literal: true

require "etc"
require "shellwords"
require_relative "../torch_ddp/libtorch"
require_relative "cache"

module Setup
  # The gems, compiled once for each combination of Ruby and libtorch and kept in the cache.
  #
  # Gems that are added later go into the complete folder, which is safe: RubyGems writes a gem's specification last.
  class Gems
    FILES = %w[Gemfile torch-ddp.gemspec include/tddp/version.h ext/torch_ddp/libtorch.rb].freeze
    BUNDLE = [RbConfig.ruby, "-S", "bundle"].freeze
    LOCK = File.join(ROOT, "Gemfile.lock")
    LINT = {"BUNDLE_WITH" => "lint"}.freeze
    VISION = {"BUNDLE_WITH" => "vision"}.freeze
    DOCS = {"BUNDLE_WITH" => "docs"}.freeze
    # The Gemfile's optional groups, each with its gem and what is left undone without it.
    GROUPS = {
      LINT => ["standard", "`rake lint` is incomplete"], VISION => ["torchvision", "examples/resnet cannot be run"],
      DOCS => ["yard", "`rake docs` cannot be run"]
    }.freeze

    attr_reader :libtorch

    # @raise [Libtorch::NotFound]
    def initialize(libtorch = Libtorch.find)
      @libtorch = libtorch
    end

    # @return [String] the folder that bundler installs into
    def path
      Cache.path("gems", "#{Cache.ruby_key}-#{@libtorch.key}")
    end

    # Installs what is missing and points this checkout at it.
    def ensure!
      return if ready?

      Console.say(@libtorch.warning) if @libtorch.warning
      # For the Gemfile, also when it is read without LIBTORCH.
      Cache.write(File.join(ROOT, ".bundle/libtorch"), "#{@libtorch.prefix}\n")
      made = Cache.make(path) { |unfinished| bundle_install(unfinished) }
      bundle("gems: pointing this checkout at them", "config", "set", "--local", "path", path, cure: "see the log")
      Cache.locked(path) { take_lock_file || bundle_install(path) } unless made
      Cache.write(ready_file, ready_text)
    end

    # @param group [Hash] of {GROUPS}
    # @return [Boolean] whether it is there now, installed if need be
    def ensure_group!(group)
      return true if group?(group)

      gem, without = GROUPS.fetch(group)
      Cache.locked(path) do
        bundle("gems: installing #{gem}", "install", env: group.merge("MAKEFLAGS" => "-j#{Etc.nprocessors}"),
          log: "bundle-#{group.fetch("BUNDLE_WITH")}", cure: "check the network; without #{gem} only #{without}")
      end
      true
    rescue Failure => e
      Console.say(e.message)
      false
    end

    # @return [Boolean] whether the gems are there, those of an optional group as well
    def group?(group = {})
      system(self.class.clean_environment.merge(group), *BUNDLE, "check", chdir: ROOT, out: File::NULL, err: File::NULL)
    end

    def ready?
      File.file?(LOCK) && File.file?(ready_file) && File.read(ready_file) == ready_text && File.directory?(path)
    end

    # A command that runs within the bundle.
    def self.exec(*command)
      [*BUNDLE, "exec", *command]
    end

    # Removes what the process that started this one set for its bundle.
    def self.clean_environment
      ENV.keys.grep(/\A(BUNDLER?_(?!SILENCE|SSL|MIRROR)|RUBYOPT\z|RUBYLIB\z|GEM_HOME\z|GEM_PATH\z)/).to_h { |name| [name, nil] }
    end

    private

    # Another checkout may have installed all: its Gemfile.lock then makes asking the registry unnecessary.
    #
    # @return [Boolean] whether that is so
    def take_lock_file
      kept = File.join(path, lock_name)
      File.file?(kept) && Cache.write(LOCK, File.read(kept)) && group?
    end

    def bundle_install(into)
      FileUtils.rm_f(LOCK)
      title = "gems for libtorch #{@libtorch.version}: torch-rb #{@libtorch.torch_rb} and rice #{@libtorch.rice} into #{path}"
      title += "\n  compiling torch-rb on all #{Etc.nprocessors} cores takes 4 to 10 minutes on two; it is done once and kept" if into != path
      bundle(title, "install",
        # The folder that this checkout was pointed at before would take precedence over BUNDLE_PATH.
        env: build_environment.merge("BUNDLE_PATH" => into, "BUNDLE_APP_CONFIG" => into, "MAKEFLAGS" => "-j#{Etc.nprocessors}"),
        cure: "check the network; for a compiler's error see mkmf.log and gem_make.out, which the log names; " \
          "LIBTORCH=/path uses another libtorch")
      Cache.write(File.join(into, lock_name), File.read(LOCK))
    end

    # Debug information and the distribution's own flags would cost a third more time.
    def build_environment
      flags = ["--with-torch-dir=#{@libtorch.prefix.shellescape}", "--with-cxxflags='-O2 -g0'", "--with-optflags=-O2",
        "--with-debugflags=-g0"]
      {"BUNDLE_BUILD__TORCH___RB" => flags.join(" ")}
    end

    # Runs bundler for this checkout, without what the process that started this one set for its own bundle. One gem at a time: make
    # can't use the job server of Bundler 4's parallel installer, and then compiles one file at a time, in spite of MAKEFLAGS.
    def bundle(title, *arguments, cure:, env: {}, log: "bundle")
      Console.step(title, *BUNDLE, *arguments, env: self.class.clean_environment.merge("BUNDLE_JOBS" => "1", **env), log: log, cure: cure)
    end

    def ready_file
      File.join(ROOT, ".bundle/ready")
    end

    def ready_text
      "#{path} #{digest}\n"
    end

    def lock_name
      "Gemfile-#{digest}.lock"
    end

    def digest
      @digest ||= FILES.inject(Digest::SHA256.new) { |sum, file| sum << File.read(File.join(ROOT, file)) }.hexdigest[0, 12]
    end
  end
end
