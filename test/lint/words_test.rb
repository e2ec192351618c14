# frozen_string_literal: true

require "minitest/autorun"

# Words of a private vocabulary that gave way to the field's standard terms, which stand beside them. They do not come back.
class WordsTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)

  GONE = {
    "council" => "coordinator", "seat" => "participant", "comer" => "joiner", "lament" => "warning", "tale" => "report", "reign" => "term"
  }.freeze

  FILES = "{src,include,ext,lib,bin,examples,test}/**/*.{c,cc,h,rb,py,md}"

  def test_words_that_are_gone
    pattern = /(?<![a-z])(#{GONE.keys.join("|")})s?(?![a-z])/i
    found = (Dir[File.join(ROOT, FILES)] + Dir[File.join(ROOT, "*.md")] - [File.expand_path(__FILE__)]).sort.flat_map do |file|
      next [] if file.start_with?(File.join(ROOT, "lib/torch_ddp/native"))

      File.readlines(file).each.with_index(1).filter_map do |line, number|
        word = line[pattern, 1] or next
        "#{file.delete_prefix("#{ROOT}/")}:#{number}: #{word}; the field says #{GONE.fetch(word.downcase)}"
      end
    end
    assert_empty found
  end
end
