# frozen_string_literal: true

# Loaded before the script in every Ruby worker that bin/torchrun starts. It needs no library and loads no torch.
#
# A worker's output goes through a pipe, which Ruby would fill 64 KiB before anyone saw a line. And what ends a
# worker is written where torchrun looks for it, in PyTorch's form, so that its report has the message. Of Ctrl-C
# torchrun tells, and no worker besides.

$stdout.sync = true
$stderr.sync = true

# These were for this worker, not for processes that it starts.
ENV.delete("TDDP_RUBY_PRELOAD")

at_exit do
  # After all other exit handlers, which were registered later. Ruby still ends by the signal, but tells nobody
  # where it was; RUBYOPT=-w lets it.
  $stderr = File.open(File::NULL, "w") if $!.is_a?(Interrupt) && !$VERBOSE
end

at_exit do
  error = $!
  path = ENV["TORCHELASTIC_ERROR_FILE"]
  next if error.nil? || error.is_a?(SystemExit) || error.is_a?(SignalException) || path.nil? || File.exist?(path)

  # A rank that lost another is not the one to blame: torchrun looks for that other before it reports.
  lost = %w[Torch::Distributed::PeerLostError Torch::Distributed::GroupError].include?(error.class.name)
  require "json"
  text = ->(string) { string.dup.force_encoding(Encoding::UTF_8).scrub }
  report = {message: {
    message: text["#{error.class}: #{error.message}"],
    extraInfo: {py_callstack: text[error.full_message(highlight: false)], timestamp: Time.now.to_i.to_s,
                consequence: lost ? "1" : "0"}
  }}
  begin
    File.write(path, JSON.generate(report))
  rescue SystemCallError
    # The error itself goes to standard error all the same.
  end
end
