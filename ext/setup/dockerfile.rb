# frozen_string_literal: true

require "json"
require_relative "mnist"
require_relative "roots"

module Setup
  # Executes examples/docker/Dockerfile without Docker: its steps, then its command, in a layer over a root of the Debian that it begins
  # from. The layer is new each time. What would take long and proves nothing is put there first: the compiled gems, MNIST, the compiler's
  # cache.
  class Dockerfile
    PATH = "examples/docker/Dockerfile"
    FROM = /\Adebian:(\w+)-slim\z/
    # Arguments: the root, the layer, a folder and where it is mounted inside, then the command.
    ENTER = <<~SHELL
      set -e
      mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/merged"
      cd "$2/merged"
      mount -t proc proc proc
      mount --rbind /dev dev
      mkdir -p "$3" ".$4"
      mount --bind "$3" ".$4"
      shift 4
      exec chroot . "$@"
    SHELL
    LIMIT = 3600
    # Of the training at the end, so that it takes seconds.
    ARGUMENTS = "--epochs 1 --subset 2000"

    # @return [Array<Array(String, String)>] the instructions, each with its text
    def self.parse(text)
      text.gsub(/^\s*#.*\n/, "").gsub("\\\n", " ").lines.map(&:strip).reject(&:empty?).map { |line| line.split(" ", 2) }
    end

    def initialize(instructions = self.class.parse(File.read(File.join(ROOT, PATH))))
      (_, image), *@steps = instructions
      @suite = image[FROM, 1] or raise Failure, "step failed: #{PATH}: FROM #{image}: expected debian:SUITE-slim"
      @folder = "/"
    end

    # @raise [Failure]
    def run
      @root = Root.new("docker", %w[apt], suite: @suite)
      reason = @root.obstacle || @root.make and raise Failure, "step failed: #{PATH}\n  #{reason}"

      MNIST.new.fetch
      Dir.mktmpdir("torch-ddp-docker") do |layer|
        @layer = layer
        %w[upper work merged].each { |name| Dir.mkdir(File.join(layer, name)) }
        seed
        @steps.each { |instruction, text| execute(instruction, text) }
      end
    end

    private

    def execute(instruction, text)
      case instruction
      when "WORKDIR" then @folder = text
      when "COPY" then copy(*text.split)
      when "RUN" then inside("RUN #{text}", text)
      when "CMD" then inside("CMD #{text}", JSON.parse(text).shelljoin)
      else raise Failure, "step failed: #{PATH}: #{instruction} is not known here"
      end
    end

    def seed
      %w[/etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt].each { |path| put(path, path) if File.file?(path) }
      gems = Gems.new.path
      copy_folder(gems, File.join("/root/.cache/torch-ddp/gems", File.basename(gems)))
    end

    def copy(*sources, target)
      sources.each do |source|
        paths = SourceFiles.all.select { |path| source == "." || path == source || path.start_with?("#{source}/") }
        raise Failure, "step failed: #{PATH}: COPY #{source}: there is no such file in git" if paths.empty?

        directory = File.directory?(File.join(ROOT, source))
        paths.each do |path|
          within = (directory ? path.delete_prefix("#{source}/") : File.basename(path))
          put(File.join(ROOT, path), File.expand_path(File.join(target, within), @folder))
        end
      end
      copy_folder(File.join(ROOT, MNIST::DATA), File.join(@folder, MNIST::DATA)) if sources == ["."]
    end

    def put(from, to)
      to = File.join(@layer, "upper", to)
      FileUtils.mkdir_p(File.dirname(to))
      FileUtils.cp(from, to, preserve: true)
    end

    def copy_folder(from, to)
      to = File.join(@layer, "upper", to)
      FileUtils.mkdir_p(to)
      FileUtils.cp_r(File.join(from, "."), to, preserve: true)
    end

    def inside(title, command)
      enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", @root.folder, @layer, Cache.path("ccache"),
        "/root/.cache/torch-ddp/ccache"]
      Console.step("Dockerfile: #{title}", *enter, "sh", "-c", "cd #{@folder} && #{command}", log: "docker", limit: LIMIT,
        env: @root.environment("ARGS" => ARGUMENTS, "DEBIAN_FRONTEND" => "noninteractive"), cure: "the message in the log")
    end
  end
end
