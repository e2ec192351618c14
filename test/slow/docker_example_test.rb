# frozen_string_literal: true

require "minitest/autorun"
require "shellwords"
require "yaml"
require_relative "../../examples/common/mnist_data"
require_relative "example_programs"
require_relative "support/namespaces"

# What examples/docker/compose.yml starts. The Dockerfile's own steps are run by `rake release:check`.
class DockerExampleTest < Minitest::Test
  include ExamplePrograms

  DATA = File.join(ROOT, "examples/mnist/data")

  def services
    YAML.safe_load_file(example("docker/compose.yml"), aliases: true).fetch("services")
  end

  def test_two_hosts_with_the_same_command_of_one_image
    assert_equal %w[host0 host1], services.keys
    services.each { |name, service| assert_equal name, service.fetch("hostname") }
    assert_equal 1, services.each_value.map { |service| service.except("hostname") }.uniq.size
    build = services["host0"].fetch("build")
    assert_equal ROOT, File.expand_path(build.fetch("context"), example("docker"))
    assert File.file?(File.join(ROOT, build.fetch("dockerfile")))
    assert_equal "host0", services["host0"].fetch("command")[/--rdzv-endpoint=([\w.]+):/, 1]
  end

  def test_what_the_image_leaves_out_is_what_git_ignores
    left_out, ignored = ["examples/docker/Dockerfile.dockerignore", ".gitignore"].map do |path|
      File.readlines(File.join(ROOT, path), chomp: true).map { |line| line.delete_prefix("/").chomp("/") }
    end
    assert_includes left_out, ".git"
    assert_empty left_out - [".git"] - ignored
    assert_empty %w[.bundle Gemfile.lock build lib/torch_ddp/native lib/torch_ddp/*.so] - left_out
  end

  def test_the_hosts_train_together
    skip Namespaces.obstacle if Namespaces.obstacle
    MNISTData.fetch(DATA)
    hosts = Namespaces.new(2)
    outputs = services.each_value.with_index.map do |service, index|
      command = service.fetch("command").gsub("host0", hosts.ipv4(0)).shellsplit
      Thread.new { run_command(*hosts.command(index), *command, "--epochs", "1", "--subset", "2000", env: GEMFILE) }
    end.map(&:value)
    assert_match(/2 ranks on cpu, 1000 images a rank/, outputs.join)
    assert_equal 1, outputs.count { |out| out.match?(/test accuracy \d/) }
  rescue MNISTData::Unreachable => e
    skip "MNIST is not here and cannot be fetched: #{e.message}"
  ensure
    hosts&.remove
  end
end
