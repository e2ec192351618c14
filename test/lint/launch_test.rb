# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "tsort"

# The laws of src/launch: a port to another system is a matter of the files that are named for Linux, and the program
# needs nothing that a machine may lack.
class LaunchLawsTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  BINARY = [ENV["TDDP_TORCHRUN"], "#{ROOT}/lib/torch_ddp/native/bin/torchrun", "#{ROOT}/build/native/bin/torchrun"]
    .compact.find { |path| File.executable?(path) }

  # What other systems lack, by what stands in the source for it.
  LINUX = {
    "prctl" => /\bprctl\b|\bPR_[A-Z]{3}/, "pidfd" => /pidfd|\bP_PIDFD\b/, "signalfd" => /signalfd/, "eventfd" => /eventfd/,
    "timerfd" => /timerfd/, "epoll" => /epoll/, "inotify" => /inotify/, "memfd" => /memfd/, "cgroup" => /cgroup/i,
    "/proc" => %r{"/?proc(?:/|")|/proc/}, "/sys" => %r{"/sys\b|/sys/(?:devices|fs|class)}, "affinity" => /sched_(?:set|get)affinity|\bCPU_(?:SET|ISSET|COUNT|ZERO)\b/,
    "close_range" => /close_range/, "syscall" => /\bsyscall\s*\(|\bSYS_[a-z]/, "clone" => /\bclone3?\s*\(|\bunshare\s*\(|\bsetns\s*\(/,
    "numa" => /set_mempolicy|\bmbind\b/, "sendfile or splice" => /\b(?:sendfile|splice|tee)\s*\(\s*\w+\s*,\s*\w+.*(?:SPLICE|NULL)/
  }.freeze

  def sources
    Dir[File.join(ROOT, "src/launch/**/*.{c,h}")].sort
  end

  def code(file)
    File.read(file).gsub(%r{/\*.*?\*/|//[^\n]*}m) { |comment| comment.gsub(/[^\n]/, " ") }
  end

  def test_what_is_linux_own_stands_in_files_named_so
    wrong = sources.grep_v(/_linux\.c\z/).flat_map do |file|
      code(file).lines.each_with_index.flat_map do |line, at|
        LINUX.filter_map { |name, pattern| "#{file.delete_prefix("#{ROOT}/")}:#{at + 1}: #{name}: #{line.strip}" if line.match?(pattern) }
      end
    end
    assert_empty wrong
  end

  # What each folder includes of the others; a header of the room itself, beside main.c, is "world" or the like.
  def folders
    sources.each_with_object(Hash.new { |all, name| all[name] = [] }) do |file, all|
      own = file.delete_prefix("#{ROOT}/src/launch/").delete_suffix(".h")[%r{\A[^/]+}]
      all[own] |= File.read(file).scan(/#\s*include\s+"launch\/(\w+)/).flatten - [own]
    end
  end

  def test_folders_do_not_include_each_other_in_circles
    all = folders
    assert_includes all["agent"], "workers"
    circles = TSort.strongly_connected_components(->(&one) { all.keys.each(&one) }, ->(name, &one) { all.fetch(name, []).each(&one) })
    assert_empty circles.select { |circle| circle.size > 1 }
  end

  # A file for one system answers a header that names no system, so that another file can stand in for it.
  def test_each_linux_file_answers_a_neutral_header
    files = sources.grep(/_linux\.c\z/)
    refute_empty files
    files.each do |file|
      own = File.basename(file, "_linux.c")
      included = File.read(file).scan(/#\s*include\s+"([^"]+)"/).flatten.map { |name| File.basename(name, ".h") }
      refute_empty included.grep_v(/_linux/), file
      assert included.any? { |name| own.start_with?(name) || name.start_with?(own) }, "#{file} does not include #{own}.h"
    end
  end

  def binary
    BINARY || skip("torchrun is not built: rake compile, or TDDP_TORCHRUN=/path")
  end

  def output(*command)
    out, status = Open3.capture2(*command)
    assert status.success?, command.join(" ")
    out
  end

  def test_the_program_links_libc_alone
    assert_empty output("readelf", "-d", binary).scan(/NEEDED.*\[(.+?)\]/).flatten.grep_v(/\A(libc|ld-linux.*)\.so/)
    loaded = output("ldd", binary).scan(/^\s*(\S+?)(?:\.so\S*)?(?:\s+=>|\s+\()/).flatten.map { |name| File.basename(name) }
    assert_empty loaded.grep_v(/\A(libc|ld-linux.*|linux-(?:vdso|gate))\z/)
  end

  # Others could come to lean on what is there by accident.
  def test_the_program_exports_nothing
    assert_empty output("nm", "-D", "--defined-only", binary).lines.map { |line| line.split.last }.grep_v(/\A(_IO_stdin_used|std(?:in|out|err)|environ|__environ)(@.*)?\z/)
  end

  def test_the_program_asks_for_no_search_path_and_no_executable_stack
    dynamic = output("readelf", "-d", binary)
    assert_empty dynamic.scan(/R(?:UN)?PATH.*$/)
    assert_match(/GNU_STACK\s+\S+\s+\S+\s+\S+\s+\S+\s+\S+\s+RW\s/, output("readelf", "-lW", binary))
  end
end
