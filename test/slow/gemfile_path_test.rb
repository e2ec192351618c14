# frozen_string_literal: true

require "minitest/autorun"
require "fileutils"
require_relative "../../ext/setup/gem_files"
require_relative "example_programs"

# A user's Gemfile that names a checkout with path:, which Bundler does not compile. With git: it does: `rake test:gem` has that.
class GemfilePathTest < Minitest::Test
  include ExamplePrograms

  SCRIPT = <<~RUBY
    require "torch/distributed"
    Torch::Distributed.init_process_group("gloo")
    tensor = Torch.ones(2) * (Torch::Distributed.get_rank + 1)
    Torch::Distributed.all_reduce(tensor)
    loaded = $LOADED_FEATURES.grep(/torch_ddp\\/ext/).first
    puts "\#{tensor.to_a} \#{loaded}"
    Torch::Distributed.destroy_process_group
  RUBY

  # What of this process's bundle must not reach the other one's.
  def bundled(*command, status: 0)
    outside = Setup::Gems.clean_environment.merge("BUNDLE_PATH" => Setup::Gems.new.path, "BUNDLE_USER_HOME" => File.join(@dir, "bundler"))
    run_command(*Setup::Gems::BUNDLE, *command, status: status, env: outside, chdir: File.join(@dir, "app"))
  end

  # A copy of this checkout that is not compiled, and a program beside it.
  def make_checkout_and_program
    checkout = File.join(@dir, "checkout")
    [*Setup::GemFiles.specification.files, "torch-ddp.gemspec"].each do |path|
      FileUtils.mkdir_p(File.dirname(File.join(checkout, path)))
      FileUtils.cp(File.join(ROOT, path), File.join(checkout, path), preserve: true)
    end
    FileUtils.mkdir_p(File.join(@dir, "app"))
    libtorch = Setup::Libtorch.find
    File.write(File.join(@dir, "app/Gemfile"), <<~RUBY)
      gem "torch-ddp", path: "../checkout"
      gem "torch-rb", "#{libtorch.torch_rb}"
      gem "rice", "#{libtorch.rice}"
    RUBY
    File.write(File.join(@dir, "app/train.rb"), SCRIPT)
    checkout
  end

  def test_a_checkout_named_with_path_is_used_once_it_is_compiled
    Dir.mktmpdir do |dir|
      @dir = File.realpath(dir)
      checkout = make_checkout_and_program
      bundled("install")
      out = bundled("exec", "ruby", "train.rb", status: 1)
      assert_match(%r{torch_ddp/ext: the extension is not built\. .* run `rake compile` there}, out)
      assert_match(/torchrun is not built\. In a checkout run `rake compile`/, bundled("exec", "torchrun", "train.rb", status: 1))

      %w[ext.so native].each { |name| FileUtils.cp_r(File.join(ROOT, "lib/torch_ddp", name), File.join(checkout, "lib/torch_ddp", name)) }
      out = bundled("exec", "torchrun", "--standalone", "--nproc-per-node=2", "train.rb")
      assert_equal ["[3.0, 3.0] #{checkout}/lib/torch_ddp/ext.so"], out.lines.grep(/ext\.so/).map(&:chomp).uniq
      assert_equal 2, out.scan("ext.so").size
    end
  end
end
