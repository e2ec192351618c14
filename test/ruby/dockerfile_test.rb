# frozen_string_literal: true

require "minitest/autorun"
require_relative "../../ext/setup/dockerfile"

# The reader of examples/docker/Dockerfile.
class DockerfileTest < Minitest::Test
  def test_instructions
    text = <<~TEXT
      # A comment.
      FROM debian:bookworm-slim

      RUN a \\
          # of a step
          && b
      COPY . .
      CMD ["rake", "mnist"]
    TEXT
    expected = [%w[FROM debian:bookworm-slim], ["RUN", "a      && b"], ["COPY", ". ."], ["CMD", '["rake", "mnist"]']]
    assert_equal expected, Setup::Dockerfile.parse(text)
  end

  def test_ours_ends_with_the_training
    steps = Setup::Dockerfile.parse(File.read(File.join(Setup::ROOT, Setup::Dockerfile::PATH)))
    assert_match Setup::Dockerfile::FROM, steps.first[1]
    assert_equal ["CMD", '["rake", "mnist"]'], steps.last
    assert_empty steps.drop(1).map(&:first).uniq - %w[COPY RUN WORKDIR CMD]
  end

  def test_another_base_is_refused
    error = assert_raises(Setup::Failure) { Setup::Dockerfile.new([%w[FROM ubuntu:24.04]]) }
    assert_match(/FROM ubuntu:24\.04: expected debian:SUITE-slim/, error.message)
  end
end
