# frozen_string_literal: true

require "digest"
require "etc"
require "shellwords"
require_relative "../torch_ddp/libtorch"
require_relative "cache"
require_relative "console"

module Setup
  # The gems, compiled once for each combination of Ruby and libtorch and kept in the cache.
  #
  # A folder of the cache is whole or absent: it is filled under another name and renamed when bundler is
  # done. Gems that are added later go into the whole folder, where RubyGems itself keeps the order (a
  # gem's specification is written last).
  class Gems
    FILES = %w[Gemfile torch-ddp.gemspec include/tddp/version.h ext/torch_ddp/libtorch.rb].freeze
    LINT = {"BUNDLE_WITH" => "lint"}.freeze
    VISION = {"BUNDLE_WITH" => "vision"}.freeze

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
      write(File.join(ROOT, ".bundle/libtorch"), "#{@libtorch.prefix}\n")
      Cache.locked(path) { install unless take_from_cache }
      write(ready_file, ready_text)
    end

    # @return [Boolean] whether standardrb is there now
    def ensure_lint!
      ensure_group!(LINT, "standard", "without standard only `rake lint` is incomplete")
    end

    # @return [Boolean] whether standardrb is there
    def lint?
      bundle_check(LINT)
    end

    # @return [Boolean] whether torchvision is there now
    def ensure_vision!
      ensure_group!(VISION, "torchvision", "without torchvision only examples/resnet cannot be run")
    end

    def ready?
      File.file?(File.join(ROOT, "Gemfile.lock")) && File.file?(ready_file) && File.read(ready_file) == ready_text &&
        File.directory?(path)
    end

    # A command that runs within the bundle.
    def self.exec(*command)
      [RbConfig.ruby, "-S", "bundle", "exec", *command]
    end

    # Bundler is told nothing by the process that started it, such as another bundle.
    def self.clean_environment
      ENV.keys.grep(/\A(BUNDLER?_(?!SILENCE|SSL|MIRROR)|RUBYOPT\z|RUBYLIB\z|GEM_HOME\z|GEM_PATH\z)/).to_h { |name| [name, nil] }
    end

    private

    # Installs one of the Gemfile's optional groups.
    def ensure_group!(group, gem, without)
      return true if bundle_check(group)

      Cache.locked(path) do
        Console.step("gems: installing #{gem}", *bundle("install"), env: group.merge("MAKEFLAGS" => "-j#{Etc.nprocessors}"),
          log: "bundle-#{group.fetch("BUNDLE_WITH")}", cure: "check the network; #{without}")
      end
      true
    rescue Failure => e
      Console.say(e.message)
      false
    end

    # Another checkout may have done it all: then its Gemfile.lock saves asking the registry.
    def take_from_cache
      return false unless File.file?(cached_lock)

      write(File.join(ROOT, "Gemfile.lock"), File.read(cached_lock))
      configure
      bundle_check
    end

    def install
      FileUtils.rm_f(File.join(ROOT, "Gemfile.lock"))
      if File.directory?(path)
        configure
        bundle_install(path)
      else
        unfinished = "#{path}.unfinished"
        FileUtils.rm_rf(unfinished)
        bundle_install(unfinished)
        File.rename(unfinished, path)
        configure
      end
      write(cached_lock, File.read(File.join(ROOT, "Gemfile.lock")))
    end

    def bundle_install(into)
      cores = Etc.nprocessors
      title = "gems for libtorch #{@libtorch.version}: torch-rb #{@libtorch.torch_rb} and rice #{@libtorch.rice} into #{path}"
      unless File.directory?(path)
        title += "\n  compiling torch-rb on all #{cores} cores takes 4 to 10 minutes on two; it is done once and kept"
      end
      Console.step(title, *bundle("install"), log: "bundle",
        env: build_environment.merge("BUNDLE_PATH" => into, "MAKEFLAGS" => "-j#{cores}"),
        cure: "check the network; for a compiler's error see mkmf.log and gem_make.out, which the log names; " \
          "LIBTORCH=/path uses another libtorch")
    end

    # Debug information and the distribution's own flags would cost a third more time.
    def build_environment
      flags = ["--with-torch-dir=#{@libtorch.prefix.shellescape}", "--with-cxxflags='-O2 -g0'", "--with-optflags=-O2",
        "--with-debugflags=-g0"]
      {"BUNDLE_BUILD__TORCH___RB" => flags.join(" ")}
    end

    def configure
      Console.step("gems: pointing this checkout at them", *bundle("config", "set", "--local", "path", path),
        log: "bundle", cure: "see the log")
    end

    def bundle_check(env = {})
      system(self.class.clean_environment.merge(env), *bundle("check"), chdir: ROOT, out: File::NULL, err: File::NULL)
    end

    def bundle(*arguments)
      [RbConfig.ruby, "-S", "bundle", *arguments]
    end

    def ready_file
      File.join(ROOT, ".bundle/ready")
    end

    def ready_text
      "#{path} #{digest}\n"
    end

    def cached_lock
      File.join(path, "Gemfile-#{digest}.lock")
    end

    def digest
      @digest ||= FILES.inject(Digest::SHA256.new) { |sum, file| sum << File.read(File.join(ROOT, file)) }.hexdigest[0, 12]
    end

    def write(file, text)
      FileUtils.mkdir_p(File.dirname(file))
      partial = "#{file}.#{Process.pid}"
      File.write(partial, text)
      File.rename(partial, file)
    end
  end
end
