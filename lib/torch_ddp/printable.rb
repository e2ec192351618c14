# frozen_string_literal: true

# @api private
module TorchDDP
  # A text that other processes and nodes have written, or parts of it, for terminals and logs: UTF-8, without what a terminal would act
  # on. Newlines and tabs stay.
  #
  # @param text [String]
  # @return [String]
  def self.printable(text)
    text.dup.force_encoding(Encoding::UTF_8).scrub.gsub("\r\n", "\n").gsub(/[[:cntrl:]&&[^\n\t]]/, "?")
  end
end
