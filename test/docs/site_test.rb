# frozen_string_literal: true

require "cgi"
require "json"
require "minitest/autorun"
require "open3"
require "rbconfig"
require "tmpdir"

# The pages of `rake docs`: they are made without a warning, their links lead somewhere, and the search finds things, in a browser without a server.
class SiteTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  BROWSER = %w[chromium chromium-browser google-chrome].find { |name| ENV["PATH"].split(":").any? { |dir| File.executable?(File.join(dir, name)) } }

  class << self
    # @return [String] the folder of the pages, made once
    def site
      @site ||= Dir.mktmpdir("torch-ddp-docs").tap do |dir|
        Minitest.after_run { FileUtils.rm_rf(dir) }
        out, status = Open3.capture2e(RbConfig.ruby, File.join(ROOT, "ext/setup/docs/site.rb"), dir)
        raise "the pages are not made:\n#{out}" unless status.success? && out.empty?
      end
    end

    # @return [Array<Array(String, String, String, String)>] what can be searched: title, kind, address, text
    def entries
      @entries ||= JSON.parse(File.read(File.join(site, "search.js"))[/\[.*\]/m])
    end
  end

  def setup
    skip "doxygen is not here: apt-get install doxygen" unless ENV["PATH"].split(":").any? { |dir| File.executable?(File.join(dir, "doxygen")) }
  end

  # @return [Boolean] whether a file of the site is there, with the anchor that the address names
  def there?(address)
    path, anchor = address.split("#", 2)
    return false unless File.file?(File.join(self.class.site, path))

    @anchors ||= Hash.new { |found, file| found[file] = File.read(File.join(self.class.site, file)).scan(/\b(?:id|name)="([^"]+)"/).flatten }
    anchor.nil? || [anchor, CGI.unescape(anchor)].any? { |each| @anchors[path].map { |id| CGI.unescapeHTML(id) }.include?(each) }
  end

  def test_what_is_found_is_there
    entries = self.class.entries
    assert_equal %w[C Guide Ruby], entries.map { |entry| entry[1] }.uniq.sort
    assert_operator entries.size, :>, 1000
    assert_empty(entries.map { |entry| entry[2] }.reject { |address| there?(address) })
  end

  def test_links_of_the_guide_lead_somewhere
    pages = Dir["{index,CHANGELOG,src/README,docs/*,examples/*/README}.html", base: self.class.site]
    assert_operator pages.size, :>, 20
    links = pages.flat_map do |page|
      File.read(File.join(self.class.site, page)).scan(/(?:href|src)="(?!https?:)([^"]+)"/).flatten.map do |href|
        href.start_with?("#") ? page + href : File.join(File.dirname(page), href).delete_prefix("./")
      end
    end
    links.map! { |link| File.expand_path("/#{link}").delete_prefix("/") }
    assert_operator links.uniq.size, :>, 50
    assert_empty(links.uniq.reject { |link| there?(link) })
  end

  # @return [String] the page as it is once its scripts have run
  def dom(address)
    out, err, status = Open3.capture3(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom",
      "file://#{self.class.site}/#{address}")
    assert status.success?, err
    out
  end

  # @return [Array<Array(String, String)>] the addresses and texts of what the search shows
  def search(words)
    list = dom("index.html?search=#{CGI.escape(words)}")[%r{<ul id="site-results">(.*?)</ul>}m, 1]
    list.scan(%r{<a href="file://#{self.class.site}/([^"]+)">(.*?)</a>}m).map { |address, html| [address, CGI.unescapeHTML(html.gsub(/<[^>]*>/, " ")).split.join(" ")] }
  end

  def test_the_search
    skip "no browser is here: apt-get install chromium" unless BROWSER

    address, text = search("all_reduce").first
    assert_equal ["Ruby Torch::Distributed.all_reduce Combines `tensor` over all ranks, in place."], [text]
    page = dom(address)
    assert_includes page, "Module: Torch::Distributed::Collectives"
    assert_includes page, '<nav id="site-bar">'

    address, text = search("tddp_group_create").first
    assert_match(/\AC tddp_group_create Joins this rank/, text)
    assert_includes dom(address), "group.h File Reference"

    assert_equal "docs/several-machines.html", search("several machines").first.first
    assert_empty search("nothingiscalledlikethis")
  end
end
