# frozen_string_literal: true

require_relative "test_helper"

class ElasticTimerTest < Minitest::Test
  Elastic = Distributed::Elastic

  # The lines that the block has torchrun get, where there is a pipe in its place.
  def requests
    Dir.mktmpdir do |folder|
      File.mkfifo(path = File.join(folder, "timers"))
      pipe = File.open(path, File::RDWR | File::NONBLOCK)
      ENV["TORCHELASTIC_TIMER_FILE"] = path
      yield
      pipe.read_nonblock(65_536).lines.map { |line| JSON.parse(line) }
    ensure
      ENV.delete("TORCHELASTIC_TIMER_FILE")
      pipe&.close
    end
  end

  def test_what_torchrun_is_asked_for
    now = Time.now.to_f
    sent = requests do
      assert_equal 7, Elastic.expires(after: 60, scope: :outer) { Elastic.expires(after: 5.5) { 7 } }
      assert_raises(IOError) { Elastic.expires(after: 1e300, scope: "\xff" * 9999) { raise IOError } }
    end
    inner = "#{__FILE__}:#{__LINE__ - 3}"
    assert_equal ["outer", inner, inner, "outer"], sent.first(4).map { |request| request["scope_id"] }
    assert_equal [9, 9, 0, 0, 9, 0], sent.map { |request| request["signal"] }
    assert_equal [Process.pid] * 6, sent.map { |request| request["pid"] }
    assert_equal [1] * 6, sent.map { |request| request["version"] }
    first, second, *stops = sent.first(4).map { |request| request["expiration_time"] }
    assert_in_delta now + 60, first, 30
    assert_in_delta now + 5.5, second, 30
    assert_equal [-1.0, -1.0], stops
    assert_operator sent[4]["scope_id"].bytesize, :<=, 255
  end

  def test_a_worker_is_ended
    error = nil
    capture_subprocess_io do
      error = assert_raises(Elastic::ChildFailedError) do
        Elastic.launch(Elastic::LaunchConfig.new(max_restarts: 0)) do
          Elastic.expires(after: 60, scope: "enough") { 1 }
          Elastic.expires(after: 0.01, scope: "too little") { sleep }
        end
      end
    end
    assert_match(/rank 0 .*was killed by SIGKILL: the timer "too little" expired/, error.message)
  end

  def test_wrong_arguments_and_no_launcher
    error = assert_raises(Distributed::UnavailableError) { Elastic.expires(after: 1) { flunk } }
    assert_match(/TORCHELASTIC_TIMER_FILE is not set/, error.message)
    ENV["TORCHELASTIC_TIMER_FILE"] = "/nowhere/timers"
    assert_match(/takes no timers/, assert_raises(Distributed::UnavailableError) { Elastic.expires(after: 1) { flunk } }.message)
    assert_match(/after: .*got 0/, assert_raises(ArgumentError) { Elastic.expires(after: 0) { flunk } }.message)
    assert_match(/after: .*got "5"/, assert_raises(ArgumentError) { Elastic.expires(after: "5") { flunk } }.message)
    assert_match(/scope: .*got ""/, assert_raises(ArgumentError) { Elastic.expires(after: 1, scope: "") { flunk } }.message)
    assert_match(/needs a block/, assert_raises(ArgumentError) { Elastic.expires(after: 1) }.message)
  ensure
    ENV.delete("TORCHELASTIC_TIMER_FILE")
  end
end
