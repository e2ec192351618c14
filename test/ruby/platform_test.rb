# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require_relative "../../ext/torch_ddp/platform"

# Where torch-ddp cannot be built, both builds say so before they compile anything.
class PlatformTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)

  def test_linux_alone
    %w[linux linux-gnu linux-musl].each { |system| assert_nil Setup::Platform.obstacle(system) }
    assert_match(%r{\Atorch-ddp cannot be built on darwin23: it needs Linux's epoll, .*prctl\. .*examples/docker},
      Setup::Platform.obstacle("darwin23"))
  end

  def test_the_extension_says_so_first
    program = "RbConfig::CONFIG['host_os'] = 'darwin23'; load #{File.join(ROOT, "ext/torch_ddp/extconf.rb").dump}"
    out, status = Open3.capture2e(RbConfig.ruby, "-rrbconfig", "-e", program)
    assert_equal [1, "#{Setup::Platform.obstacle("darwin23")}\n"], [status.exitstatus, out]
  end

  def test_cmake_says_the_same
    out, status = Open3.capture2e("cmake", "-DCMAKE_SYSTEM_NAME=Darwin", "-P", File.join(ROOT, "src/platform.cmake"))
    assert_equal 1, status.exitstatus
    assert_includes out.split.join(" "), Setup::Platform.obstacle("Darwin").split.join(" ")
    assert system("cmake", "-DCMAKE_SYSTEM_NAME=Linux", "-P", File.join(ROOT, "src/platform.cmake"))
  end
end
