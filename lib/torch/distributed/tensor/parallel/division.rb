# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      module Parallel
        # Divides modules: checks on all processes alike, then takes the values of one, and has the modules called in their styles.
        #
        # @api private
        class Division
          STYLE = :@_parallel_style

          # @param operation [String] for messages
          # @param group [ProcessGroup]
          # @param source [Integer, nil] the rank whose values all take
          def initialize(operation, group, source)
            @operation = operation
            @group = group
            @source = source
          end

          # @yieldreturn [Array(Torch::NN::Module, Array<Target>)] the model, and what is to be divided in it
          # @return [void]
          def run
            failure = nil
            begin
              root, targets = yield
              prepare(root, targets)
            rescue => e
              failure = e
            end
            agree(failure)
            take_values if @source
            @layouts.each { |parameter, (_, layout)| Tensor.divide(parameter, layout) unless Tensor.layout(parameter) }
            targets.each { |target| install(target) }
          end

          private

          # --- what is wrong is found before anything is changed ---

          def prepare(root, targets)
            if @source && !(@source.is_a?(Integer) && @source.between?(0, @group.size - 1))
              raise ArgumentError, "src_data_rank: expected a rank from 0 to #{@group.size - 1} or nil, got #{@source.inspect}"
            end

            check_wrappers(root)
            @layouts = {}.compare_by_identity
            @lines = targets.flat_map { |target| describe(target) }
            check_ties(root, targets)
          end

          def check_wrappers(root)
            wrapped = root.modules.find { |mod| mod.is_a?(Torch::NN::Parallel::DistributedDataParallel) }
            raise ArgumentError, "module: expected one that is not in a #{wrapped.class} yet: divide the model, then wrap it" if wrapped
          end

          # @return [Array<String>] what must be the same on all processes
          def describe(target)
            if Parallel.parallelized?(target.mod)
              raise ArgumentError, "#{target}: it is parallel already, by #{target.mod.instance_variable_get(STYLE).inspect}"
            end

            named = target.style.layouts(target, @group)
            ["#{target}: #{target.style.inspect}", *named.map { |name, (parameter, layout)| add("#{target}: #{name}", parameter, layout) }]
          end

          def add(name, parameter, layout)
            standing = Tensor.layout(parameter) || @layouts[parameter]&.last
            unless [nil, layout].include?(standing)
              raise ArgumentError, "#{name} is divided already: #{standing.inspect}, expected #{layout.inspect}"
            end

            @layouts[parameter] = [name, layout]
            "#{name}: #{parameter.dtype} #{layout.inspect}#{", frozen" unless parameter.requires_grad}"
          end

          # A module that knows nothing of the division would compute with a part.
          def check_ties(root, targets)
            known = targets.to_h { |target| [target.mod, true] }.compare_by_identity
            root.named_modules.each do |place, mod|
              next if known[mod] || Parallel.parallelized?(mod)

              mod.named_parameters(recurse: false).each do |name, parameter|
                owner, layout = @layouts[parameter]
                next unless layout&.divided?

                raise ArgumentError, "#{[place, name].reject(&:empty?).join(".")} is the same parameter as that of #{owner}, which is " \
                  "divided: expected a style for #{place.empty? ? "the module itself" : place}, too"
              end
            end
          end

          # A process that fails says so instead of leaving the others waiting.
          def agree(failure)
            raise failure if failure && @group.size == 1
            return if @group.size == 1

            all = Distributed.all_gather_object([failure&.message, @lines, @source], group: @group, serializer: :json)
            raise failure if failure

            failed = all.index { |message, _, _| message }
            raise MismatchError, "#{@operation} failed on global rank #{@group.ranks[failed]}: #{all[failed].first}" if failed

            compare(all.map { |_, lines, source| [*lines, "src_data_rank: #{source.inspect}"] })
          end

          def compare(all)
            other = all.index { |lines| lines != all.first } or return
            place = all.first.zip(all[other]).index { |one, two| one != two } || all.first.size
            one, two = [0, other].map { |rank| all[rank][place]&.inspect || "nothing more" }
            raise MismatchError, "#{@operation}: expected the same on all processes, but global rank #{@group.ranks[0]} has #{one} " \
              "where global rank #{@group.ranks[other]} has #{two}"
          end

          # --- changes ---

          def take_values
            return if @group.size == 1

            @layouts.each_key do |parameter|
              next if Tensor.layout(parameter)

              Torch.no_grad { Distributed.broadcast(parameter.detach, group_src: @source, group: @group) }
            end
          end

          def install(target)
            style, group = target.style, @group
            target.mod.instance_variable_set(STYLE, style)
            ModuleHooks.around(target.mod, @operation, moving: method(:keep_layouts)) do |inputs, kwargs, forward|
              style.run(target, group, inputs, kwargs, forward)
            end
          end

          def keep_layouts(mod)
            layouts = mod.named_parameters(recurse: false).transform_values { |parameter| Tensor.layout(parameter) }.compact
            yield
          ensure
            layouts&.each { |name, layout| Tensor.keep_layout(mod.named_parameters(recurse: false).fetch(name), layout) }
          end
        end
        private_constant :Division
      end
    end
  end
end
