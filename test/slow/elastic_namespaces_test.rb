# frozen_string_literal: true

require_relative "support/elastic_case"

# The hosts of the other tests: what they promise.
class ElasticNamespacesTest < ElasticCase
  SERVER = <<~RUBY
    require "socket"
    server = TCPServer.new(ARGV[0], 5000)
    puts "listening"
    $stdout.flush
    loop { connection = server.accept; Thread.new { while (line = connection.gets); connection.puts("\#{Socket.gethostname} \#{line}"); end } }
  RUBY

  CLIENT = <<~RUBY
    require "socket"
    socket = Socket.tcp(ARGV[0], 5000, connect_timeout: 3)
    $stdin.each_line do |line|
      socket.puts(line)
      puts(IO.select([socket], nil, nil, 1) ? socket.gets : "silence")
      $stdout.flush
    end
  RUBY

  def on_host(host, code, *arguments, &block)
    IO.popen(PLAIN, [*@hosts.command(host), RbConfig.ruby, "-e", code, *arguments], "r+", &block)
  end

  def conversation(address)
    server = on_host(1, SERVER, address)
    assert_equal "listening\n", server.gets
    on_host(0, CLIENT, address) { |client| yield ->(text) { client.puts(text) || client.gets.chomp } }
  ensure
    Process.kill(:KILL, server.pid)
    server.close
  end

  def test_a_connection_passes_until_it_is_cut_and_after_it_is_mended
    hosts(2)
    conversation(@hosts.ipv4(1)) do |say|
      assert_equal "node-b one", say.call("one")
      @hosts.cut(1)
      assert_equal "silence", say.call("two")
      @hosts.mend(1)
      # What was said in between arrives now.
      answers = Array.new(8) { say.call("three") }
      assert_includes answers, "node-b three"
    end
  end

  def test_ipv6_alone
    hosts(2, ipv4: false)
    conversation(@hosts.ipv6(1)) { |say| assert_equal "node-b hello", say.call("hello") }
    out, = Open3.capture2("ip", "-n", @hosts.name(0), "-4", "address", "show", "eth0")
    assert_empty out
  end

  def test_what_a_killed_test_left_is_removed
    code = "require #{File.join(__dir__, "support/namespaces").dump}; Namespaces.new(1); puts Process.pid; $stdout.flush; sleep"
    pid = nil
    IO.popen([RbConfig.ruby, "-e", code]) do |io|
      pid = io.gets.to_i
      assert_equal 2, names.grep(/-#{pid}-/).size
      Process.kill(:KILL, pid)
    end
    Namespaces.sweep
    assert_empty names.grep(/-#{pid}-/)
  end

  def test_they_are_removed_at_the_end
    hosts(2)
    assert_equal 3, names.grep(/-#{Process.pid}-/).size
    @hosts.remove
    assert_empty names.grep(/-#{Process.pid}-/)
  end

  def names
    Open3.capture2("ip", "netns", "list").first.lines(chomp: true)
  end
end
