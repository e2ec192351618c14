# frozen_string_literal: true

require "fileutils"
require "tmpdir"

# An etcd of one member or several, each a process of the test's. They are killed in the end: what they store is a test's.
class EtcdCluster
  # @return [String, nil] why there can be none here
  def self.obstacle
    found = ENV["PATH"].split(":").any? { |dir| File.executable?(File.join(dir, "etcd")) }
    found ? nil : "etcd was not found (Debian: etcd-server)"
  end

  # @param addresses [Array<(String, Integer, Integer)>] of each member, host and ports: for clients, and for the other members
  # @param commands [Array<Array<String>>, nil] what to put before each member's command
  # @param flags [Array<String>] of all members
  # @param scheme [String] of its URLs for clients
  def initialize(addresses, commands: nil, flags: [], scheme: "http")
    @scheme = scheme
    @folder = Dir.mktmpdir("etcd-test")
    @addresses = addresses
    @commands = commands || Array.new(addresses.size) { [] }
    @flags = flags
    @pids = Array.new(addresses.size)
    addresses.each_index { |member| start(member) }
  end

  # Starts a member, or again with what it had stored.
  def start(member)
    host, client, peer = @addresses[member]
    @pids[member] = Process.spawn(*@commands[member], "etcd", "--name", "m#{member}", "--data-dir", File.join(@folder, member.to_s),
      "--listen-client-urls", "#{@scheme}://#{host}:#{client}", "--advertise-client-urls", "#{@scheme}://#{host}:#{client}",
      "--listen-peer-urls", "http://#{host}:#{peer}", "--initial-advertise-peer-urls", "http://#{host}:#{peer}",
      "--initial-cluster", cluster, *@flags, out: log(member), err: log(member), in: File::NULL)
  end

  def kill(member)
    pid, @pids[member] = @pids[member], nil
    return unless pid

    Process.kill(:KILL, pid)
    Process.wait(pid)
  rescue Errno::ESRCH
    Process.wait(pid)
  end

  # Returns once all threads of the member stand still.
  def stop(member)
    Process.kill(:STOP, @pids[member])
    Process.wait(@pids[member], Process::WUNTRACED)
  end

  def continue(member)
    Process.kill(:CONT, @pids[member])
  end

  def continue_all
    @pids.compact.each { |pid| Process.kill(:CONT, pid) }
  end

  def remove
    @pids.each_index { |member| kill(member) }
    FileUtils.rm_rf(@folder)
  end

  # @return [String] for --rdzv-endpoint
  def endpoints
    @addresses.map { |address| address.first(2).join(":") }.join(",")
  end

  private

  def cluster
    @addresses.each_with_index.map { |(host, _, peer), member| "m#{member}=http://#{host}:#{peer}" }.join(",")
  end

  def log(member)
    [File.join(@folder, "#{member}.log"), "a"]
  end
end
