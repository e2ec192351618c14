# frozen_string_literal: true

require_relative "../ruby/test_helper"
require_relative "forks"
require_relative "partner"

# Our stores against PyTorch's own: its client on our server, ours on its server, both on one file. Of PyTorch 1.13 as
# well, whose dialect is older.
class StorePythonTest < Minitest::Test
  include Partner

  SCRIPT = File.expand_path("store_partner.py", __dir__).freeze
  LIMIT = 90 * FACTOR

  # One for all tests of this process.
  def self.forks(python)
    @forks ||= Forks.new(python)
  end

  def run_script(*arguments)
    run = StorePythonTest.forks(@python).run(SCRIPT, *arguments)
    Timeout.timeout(LIMIT) { yield run }
  ensure
    run&.close
  end

  def with_python(*arguments)
    run_script(*arguments) do |run|
      reader = Thread.new { run.output.read }
      yield
      assert_equal 0, run.status, reader.value
      assert_equal "ok", reader.value.lines.last.to_s.strip
    end
  end

  def old?
    older_than?("2.0")
  end

  # @param version [String] of PyTorch
  def older_than?(version)
    Gem::Version.new(@version[/[\d.]+/]) < Gem::Version.new(version)
  end

  # A store of PyTorch's that only serves; ends with the block.
  def with_host
    port = held_port
    run_script("host", port) do |run|
      # Warnings may come first.
      until (line = run.output.gets).to_s.start_with?("ok")
        flunk "PyTorch's store did not start" unless line
      end
      yield port, run.pid
    end
  end

  def client_of(port)
    Distributed::TCPStore.new("127.0.0.1", port, timeout: 20)
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
    # The connection is as good as before, also when what was waited for comes.
    store.set(key["never"], "here after all")
    assert_equal "here after all", store.get(key["never"])
    assert_equal [-1, -2], [store.add(key["n"], 1), store.add(key["n"], -1)]
  end

  # The same as play() there, on a server of PyTorch's.
  def play(store, rank)
    exercise(store, "pair#{rank}/")
    50.times do |turn|
      mine, theirs = "#{turn}/#{rank}", "#{turn}/#{1 - rank}"
      if (turn + rank).even?
        sleep 0.002
        (turn % 3 == 1) ? assert_equal(turn, store.add(mine, turn)) : store.set(mine, turn.to_s)
        assert_equal "heard", store.get(theirs)
      else
        store.wait([theirs])
        assert_equal turn.to_s, store.get(theirs)
        store.set(mine, "heard")
      end
    end
    store.add("sum", rank + 1)
    store.set("done#{rank}", "")
    store.wait(%w[done0 done1])
    assert_equal "3", store.get("sum")
    store.set("left#{rank}", "")
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
    port = held_port
    with_python("server", port) do
      ours = Distributed::TCPStore.new("127.0.0.1", port, 2, false, timeout: 30)
      meet(ours)
      ours.close
    end
  end

  def test_our_client_and_pytorchs_take_turns_on_its_server
    port = held_port
    with_python("pair", port, 0, "host") do
      ours = Distributed::TCPStore.new("127.0.0.1", port, 2, false, timeout: 30)
      play(ours, 1)
      ours.close
    end
  end

  # Each with several connections, and all appending the same.
  def test_many_of_our_clients_on_pytorchs_server
    with_host do |port|
      stores = Array.new(4) { client_of(port) }
      Array.new(4) do |i|
        Thread.new do
          exercise(stores[i], "client#{i}/")
          copy = stores[i].clone
          25.times do |turn|
            copy.append("log", "x")
            stores[i].add("n", i)
            stores[i].set("#{turn}/#{i}", turn.to_s)
            stores[i].wait(Array.new(4) { |other| "#{turn}/#{other}" })
          end
          copy.close
        end
      end.each(&:join)
      assert_equal "x" * 100, stores[0].get("log")
      assert_equal "150", stores[0].get("n")
      keys = Array.new(100) { |i| "#{i / 4}/#{i % 4}" }
      assert_equal Array.new(100) { |i| (i / 4).to_s }, stores[1].multi_get(keys)
      stores.each(&:close)
    end
  end

  # One waits, another brings it: by set, by add, by append, by several at once.
  def test_our_clients_wake_each_other_on_pytorchs_server
    with_host do |port|
      waiting, bringing = Array.new(2) { client_of(port) }
      got = Thread.new { %w[set add append several].map { |name| waiting.get(name) } << waiting.multi_get(%w[m1 m2]) }
      [-> { bringing.set("set", "1") }, -> { bringing.add("add", 2) }, -> { bringing.append("append", "3") },
        -> { bringing.multi_set(%w[several m1 m2], %w[4 5 6]) }].each do |bring|
        await_waiting(got)
        bring.call
      end
      assert_equal ["1", "2", "3", "4", %w[5 6]], got.value
      [waiting, bringing].each(&:close)
    end
  end

  # However the time runs out and the key comes, nobody gets an answer that is another's.
  def test_waits_that_run_out_on_pytorchs_server
    with_host do |port|
      ours, other = Array.new(2) { client_of(port) }
      15.times do |turn|
        time = 0.01 + 0.02 * turn
        late = Thread.new do
          sleep time - 0.005
          other.set("late#{turn}", "here")
        end
        begin
          ours.wait(["late#{turn}"], time)
        rescue Distributed::TimeoutError => e
          assert_match(/late#{turn}/, e.message)
        end
        assert_equal turn + 1, ours.add("n", 1)
        late.join
        assert_equal "here", ours.get("late#{turn}")
        assert_raises(Distributed::TimeoutError) { ours.wait(["never"], 0) }
        assert_equal turn + 1, ours.add("n", 0)
      end
      [ours, other].each(&:close)
    end
  end

  def test_what_pytorchs_server_lacks_is_said
    with_host do |port|
      ours = client_of(port)
      ours.set("k", "v")
      assert_equal !old?, ours.has_extended_api?
      calls = [-> { ours.queue_push("q", "v") }, -> { ours.queue_pop("q") }, -> { ours.queue_len("q") }]
      lists = [-> { ours.list_keys }, -> { ours.barrier("b", 1) }]
      copy = ours.clone
      (calls + (older_than?("2.7") ? lists : [])).each do |call|
        2.times { assert_match(/torch-ddp/, assert_raises(Distributed::UnsupportedError, &call).message) }
        assert_equal "v", ours.get("k")
      end
      assert_match(/PyTorch 1\.13/, assert_raises(Distributed::UnsupportedError) { copy.queue_len("q") }.message) if old?
      [ours, copy].each(&:close)
    end
  end

  def test_the_death_of_pytorchs_server_ends_a_wait
    with_host do |port, pid|
      ours = client_of(port)
      waiting = Thread.new { assert_raises(Distributed::NetworkError) { ours.get("never") } }
      await_waiting(waiting)
      Process.kill(:KILL, pid)
      assert_match(/127\.0\.0\.1:#{port}/, waiting.value.message)
      assert_raises(Distributed::NetworkError) { ours.set("k", "v") }
      ours.close
    end
  end

  # What only ours knows of lies in the same file.
  def with_barriers(store)
    store.barrier("alone", 1)
    meet(store)
    store.barrier("alone", 1)
    assert_equal "2", store.get("alone")
    assert_includes store.list_keys, "python/n"
  end

  # The last of two removes the file. They leave one after the other: PyTorch counts itself out in two steps, and
  # if another leaves between them, neither takes itself for the last, also where both are PyTorch.
  def test_on_one_file_where_we_leave_last
    Dir.mktmpdir do |folder|
      path = File.join(folder, "store")
      ours = Distributed::FileStore.new(path, 2, timeout: 30)
      with_python("file", path) { with_barriers(ours) }
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
        with_barriers(ours)
        ours.close
        assert File.exist?(path), "we left the file to PyTorch"
        File.write(left, "")
      end
      assert_equal ["left"], Dir.children(folder)
    end
  end
end
