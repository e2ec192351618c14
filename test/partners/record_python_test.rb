# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rbconfig"
require "tmpdir"
require_relative "partner"

# A Ruby worker that fails, as PyTorch's launcher sees it.
class RecordPythonTest < Minitest::Test
  include Partner

  LIB = File.expand_path("../../lib", __dir__)
  # Without torch, which takes a second to load; torch/distributed loads the same.
  WORKER = <<~RUBY
    module Torch; module Distributed; end; end
    require "torch/distributed/elastic"
    def train = raise(ArgumentError, "b\\u00f6se \\xff")
    train
  RUBY

  def in_folder(&block)
    Dir.mktmpdir(&block)
  end

  def plain
    {"RUBYOPT" => nil, "RUBYLIB" => LIB}
  end

  def test_pytorch_reads_the_error_file
    in_folder do |folder|
      path = File.join(folder, "error.json")
      Open3.capture3({"TORCHELASTIC_ERROR_FILE" => path}.merge(plain), RbConfig.ruby, "-e", WORKER)
      out, err, status = Open3.capture3(*@python, "-c", <<~PYTHON, path)
        import sys
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
        failure = ProcessFailure(0, 1234, 1, sys.argv[1])
        print(failure.timestamp)
        print(ChildFailedError("worker", {0: failure}))
      PYTHON
      assert status.success?, err
      assert_in_delta Time.now.to_i, out.lines.first.to_i, 60
      assert_match(/traceback : -e:3:in .*train': böse \ufffd \(ArgumentError\)/, out.dup.force_encoding("UTF-8"))
    end
  end

  def test_under_pythons_torchrun
    in_folder do |folder|
      script = File.join(folder, "worker.rb")
      File.write(script, WORKER)
      env = {"OMP_NUM_THREADS" => "1"}.merge(Partner::FILE_ENVIRONMENT, plain)
      _, err, status = Open3.capture3(env, "timeout", "60", *@python, *Partner.torchrun(folder), *Partner.in_a_file(folder),
        "--nproc_per_node=1", "--no_python", RbConfig.ruby, script)
      err = err.dup.force_encoding(Encoding::UTF_8).scrub
      assert_equal 1, status.exitstatus
      assert_match(/worker\.rb:3:in .*train': böse \ufffd \(ArgumentError\)/, err)
    end
  end
end
