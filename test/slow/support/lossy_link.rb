# frozen_string_literal: true

require "rbconfig"
require "socket"

# A link between two network namespaces that loses, delays and reorders packets, as `tc netem` does where the kernel has
# it: a tunnel device in each, and a thread that carries packets from one to the other.
class LossyLink
  # Run in a namespace: makes the device and hands its descriptor over.
  DEVICE = <<~RUBY
    require "socket"
    device = File.open("/dev/net/tun", "r+b")
    device.ioctl(0x400454ca, [ARGV[0], 0x1001].pack("a16Sx22")) # TUNSETIFF, IFF_TUN | IFF_NO_PI
    UNIXSocket.for_fd(ARGV[1].to_i).send_io(device)
  RUBY

  NAME = "lossy"
  LARGEST = 65_536

  # @return [String, nil] why there can be none here
  def self.obstacle
    "tunnel devices need /dev/net/tun" unless File.writable?("/dev/net/tun")
  end

  attr_reader :lost, :reordered

  # @param hosts [Namespaces] of which the first two get the addresses 10.79.0.1 and 10.79.0.2
  # @param loss [Float] the share of packets that do not arrive
  # @param delay [Range<Float>] in seconds; packets overtake each other within it
  def initialize(hosts, loss:, delay:, seed:)
    @random = Random.new(seed)
    @loss = loss
    @delay = delay
    @queue = []
    @lost = @reordered = 0
    @ends = [0, 1].map { |host| open_end(hosts, host) }
    @stop, @stopper = IO.pipe
    @thread = Thread.new { carry }
    @thread.report_on_exception = true
  end

  def close
    @stopper.close
    @thread.join
    [*@ends, @stop].each(&:close)
  end

  private

  def open_end(hosts, host)
    ours, theirs = UNIXSocket.pair
    pid = Process.spawn(*hosts.command(host), RbConfig.ruby, "-e", DEVICE, NAME, theirs.fileno.to_s, theirs => theirs)
    theirs.close
    device = ours.recv_io(File, "r+b")
    Process.wait(pid)
    Namespaces.ip("-n", hosts.name(host), ["address add 10.79.0.#{host + 1}/24 dev #{NAME}", "link set #{NAME} up"])
    device
  ensure
    ours&.close
  end

  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC)
  end

  def carry
    loop do
      due = @queue.first&.first
      ready, = IO.select([*@ends, @stop], nil, nil, due && [due - now, 0].max)
      break if ready&.include?(@stop)

      ready&.each { |from| take(from) }
      deliver
    end
  end

  def take(from)
    packet = from.readpartial(LARGEST)
    return @lost += 1 if @random.rand < @loss

    due = now + @random.rand(@delay)
    place = @queue.index { |(other, *)| other > due } || @queue.size
    @reordered += 1 if place < @queue.size
    @queue.insert(place, [due, @ends.find { |other| other != from }, packet])
  end

  def deliver
    while @queue.first && @queue.first[0] <= now
      _, to, packet = @queue.shift
      to.syswrite(packet)
    end
  end
end
