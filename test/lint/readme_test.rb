# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rbconfig"
require_relative "../../ext/torch_ddp/libtorch"

# What README.md and the pages in docs name is there, and what a user may set is named in them.
class ReadmeTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  PAGES = ["README.md", *Dir[File.join(ROOT, "docs/*.md")].map { |path| "docs/#{File.basename(path)}" }.sort]
    .to_h { |page| [page, File.read(File.join(ROOT, page))] }
  README = PAGES.fetch("README.md")
  TEXT = PAGES.values.join("\n")
  # What fits on a screen, up to the heading with which the rest begins.
  LINES_OF_A_SCREEN = 50

  # Read, but nobody's to set: what torchrun says to its workers, and Rake to its tests.
  INTERNAL = %w[TORCHELASTIC_ERROR_FILE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING
    TDDP_STAND_IN_CUDA TDDP_RESULTS TDDP_EVERYTHING TDDP_TEST_TIMEOUT_MULTIPLIER].freeze

  def code
    @code ||= Dir[File.join(ROOT, "{src,lib,ext}/**/*.{c,cc,h,rb}"), File.join(ROOT, "{bin/*,Rakefile}")].map { |path| File.read(path) }.join("\n")
  end

  # All names of the public headers, those that macros make as well.
  def c_names
    headers = Dir[File.join(ROOT, "include/**/*.h")].map { |path| "#include \"#{path}\"\n" }.join
    names, status = Open3.capture2("cc", "-E", "-P", "-dD", "-I#{ROOT}/include", "-", stdin_data: headers)
    assert status.success?
    names.scan(/\btddp_\w+/i).uniq
  end

  def test_names_of_the_c_api_are_there
    named = TEXT.scan(/`[^`\n]*`/).flat_map { |words| words.scan(/\btddp_[a-z0-9_]*[a-z0-9]\b(?![.\/])/) }.uniq
    assert_operator named.size, :>=, 15
    assert_empty named - c_names
  end

  def test_it_is_a_screen_and_links
    assert_operator README[/\A.*?^## /m].lines.size, :<=, LINES_OF_A_SCREEN
    assert_operator PAGES.size, :>=, 12
    assert_empty(PAGES.keys.drop(1).reject { |page| README.include?("](#{page})") })
  end

  def test_variables_that_are_read_are_named
    read = code.scan(/(?:getenv\(|from_environment\(|ENV\[|ENV\.fetch\(|\.variable = )"((?:TDDP|TORCH|TORCHELASTIC|GLOO)_\w+)"/).flatten.uniq
    assert_operator read.size, :>=, 20
    assert_empty(read.reject { |name| TEXT.include?("`#{name}`") } - INTERNAL)
  end

  def test_tasks_that_they_name_are_there
    tasks, status = Open3.capture2(RbConfig.ruby, "-S", "rake", "-f", File.join(ROOT, "Rakefile"), "-P")
    assert status.success?
    there = tasks.scan(/^rake (\S+)/).flatten
    rows = TEXT.lines.grep(/^\| `rake /).flat_map { |line| line.split("|")[1].scan(/`(?:rake )?([a-z0-9:]+)`/).flatten }
    named = rows | TEXT.scan(/\brake ((?:test|bench|release)?:?[a-z0-9]+)\b/).flatten - %w[on is]
    assert_operator named.size, :>=, 15
    assert_empty named - there
  end

  def test_what_they_name_is_there
    flags = File.read(File.join(ROOT, "src/launch/command/flags.c"))
    extension = File.read(File.join(ROOT, "ext/torch_ddp/extconf.rb"))
    constants = c_names
    missing = PAGES.flat_map do |page, text|
      links = text.scan(/\]\((?!http)([^)]+)\)/).flatten.reject { |link| link_there?(page, link) }
      files = text.scan(%r{`((?:src|examples|test|ext|lib)/[\w./]+)`}).flatten.reject { |path| File.exist?(File.join(ROOT, path)) }
      variables = text.gsub(/^```c\n.*?^```$/m, "").scan(/\b((?:TDDP|TORCH|TORCHELASTIC|GLOO)_[A-Z_]*[A-Z])/).flatten.uniq - constants
      variables.reject! { |name| code.match?(/"#{name}[" =]/) }
      options = text.scan(/(?:torchrun |`)--([a-z-]+)/).flatten.uniq.reject { |name| flags.match?(/"(?:[\w-]+ )*#{name}[" ]/) || extension.include?("--#{name}") }
      [*links, *files, *variables, *options].map { |name| "#{page}: #{name}" }
    end
    assert_empty missing
  end

  # The first column of tables of messages; "…" stands for what differs.
  def test_messages_that_troubleshooting_quotes_are_in_the_sources
    texts = joined(code)
    assert_operator quoted_messages.size, :>=, 90
    assert_empty(quoted_messages.reject { |message| parts(message).all? { |part| texts.include?(part) } })
  end

  # Of what ranks and hosts do to each other; wrong arguments say themselves what is expected. Left out: what only
  # passes another message on, what backends for tests say, and what no user sees.
  def test_what_the_library_says_of_ranks_and_hosts_is_quoted
    files = Dir[File.join(ROOT, "src/{backend,ddp,flat,group,net,reducer,sharder,store,torch,launch/etcd}/**/*.{c,cc}")].grep_v(%r{/backend/fake/})
    messages = files.flat_map do |path|
      joined(File.read(path)).scan(/fail\w*\((?:\w+, )?\s*TDDP_(?:TIMEOUT|MISMATCH|PEER_LOST|GROUP_FAILED|NETWORK|UNAVAILABLE),\s*"((?:[^"\\]|\\.)*)"/)
    end.flatten.uniq - ["aborted", "%s: aborted", "%s: no answer in time", "%s: not done in the time given", "no failure notice"]
    messages.reject! { |message| message.gsub(/%\w|rank|of group|[^a-z]/, "").empty? }
    assert_operator messages.size, :>=, 50
    assert_empty(messages.reject { |message| quoted_messages.any? { |quoted| parts(quoted).all? { |part| message.include?(part) } } })
  end

  # Until somebody has measured on a GPU, both say so.
  def test_what_is_known_of_gpus
    results = File.read(File.join(ROOT, "test/gpu/RESULTS.md"))
    assert_equal results.include?("Nothing has been measured yet"), TEXT.include?("no GPU has been at\nhand so far")
    versions = TEXT[/compiled against CUDA ([\d.]+), NCCL ([\d.]+) and libtorch ([\d.]+)/] && $~.captures
    %w[CUDA NCCL].zip(versions) { |name, version| assert_match(/#{name} #{version}\b/, results) }
    assert_match(/^libtorch #{versions.last} for CUDA/, results)
  end

  def test_versions_are_the_gem_s
    version = File.read(File.join(ROOT, "include/tddp/version.h"))[/"(\d+\.\d+\.\d+)"/, 1]
    assert_includes TEXT, "gem install ./torch-ddp-#{version}.gem"
    pairs = TEXT.scan(/(\d+\.\d+\.\d+) with libtorch (\d+\.\d+)/)
    assert_equal pairs.map(&:first), pairs.map { |_, libtorch| Setup::Libtorch.versions_for(libtorch)[:torch_rb] }
    gems = %w[rice torch-rb].map { |name| TEXT[/^gem install #{name} -v (\S+)/, 1] }
    assert_equal gems, Setup::Libtorch.versions_for("1.13").values_at(:rice, :torch_rb)
  end

  private

  # Literals that C puts together are one.
  def joined(text)
    text.gsub(/"\s*\\?\s*\n?\s*(?:PRI\w+\s*)?"/, "")
  end

  def parts(message)
    message.split("…").map(&:strip).reject(&:empty?)
  end

  def quoted_messages
    @quoted_messages ||= begin
      tables = PAGES.fetch("docs/troubleshooting.md").scan(/^\| message \|.*?\n\n|^\| message \|.*\z/m)
      messages = tables.flat_map { |table| table.lines.drop(2).filter_map { |line| line[/^\| `([^`]+)` \|/, 1] } }
      assert_equal tables.sum { |table| table.lines.drop(2).grep(/^\|/).size }, messages.size
      messages
    end
  end

  # A file, and a heading of it if the link names one.
  def link_there?(page, link)
    path, heading = link.split("#", 2)
    file = path.empty? ? File.join(ROOT, page) : File.expand_path(path, File.join(ROOT, File.dirname(page)))
    return false unless File.exist?(file)

    headings = File.read(file).scan(/^#+ (.*)$/).flatten.map { |title| title.downcase.gsub(/[^\w\- ]/, "").tr(" ", "-") }
    heading.nil? || headings.include?(heading)
  end
end
