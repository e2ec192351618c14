# frozen_string_literal: true

require "minitest/autorun"
require "tsort"

# Files of groups and backends that call each other in a circle are one module: they lie in one folder. Otherwise a reader has to know
# both folders to understand either.
class CirclesTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  FILES = Dir.glob("src/{group,backend}/**/*.{c,cc}", base: ROOT).sort.freeze
  # A function that other files may call begins at the left margin, without `static`.
  DEFINITION = /^(?!static|typedef|return|else)[a-z][\w ]*[ *](tddp_\w+)\([^;{]*\)\s*\{/

  # What calls what: by file, the files that define the functions it names.
  class Calls < Hash
    include TSort

    alias_method :tsort_each_node, :each_key

    def tsort_each_child(file, &) = fetch(file).each(&)
  end

  def calls
    texts = FILES.to_h { |file| [file, File.read(File.join(ROOT, file))] }
    owners = texts.flat_map { |file, text| text.scan(DEFINITION).flatten.map { |name| [name, file] } }.to_h
    texts.each_with_object(Calls.new) do |(file, text), all|
      all[file] = text.scan(/\btddp_\w+/).uniq.filter_map { |name| owners[name] }.uniq - [file]
    end
  end

  def test_no_circle_goes_through_two_folders
    circles = calls.strongly_connected_components.select { |files| files.map { |file| File.dirname(file) }.uniq.size > 1 }
    assert_empty circles.map { |files| files.sort.join(" ") }, "these files call each other in a circle, across folders"
  end

  def test_it_finds_what_is_there
    all = calls
    assert_includes all.fetch("src/group/work.c"), "src/group/executor.c"
    assert_includes all.fetch("src/backend/shm/reductions.c"), "src/backend/shm/wait.c"
  end
end
