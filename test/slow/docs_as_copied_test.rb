# frozen_string_literal: true

require_relative "../ruby/documented"
require_relative "example_programs"
require_relative "../../ext/setup/gems"

# README.md and getting-started as a new user follows them: each program is copied as it stands to an empty folder and started by the
# commands below it, with the Gemfile that the page names, and prints what the page shows. `rake compile` was run before.
class DocsAsCopiedTest < Minitest::Test
  include ExamplePrograms

  PROGRAM = "train.rb"
  GEMFILE = "export BUNDLE_GEMFILE=/path/to/torch-ddp/Gemfile\n"

  # As outside a bundle, and outside a launcher.
  def outside
    Setup::Gems.clean_environment.merge("RUBYLIB" => nil, "RUBYOPT" => nil, "OMP_NUM_THREADS" => nil, "BUNDLE_GEMFILE" => File.join(ROOT, "Gemfile"))
  end

  def run_commands(commands, folder)
    run_command("sh", "-e", "-c", commands, env: outside, chdir: folder)
  end

  # @return [String] what it prints, errors too
  def run_program(program)
    Dir.mktmpdir do |folder|
      File.write(File.join(folder, PROGRAM), program)
      run_commands("bundle exec ruby #{PROGRAM}", folder)
    end
  end

  # @return [Array<String>] the programs that were run
  def follow(page)
    kinds = Documented.fences(page)
    assert_includes kinds, ["sh", GEMFILE]
    programs = kinds.slice_before { |kind, _| kind == "ruby" }.select { |(kind, _), *| kind == "ruby" }
    programs.map do |(_, program), *rest|
      Dir.mktmpdir do |folder|
        File.write(File.join(folder, PROGRAM), program)
        runs = rest.each_cons(2).select { |(kind, _), _| kind == "sh" }
        refute_empty runs, "commands and output below #{program}"
        runs.each do |(_, commands), (kind, shown)|
          assert_equal "", kind, "what follows #{commands}"
          assert_equal shown, run_commands(commands, folder), "#{commands} of #{page}"
        end
      end
      program
    end
  end

  # The other program: lines that begin with + are out, those with - stand in their place.
  def undo(diff, program)
    rest = program.lines
    made = []
    diff.split("\n\n").each do |hunk|
      removed, added = hunk.lines.map(&:chomp).partition { |line| line.start_with?("-") }.map { |lines| lines.map { |line| "#{line[1..]}\n" } }
      at = rest.index(added.first) or flunk "#{added.first} is not in the program, or not in this place"
      assert_equal added, rest[at, added.size]
      made.concat(rest.shift(at), removed)
      rest.shift(added.size)
    end
    (made + rest).join
  end

  def test_the_first_page
    program, *others = follow("README.md")
    assert_empty others
    _, diff = Documented.fences("README.md").find { |kind, _| kind == "diff" }
    alone = undo(diff, program)
    refute_includes alone, "Distributed"
    lines = run_program(alone).lines
    assert_equal((1..5).map { |epoch| "epoch #{epoch}: loss " }, lines.map { |line| line[/\Aepoch \d: loss (?=0\.\d{4}\n\z)/] })
  end

  def test_getting_started
    assert_operator follow("docs/getting-started.md").size, :>=, 5
  end

  # What the pages' Gemfile serves beside programs: RubyGems finds nothing to complain of.
  def test_irb_has_nothing_to_say
    Dir.mktmpdir { |folder| assert_match(/\Airb \S+ \(\S+\)\n\z/, run_commands("bundle exec irb --version", folder)) }
  end
end
