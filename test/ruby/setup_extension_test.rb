# frozen_string_literal: true

require "minitest/autorun"
require "fileutils"
require "open3"
require "rbconfig"
require "tmpdir"
require_relative "../../ext/setup/libtorch_archive"
require_relative "../../ext/setup/native"

# The options of the extension's build, which are those of `gem install torch-ddp -- ...` and `bundle config build.torch-ddp ...`.
class SetupExtensionTest < Minitest::Test
  def test_an_option_that_nothing_reads_is_refused
    out, status = configure("--with-gloo=/opt", "--with-cflags=-g", "--with-torch-include=/opt", "--with-torch-dir=/opt", "--without-gloo", "--enable-cuda")
    refute status.success?, out
    assert_match(/^--with-gloo, --with-torch-include, --without-gloo, --enable-cuda: expected --with-gloo-dir, .*or one of mkmf's own options$/, out)
  end

  def test_gloo_is_not_looked_for_where_libtddp_is_built_already
    out, status = configure("--with-tddp-dir=#{Setup::Native::PREFIX}", "--with-gloo_include=/opt/include")
    refute status.success?, out
    assert_includes out, "--with-gloo-include: has no effect with --with-tddp-dir"
  end

  def test_options_reach_cmake
    Dir.mktmpdir do |dir|
      make_gloo("#{dir}/gloo")
      given = cmake_s(dir, "--with-gloo-dir=#{dir}/gloo", "--with-cuda-include=/opt/cuda/include", "--enable-werror", "--with-cflags=-O1 -g",
        "--with-cppflags=-DNDEBUG", "--with-ldflags=-Wl,-O1", "--with-opt-dir=/opt/a:/opt/b")
      assert_equal "#{dir}/gloo/include", given["GLOO_INCLUDE_DIR"]
      assert_equal "#{dir}/gloo/lib/libgloo.so", given["GLOO_LIBRARY"]
      assert_equal ["/opt/cuda/include", "ON", "-DNDEBUG -O1 -g", "-DNDEBUG", "-Wl,-O1", "/opt/a;/opt/b"],
        given.values_at("TDDP_CUDA_INCLUDE_DIR", "TDDP_WERROR", "CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS", "CMAKE_MODULE_LINKER_FLAGS", "CMAKE_PREFIX_PATH")

      FileUtils.mv("#{dir}/gloo/lib", "#{dir}/static")
      FileUtils.mv("#{dir}/static/libgloo.so", "#{dir}/static/libgloo.a")
      given = cmake_s(dir, "--with-gloo-include=#{dir}/gloo/include", "--with-gloo-lib=#{dir}/static")
      assert_equal ["#{dir}/gloo/include", "#{dir}/static/libgloo.a", nil], given.values_at("GLOO_INCLUDE_DIR", "GLOO_LIBRARY", "TDDP_WERROR")
    end
  end

  def test_a_folder_without_gloo_is_named
    Dir.mktmpdir do |dir|
      out, = configure("--with-gloo-include=#{dir}")
      assert_includes out, "#{dir}/gloo/transport/tcp/device.h is not there; expected Gloo's headers"
      out, = configure("--with-gloo-lib=#{dir}")
      assert_includes out, "libgloo is not in #{dir}; expected Gloo's library"
    end
  end

  # Of the shape of pytorch.org's, named either way.
  def test_an_archive_s_libtorch
    here = Setup::Libtorch.find
    Dir.mktmpdir do |dir|
      archive = Setup::LibtorchArchive.make("#{dir}/libtorch", here)
      found = Setup::Libtorch.find(nil, env: {"LIBTORCH" => archive})
      assert_equal [here.version, "#{archive}/lib", ["#{archive}/include", "#{archive}/include/torch/csrc/api/include"]],
        [found.version, found.lib_dir, found.include_dirs]
      assert_path_exists File.join(found.include_dirs.last, "torch/torch.h")
      refute_equal here.key, found.key
      assert_equal archive, cmake_s(dir, "--with-torch-dir=#{archive}")["TDDP_LIBTORCH"]
      assert_equal archive, cmake_s(dir, env: {"LIBTORCH" => archive})["TDDP_LIBTORCH"]
    end
  end

  # A new compiler's new warning does not end a build, unless CI's own compiler gives it.
  def test_warnings_are_errors_in_ci_alone
    before = ENV["CI"]
    {nil => "OFF", "true" => "ON"}.each do |ci, expected|
      ENV["CI"] = ci
      assert_includes Setup::Native.settings_for(nil, {}), "-DTDDP_WERROR=#{expected}", ci.inspect
    end
  ensure
    ENV["CI"] = before
  end

  private

  # Runs extconf.rb, which may write only where it was started.
  def configure(*options, env: {})
    Dir.mktmpdir { |dir| Open3.capture2e(env, RbConfig.ruby, File.join(Setup::ROOT, "ext/torch_ddp/extconf.rb"), *options, chdir: dir) }
  end

  # What a cmake that fails was given.
  def cmake_s(dir, *options, env: {})
    FileUtils.mkdir_p("#{dir}/bin")
    File.write("#{dir}/bin/cmake", "#!/bin/sh\nprintf '%s\\n' \"$@\" > #{dir}/given\nexit 1\n")
    File.chmod(0o755, "#{dir}/bin/cmake")
    out, status = configure(*options, env: {"PATH" => "#{dir}/bin:#{ENV["PATH"]}", **env})
    refute status.success?, out
    assert_path_exists "#{dir}/given", out
    File.readlines("#{dir}/given", chomp: true).filter_map { |line| line.delete_prefix("-D").split("=", 2) if line.start_with?("-D") }.to_h
  end

  def make_gloo(prefix)
    FileUtils.mkdir_p(["#{prefix}/include/gloo/transport/tcp", "#{prefix}/lib"])
    FileUtils.touch(["#{prefix}/include/gloo/transport/tcp/device.h", "#{prefix}/lib/libgloo.so"])
  end
end
