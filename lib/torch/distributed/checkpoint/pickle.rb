# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Reads the part of Python's pickle format in which torch.save writes plain values: numbers, texts, lists, tuples,
      # dicts and tensors. What would call anything else is refused, so reading runs no code of the file's.
      #
      # @api private
      class Pickle
        MARK = Object.new.freeze
        private_constant :MARK

        # How many values a key that is a tuple may have, with those of tuples within it.
        KEY_SIZE = 64
        private_constant :KEY_SIZE

        # A name of Python's, "torch._utils._rebuild_tensor_v2".
        Global = Struct.new(:name)

        # @param bytes [String]
        # @param path [String] for texts
        # @param build [#call] `(name, arguments)` makes what a call of that Python function gives, or raises
        # @param persistent [#call] makes what a persistent id stands for
        def initialize(bytes, path, build, persistent)
          @bytes = bytes
          @path = path
          @build = build
          @persistent = persistent
          @at = 0
          @stack = []
          @memo = {}
        end

        # @return [Object]
        def load
          loop do
            code = take(1)
            return @stack.pop if code == "."

            perform(code)
          end
        end

        private

        # One byte each: what it pushes.
        CONSTANTS = {"N" => -> {}, "\x88".b => -> { true }, "\x89".b => -> { false }, "}" => -> { {} }, "]" => -> { [] }, ")" => -> { [] },
                     "(" => -> { MARK }}.freeze
        # Numbers, and how they are packed.
        NUMBERS = {"J" => [4, "l<"], "K" => [1, "C"], "M" => [2, "S<"], "G" => [8, "G"]}.freeze
        # Texts and bytes: how their size is packed, and whether they are text.
        TEXTS = {"X" => [4, "L<", true], "\x8c".b => [1, "C", true], "\x8d".b => [8, "Q<", true], "B" => [4, "L<", false],
                 "C" => [1, "C", false], "U" => [1, "C", true], "T" => [4, "l<", true]}.freeze
        TUPLES = {"\x85".b => 1, "\x86".b => 2, "\x87".b => 3}.freeze
        # What can be a key, or within a tuple that is one.
        KEYS = [String, Integer, Float, Complex, true, false, nil, Global].freeze
        private_constant :CONSTANTS, :NUMBERS, :TEXTS, :TUPLES, :KEYS

        def perform(code)
          if (constant = CONSTANTS[code])
            @stack.push(constant.call)
          elsif (size, format = NUMBERS[code])
            @stack.push(take(size).unpack1(format))
          elsif (size, format, text = TEXTS[code])
            bytes = take(take(size).unpack1(format))
            @stack.push(text ? bytes.force_encoding(Encoding::UTF_8) : bytes)
          elsif (count = TUPLES[code])
            @stack.push(@stack.pop(count))
          else
            perform_other(code)
          end
        end

        def perform_other(code)
          case code
          when "\x80".b then take(1)
          when "\x95".b then take(8)
          when "q" then @memo[take(1).unpack1("C")] = @stack.last
          when "r" then @memo[take(4).unpack1("L<")] = @stack.last
          when "\x94".b then @memo[@memo.size] = @stack.last
          when "h" then @stack.push(@memo.fetch(take(1).unpack1("C")))
          when "j" then @stack.push(@memo.fetch(take(4).unpack1("L<")))
          when "\x8a".b then @stack.push(integer(take(take(1).unpack1("C"))))
          when "t" then @stack.push(marked)
          when "a" then pushed(1)
          when "e" then pushed(nil)
          when "s" then put(@stack.pop(2))
          when "u" then put(marked)
          when "c" then @stack.push(Global.new("#{line}.#{line}"))
          when "\x93".b then @stack.push(Global.new(@stack.pop(2).join(".")))
          when "R" then called
          when "b" then built
          when "Q" then @stack.push(@persistent.call(@stack.pop))
          else
            raise CheckpointError, "#{@path} has something that is no plain value (pickle code #{code.inspect} at #{@at - 1}): " \
              "expected tensors, numbers, texts, lists and dicts"
          end
        end

        def take(size)
          raise DamagedError, "#{@path} is damaged: its description ends early" if size.negative? || @at + size > @bytes.bytesize

          @at += size
          @bytes.byteslice(@at - size, size)
        end

        def line
          stop = @bytes.index("\n", @at) || raise(DamagedError, "#{@path} is damaged: its description ends early")
          take(stop + 1 - @at).chomp.force_encoding(Encoding::UTF_8)
        end

        # Little-endian, of any length, with a sign.
        def integer(bytes)
          value = bytes.bytes.each_with_index.sum { |byte, i| byte << (8 * i) }
          (bytes.empty? || bytes.getbyte(-1) < 128) ? value : value - (1 << (8 * bytes.bytesize))
        end

        def marked
          from = @stack.rindex { |each| MARK.equal?(each) } || raise(DamagedError, "#{@path} is damaged: a mark is missing in its description")
          values = @stack.slice!(from..)
          values.drop(1)
        end

        def pushed(count)
          values = count ? @stack.pop(count) : marked
          @stack.last.is_a?(Array) ? @stack.last.concat(values) : misplaced("elements")
        end

        def put(pairs)
          misplaced("keys") unless @stack.last.is_a?(Hash) && pairs.size.even?

          pairs.each_slice(2) { |key, value| @stack.last[checked_key(key)] = value }
        end

        # What would change anything else that was read.
        def misplaced(what)
          raise DamagedError, "#{@path} is damaged: its description has #{what} of a #{@stack.last.class}"
        end

        # Ruby's hash of an array is that of all within it, however often it contains the same one.
        def checked_key(key)
          left = [key]
          (KEY_SIZE + 1).times do
            return key if left.empty?

            value = left.pop
            next left.concat(value.first(KEY_SIZE)) if value.is_a?(Array) && value.size <= KEY_SIZE

            break unless KEYS.any? { |kind| kind === value }
          end
          raise DamagedError, "#{@path} is damaged: its description has a key that is no number, no text and no short tuple of them"
        end

        def called
          arguments = @stack.pop
          function = @stack.pop
          raise DamagedError, "#{@path} is damaged: a call of #{function.class} in its description" unless function.is_a?(Global)

          @stack.push(@build.call(function.name, arguments))
        end

        # Attributes of a dict (a model's state_dict has its versions there) are left out.
        def built
          @stack.pop
          return if @stack.last.is_a?(Hash) || @stack.last.is_a?(Torch::Tensor)

          raise CheckpointError, "#{@path} has an object with attributes: expected tensors, numbers, texts, lists and dicts"
        end
      end
    end
  end
end
