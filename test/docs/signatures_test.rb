# frozen_string_literal: true

require "logger"
require "minitest/autorun"
require "open3"
require "rbconfig"
require "rbs"
require_relative "../../ext/setup/docs/signatures"
require_relative "public_surface"

# The signatures in sig are those of the comments, are valid, have all public methods, and agree with what programs pass and get.
class SignaturesTest < Minitest::Test
  ROOT = PublicSurface::ROOT
  # Programs that make no mistakes: those of the documentation first of all.
  PROGRAMS = %w[docs_training docs work].freeze
  # A group's operations are made by the parameters of others, and processes are started for the place of the call, both of which the check's
  # wrappers hide.
  EXCLUDED = "/some_of_the_ranks|coming_from_torch_ddp/"

  class << self
    def signatures
      @signatures ||= Signatures.new
    end

    def text
      @text ||= signatures.text
    end

    # @return [RBS::DefinitionBuilder]
    def builder
      @builder ||= begin
        loader = RBS::EnvironmentLoader.new
        loader.add(path: Pathname(File.join(ROOT, "sig")))
        RBS::DefinitionBuilder.new(env: RBS::Environment.from_loader(loader).resolve_type_names)
      end
    end
  end

  def test_they_are_those_of_the_comments
    there = File.readlines(Signatures::FILE, chomp: true)
    wanted = self.class.text.lines(chomp: true)
    assert_equal [[], []], [wanted - there, there - wanted], "missing in sig, and no longer right: run `rake sig`"
    assert_equal wanted, there, "run `rake sig`"
  end

  def test_types_are_known
    assert_match(/^module/, self.class.text)
    assert_empty self.class.signatures.unknown.uniq
  end

  def test_they_are_valid
    out, status = Open3.capture2e(RbConfig.ruby, "-S", "rbs", "-I", File.join(ROOT, "sig"), "validate")
    assert status.success?, out
  end

  def test_no_public_method_is_missing
    assert_match(/^module/, self.class.text) # YARD knows the sources now
    missing = PublicSurface.modules.flat_map do |name, mod|
      object = YARD::Registry.at(name)
      next [] if object && self.class.signatures.hidden?(object)

      PublicSurface.own_methods(mod).reject { |each| hidden?(name + each) || signed?(name, each) }.map { |each| name + each }
    end
    assert_empty missing
  end

  def test_programs_agree_with_them
    env = {"RBS_TEST_TARGET" => "Torch::*", "RBS_TEST_OPT" => "-I #{File.join(ROOT, "sig")}", "RBS_TEST_LOGLEVEL" => "error"}
    PROGRAMS.each do |name|
      out, status = Open3.capture2e(env, RbConfig.ruby, "-rbundler/setup", "-I#{ROOT}/lib", "-I#{ROOT}/test", "-rrbs/test/setup", "test/ruby/#{name}_test.rb",
        "--exclude", EXCLUDED, chdir: ROOT)
      assert status.success?, out
    end
  end

  private

  def hidden?(path)
    object = YARD::Registry.at(path)
    object && self.class.signatures.hidden?(object)
  end

  def signed?(owner, method)
    type = RBS::TypeName.parse("::#{owner}")
    return false unless self.class.builder.env.module_name?(type)

    definition = method.start_with?("#") ? self.class.builder.build_instance(type) : self.class.builder.build_singleton(type)
    !definition.methods[method[1..].to_sym].nil?
  end
end
