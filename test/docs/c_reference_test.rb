# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rexml/document"
require "tmpdir"

# The C reference has all that the public headers declare.
class CReferenceTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  # Helpers of a table's own lines, undefined where it ends.
  HELPERS = /\ATDDP_\w+_(ENUM|FIELD)\z/

  def setup
    skip "doxygen is not here: apt-get install doxygen" unless ENV["PATH"].split(":").any? { |dir| File.executable?(File.join(dir, "doxygen")) }
  end

  # Doxygen's view of the headers, as XML documents.
  def documents
    Dir.mktmpdir do |dir|
      settings = File.read(File.join(ROOT, "ext/setup/docs/Doxyfile"))
      out, status = Open3.capture2e("doxygen", "-", chdir: ROOT,
        stdin_data: "#{settings}\nOUTPUT_DIRECTORY = #{dir}\nGENERATE_HTML = NO\n")
      assert status.success?, out
      assert_empty out
      Dir[File.join(dir, "xml/{*_8h,struct*}.xml")].map { |path| REXML::Document.new(File.read(path)).root.elements["compounddef"] }
    end
  end

  def documented?(element)
    %w[briefdescription detaileddescription].any? { |name| !REXML::XPath.match(element.elements[name], ".//text()").join.strip.empty? }
  end

  # Functions, types and macros; members of structs mostly speak for themselves.
  def test_no_comment_is_missing
    found = documents.flat_map do |compound|
      members = (compound.attributes["kind"] == "file") ? REXML::XPath.match(compound, ".//memberdef") : []
      [compound, *members].map { |each| [(each.elements["name"] || each.elements["compoundname"]).text, documented?(each)] }
    end
    assert_empty found.reject { |name, documented| documented || name.match?(HELPERS) }.map(&:first)
    declared = Dir[File.join(ROOT, "include/**/*.h")].flat_map { |path| File.read(path).scan(/^TDDP_API[^;(]*?\b(tddp_\w+)\(/).flatten }.uniq
    assert_operator declared.size, :>, 250
    assert_empty declared - found.map(&:first)
  end
end
