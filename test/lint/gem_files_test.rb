# frozen_string_literal: true

require "minitest/autorun"
require_relative "../../ext/setup/gem_files"

# The gem holds what git does, but for the files of those who work on it.
class GemFilesTest < Minitest::Test
  def test_the_gem_s_files_are_git_s
    skip "git is not here" unless Setup::SystemPackages.program?("git")
    assert_empty Setup::GemFiles.differences
  rescue Setup::Failure => e
    skip e.message
  end

  # The gem is built where it is installed. In a bundle that names a built checkout by its path nothing is missing.
  def test_the_extension_is_built_by_those_who_install_the_gem
    assert_equal ["ext/torch_ddp/extconf.rb"], Setup::GemFiles.specification.extensions
    loaded = Gem.loaded_specs["torch-ddp"] or skip "there is no bundle here"
    skip "the extension is not built" unless File.exist?(File.join(loaded.full_gem_path, "lib/torch_ddp/ext.so"))
    assert_empty loaded.extensions
    refute loaded.missing_extensions?
  end

  def test_what_users_get
    spec = Setup::GemFiles.specification
    assert_empty %w[lib/torch/distributed.rb src/base/base.h ext/torch_ddp/extconf.rb CMakeLists.txt README.md LICENSE.txt] - spec.files
    assert_empty spec.files.grep(%r{\A(test|examples|ext/setup|lib/torch_ddp/native)/})
    assert_equal %w[torchfrtrace torchrun torchtrace], spec.executables.sort
    assert_equal "true", spec.metadata["rubygems_mfa_required"]
    links = spec.metadata.values_at("source_code_uri", "changelog_uri", "documentation_uri", "bug_tracker_uri")
    assert_empty(links.reject { |uri| uri.start_with?("#{spec.homepage}/") })
    assert(links.first(3).all? { |uri| uri.include?("/v#{spec.version}") })
  end
end
