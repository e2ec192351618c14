# frozen_string_literal: true

require "open3"
require "shellwords"

# The Python whose PyTorch the tests of this folder meet.
#
# PARTNER_PYTHON names it, with arguments if need be. Without it, it is python3, or /usr/bin/python3 where python3 has
# no torch.
module Partner
  CANDIDATES = (ENV["PARTNER_PYTHON"] ? [Shellwords.split(ENV["PARTNER_PYTHON"])] : [["python3"], ["/usr/bin/python3"]]).freeze

  def self.version_of(python)
    out, status = Open3.capture2e(*python, "-c", "import torch; print('torch', torch.__version__)")
    status.success? ? out[/^torch (\S+)/, 1].to_s : ""
  rescue Errno::ENOENT
    ""
  end

  # @return [Array] the command and its version of PyTorch, or two nils
  def self.find
    @found ||= CANDIDATES.map { |python| [python, version_of(python)] }.find { |_, version| !version.empty? } || [nil, nil]
  end

  # PyTorch's torchrun, as arguments for its Python. Its logs are asked for: without, that of 1.13 starts no worker with
  # a Python from 3.11 on, which counts no 0 among the values of a flag.
  def self.torchrun(folder)
    ["-m", "torch.distributed.run", "--redirects=1", "--tee=1", "--log_dir=#{folder}/log", "--monitor_interval=0.1"]
  end

  # Its nodes, one here, meet in a file: Debian's PyTorch 2.6 is built without libuv, which its torchrun wants for a store.
  FILE_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE" => "1"}.freeze

  def self.in_a_file(folder)
    ["--rdzv_backend=c10d", "--rdzv_conf=store_type=file", "--rdzv_endpoint=#{folder}/store", "--rdzv_id=job", "--nnodes=1:1"]
  end

  def setup
    super
    @python, @version = Partner.find
    skip "no torch for #{CANDIDATES.map { |python| python.join(" ") }.join(" or ")}" unless @python
  end

  # Runs Python for a bounded time: a partner that hangs is ended, with the processes it has started.
  #
  # @return [Array] standard output, standard error and the status, which is 124 for one that was ended
  def run_python(*arguments, env: {}, limit: 60, **options)
    limit *= Float(ENV.fetch("TDDP_TEST_TIMEOUT_MULTIPLIER", "1"))
    Open3.capture3(env, "timeout", "--kill-after=5", limit.to_s, *@python, *arguments, **options)
  end
end
