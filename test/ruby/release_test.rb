# frozen_string_literal: true

require "minitest/autorun"
require_relative "../../ext/setup/release"

# What `rake release:check` looks at before it builds anything.
class ReleaseTest < Minitest::Test
  VERSION = Setup::GemFiles.specification.version.to_s

  def release
    @release ||= Setup::Release.new
  end

  def test_versions_agree
    assert_empty release.version_problems
    assert_equal ["CHANGELOG.md begins with \"9.9.9 (unreleased)\", not with #{VERSION}"],
      release.version_problems(changelog: "# Changes\n\n## 9.9.9 (unreleased)\n\n## #{VERSION}\n")
    assert_equal ["CHANGELOG.md begins with \"\", not with #{VERSION}"], release.version_problems(changelog: "")
    header = File.read(File.join(Setup::ROOT, "include/tddp/version.h")).sub(/(VERSION_PATCH) \d+/, '\1 77')
    assert_equal ["include/tddp/version.h: TDDP_VERSION is #{VERSION}, its parts are #{VERSION.sub(/\d+\z/, "77")}"],
      release.version_problems(header: header)
  end

  def test_the_homepage_is_where_the_repository_is
    homepage = Setup::GemFiles.specification.homepage
    path = homepage.delete_prefix("https://")
    [[], ["/srv/clone"], [homepage], ["#{homepage}.git"], ["git@#{path.sub("/", ":")}.git"], ["https://elsewhere.example/a/b", homepage]].each do |remotes|
      assert_empty release.address_problems(remotes), remotes.inspect
    end
    assert_equal ["torch-ddp.gemspec: the homepage #{homepage} is none of this repository's remotes: https://elsewhere.example/a/b"],
      release.address_problems(["https://elsewhere.example/a/b"])
  end

  def test_glibc_that_is_promised_is_that_of_the_refusal
    assert_includes File.read(File.join(Setup::ROOT, "ext/torch_ddp/extconf.rb")), "glibc #{Setup::GemFiles::GLIBC} or newer"
  end
end
