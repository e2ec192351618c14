# frozen_string_literal: true

require "minitest/autorun"
require "fileutils"
require "open3"
require "tmpdir"

# The precompiled gem where it does not run. Where it does: `rake test:gem`.
class PrecompiledTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)

  # @param program [String] what stands for its torchrun
  def install(program)
    Dir.mktmpdir do |dir|
      FileUtils.mkdir_p(["#{dir}/ext", "#{dir}/lib/torch_ddp/native/bin"])
      FileUtils.cp_r(File.join(ROOT, "ext/torch_ddp"), "#{dir}/ext")
      File.write("#{dir}/lib/torch_ddp/native/bin/torchrun", program, perm: 0o755)
      Open3.capture2e(RbConfig.ruby, "#{dir}/ext/torch_ddp/extconf.rb", chdir: dir)
    end
  end

  def test_where_it_does_not_run_the_sources_are_recommended
    {"#!/bin/sh\necho GLIBC_2.36 not found\nexit 1\n" => /GLIBC_2\.36 not found/, "#!/no/such/loader\n" => /No such file or directory/}.each do |program, reason|
      out, status = install(program)
      refute status.success?
      assert_match reason, out
      assert_match(/compiled for x86-64 Linux with glibc 2\.36 or newer, and does not run here: .*\n.*no platform in its name, torch-ddp-VERSION\.gem/, out)
    end
  end
end
