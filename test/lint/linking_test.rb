# frozen_string_literal: true

require "fileutils"
require "minitest/autorun"
require "open3"
require "tmpdir"
require_relative "../held_ports"

# A program in C that links libtddp as it is installed, found by pkg-config and by CMake, runs as two ranks.
class LinkingTest < Minitest::Test
  include HeldPorts

  ROOT = File.expand_path("../..", __dir__)
  PREFIX = File.join(ROOT, "lib/torch_ddp/native")
  EXAMPLE = File.join(ROOT, "examples/c")
  WARNINGS = %w[-std=c11 -Wall -Wextra -Wpedantic -Werror].freeze

  def setup
    skip "lib/torch_ddp/native is not built: rake compile" unless File.exist?(File.join(PREFIX, "lib/libtddp.so"))
  end

  def command(*words, env: {})
    out, status = Open3.capture2e(env, *words)
    assert status.success?, "#{words.join(" ")}:\n#{out}"
    out
  end

  def sums(output)
    output.lines.map { |line| line.strip[/rank \d of .*/] }.compact.sort
  end

  SUMS = ["rank 0 of 2: 2 4 6 1", "rank 1 of 2: 2 4 6 1"].freeze

  # An installation may be moved, so it is used at another place than it was built for.
  def moved(dir)
    prefix = File.join(dir, "moved")
    FileUtils.mkdir_p(prefix)
    FileUtils.cp_r(File.join(PREFIX, "."), prefix)
    prefix
  end

  def test_found_by_pkg_config_and_without_a_launcher
    Dir.mktmpdir do |dir|
      prefix = moved(dir)
      env = {"PKG_CONFIG_PATH" => File.join(prefix, "lib/pkgconfig")}
      flags = command("pkg-config", "--cflags", "--libs", "tddp", env: env).split
      assert_equal ["#{prefix}/include"], flags.grep(/\A-I/).map { |flag| File.expand_path(flag.delete_prefix("-I")) }
      assert_equal File.read(File.join(ROOT, "include/tddp/version.h"))[/TDDP_VERSION "(.+)"/, 1], command("pkg-config", "--modversion", "tddp", env: env).strip
      program = File.join(dir, "all_reduce")
      command("cc", *WARNINGS, File.join(EXAMPLE, "all_reduce.c"), "-o", program, *flags)
      assert_equal SUMS, sums(two_ranks(program, "LD_LIBRARY_PATH" => File.join(prefix, "lib")))
    end
  end

  def two_ranks(program, env)
    env = env.merge("WORLD_SIZE" => "2", "MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => held_port.to_s, "TORCHELASTIC_USE_AGENT_STORE" => nil)
    ranks = [0, 1].map { |rank| Thread.new { command(program, env: env.merge("RANK" => rank.to_s)) } }
    ranks.map(&:value).join
  end

  def test_found_by_cmake_and_with_torchrun
    Dir.mktmpdir do |dir|
      prefix = moved(dir)
      command("cmake", "-S", EXAMPLE, "-B", dir, "-DCMAKE_PREFIX_PATH=#{prefix}", "-DCMAKE_C_FLAGS=#{WARNINGS.join(" ")}")
      command("cmake", "--build", dir)
      output = command(File.join(prefix, "bin/torchrun"), "--standalone", "--no-python", "--nproc-per-node=2", File.join(dir, "all_reduce"))
      assert_equal SUMS, sums(output)
    end
  end

  # The library's name in programs has its minor version: another one may have another ABI.
  def test_programs_name_the_minor_version
    out = command("readelf", "-d", File.join(PREFIX, "lib/libtddp.so"))
    version = File.read(File.join(ROOT, "include/tddp/version.h"))[/TDDP_VERSION "(\d+\.\d+)/, 1]
    assert_equal "libtddp.so.#{version}", out[/SONAME.*\[(.+)\]/, 1]
  end
end
