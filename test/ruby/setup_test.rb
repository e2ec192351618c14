# frozen_string_literal: true

require "minitest/autorun"
require "minitest/mock"
require "fileutils"
require "open3"
require "tmpdir"
require_relative "../../examples/common/mnist_data"
require_relative "../../ext/setup/cache"
require_relative "../../ext/setup/console"
require_relative "../../ext/setup/mnist"
require_relative "../../ext/setup/native"
require_relative "../../ext/setup/summary"
require_relative "../../ext/torch_ddp/libtorch"

class LibtorchTest < Minitest::Test
  def test_the_table_answers_by_minor_version
    {"1.13.1" => %w[0.12.2 4.0.4], "2.6.0" => %w[0.19.1 4.5.0], "2.14" => %w[0.26.0 4.12.0]}.each do |version, gems|
      answer = Setup::Libtorch.versions_for(version)
      assert_equal gems, answer.values_at(:torch_rb, :rice), version
      refute answer.key?(:warning), version
    end
  end

  def test_a_libtorch_that_is_too_new_gets_the_newest_with_a_warning
    answer = Setup::Libtorch.versions_for("9.1.0")
    assert_equal Setup::Libtorch::VERSIONS.last.drop(1), answer.values_at(:torch_rb, :rice)
    assert_match(/libtorch 9\.1\.0 is not in the table/, answer[:warning])
  end

  def test_a_libtorch_between_two_rows_gets_the_older_one_with_a_warning
    answer = Setup::Libtorch.versions_for("2.11.0")
    assert_equal "0.23.1", answer[:torch_rb]
    assert_match(/made for libtorch 2\.10/, answer[:warning])
  end

  def test_a_libtorch_that_is_too_old_is_refused
    error = assert_raises(Setup::Libtorch::NotFound) { Setup::Libtorch.versions_for("1.12.1") }
    assert_match(/1\.12\.1 is too old: 1\.13/, error.message)
  end

  def test_the_extension_s_help_names_what_goes_with_the_libtorch_found
    with_libtorch("2.6.0") do |prefix|
      out, status = Open3.capture2e({**Setup::Gems.clean_environment, "LIBTORCH" => prefix}, RbConfig.ruby, File.join(Setup::ROOT, "ext/torch_ddp/extconf.rb"), "--help")
      assert status.success?, out
      assert_includes out, "gem install rice -v 4.5.0\n"
      assert_includes out, "gem install torch-rb -v 0.19.1 -- --with-torch-dir=#{prefix}\n"
    end
  end

  # A bundler that makes a folder, and two checkouts.
  def test_torch_rb_is_compiled_once_for_all_checkouts
    with_libtorch("2.6.0") do |prefix|
      Dir.mktmpdir do |dir|
        FileUtils.mkdir_p("#{dir}/bin")
        File.write("#{dir}/bin/bundle", <<~RUBY)
          File.write("#{dir}/calls", "\#{ARGV.first}\n", mode: "a")
          if ARGV.first == "install"
            require "fileutils"
            FileUtils.mkdir_p(ENV.fetch("BUNDLE_PATH"))
            File.write("Gemfile.lock", "locked")
          end
        RUBY
        environment = {**Setup::Gems.clean_environment, "PATH" => "#{dir}/bin:#{ENV["PATH"]}", "XDG_CACHE_HOME" => "#{dir}/cache",
                                                        "LIBTORCH" => prefix}
        calls = %w[one two].map do |name|
          checkout = copy_for_gems("#{dir}/#{name}")
          program = "Setup::Gems.new.ensure!; Setup::Gems.new.ensure!; print Setup::Gems.new.path"
          out, status = Open3.capture2e(environment, RbConfig.ruby, "-r#{checkout}/ext/setup/gems.rb", "-e", program, chdir: checkout)
          assert status.success?, out
          assert File.directory?(out[%r{^#{dir}/cache/torch-ddp/gems/\S+\z}]), out
          assert_equal "locked", File.read("#{checkout}/Gemfile.lock")
          File.readlines("#{dir}/calls", chomp: true).tap { File.delete("#{dir}/calls") }
        end
        assert_equal [%w[install config], %w[config check]], calls
      end
    end
  end

  def test_rows_ascend
    versions = Setup::Libtorch::VERSIONS.map { |row| row.map { |part| Gem::Version.new(part) } }
    versions.each_cons(2) do |older, newer|
      assert_operator older[0], :<, newer[0]
      assert_operator older[1], :<, newer[1]
      assert_operator older[2], :<=, newer[2]
    end
  end

  def test_a_named_folder_is_read
    with_libtorch("2.6.0") do |prefix|
      libtorch = Setup::Libtorch.find(nil, env: {"LIBTORCH" => prefix})
      assert_equal "2.6.0", libtorch.version
      assert_equal File.join(prefix, "lib"), libtorch.lib_dir
      assert_equal 17, libtorch.cxx_standard
      assert_equal ["#{prefix}/include", "#{prefix}/include/torch/csrc/api/include"], libtorch.include_dirs
      assert_match(/\Alibtorch-2\.6\.0-\h{8}-torch-rb-0\.19\.1-rice-4\.5\.0\z/, libtorch.key)
    end
    with_libtorch("2.13.0") { |prefix| assert_equal 20, Setup::Libtorch.find(prefix).cxx_standard }
  end

  def test_a_folder_without_libtorch_is_named
    Dir.mktmpdir do |dir|
      error = assert_raises(Setup::Libtorch::NotFound) { Setup::Libtorch.find(nil, env: {"LIBTORCH" => dir}) }
      assert_includes error.message, dir
      assert_includes error.message, "LIBTORCH"
      assert_nil Setup::Libtorch.find_or_nil(dir)
    end
  end

  def test_headers_without_the_library_are_told_apart
    with_libtorch("2.6.0") do |prefix|
      FileUtils.rm_r(File.join(prefix, "lib"))
      error = assert_raises(Setup::Libtorch::NotFound) { Setup::Libtorch.find(prefix) }
      assert_match(/libtorch_cpu\.so is not/, error.message)
    end
  end

  def test_the_old_abi_is_refused
    with_libtorch("2.6.0") do |prefix|
      FileUtils.mkdir_p("#{prefix}/share/cmake/Torch")
      config = "#{prefix}/share/cmake/Torch/TorchConfig.cmake"
      File.write(config, "set(TORCH_CXX_FLAGS \"-D_GLIBCXX_USE_CXX11_ABI=1\")\n")
      assert_equal "2.6.0", Setup::Libtorch.find(prefix).version
      assert_match(/found 2\.6\.0/, ask_cmake(prefix))
      File.write(config, "set(TORCH_CXX_FLAGS \"-D_GLIBCXX_USE_CXX11_ABI=0\")\n")
      assert_match(/old ABI.*cxx11-abi/, assert_raises(Setup::Libtorch::NotFound) { Setup::Libtorch.find(prefix) }.message)
      assert_match(/old ABI.*cxx11-abi/m, ask_cmake(prefix))
    end
  end

  # The Gemfile asks Ruby, the build asks CMake: both find the same, wherever a libtorch keeps its version.
  def test_cmake_reads_the_same_version
    [["1.13.1", 0, 17], ["2.6.0", 0, 17], ["2.10.2", 1, 17], ["2.13.0", 1, 20]].each do |version, header, standard|
      with_libtorch(version, header) do |prefix|
        assert_equal version, Setup::Libtorch.find(prefix).version
        assert_equal "#{version} C++#{standard}", ask_cmake(prefix)[/found (.*)/, 1]
      end
    end
    with_libtorch("2.6.0") do |prefix|
      File.write(File.join(prefix, Setup::Libtorch::VERSION_HEADERS[0]), "#define TORCH_VERSION_MAJOR 2\n")
      assert_match(/version was not found.*#{prefix}/m, ask_cmake(prefix))
    end
  end

  def test_the_shim_s_cuda_part_follows_libtorch_and_the_headers
    with_libtorch("2.6.0") do |prefix|
      assert_equal "OFF", ask_cmake(prefix)[/CUDA part: (\w+)/, 1]
      assert_match(/TDDP_CUDA is ON, but this was not found: libtorch_cuda, libc10_cuda/, ask_cmake(prefix, "ON"))
      FileUtils.touch(%w[torch_cuda c10_cuda].map { |name| "#{prefix}/lib/lib#{name}.so" })
      unless File.exist?("/usr/local/cuda/include/cuda_runtime_api.h") || File.exist?("/usr/include/cuda_runtime_api.h")
        assert_match(/CUDA part, for\s+want of cuda_runtime_api\.h/, ask_cmake(prefix))
      end
      FileUtils.mkdir_p("#{prefix}/include/crt")
      FileUtils.touch(%w[cuda_runtime_api.h crt/host_defines.h].map { |name| "#{prefix}/include/#{name}" })
      assert_equal "ON", ask_cmake(prefix)[/CUDA part: (\w+)/, 1]
      assert_equal "OFF", ask_cmake(prefix, "OFF")[/CUDA part: (\w+)/, 1]
    end
  end

  private

  # A folder with what the search looks at. The version stands in one of the two headers.
  def with_libtorch(version, header = 0)
    Dir.mktmpdir do |prefix|
      headers = Setup::Libtorch::VERSION_HEADERS.map { |path| File.join(prefix, path) }
      FileUtils.mkdir_p([*headers.map { |path| File.dirname(path) }, File.join(prefix, "lib")])
      File.write(headers[0], "#include <torch/headeronly/version.h>\n")
      parts = %w[MAJOR MINOR PATCH].zip(version.split("."))
      File.write(headers[header], parts.map { |name, number| "#define TORCH_VERSION_#{name} #{number}\n" }.join)
      FileUtils.touch([File.join(File.dirname(headers[0]), "torch.h"), *%w[torch torch_cpu c10].map { |name| "#{prefix}/lib/lib#{name}.so" }])
      yield prefix
    end
  end

  # The files of this checkout that its gems depend on.
  def copy_for_gems(folder)
    [*Setup::Gems::FILES, *Dir.glob("ext/setup/*.rb", base: Setup::ROOT)].each do |file|
      FileUtils.mkdir_p(File.dirname("#{folder}/#{file}"))
      FileUtils.cp(File.join(Setup::ROOT, file), "#{folder}/#{file}")
    end
    folder
  end

  def ask_cmake(prefix, cuda = "AUTO")
    script = File.join(prefix, "ask.cmake")
    File.write(script, <<~CMAKE)
      set(CMAKE_FIND_LIBRARY_PREFIXES lib)
      set(CMAKE_FIND_LIBRARY_SUFFIXES .so)
      set(TDDP_LIBTORCH #{prefix})
      set(TDDP_CUDA #{cuda})
      include(#{File.join(Setup::ROOT, "src/torch/FindLibtorch.cmake")})
      message(STATUS "found ${TDDP_LIBTORCH_VERSION} C++${TDDP_LIBTORCH_CXX_STANDARD}")
    CMAKE
    Open3.capture2e("cmake", "-P", script).first
  end
end

class MNISTDataTest < Minitest::Test
  BODIES = {train_images: (0...24).to_a.pack("C*"), train_labels: [3, 1].pack("C*"),
            test_images: (100...112).to_a.pack("C*"), test_labels: [9].pack("C*")}.freeze
  DIMENSIONS = {train_images: [2, 3, 4], train_labels: [2], test_images: [1, 3, 4], test_labels: [1]}.freeze

  def setup
    @dir = Dir.mktmpdir
    @files = BODIES.to_h do |name, body|
      bytes = [MNISTData::FILES[name].magic, *DIMENSIONS[name]].pack("N*") + body
      File.binwrite(File.join(@dir, name.to_s), bytes)
      [name, MNISTData::DataFile.new(name.to_s, MNISTData::FILES[name].magic, DIMENSIONS[name], Digest::SHA256.hexdigest(bytes))]
    end
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  def test_whole_files_become_tensors
    data = MNISTData.load(@dir, files: @files)
    assert_equal [2, 1, 3, 4], data[:train_images].shape
    assert_equal [:float32, :int64], data.values_at(:train_images, :train_labels).map(&:dtype)
    assert_equal [[3, 1], [9]], data.values_at(:train_labels, :test_labels).map(&:to_a)
    GC.start
    expected = (100...112).map { |pixel| (pixel / 255.0 - 0.1307) / 0.3081 }
    data[:test_images].flatten.to_a.zip(expected) { |found, wanted| assert_in_delta wanted, found, 1e-6 }
  end

  def test_a_missing_file_is_named_with_the_command_that_fetches_it
    File.delete(path("train_labels"))
    assert_error(/#{path("train_labels")} is missing: `rake mnist` fetches it/)
  end

  def test_a_truncated_file_is_named
    File.truncate(path("train_images"), 30)
    assert_error(/train_images is not what it should be: expected 40 bytes, found 30 bytes. Delete it/)
  end

  def test_an_empty_file_is_named
    File.truncate(path("test_labels"), 0)
    assert_error(/test_labels .*expected magic number 2049, found an empty file/)
  end

  def test_a_wrong_magic_number_is_named
    patch("train_labels", 3, "\x03")
    assert_error(/train_labels .*expected magic number 2049, found 2051/)
  end

  def test_wrong_counts_are_named
    patch("test_images", 7, "\x07")
    assert_error(/test_images .*expected counts \[1, 3, 4\], found \[7, 3, 4\]/)
  end

  def test_an_altered_pixel_is_named
    patch("train_images", 20, "\xff")
    assert_error(/train_images .*expected SHA-256 \h{64}, found \h{64}/)
  end

  def test_fetch_leaves_whole_files_alone
    before = Dir.children(@dir).sort
    assert_equal @dir, MNISTData.fetch(@dir, files: @files, sources: [])
    assert_equal before, Dir.children(@dir).sort
  end

  def test_fetch_names_a_broken_file_and_keeps_it
    File.truncate(path("train_images"), 30)
    error = assert_raises(MNISTData::Error) { MNISTData.fetch(@dir, files: @files, sources: []) }
    assert_match(/train_images .*expected 40 bytes, found 30/, error.message)
    assert_equal 30, File.size(path("train_images"))
  end

  def test_fetch_tells_when_no_source_answers
    File.delete(path("train_images"))
    error = assert_raises(MNISTData::Unreachable) { MNISTData.fetch(@dir, files: @files, sources: []) }
    assert_match(/could not be fetched into #{@dir}/, error.message)
  end

  def test_the_real_table_has_the_real_sizes
    assert_equal [47_040_016, 60_008, 7_840_016, 10_008], MNISTData::FILES.values.map(&:size)
  end

  private

  def path(name)
    File.join(@dir, name)
  end

  def patch(name, offset, byte)
    File.open(path(name), "r+b") { |file| file.pwrite(byte, offset) }
  end

  def assert_error(pattern)
    error = assert_raises(MNISTData::Error) { MNISTData.load(@dir, files: @files) }
    assert_match pattern, error.message
  end
end

class SummaryTest < Minitest::Test
  CTEST = <<~TEXT
    Test project /somewhere/build
          Start  1: base/base
     1/6 Test  #1: base/base ........................   Passed    0.52 sec
     2/6 Test  #2: net/net ..........................***Failed    0.01 sec
    what it printed: 3/6 Test was fun
     3/6 Test  #3: store/tcp ........................***Skipped   0.00 sec
     4/6 Test  #4: group/group ......................***Timeout 120.00 sec
     5/6 Test #15: gloo/gloo ........................***Exception: SegFault  0.10 sec
     6/6 Test #16: torch/ddp ........................Subprocess aborted***Exception:   0.10 sec

    17% tests passed, 4 tests failed out of 6
  TEXT

  def test_ctest_is_counted_by_its_lines
    assert_equal({passed: 1, failed: 4, skipped: 1}, Setup::Summary.ctest(CTEST))
  end

  def test_minitest_is_counted_by_its_closing_line
    text = "# Running:\n..\n12 runs, 40 assertions, 1 failures, 2 errors, 3 skips\n"
    assert_equal({passed: 6, failed: 3, skipped: 3}, Setup::Summary.minitest(text))
    assert_equal({passed: 0, failed: 0, skipped: 0}, Setup::Summary.minitest("crashed\n"))
  end

  def test_results_are_kept_and_added_up
    with_results do |path|
      Setup::Summary.record("c", {passed: 5, failed: 0, skipped: 1}, 1.25)
      Setup::Summary.record("ruby", {passed: 7, failed: 2, skipped: 0}, 3)
      sums = Setup::Summary.total(Setup::Summary.read(path))
      assert_equal "12 passed, 2 failed, 1 skipped", Setup::Summary.closing_line(sums)
    end
  end

  def test_what_was_skipped_is_told_at_the_end
    ctest = "  1/2 Test  #1: nccl/real ....***Skipped   0.01 sec\n  2/2 Test  #2: net/net ....   Passed    0.01 sec\n"
    minitest = "skipped: A#test_b: no GPU\nskipped: A#test_c: no GPU\nskipped: B#test_d: no torch for python3\n3 runs, 0 assertions, 0 failures, 0 errors, 3 skips\n"
    assert_equal({"nccl/real" => 1}, Setup::Summary.skips(ctest))
    assert_equal({"no GPU" => 2, "no torch for python3" => 1}, Setup::Summary.skips(minitest))
    with_results do |path|
      Setup::Summary.record("c", {passed: 1, failed: 0, skipped: 1}, 1, skips: Setup::Summary.skips(ctest))
      Setup::Summary.record("laws", {passed: 9, failed: 0, skipped: 0}, 1)
      Setup::Summary.record("partners", {passed: 0, failed: 0, skipped: 3}, 3, skips: Setup::Summary.skips(minitest))
      Setup::Summary.record("debian13", {passed: 0, failed: 0, skipped: 1}, 0, reason: "no network")
      text = <<~TEXT
        skipped:
          c: 1 of its tests: nccl/real
          partners: 2 of its tests: no GPU
          partners: 1 of its tests: no torch for python3
          debian13: all of it: no network
      TEXT
      assert_equal text, Setup::Summary.skipped(Setup::Summary.read(path))
      out, = Open3.capture2e(RbConfig.ruby, File.expand_path("../../ext/setup/summary.rb", __dir__), path)
      assert out.end_with?("#{text}10 passed, 0 failed, 5 skipped\n"), out
    end
    assert_equal "", Setup::Summary.skipped([])
  end

  def test_a_runner_that_ended_badly_counts_as_a_failure
    with_results do
      counts = {passed: 5, failed: 0, skipped: 0}
      assert_equal 1, Setup::Summary.record("c", counts, 1, clean: false).failed
      assert_equal 3, Setup::Summary.record("c", counts.merge(failed: 3), 1, clean: false).failed
    end
  end

  def test_the_failures_are_told_at_the_end
    minitest = "# Running:\nF.\n\n  1) Failure:\nA#b [c.rb:1]:\nExpected 1\n\n2 runs, 2 assertions, 1 failures, 0 errors, 0 skips\n"
    ctest = "noise\nThe following tests FAILED:\n\t  2 - net/net (Failed)\n"
    assert_equal "  1) Failure:\nA#b [c.rb:1]:\nExpected 1\n", Setup::Summary.failures(minitest).lines.first(3).join
    assert_equal ctest.lines.drop(1).join, Setup::Summary.failures(ctest)
    assert_equal "40\n", Setup::Summary.failures((1..99).map { |i| "#{i}\n" }.join).lines.first
    with_results do |path|
      Setup::Summary.record("c", {passed: 5, failed: 0, skipped: 1}, 1.25, report: "all is well")
      Setup::Summary.record("ruby", {passed: 7, failed: 2, skipped: 0}, 3, report: "A#b")
      assert_equal "!! ruby\nA#b\n", Setup::Summary.reports(Setup::Summary.read(path))
    end
  end

  private

  def with_results
    before = ENV["TDDP_RESULTS"]
    Dir.mktmpdir do |dir|
      ENV["TDDP_RESULTS"] = File.join(dir, "results")
      yield ENV["TDDP_RESULTS"]
    end
  ensure
    ENV["TDDP_RESULTS"] = before
  end
end

class SetupTest < Minitest::Test
  def test_the_cache_follows_xdg
    before = ENV["XDG_CACHE_HOME"]
    ENV["XDG_CACHE_HOME"] = "/var/tmp/somewhere"
    assert_equal "/var/tmp/somewhere/torch-ddp/gems/x", Setup::Cache.path("gems", "x")
    ENV["XDG_CACHE_HOME"] = "relative paths do not count"
    assert_equal File.join(Dir.home, ".cache/torch-ddp"), Setup::Cache.root
  ensure
    ENV["XDG_CACHE_HOME"] = before
  end

  def test_packages_that_this_user_may_not_install_are_a_command_to_run
    packages = Setup::SystemPackages
    installed = []
    packages.stub(:missing, %w[one two]) do
      packages.stub(:debian?, true) do
        packages.stub(:privilege, nil) do
          error = assert_raises(Setup::Failure) { packages.ensure!(%w[one two three]) }
          assert_match(/sudo apt-get update && sudo apt-get install -y --no-install-recommends one two$/, error.message)
        end
        packages.stub(:install, ->(*given) { installed << given }) do
          [[], %w[sudo -n]].each { |prefix| packages.stub(:privilege, prefix) { packages.ensure!(%w[one two three], why: "needed") } }
        end
      end
    end
    packages.stub(:missing, []) { packages.stub(:install, ->(*) { flunk "nothing is missing" }) { packages.ensure!(%w[one]) } }
    assert_equal [[[], %w[one two], "needed"], [%w[sudo -n], %w[one two], "needed"]], installed
  end

  def test_mnist_ends_with_the_accuracy_and_the_command
    mnist = Setup::MNIST.new
    asked = nil
    said, = capture_io do
      mnist.stub(:fetch, nil) do
        training = "puts 'epoch 1: loss 0.5, 7 images/s, test accuracy 98.29 % (9829 of 10000)', 'the rest'"
        Setup::Gems.stub(:exec, ->(*command) { (asked = command) && [RbConfig.ruby, "-e", training] }) { mnist.run }
      end
    end
    command = "torchrun --standalone --nproc-per-node=2 examples/mnist/distributed.rb --data-dir examples/mnist/data"
    assert_equal command, asked.join(" ")
    assert_match(/\Atraining: bundle exec #{command}\nepoch 1: .*\nthe rest\n\ntest accuracy: 98\.29 % \(9829 of 10000\)\nafter [\d.]+ s, by the command\n  bundle exec #{command}\n\z/,
      said)
    capture_io do
      mnist.stub(:fetch, nil) do
        Setup::Gems.stub(:exec, [RbConfig.ruby, "-e", "exit 3"]) { assert_match(/step failed \(exit 3\)/, assert_raises(Setup::Failure) { mnist.run }.message) }
      end
    end
  end

  def test_durations_are_readable
    assert_equal "0.3 s", Setup::Console.duration(0.31)
    assert_equal "3 min 07 s", Setup::Console.duration(187.2)
  end

  def test_two_processes_do_not_make_the_same_folder_at_once
    Dir.mktmpdir do |dir|
      folder = File.join(dir, "made")
      pids = Array.new(3) do
        fork do
          $stdout.reopen(File::NULL)
          Setup::Cache.locked(folder) do
            Dir.mkdir("#{folder}.busy")
            sleep 0.05
            Dir.rmdir("#{folder}.busy")
          end
          exit!(true)
        rescue SystemCallError
          exit!(false)
        end
      end
      assert(pids.all? { |pid| Process.wait2(pid)[1].success? })
    end
  end

  def test_a_failed_step_names_the_step_the_log_and_the_cure
    error = nil
    capture_io do
      error = assert_raises(Setup::Failure) do
        Setup::Console.step("breaking it", "sh", "-c", "echo reason; exit 3", log: "test-step", cure: "mend it")
      end
    end
    ["breaking it", "exit 3", "reason", "build/log/test-step.log", "mend it"].each { |text| assert_includes error.message, text }
  end

  def test_a_step_that_takes_too_long_is_ended
    error = nil
    capture_io do
      error = assert_raises(Setup::Failure) do
        Setup::Console.step("sleeping", "sleep", "60", log: "test-step", cure: "wake it", limit: 0.2)
      end
    end
    assert_includes error.message, "took too long"
  end

  def test_a_build_is_done_again_only_when_something_changed
    Dir.mktmpdir do |dir|
      runs = 0
      build = ->(settings) { Setup::Native.built(dir, ["ext/setup/*.rb"], settings, nil) { runs += 1 } }
      build.call("a")
      build.call("a")
      assert_equal 1, runs
      build.call("b")
      assert_equal 2, runs
      assert_raises(RuntimeError) { Setup::Native.built(dir, [], "c", nil) { raise "broken" } }
      build.call("b")
      assert_equal 3, runs
    end
  end
end
