# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "timeout"
require "tmpdir"
require "torch/distributed"
require_relative "partner"

# Our stores against PyTorch's own: its client on our server, ours on its server, both on one file.
#
# Of PyTorch 1.13 the server cannot take part: our own client speaks to 2.x.
class StorePythonTest < Minitest::Test
  include Partner

  Distributed = Torch::Distributed

  SCRIPT = File.read(File.expand_path("store_partner.py", __dir__)).freeze
  LIMIT = 90

  def with_python(*arguments)
    Open3.popen2e(*@python, "-", *arguments.map(&:to_s)) do |input, output, python|
      input.write(SCRIPT)
      input.close
      reader = Thread.new { output.read }
      Timeout.timeout(LIMIT) do
        yield
        assert python.value.success?, reader.value
      end
      assert_equal "ok", reader.value.lines.last.to_s.strip
    ensure
      Process.kill(:KILL, python.pid) if python.alive?
    end
  end

  # The same as exercise() there.
  def exercise(store, own)
    key = ->(name) { own + name }
    store.set(key["k"], "v")
    assert_equal "v", store.get(key["k"])
    store.set(key["empty"], "")
    assert_equal "", store.get(key["empty"])
    assert_equal [5, -2], [store.add(key["n"], 5), store.add(key["n"], -7)]
    assert_equal "-2", store.get(key["n"])
    assert_equal "x", store.compare_set(key["c"], "", "x")
    assert_equal "x", store.compare_set(key["c"], "wrong", "y")
    assert_equal "old", store.compare_set(key["absent"], "old", "new")
    store.append(key["a"], "12")
    store.append(key["a"], "3")
    assert_equal "123", store.get(key["a"])
    store.multi_set([key["m1"], key["m2"]], %w[1 22])
    assert_equal %w[1 22], store.multi_get([key["m1"], key["m2"]])
    assert store.check([key["k"], key["n"]])
    refute store.check([key["k"], key["never"]])
    assert store.delete_key(key["k"])
    big = (0..255).to_a.pack("C*") * (1 << 12)
    store.set(key["big"], big)
    assert_equal big, store.get(key["big"])
    assert_raises(Distributed::TimeoutError) { store.wait([key["never"]], 0.2) }
    assert_equal "-2", store.get(key["n"])
  end

  def meet(store)
    exercise(store, "ruby/")
    # Until it is closed as well, it keeps the store beneath it open.
    nested = Distributed::PrefixStore.new("nested", store)
    exercise(nested, "ruby/")
    nested.close
    store.set("from_ruby", "hello too")
    assert_equal "hello", store.get("from_python")
    assert_equal "-2", store.get("python/n")
    assert_equal "-2", store.get("nested/python/n")
    store.wait(["python_is_done"])
    store.set("ruby_is_done", "1")
  end

  def test_pytorchs_client_on_our_server
    server = Distributed::TCPStore.new("127.0.0.1", 0, nil, true, timeout: 30)
    with_python("client", server.port) do
      ours = Distributed::TCPStore.new("127.0.0.1", server.port, timeout: 30)
      meet(ours)
      ours.close
    end
  ensure
    server&.close
  end

  def test_two_of_pytorchs_clients_on_our_server
    server = Distributed::TCPStore.new("127.0.0.1", 0, nil, true, timeout: 30)
    with_python("pair", server.port, 0) { with_python("pair", server.port, 1) {} }
  ensure
    server&.close
  end

  def test_our_client_on_pytorchs_server
    skip "PyTorch #{@version}: our client does not speak to the servers of 1.x" if @version.to_i < 2
    port = Distributed.free_port
    with_python("server", port) do
      ours = Distributed::TCPStore.new("127.0.0.1", port, 2, false, timeout: 30)
      meet(ours)
      ours.close
    end
  end

  # The last of two removes the file. They leave one after the other: PyTorch counts itself out in two steps, and
  # if another leaves between them, neither takes itself for the last, also where both are PyTorch.
  def test_on_one_file_where_we_leave_last
    Dir.mktmpdir do |folder|
      path = File.join(folder, "store")
      ours = Distributed::FileStore.new(path, 2, timeout: 30)
      with_python("file", path) { meet(ours) }
      assert File.exist?(path), "PyTorch left the file to us"
      ours.close
      assert_empty Dir.children(folder)
    end
  end

  def test_on_one_file_where_pytorch_leaves_last
    Dir.mktmpdir do |folder|
      path = File.join(folder, "store")
      left = File.join(folder, "left")
      with_python("file", path, left) do
        ours = Distributed::FileStore.new(path, 2, timeout: 30)
        meet(ours)
        ours.close
        assert File.exist?(path), "we left the file to PyTorch"
        File.write(left, "")
      end
      assert_equal ["left"], Dir.children(folder)
    end
  end
end
