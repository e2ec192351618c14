# frozen_string_literal: true

require "cgi"
require "fileutils"
require "json"
require "open3"
require "redcarpet"
require "rexml/document"
require "set" # YARD on Ruby 3.1
require "yard"

# Makes the pages of `rake docs` in a folder: the Markdown of the repository, YARD's and Doxygen's pages, and one search over all of them. They
# are plain files, which need no server. Run within the bundle, with its group docs.
class Site
  ROOT = File.expand_path("../../..", __dir__)
  PAGES = ["README.md", "CHANGELOG.md", "src/README.md", *Dir["docs/*.md", "examples/*/README.md", base: ROOT].sort].freeze
  # A page's section: what is searched, and where it is.
  Entry = Struct.new(:title, :kind, :url, :text)

  def initialize(folder)
    @folder = File.expand_path(folder)
    @entries = []
  end

  # @raise [RuntimeError] if there was a warning
  def make
    FileUtils.rm_rf(@folder)
    FileUtils.mkdir_p(@folder)
    %w[site.css site.js].each { |name| FileUtils.cp(File.join(__dir__, name), @folder) }
    ruby
    c
    PAGES.each { |page| markdown(page) }
    decorate
    File.write(File.join(@folder, "search.js"), "window.searchEntries = #{JSON.generate(@entries.map(&:to_a))};\n")
  end

  private

  # --- the Ruby reference

  def ruby
    done = Dir.chdir(ROOT) do
      YARD::CLI::Yardoc.new.run("--output-dir", File.join(@folder, "ruby"), "--no-save", "--no-cache", "--quiet", "--no-stats", "--fail-on-warning",
        "--readme", "ext/setup/docs/ruby.md")
    end
    raise "YARD has warned" if done == false

    mixed_in = {} # by module: as whose methods its own are called
    YARD::Registry.all(:module, :class).each { |owner| owner.class_mixins.each { |mod| mixed_in[mod.path] = owner } }
    YARD::Registry.all(:module, :class, :method, :constant).each { |object| add_ruby(object, mixed_in) unless hidden?(object) }
  end

  def add_ruby(object, mixed_in)
    caller = mixed_in[object.namespace.path] if object.type == :method && object.scope == :instance
    title = caller ? "#{caller.path}.#{object.name}" : object.path
    @entries << Entry.new(title, "Ruby", "ruby/#{ruby_url(object)}", object.docstring.summary)
  end

  def ruby_url(object)
    owner = object.is_a?(YARD::CodeObjects::NamespaceObject) ? object : object.namespace
    path = (@ruby_pages ||= {})[owner.path] ||= serializer.serialized_path(owner)
    case object.type
    when :method then "#{path}##{CGI.escape(original(object).to_s)}-#{object.scope}_method"
    when :constant then "#{path}##{object.name}-constant"
    else path
    end
  end

  # @return [Symbol] the name under which YARD shows a method that may be an alias
  def original(method)
    while (name = method.namespace.aliases[method])
      other = method.namespace.child(name: name, scope: method.scope) or return name
      method = other
    end
    method.name
  end

  def serializer
    @serializer ||= YARD::Serializers::FileSystemSerializer.new(extension: "html")
  end

  # As --hide-api private does, and what is not public.
  def hidden?(object)
    return false if object.root?

    object.visibility != :public || object.tag(:api)&.text == "private" || hidden?(object.namespace)
  end

  # --- the C reference

  def c
    settings = "#{File.read(File.join(__dir__, "Doxyfile"))}\nOUTPUT_DIRECTORY = #{@folder}/c\n"
    FileUtils.mkdir_p("#{@folder}/c")
    out, status = Open3.capture2e("doxygen", "-", stdin_data: settings, chdir: ROOT)
    raise "doxygen: #{out}" unless status.success? && out.empty?

    Dir["#{@folder}/c/xml/{*_8h,struct*}.xml"].sort.each { |path| add_c(REXML::Document.new(File.read(path)).root.elements["compounddef"]) }
    FileUtils.rm_rf("#{@folder}/c/xml")
  end

  def add_c(compound)
    @entries << Entry.new(compound.elements["compoundname"].text, "C", "c/#{compound.attributes["id"]}.html", words(compound, "briefdescription"))
    return if compound.attributes["kind"] == "struct"

    members = compound.get_elements("sectiondef/memberdef")
    (members + members.flat_map { |member| member.get_elements("enumvalue") }).each do |member|
      name = member.elements["name"].text
      next if name.start_with?("@") # an enumeration without a name

      page, anchor = member.attributes["id"].match(/\A(.*)_1(\w+)\z/).captures
      @entries << Entry.new(name, "C", "c/#{page}.html##{anchor}", words(member, "briefdescription"))
    end
  end

  def words(element, name)
    plain(element.elements[name].to_s)
  end

  # --- the Markdown

  def markdown(page)
    text = File.read(File.join(ROOT, page))
    html = Redcarpet::Markdown.new(Redcarpet::Render::HTML.new(with_toc_data: true), fenced_code_blocks: true, tables: true, autolink: true)
      .render(text)
    html = with_anchors(html).gsub(/(href|src)="(?!https?:|#)([^"#]+)/) { "#{$1}=\"#{link(page, $2)}" }
    title = text[/^# (.*)/, 1] || page
    target = File.join(@folder, target_of(page))
    FileUtils.mkdir_p(File.dirname(target))
    File.write(target, <<~HTML)
      <!DOCTYPE html>
      <html lang="en">
      <head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>#{CGI.escapeHTML(title)}</title></head>
      <body><main class="page">
      #{html.gsub("<table>", "<div class=\"scroll\"><table>").gsub("</table>", "</table></div>")}
      </main></body>
      </html>
    HTML
    add_sections(page, title, html)
  end

  # Headings are linked to as GitHub does.
  def with_anchors(html)
    html.gsub(%r{<h(\d)[^>]*>(.*?)</h\1>}) do
      level, title = $1, $2
      "<h#{level} id=\"#{anchor(title)}\">#{title}</h#{level}>"
    end
  end

  def anchor(title)
    plain(title).downcase.gsub(/[^\w\- ]/, "").tr(" ", "-")
  end

  def plain(html)
    CGI.unescapeHTML(html.gsub(/<[^>]*>/, " ")).split.join(" ")
  end

  def add_sections(page, title, html)
    html.split(/(?=<h[1-3] )/).each do |section|
      heading = section[%r{<h[1-3][^>]*>(.*?)</h}, 1] or next
      name = plain(heading)
      url = target_of(page) + ((name == plain(title)) ? "" : "##{anchor(heading)}")
      @entries << Entry.new((name == plain(title)) ? name : "#{name} – #{plain(title)}", "Guide", url, plain(section.sub(heading, "")))
    end
  end

  # README.md is the first page.
  def target_of(page)
    (page == "README.md") ? "index.html" : page.sub(/\.md\z/, ".html")
  end

  # Where a page's link goes: another page, a header in the reference, or a copy of the file.
  def link(page, href)
    path = File.expand_path(File.join(ROOT, File.dirname(page), href)).delete_prefix("#{ROOT}/")
    target = if PAGES.include?(path)
      target_of(path)
    elsif (header = path[%r{\Ainclude/(?:tddp/)?(\w+)\.h\z}, 1])
      "c/#{header.gsub("_", "__")}_8h.html"
    else
      copy(path)
    end
    "#{"../" * page.count("/")}#{target}"
  end

  def copy(path)
    from = File.join(ROOT, path)
    raise "#{path} is linked to, but not there" unless File.file?(from)

    FileUtils.mkdir_p(File.dirname(File.join(@folder, path)))
    FileUtils.cp(from, File.join(@folder, path))
    path
  end

  # The bar with the search, on every page.
  def decorate
    Dir["#{@folder}/**/*.html"].each do |path|
      root = "../" * path.delete_prefix("#{@folder}/").count("/")
      text = File.read(path)
      tags = "<link rel=\"stylesheet\" href=\"#{root}site.css\"><script src=\"#{root}site.js\" defer></script>"
      File.write(path, text.sub("</head>") { "#{tags}</head>" })
    end
  end
end

Site.new(ARGV.fetch(0)).make if $PROGRAM_NAME == __FILE__
