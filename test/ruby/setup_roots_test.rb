# frozen_string_literal: true

require "minitest/autorun"
require "digest"
require "fileutils"
require "tmpdir"
require_relative "../../ext/setup/roots"
require_relative "../../ext/setup/tests"

# The roots that legs of their own are run in: nothing here makes one.
class RootTest < Minitest::Test
  # A leg's root that is made and entered without mmdebstrap, chroot or sources.
  class PlainRoot < Setup::Root
    attr_accessor :obstacle, :makes

    def make
      self.makes = makes.to_i + 1
      FileUtils.mkdir_p(folder)
      nil
    end

    def using
      yield
    end

    def enter(*command)
      ["env", *command]
    end

    def environment(more = {})
      {"PATH" => "#{folder}/bin:#{ENV["PATH"]}", **more}
    end
  end

  def setup
    @before = ENV.to_h.slice("XDG_CACHE_HOME", "TDDP_RESULTS")
    @dir = Dir.mktmpdir
    ENV["XDG_CACHE_HOME"] = @dir
    ENV["TDDP_RESULTS"] = File.join(@dir, "results")
    @root = PlainRoot.new("plain", %w[a b])
  end

  # Which tells the checkout's files.
  def needs_git
    skip "git is not here" unless Setup::SystemPackages.program?("git")
  end

  def teardown
    %w[XDG_CACHE_HOME TDDP_RESULTS].each { |name| ENV[name] = @before[name] }
    FileUtils.rm_rf(@dir)
  end

  def test_a_root_is_named_by_its_packages
    assert_equal "#{@dir}/torch-ddp/plain/#{Digest::SHA256.hexdigest("a b")[0, 12]}", @root.folder
    assert_equal @root.folder, Setup::Root.new("plain", %w[a b], options: ["--more"]).folder
    refute_equal @root.folder, Setup::Root.new("plain", %w[a c]).folder
    assert_equal File.join(@dir, "torch-ddp/debian13", Digest::SHA256.hexdigest(Setup::Debian::PACKAGES.join(" "))[0, 12]),
      Setup::Debian13.new.folder
  end

  def test_a_command_is_entered_with_nothing_of_this_shell_but_the_network_s
    root = Setup::Root.new("plain", %w[a b])
    assert_equal ["sh", root.folder, "true", "now"], root.enter("true", "now").last(4)
    assert_equal root.folder, root.enter.last
    with_environment("https_proxy" => "here", "LD_PRELOAD" => "there", "CI" => "true") do
      environment = root.environment("MORE" => "1")
      assert_equal ["here", nil, "true", "1", "/root"], environment.values_at("https_proxy", "LD_PRELOAD", "CI", "MORE", "HOME")
    end
  end

  # Only what changed is copied, so that what is built inside is not built again.
  def test_sources_follow_the_checkout
    needs_git
    root = Setup::Root.new("plain", %w[a b])
    FileUtils.mkdir_p(root.folder)
    copied = File.join(root.folder, Setup::Root::SOURCE, "Rakefile")
    stray = File.join(root.folder, Setup::Root::SOURCE, ".bundle/copied-files")
    built = File.join(root.folder, Setup::Root::SOURCE, "build/product")
    root.using { assert FileUtils.identical?(File.join(Setup::ROOT, "Rakefile"), copied) }
    before = File.stat(copied).mtime
    [built, File.join(File.dirname(copied), "gone.c")].each { |path| FileUtils.mkdir_p(File.dirname(path)) && FileUtils.touch(path) }
    File.write(stray, "gone.c\n", mode: "a")
    root.using do
      assert_equal before, File.stat(copied).mtime
      assert_path_exists built
      refute_path_exists File.join(File.dirname(copied), "gone.c")
    end
  end

  def test_the_leg_is_done_again_only_when_a_file_that_matters_changed
    needs_git
    assert_equal 1, run_leg.passed
    assert_match(/\Aunchanged: it passed on \d{4}-\d\d-\d\d .* TDDP_EVERYTHING=1/, run_leg.reason)
    with_environment("TDDP_EVERYTHING" => "1") { assert_nil run_leg.reason }
    assert_nil run_leg(files: %w[CMakeLists.txt include/**/*.h src/torch/**/*.cc]).reason
    assert_equal 3, @root.makes
  end

  def test_a_leg_that_failed_is_done_again
    needs_git
    2.times { assert_equal 1, run_leg(tests: "1/1 Test #1: nccl/operations ...***Failed 0.1 sec").failed }
    assert_equal 2, @root.makes
  end

  def test_a_leg_that_cannot_be_says_why
    needs_git
    @root.obstacle = "making a root folder needs root"
    result = run_leg
    assert_equal [0, 0, 1, "making a root folder needs root"], result.to_h.values_at(:passed, :failed, :skipped, :reason)
    assert_includes Setup::Summary.table([result]), "(making a root folder needs root)"
    assert_nil @root.makes
  end

  def test_a_task_in_debian_unstable_fails_with_the_reason
    unstable = Setup::Unstable.new
    assert_equal File.join(@dir, "torch-ddp/unstable"), File.dirname(unstable.folder)
    unstable.define_singleton_method(:obstacle) { "making a root folder needs root" }
    assert_includes assert_raises(Setup::Failure) { unstable.run_task("bench:fsdp") }.message, "making a root folder needs root"
  end

  def test_a_root_of_debian_unstable_is_named_by_what_is_newest
    digest = Digest::SHA256.hexdigest(Setup::Debian::PACKAGES.join(" "))[0, 12]
    {"2.14.1+dfsg-1" => "2.14", "2.15.0-2" => "2.15"}.each do |version, short|
      unstable = unstable_of("Inst ruby3.3 (3.3.8-2.2 D)\nInst g++ (4:16.1.0-3 D)\nInst libtorch-dev (#{version} D)\nInst ruby (1:3.3+b1 D) []\n")
      capture_io { assert_nil unstable.obstacle }
      assert_equal "#{@dir}/torch-ddp/unstable/#{digest}-libtorch-#{short}-g++-16.1-ruby-3.3", unstable.folder
    end
    with_environment("CI" => "true") { assert_equal [nil, "true"], [Setup::Unstable.new, Setup::Debian13.new].map { |root| root.environment["CI"] } }
  end

  def test_a_broken_archive_of_debian_unstable_is_no_failure
    unstable = unstable_of(nil)
    capture_io { assert_match(/\ADebian unstable has no such set of packages at present, see /, unstable.obstacle) }
    older, newer = [14, 15].map { |minor| "#{unstable.folder}-libtorch-2.#{minor}-g++-16.1-ruby-3.3" }
    FileUtils.mkdir_p([older, newer, "#{newer}.unfinished"])
    File.utime(Time.now, Time.now - 60, older)
    out, = capture_io { assert_nil unstable.obstacle }
    assert_equal newer, unstable.folder
    assert_match(/out of reach.*going on with #{Regexp.escape(newer)}/, out)
  end

  def test_a_libtorch_that_no_torch_rb_goes_with_is_no_failure
    unstable = unstable_of("Inst g++ (4:16.1.0-3 D)\nInst libtorch-dev (9.1.0 D)\nInst ruby (1:3.3+b1 D)\n")
    unstable.define_singleton_method(:make) { nil }
    capture_io { refute unstable.run(Setup::Tests.new, "newest", %i[ruby], %w[CMakeLists.txt]) }
    result = Setup::Summary.read(ENV["TDDP_RESULTS"]).last
    assert_equal ["newest", 0, 1], result.to_h.values_at(:leg, :failed, :skipped)
    assert_match(/libtorch 9\.1 is not in the table/, result.reason)
  end

  def test_what_the_leg_depends_on_is_there
    missing = Setup::CUDA::FILES.select { |pattern| Dir.glob(pattern, base: Setup::ROOT).empty? }
    assert_empty missing
    assert_includes Setup::CUDA.new.send(:targets), "test_real_no_gpu"
  end

  private

  # A Debian unstable whose archive answers that; nil: it is broken.
  def unstable_of(answer)
    command = answer ? ["printf", "%s", answer] : ["false"]
    Setup::Unstable.new.tap do |unstable|
      unstable.define_singleton_method(:mmdebstrap) { |*| command }
      unstable.define_singleton_method(:obstacle) { look_up } # whatever this machine permits
    end
  end

  # With a cmake and a ctest that say what is given; the last of the leg's results.
  def run_leg(files: %w[CMakeLists.txt], tests: "1/1 Test #1: nccl/operations ...   Passed 0.1 sec")
    bin = File.join(@root.folder, "bin")
    FileUtils.mkdir_p(bin)
    {"cmake" => "true", "ctest" => "echo '#{tests}'"}.each do |name, line|
      File.write(File.join(bin, name), "#!/bin/sh\n#{line}\n")
      File.chmod(0o755, File.join(bin, name))
    end
    capture_io { Setup::CUDA.new(root: @root, files: files).run(Setup::Tests.new) }
    Setup::Summary.read(ENV["TDDP_RESULTS"]).last
  end

  def with_environment(values)
    before = values.to_h { |name, _| [name, ENV[name]] }
    values.each { |name, value| ENV[name] = value }
    yield
  ensure
    before.each { |name, value| ENV[name] = value }
  end
end
