# frozen_string_literal: true

require "json"
require "minitest/autorun"
require "open3"
require "rbconfig"
require "timeout"
require_relative "support/namespaces"

# The tests of the collectives again, the ranks of each world on two hosts: shared memory within them, Gloo between.
class DividedWorldsTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  LIMIT = 600
  SUITES = %w[collectives pieces point_to_point coalescing objects].freeze

  def setup
    skip Namespaces.obstacle if Namespaces.obstacle

    @hosts = Namespaces.new(2)
  end

  def teardown
    @hosts&.remove
  end

  def run_divided(*arguments, env: {})
    env = {"TDDP_SHM" => "1", "DIVIDED_ADDRESS" => @hosts.ipv4(0),
           "DIVIDED_NAMESPACE" => File.join("/run/netns", @hosts.name(1)), **env}
    command = [*@hosts.command(0), RbConfig.ruby, "-I", File.join(ROOT, "lib"), "-r", File.join(__dir__, "support/divided_worlds"), *arguments]
    Timeout.timeout(LIMIT) { Open3.capture2e(env, *command) }
  end

  SUITES.each do |suite|
    define_method(:"test_#{suite}") do
      out, status = run_divided(File.join(ROOT, "test/ruby/#{suite}_test.rb"))
      assert_predicate status, :success?, out
      assert_match(/\d+ runs, .* 0 failures, 0 errors/, out)
    end
  end

  # That all of it is about what it says.
  def test_memory_is_shared_within_hosts_alone
    code = <<~RUBY
      include Worlds
      puts JSON.generate(world(4) { [File.readlink("/proc/self/ns/net"), File.foreach("/proc/self/maps").grep(/memfd:tddp/).any?] })
      $stdout.flush
      exit!(0)
    RUBY
    out, status = run_divided("-rjson", "-e", code)
    assert_predicate status, :success?, out
    ranks = JSON.parse(out.lines.last)
    assert_equal [0, 0, 1, 1], ranks.map { |space, _| ranks.map(&:first).uniq.index(space) }
    assert ranks.all?(&:last), out
  end
end
