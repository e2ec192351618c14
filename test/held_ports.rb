# frozen_string_literal: true

require "socket"

# Ports for listeners that a test starts, in this process or in others.
module HeldPorts
  # Binds a port and holds it until the test ends: the system gives it to nobody else, while a listener that sets
  # SO_REUSEADDR, as servers do, can have it. Before one does, connecting is refused.
  #
  # @param port [Integer] 0: any
  # @return [Integer] a port of 127.0.0.1
  # @raise [Errno::EADDRINUSE] if the port is not free
  def held_port(port = 0)
    socket = Socket.new(:INET, :STREAM)
    (@held_ports ||= []) << socket
    socket.setsockopt(:SOCKET, :REUSEADDR, true)
    socket.bind(Addrinfo.tcp("127.0.0.1", port))
    socket.local_address.ip_port
  end

  # @return [Boolean] whether a process of this host listens on the port
  def listening?(port)
    %w[tcp tcp6].flat_map { |name| File.readlines("/proc/net/#{name}") }.map(&:split)
      .any? { |line| line[1].end_with?(format(":%04X", port)) && line[3] == "0A" }
  end

  def release_ports
    @held_ports&.each(&:close)
    @held_ports = nil
  end

  def after_teardown
    super
  ensure
    release_ports
  end
end
