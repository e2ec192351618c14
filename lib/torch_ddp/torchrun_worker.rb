# frozen_string_literal: true

# Loaded before the script in every Ruby worker that bin/torchrun starts. It needs no library and loads no torch.
#
# A worker's output goes through a pipe, which Ruby would fill 64 KiB before anyone saw a line. And what ends a
# worker is written where torchrun looks for it, so that its report has the message. torchrun reports Ctrl-C, and no
# worker besides.

require_relative "error_file"

$stdout.sync = true
$stderr.sync = true

# These were for this worker, not for processes that it starts.
ENV.delete("TDDP_RUBY_PRELOAD")

at_exit do
  # After all other exit handlers, which were registered later. Ruby still ends by the signal, but reports nothing
  # where it was; RUBYOPT=-w lets it.
  $stderr = File.open(File::NULL, "w") if $!.is_a?(Interrupt) && !$VERBOSE
end

TorchDDP::ErrorFile.install
