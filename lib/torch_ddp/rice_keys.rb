# frozen_string_literal: true

module TorchDDP
  # Keeps apart what rice before 4.3 takes for one method.
  #
  # It finds a method's C++ function by the number (53 + class) * 53 + id, where class is an address. Two methods of
  # classes that lie near each other can have the same number; then one is called as the other, and the process ends
  # with std::bad_any_cast. Whether it happens is a matter of the heap: of a run's luck. Classes whose addresses differ
  # by more than any two ids can make up for never collide. So those that torch-rb opens when it is loaded are made
  # before that, far enough from each other; it takes what is there already.
  #
  # Without effect where torch is loaded already, or with a rice that needs none of it.
  module RiceKeys
    MODULES = %w[Torch Torch::NN Torch::NN::Init Torch::FFT Torch::Linalg Torch::Special Torch::Random Torch::CUDA Torch::Backends
      Torch::Backends::OpenMP Torch::Backends::MKL].freeze
    CLASSES = {
      "Torch::IValue" => "Object", "Torch::Generator" => "Object", "Torch::Tensor" => "Object", "Torch::TensorOptions" => "Object",
      "Torch::Device" => "Object", "Torch::NN::Parameter" => "Torch::Tensor"
    }.freeze

    # Bytes: 53 times as much is more than 16 times the symbols that any program has.
    APART = 32 * 1024

    module_function

    def spread
      return if RUBY_ENGINE != "ruby" || defined?(::Torch::Tensor) || !needed?

      require "objspace"
      @taken = []
      @fillers = []
      MODULES.each { |name| place(name) { Module.new } }
      CLASSES.each { |name, parent| place(name) { Class.new(Object.const_get(parent)) } }
    ensure
      @fillers = nil
    end

    def needed?
      rice = Gem.loaded_specs["rice"] || Gem::Specification.find_by_name("rice")
      rice.version < Gem::Version.new("4.3")
    rescue Gem::LoadError
      false
    end

    # Sets a constant that is not there yet to a module that lies apart from the others, as its singleton class does.
    # Gives up after some tries: it is then as it would have been without.
    def place(name, &make)
      *outer, last = name.split("::")
      holder = outer.inject(Object) { |found, part| found.const_get(part, false) }
      if holder.const_defined?(last, false)
        @taken.concat(addresses(holder.const_get(last, false)))
      else
        made = 50.times.lazy.map { candidate(make) }.find { |one| apart?(addresses(one)) } || make.call
        @taken.concat(addresses(made))
        holder.const_set(last, made)
      end
    end

    # With other objects before it, and between it and its singleton class. All are kept until the end, or their places
    # would be given out again.
    def candidate(make)
      fill
      made = make.call
      fill
      made.singleton_class
      @fillers << made
      made
    end

    def fill
      @fillers << Array.new(APART / 40) { Object.new }
    end

    def addresses(made)
      [made, made.singleton_class].map { |one| ObjectSpace.dump(one)[/"address":"0x(\h+)"/, 1].hex }
    end

    # A class and its singleton class are made together. Their ids would have to differ by 8 modulo 16 to meet, which
    # those of two methods do not.
    def apart?(pair)
      between = (pair[0] - pair[1]).abs
      (between > APART || between * 53 % 16 == 8) && pair.all? { |one| @taken.all? { |other| (other - one).abs > APART } }
    end

    private_class_method :needed?, :place, :candidate, :fill, :addresses, :apart?
  end
end

TorchDDP::RiceKeys.spread
