# frozen_string_literal: true

require_relative "dockerfile"
require_relative "gem_test"
require_relative "roots"

module Setup
  # Checks what a release needs.
  class Release
    # @raise [Failure]
    def check
      problems = GemFiles.differences + version_problems + address_problems
      raise Failure, "step failed: release #{version}\n  #{problems.join("\n  ")}" if problems.any?

      Dockerfile.new.run
      files = Debian12.new.gem_files
      Console.say "", "release #{version}: these files are right", *files.map { |path| "  #{path}" }
      Console.say "before the release: CHANGELOG.md still has \"#{version} (unreleased)\"" if newest_change.include?("unreleased")
    end

    # @return [Array<String>] what disagrees on the version, a line each
    def version_problems(changelog: read("CHANGELOG.md"), header: read("include/tddp/version.h"))
      numbers = %w[MAJOR MINOR PATCH].map { |part| header[/define TDDP_VERSION_#{part} (\d+)/, 1] }.join(".")
      newest = newest_change(changelog)
      [
        ("include/tddp/version.h: TDDP_VERSION is #{version}, its parts are #{numbers}" unless numbers == version),
        ("CHANGELOG.md begins with #{newest.inspect}, not with #{version}" unless newest.split.first == version)
      ].compact
    end

    # @param remotes [Array<String>] the addresses of this repository's remotes; without one nothing is compared
    # @return [Array<String>]
    def address_problems(remotes = git_remotes)
      homepage = GemFiles.specification.homepage
      path = homepage[%r{\Ahttps://(.+)\z}, 1]
      remotes = remotes.grep(%r{\A(https?|ssh|git)://|@}) # not folders
      return [] if remotes.empty? || remotes.any? { |remote| remote.delete_suffix(".git").tr(":", "/").end_with?(path) }

      ["torch-ddp.gemspec: the homepage #{homepage} is none of this repository's remotes: #{remotes.join(", ")}"]
    end

    private

    def newest_change(changelog = read("CHANGELOG.md"))
      changelog[/^## (.+)$/, 1].to_s
    end

    def version
      GemFiles.specification.version.to_s
    end

    def read(path)
      File.read(File.join(ROOT, path))
    end

    def git_remotes
      Open3.capture2("git", "-C", ROOT, "remote", "-v").first.lines.map { |line| line.split[1] }.uniq
    end
  end

  # A root of Debian 12, the oldest system that torch-ddp supports: what is compiled there runs on newer ones.
  class Debian12 < Root
    PACKAGES = (%w[ca-certificates git procps rake ruby ruby-bundler] + SystemPackages::BUILD + SystemPackages::LIBTORCH).sort.freeze
    PROGRAM = <<~RUBY
      require "./ext/setup/gem_test"
      gems = Setup::Gems.new
      gems.ensure! unless File.directory?(gems.path)
      Setup::GemTest.new(gems).run
    RUBY
    # Seconds, of which torch-rb's compilation may take most.
    LIMIT = 3600

    def initialize
      super("debian12", PACKAGES, suite: "bookworm")
    end

    # The compiler is the same as on any Debian 12, so it shares this machine's compiler cache.
    def enter(*command)
      ["unshare", "--mount", "--propagation", "private", "sh", "-ec", 'mkdir -p "$1" "$2"; mount --bind "$1" "$2"; shift 2; exec "$@"', "sh",
        Cache.path("ccache"), File.join(folder, "root/.cache/torch-ddp/ccache"), *super]
    end

    # Builds the gem's files inside, installs and uses them there, and brings them here.
    #
    # @return [Array<String>] the files
    # @raise [Failure]
    def gem_files
      reason = obstacle || make and raise Failure, "step failed: Debian 12\n  #{reason}"

      using do
        FileUtils.rm_rf(inside(GemFiles::FOLDER))
        copy_compiled_gems
        status, = Console.run(*enter("sh", "-c", "cd #{SOURCE} && exec ruby -e \"$1\"", "sh", PROGRAM), log: "debian12", limit: LIMIT,
          show: true, env: environment)
        unless status&.success?
          raise Failure, "step failed (#{Console.ending(status)}): the gem's files on Debian 12\n  likely cure: its messages are above"
        end

        FileUtils.mkdir_p(GemFiles::FOLDER)
        Dir.glob(File.join(inside(GemFiles::FOLDER), "*.gem")).sort.each { |path| FileUtils.cp(path, GemFiles::FOLDER) }
          .map { |path| File.join(GemFiles::FOLDER, File.basename(path)) }
      end
    end

    private

    # Where a path of this checkout is in the root.
    def inside(path)
      File.join(folder, SOURCE, path.delete_prefix(ROOT))
    end

    # Where this is a Debian 12 as well, what was compiled here serves there.
    def copy_compiled_gems
      releases = ["/", folder].map { |root| File.read(File.join(root, "etc/os-release"))[/^VERSION_CODENAME=.*/] }
      from = Gems.new.path
      to = File.join(folder, "root", ".cache/torch-ddp/gems", File.basename(from))
      return if releases.uniq.size > 1 || !File.directory?(from) || File.directory?(to)

      Cache.make(to) { |unfinished| FileUtils.cp_r(File.join(from, "."), unfinished, preserve: true) }
    rescue Libtorch::NotFound, Errno::ENOENT
      nil # then it is compiled there
    end
  end
end
