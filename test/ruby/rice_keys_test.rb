# frozen_string_literal: true

require_relative "test_helper"
require "json"
require "open3"

# Torch's classes lie apart where its rice takes methods of near classes for each other.
class RiceKeysTest < Minitest::Test
  SCRIPT = <<~RUBY
    require "torch/distributed"
    require "objspace"
    require "json"
    names = TorchDDP::RiceKeys::MODULES + TorchDDP::RiceKeys::CLASSES.keys
    own = names.to_h do |name|
      made = Object.const_get(name)
      [name, [made, made.singleton_class].map { |one| ObjectSpace.dump(one)[/"address":"0x(\\h+)"/, 1].hex }]
    end
    puts JSON.generate(apart: TorchDDP::RiceKeys::APART, addresses: own)
  RUBY

  def test_classes_lie_apart
    rice = Gem.loaded_specs.fetch("rice").version
    skip "rice #{rice} tells methods apart by itself" if rice >= Gem::Version.new("4.3")
    out, status = Open3.capture2(RbConfig.ruby, "-I#{File.expand_path("../../lib", __dir__)}", "-e", SCRIPT)
    assert status.success?
    found = JSON.parse(out)
    found["addresses"].to_a.combination(2) do |(one, here), (other, there)|
      nearest = here.product(there).map { |a, b| (a - b).abs }.min
      assert_operator nearest, :>, found["apart"], "#{one} and #{other}"
    end
  end

  # What Bundler.require loads.
  def test_the_gem_s_name_is_a_library
    out, err, status = capture_ruby("-e", 'require "torch-ddp"; p Torch::Distributed.available?')
    assert_equal ["true\n", "", true], [out, err, status.success?]
  end

  def test_a_library_that_is_loaded_stays_as_it_is
    tensor = Torch::Tensor
    TorchDDP::RiceKeys.spread
    assert_same tensor, Torch::Tensor
  end
end
