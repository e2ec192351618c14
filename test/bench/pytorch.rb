# frozen_string_literal: true

# The Python whose PyTorch a benchmark is compared with: PYTHON, else Debian's.
module PyTorch
  # @return [String] the interpreter; ends the program if it has no torch
  def self.python
    python = ENV.fetch("PYTHON", "/usr/bin/python3")
    return python if system(python, "-c", "import torch.distributed", err: File::NULL)

    abort "#{python} has no torch: install python3-torch, or name another interpreter with PYTHON=..."
  end
end
