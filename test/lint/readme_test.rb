# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rbconfig"
require_relative "../../ext/torch_ddp/libtorch"

# What the README and the pages in docs name is there, and what a user may set is named in the README.
class ReadmeTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  README = File.read(File.join(ROOT, "README.md"))
  PAGES = Dir[File.join(ROOT, "docs/*.md")].sort.to_h { |path| ["docs/#{File.basename(path)}", File.read(path)] }

  # Read, but nobody's to set: what torchrun says to its workers, and Rake to its tests.
  INTERNAL = %w[TORCHELASTIC_ERROR_FILE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING
    TDDP_STAND_IN_CUDA TDDP_RESULTS TDDP_EVERYTHING TDDP_TEST_TIMEOUT_MULTIPLIER].freeze

  def code
    @code ||= Dir[File.join(ROOT, "{src,lib,ext}/**/*.{c,cc,h,rb}"), File.join(ROOT, "{bin/*,Rakefile}")].map { |path| File.read(path) }.join("\n")
  end

  def test_variables_that_it_names_are_read
    named = README.scan(/`((?:TDDP|TORCH|TORCHELASTIC|GLOO)_[A-Z_]+)/).flatten.uniq
    assert_operator named.size, :>=, 40
    assert_empty(named.reject { |name| code.include?("\"#{name}\"") || code.include?("\"#{name}=") })
  end

  def test_variables_that_are_read_are_named
    read = code.scan(/(?:getenv\(|from_environment\(|ENV\[|ENV\.fetch\(|\.variable = )"((?:TDDP|TORCH|TORCHELASTIC|GLOO)_\w+)"/).flatten.uniq
    assert_operator read.size, :>=, 20
    assert_empty(read.reject { |name| README.include?("`#{name}") } - INTERNAL)
  end

  def test_flags_that_it_names_are_torchrun_s
    flags = File.read(File.join(ROOT, "src/launch/command/flags.c"))
    named = README[/^## torchrun$.*?^## Who may join$/m].scan(/`(?:torchrun )?--([a-z-]+)/).flatten.uniq - %w[with-torch-dir]
    assert_operator named.size, :>=, 15
    assert_empty(named.reject { |name| flags.include?("\"#{name}\"") || flags.include?("\"--#{name}\"") })
  end

  def test_tasks_that_it_names_are_there
    tasks, status = Open3.capture2(RbConfig.ruby, "-S", "rake", "-f", File.join(ROOT, "Rakefile"), "-P")
    assert status.success?
    there = tasks.scan(/^rake (\S+)/).flatten
    rows = README.lines.grep(/^\| `rake /).flat_map { |line| line.split("|")[1].scan(/`(?:rake )?([a-z0-9:]+)`/).flatten }
    named = rows | README.scan(/\brake ((?:test|bench)?:?[a-z0-9]+)\b/).flatten - %w[on is]
    assert_operator named.size, :>=, 15
    assert_empty named - there
  end

  def test_files_that_it_names_are_there
    files = README.scan(/\]\((?!http)([^)#]+)\)/).flatten + README.scan(%r{`((?:src|examples|test|ext)/[\w./]+)`}).flatten
    assert_operator files.size, :>=, 8
    assert_empty(files.reject { |path| File.exist?(File.join(ROOT, path)) })
  end

  def test_pages_are_in_the_readme
    assert_operator PAGES.size, :>=, 3
    assert_empty(PAGES.keys.reject { |page| README.include?("](#{page})") })
  end

  def test_what_pages_name_is_there
    flags = File.read(File.join(ROOT, "src/launch/command/flags.c"))
    missing = PAGES.flat_map do |page, text|
      links = text.scan(/\]\((?!http)([^)]+)\)/).flatten.reject { |link| link_there?(page, link) }
      files = text.scan(%r{`((?:src|examples|test|ext|lib)/[\w./]+)`}).flatten.reject { |path| File.exist?(File.join(ROOT, path)) }
      variables = text.scan(/\b((?:TDDP|TORCH|TORCHELASTIC|GLOO)_[A-Z_]+)/).flatten.uniq.reject { |name| code.include?("\"#{name}\"") }
      options = text.scan(/(?:torchrun |`)--([a-z-]+)/).flatten.uniq.reject { |name| flags.include?("\"#{name}\"") || flags.include?("\"--#{name}\"") }
      [*links, *files, *variables, *options].map { |name| "#{page}: #{name}" }
    end
    assert_empty missing
  end

  # The first column of tables of messages; "…" stands for what differs.
  def test_messages_that_troubleshooting_quotes_are_in_the_sources
    texts = code.gsub(/"\s*\\?\s*\n?\s*"/, "")
    tables = PAGES.fetch("docs/troubleshooting.md").scan(/^\| message \|.*?\n\n|^\| message \|.*\z/m)
    messages = tables.flat_map { |table| table.lines.drop(2).filter_map { |line| line[/^\| `([^`]+)` \|/, 1] } }
    assert_operator messages.size, :>=, 30
    assert_equal tables.sum { |table| table.lines.drop(2).grep(/^\|/).size }, messages.size
    assert_empty(messages.reject { |message| message.split("…").map(&:strip).reject(&:empty?).all? { |part| texts.include?(part) } })
  end

  # Until somebody has measured on a GPU, both say so.
  def test_what_is_known_of_gpus
    results = File.read(File.join(ROOT, "test/gpu/RESULTS.md"))
    assert_equal results.include?("Nothing has been measured yet"), README.include?("no GPU has been at\nhand so far")
    versions = README[/compiled against CUDA ([\d.]+), NCCL ([\d.]+) and libtorch ([\d.]+)/] && $~.captures
    %w[CUDA NCCL].zip(versions) { |name, version| assert_match(/#{name} #{version}\b/, results) }
    assert_match(/^libtorch #{versions.last} for CUDA/, results)
  end

  def test_versions_are_the_gem_s
    version = File.read(File.join(ROOT, "include/tddp/version.h"))[/"(\d+\.\d+\.\d+)"/, 1]
    assert_includes README, "gem install ./torch-ddp-#{version}.gem"
    pairs = README.scan(/(\d+\.\d+\.\d+) with libtorch (\d+\.\d+)/)
    assert_equal pairs.map(&:first), pairs.map { |_, libtorch| Setup::Libtorch.versions_for(libtorch)[:torch_rb] }
    gems = %w[rice torch-rb].map { |name| README[/^gem install #{name} -v (\S+)/, 1] }
    assert_equal gems, Setup::Libtorch.versions_for("1.13").values_at(:rice, :torch_rb)
  end

  private

  # A file, and a heading of it if the link names one.
  def link_there?(page, link)
    path, heading = link.split("#", 2)
    file = path.empty? ? File.join(ROOT, page) : File.expand_path(path, File.join(ROOT, "docs"))
    return false unless File.exist?(file)

    headings = File.read(file).scan(/^#+ (.*)$/).flatten.map { |title| title.downcase.gsub(/[^\w\- ]/, "").tr(" ", "-") }
    heading.nil? || headings.include?(heading)
  end
end
