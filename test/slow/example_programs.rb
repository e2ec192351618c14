# frozen_string_literal: true

require "open3"
require "rbconfig"
require "tmpdir"

# Runs the programs of examples/ as users do.
module ExamplePrograms
  ROOT = File.expand_path("../..", __dir__)
  GEMFILE = {"BUNDLE_GEMFILE" => File.join(ROOT, "Gemfile")}.freeze

  def example(name)
    File.join(ROOT, "examples", name)
  end

  # Where a program loads torch first, Rice before 4.3 has two methods under one key in some processes, and calls the wrong one.
  # What keeps them apart is loaded before the program then.
  MIXES_UP = Gem.loaded_specs.fetch("rice").version < Gem::Version.new("4.3")
  KEPT_APART = {"RUBYOPT" => "-r#{File.join(ROOT, "lib/torch_ddp/rice_keys.rb")}"}.freeze

  # @return [String] what it printed, errors too
  def run_command(*command, status: 0, env: {}, chdir: ROOT)
    out, ended = Open3.capture2e(env, *command, chdir: chdir)
    out, ended = Open3.capture2e(env.merge(KEPT_APART), *command, chdir: chdir) if MIXES_UP && out.include?("std::bad_any_cast")
    assert_equal status, ended.exitstatus, out
    out
  end

  # From a folder that is not the checkout's, and as without a bundle around it.
  def run_ruby(name, *arguments, status: 0, env: {})
    Dir.mktmpdir do |dir|
      outside = {"BUNDLE_GEMFILE" => nil, "RUBYOPT" => nil, "BUNDLER_SETUP" => nil, "RUBYLIB" => nil, "BUNDLE_BIN_PATH" => nil}
      run_command(RbConfig.ruby, example(name), *arguments, status: status, env: outside.merge(env), chdir: dir)
    end
  end

  def torchrun(processes, name, *arguments, status: 0, env: {})
    run_command("bundle", "exec", "torchrun", "--standalone", "--nproc-per-node=#{processes}", example(name), *arguments,
      status: status, env: GEMFILE.merge(env))
  end

  # A mistake on the command line is one line that names it, and every program has --help.
  def assert_refused(pattern, name, *arguments, env: {})
    out = run_ruby(name, *arguments, status: 1, env: env)
    assert_match pattern, out
    assert_equal 1, out.lines.size, out
  end

  # @return [Array<Array<String>>] the cells of the table under a header that begins with these words
  def table(out, header)
    lines = out.lines.map(&:chomp)
    at = lines.index { |line| line.start_with?(header) }
    assert at, "no table #{header} in:\n#{out}"
    lines.drop(at + 2).take_while { |line| line.include?(" | ") }.map { |line| line.split("|").map(&:strip) }
  end
end
