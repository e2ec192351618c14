# frozen_string_literal: true

require "open3"

# Hosts on one machine: network namespaces that a bridge joins, each with an address of either kind and a host name of its
# own, which no name service knows. The bridge stands in a namespace as well, so that nothing of the machine's own network
# changes. The names carry this process's id: what a killed test has left is removed by the next one.
class Namespaces
  PREFIX = "tddp-test"
  PROGRAMS = %w[ip unshare hostname].freeze

  class << self
    # @return [String, nil] why there can be none here
    def obstacle
      return @obstacle if defined?(@obstacle)

      @obstacle = find_obstacle
    end

    # Removes what tests that live no more have left.
    def sweep
      out, = Open3.capture2("ip", "netns", "list")
      out.scan(/^#{PREFIX}-(\d+)-\S+/o) do |(pid)|
        name = Regexp.last_match(0)
        system("ip", "netns", "delete", name, err: File::NULL) unless File.directory?("/proc/#{pid}")
      end
    end

    def ip(*options, lines)
      out, status = Open3.capture2e("ip", *options, "-batch", "-", stdin_data: lines.join("\n"))
      raise "ip #{options.join(" ")}: #{out}" unless status.success?
    end

    private

    def find_obstacle
      return "network namespaces need root" unless Process.uid.zero?

      missing = PROGRAMS.reject { |name| ENV["PATH"].split(":").any? { |dir| File.executable?(File.join(dir, name)) } }
      return "not found: #{missing.join(", ")} (Debian: iproute2, util-linux, hostname)" if missing.any?

      sweep
      trial
    end

    # Whether all of it works is best found out by doing it.
    def trial
      hosts = new(2, trial: true)
      out, status = Open3.capture2e(*hosts.command(1), "true")
      status.success? ? nil : "a namespace cannot be entered: #{out.strip}"
    rescue RuntimeError => e
      "namespaces cannot be made here: #{e.message.strip}"
    ensure
      hosts&.remove
    end
  end

  # @param count [Integer] hosts, up to 200
  # @param ipv4 [Boolean] false: they have IPv6 alone
  def initialize(count, ipv4: true, trial: false)
    raise self.class.obstacle if !trial && self.class.obstacle

    @count = count
    @maker = Process.pid
    @serial = (@@serial = (defined?(@@serial) ? @@serial : 0) + 1)
    make(ipv4)
    at_exit { remove }
  rescue
    remove
    raise
  end

  # The same addresses in every test: nobody else sees them.
  def ipv4(host)
    "10.77.0.#{host + 1}"
  end

  def ipv6(host)
    "fd77::#{(host + 1).to_s(16)}"
  end

  # A network of the same bridge in which a host has a second address: 10.78.0.0/24.
  def add_address(host, text)
    self.class.ip("-n", name(host), ["address add #{text} dev eth0"])
  end

  def host_name(host)
    "node-#{"abcdefghijklmnopqrstuvwxyz"[host] || host}"
  end

  # What to put before a command that is to run on this host; its process id stays the same.
  def command(host)
    ["ip", "netns", "exec", name(host), "unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", host_name(host)]
  end

  # The cable is pulled: nothing comes and goes, and nobody is told.
  def cut(*hosts)
    switch(hosts, "down")
  end

  def mend(*hosts)
    switch(hosts, "up")
  end

  # These hosts see each other and nobody else, and the others likewise.
  def divide(*hosts)
    self.class.ip("-n", name("switch"), hosts.map { |host| "link set port#{host} master aside" })
  end

  def unite
    self.class.ip("-n", name("switch"), Array.new(@count) { |host| "link set port#{host} master hub" })
  end

  # @return [Array<Integer>] the processes on this host
  def processes(host)
    Open3.capture2("ip", "netns", "pids", name(host)).first.split.map(&:to_i)
  end

  # Only the maker removes them, not a child that inherited the handler.
  def remove
    return unless @maker == Process.pid && @made

    @made = false
    names.each do |name|
      system("ip", "netns", "delete", name, out: File::NULL, err: File::NULL)
    end
  end

  # What the names of its namespaces begin with; a dash and the host follow.
  def prefix
    "#{PREFIX}-#{@maker}-#{@serial}"
  end

  def name(host)
    "#{prefix}-#{host}"
  end

  private

  def names
    ["switch", *0...@count].map { |host| name(host) }
  end

  def switch(hosts, state)
    self.class.ip("-n", name("switch"), hosts.map { |host| "link set port#{host} #{state}" })
  end

  def make(ipv4)
    @made = true
    self.class.ip(names.map { |name| "netns add #{name}" })
    ports = Array.new(@count) do |host|
      ["link add port#{host} type veth peer name eth0 netns #{name(host)}", "link set port#{host} master hub up"]
    end
    self.class.ip("-n", name("switch"), [*%w[hub aside].flat_map { |bridge| ["link add #{bridge} type bridge", "link set #{bridge} up"] }, *ports.flatten])
    @count.times do |host|
      self.class.ip("-n", name(host), ["link set lo up", "link set eth0 up",
        *("address add #{ipv4(host)}/24 dev eth0" if ipv4), "address add #{ipv6(host)}/64 dev eth0 nodad"])
    end
  end
end
