# frozen_string_literal: true

require_relative "test_helper"
require "json"
require "torch_ddp/error_file"

# TORCHELASTIC_ERROR_FILE, whoever launched the worker.
class RecordTest < Minitest::Test
  LIB = File.expand_path("../../lib", __dir__)
  PRELOAD = File.join(LIB, "torch_ddp/torchrun_worker.rb")
  ELASTIC = "module Torch; module Distributed; end; end; require 'torch/distributed/elastic'; E = Torch::Distributed::Elastic; "

  # Runs a worker without torch, which would take a second.
  # @return [Array] what it wrote to its error file, its standard error, and how it ended
  def worker(code, *flags, file: nil)
    Dir.mktmpdir do |folder|
      path = file || File.join(folder, "error.json")
      _, err, status = Open3.capture3({"TORCHELASTIC_ERROR_FILE" => path, "RUBYOPT" => nil}, RbConfig.ruby, "-I", LIB, *flags, "-e", code)
      left = Dir.children(folder) - ["error.json"]
      assert_empty left
      written = File.exist?(path) ? File.read(path) : nil
      [written && JSON.parse(written)["message"], err, status, written]
    end
  end

  def test_an_exception_that_nobody_rescues
    [[ELASTIC], ["", "-r", PRELOAD], [ELASTIC, "-r", PRELOAD]].each do |before, *flags|
      said, err, status = worker("#{before}def train = raise(ArgumentError, \"bad \\\"thing\\\"\")\ntrain", *flags)
      refute status.success?
      assert_equal "ArgumentError: bad \"thing\"", said["message"]
      assert_match(/\A-e:\d+:in .*train': bad "thing" \(ArgumentError\)/, said["extraInfo"]["py_callstack"])
      assert_equal %w[py_callstack timestamp consequence], said["extraInfo"].keys
      assert_in_delta Time.now.to_i, said["extraInfo"]["timestamp"].to_i, 60
      # Newer versions of Ruby show the line of code as well.
      assert_equal 1, err.scan("(ArgumentError)").size
    end
  end

  def test_loading_torch_distributed_is_enough
    Dir.mktmpdir do |folder|
      path = File.join(folder, "error.json")
      _, _, status = ruby("Torch::Distributed.all_reduce(Torch.ones(1))", env: {"TORCHELASTIC_ERROR_FILE" => path})
      refute status.success?
      said = JSON.parse(File.read(path))["message"]
      assert_match(/\ATorch::Distributed::GroupError: the default process group is not initialized/, said["message"])
      assert_equal "1", said["extraInfo"]["consequence"]
    end
  end

  def test_what_is_no_failure_to_tell
    ["exit", "exit 3", "exit!(4)", "Process.kill(:TERM, $$); sleep 60", "begin; raise 'x'; rescue; end", "Thread.new { Thread.current.report_on_exception = false; raise 'x' }.then { |thread| Thread.pass while thread.alive? }",
      "fork { $stderr.close; raise 'x' }; Process.wait"].each do |code|
      assert_nil worker(ELASTIC + code)[0], code
    end
  end

  def test_ways_to_end
    assert_equal "SystemExit: no data", worker(ELASTIC + "abort 'no data'")[0]["message"]
    assert_equal "RuntimeError: in a thread", worker(ELASTIC + "Thread.new { Thread.current.report_on_exception = false; Thread.current.abort_on_exception = true; raise 'in a thread' }; sleep 60")[0]["message"]
    assert_equal "NotImplementedError: later", worker(ELASTIC + "raise NotImplementedError, 'later'")[0]["message"]
    assert_match(/\ASystemStackError/, worker(ELASTIC + "def a = a(); a")[0]["message"])
    assert_equal "RuntimeError: at exit", worker(ELASTIC + "at_exit { raise 'at exit' }")[0]["message"]
    assert_match(/\ASyntaxError/, worker(ELASTIC + "eval('1 +')")[0]["message"])
  end

  def test_texts_of_all_kinds
    long = worker(ELASTIC + "raise 'a' * 1_300_000 + 'end'")
    assert_operator long[3].bytesize, :<, 1 << 20
    assert_match(/\ARuntimeError: a+\n\.\.\. \d+ bytes left out \.\.\.\na+end\z/, long[0]["message"])
    control = worker(ELASTIC + 'raise "\x01" * 300_000')
    assert_operator control[3].bytesize, :<, 1 << 20
    assert_equal "RuntimeError: a\ufffdb", worker(ELASTIC + 'raise "a\xffb"')[0]["message"]
    assert_equal "RuntimeError: b\ufffd", worker(ELASTIC + 'raise "b\xff".b')[0]["message"]
    assert_equal "RuntimeError: bös", worker(ELASTIC + 'raise "b\u00f6s".encode("UTF-16LE")')[0]["message"]
    assert_equal "RuntimeError: bös", worker(ELASTIC + 'raise "b\u00f6s".encode("ISO-8859-1")')[0]["message"]
    assert_match(/its message raised ZeroDivisionError/, worker(ELASTIC + "e = RuntimeError.new; def e.message = 1 / 0; E.record { raise e }")[0]["message"])
    assert_match(/\A#<Class:0x\h+>: RuntimeError|\A#<Class/, worker(ELASTIC + "raise Class.new(RuntimeError)")[0]["message"])
  end

  def test_a_file_that_cannot_be_written
    %w[/dev/null/error.json /proc/self/error.json].each do |path|
      said, err, status = worker(ELASTIC + "raise 'x'", file: path)
      assert_nil said
      assert_equal 1, status.exitstatus
      assert_equal 1, err.scan("RuntimeError").size
      refute_match(/error_file/, err)
    end
  end

  def test_what_somebody_else_wrote_stays
    said, = worker(ELASTIC + 'File.write(ENV["TORCHELASTIC_ERROR_FILE"], %({"message": {"message": "mine"}})); raise "x"')
    assert_equal "mine", said["message"]
  end

  def test_record
    assert_equal "RuntimeError: told", worker(ELASTIC + "E.record { raise 'told' } rescue exit(1)")[0]["message"]
    assert_equal "RuntimeError: last", worker(ELASTIC + "begin; E.record { raise 'first' }; rescue; end; raise 'last'")[0]["message"]
    assert_nil worker(ELASTIC + "E.record { exit 3 }")[0]
    assert_equal "RuntimeError: deep", worker(ELASTIC + "E.record { E.record { raise 'deep' } }")[0]["message"]
    wrapped = "def main(a, b: 1) = yield(a + b) ; p E.record(method(:main)).call(2, b: 3) { |sum| sum * 2 }; E.record(method(:main)).call(1) { raise 'in it' }"
    assert_equal "RuntimeError: in it", worker(ELASTIC + wrapped)[0]["message"]
  end

  def test_record_gives_back_values
    elastic = Distributed::Elastic
    assert_equal 3, elastic.record { 3 }
    assert_equal [1, {b: 2}], elastic.record(->(a, b:) { [a, {b: b}] }).call(1, b: 2)
    assert_raises(ArgumentError) { elastic.record }
    assert_raises(ArgumentError) { elastic.record(-> {}) {} }
    with_env("TORCHELASTIC_ERROR_FILE" => nil) { assert_raises(KeyError) { elastic.record { raise KeyError } } }
  end
end
