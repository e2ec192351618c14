# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # Which rank has which stage: stage s is on rank s modulo their number, or all are in this process.
      #
      # @api private
      class StageLayout
        # @return [Array<PipelineStage>] this process's, by number
        attr_reader :stages

        # @return [Integer] of the pipeline
        attr_reader :num_stages

        # @return [ProcessGroup, nil] nil: all stages are in this process
        attr_reader :group

        def initialize(stages)
          @stages = stages.is_a?(Array) ? stages : [stages]
          unless !@stages.empty? && @stages.all?(PipelineStage)
            raise TypeError, "stages: expected a PipelineStage or an Array of them, got #{stages.inspect}"
          end

          @group = found_group
          number_stages
          @stages = @stages.sort_by(&:stage_index)
          @num_stages = @stages.first.num_stages
          whole = @stages.size == @num_stages
          unless @group || whole
            raise ArgumentError, "stages: #{@stages.inspect} are not all of #{@num_stages}, and there is no process group whose ranks " \
              "have the others"
          end

          @group = nil if whole
        end

        def local?
          @group.nil?
        end

        def rank
          local? ? 0 : @group.rank
        end

        # @return [Hash{Integer => PipelineStage}]
        def by_index
          @by_index ||= @stages.to_h { |stage| [stage.stage_index, stage] }
        end

        # @return [Proc] the rank of a stage
        def owner
          ranks = local? ? 1 : @group.size
          ->(stage) { stage % ranks }
        end

        def last_rank
          owner.call(num_stages - 1)
        end

        def first_here?
          by_index.key?(0)
        end

        def last_here?
          by_index.key?(num_stages - 1)
        end

        # @param several [Boolean] whether a rank may have several stages
        # @return [Integer] for how many ranks a plan is made; in one process that is each device's
        def plan_ranks(several)
          return @group.size unless local?

          devices = @stages.map { |stage| stage.device.to_s }.uniq.size
          (several && (num_stages % devices).zero?) ? devices : num_stages
        end

        # Checks on all ranks what each has; the block's failure is raised on all.
        #
        # @yieldreturn [Hash] what is the same on all ranks
        def agree(name)
          failure = nil
          mine = begin
            check_places
            yield.merge("num_stages" => num_stages)
          rescue => e
            failure = e
            {"failure" => e.message}
          end
          raise failure if failure && (local? || @group.size == 1)
          return if local?

          compare(name, Distributed.all_gather_object(mine, group: @group, serializer: :json), failure)
        end

        # @return [Array<Object>] every rank's, as JSON has it
        def gather(object)
          local? ? [object] : Distributed.all_gather_object(object, group: @group, serializer: :json)
        end

        private

        def found_group
          given = @stages.filter_map(&:group).uniq
          raise ArgumentError, "stages: expected one group, got #{given.inspect}" if given.size > 1

          found = given.first || Distributed.default_process_group
          raise ArgumentError, "group: this process is not in it" if found && !found.is_a?(ProcessGroup)

          found
        end

        # Those that have no number are the ranks', if this one has one stage, else all of the pipeline.
        def number_stages
          without = @stages.select { |stage| stage.stage_index.nil? }
          unless without.empty? || without.size == @stages.size
            raise ArgumentError, "stages: expected stage_index of all or of none, got #{@stages.inspect}"
          end

          if @stages.size == 1 && @group
            without.each { |stage| stage._place(@group.rank, @group.size) }
          else
            without.each_with_index { |stage, index| stage._place(index, @stages.size) }
          end
          numbers = @stages.map(&:stage_index)
          counts = @stages.map(&:num_stages).uniq
          return if counts.size == 1 && numbers.uniq.size == numbers.size

          raise ArgumentError, "stages: expected different stage_index and the same num_stages, got #{@stages.inspect}"
        end

        def check_places
          return if local?
          unless (num_stages % @group.size).zero?
            raise ArgumentError, "num_stages: expected a multiple of the group's #{@group.size} ranks, got #{num_stages}"
          end

          expected = (rank...num_stages).step(@group.size).to_a
          return if @stages.map(&:stage_index) == expected

          raise ArgumentError, "stages: expected stage_index #{expected.join(", ")} on rank #{rank} of #{@group.size}, got " \
            "#{@stages.map(&:stage_index).join(", ")}"
        end

        def compare(name, all, failure)
          failed = all.index { |each| each["failure"] }
          raise failure if failure
          raise MismatchError, "#{name}: rank #{failed} of the pipeline: #{all[failed]["failure"]}" if failed

          shown = all.map { |each| each.merge("tie" => each["tie"].map { |tie| tie["stages"] }) }
          shown.each_with_index do |each, other|
            key = each.keys.find { |one| each[one] != shown[0][one] } or next
            raise MismatchError, "#{name}: #{key}: #{shown[0][key].inspect} on rank 0 of the pipeline, #{each[key].inspect} on " \
              "rank #{other}"
          end
          compare_ties(name, all)
        end

        def compare_ties(name, all)
          all.map { |each| each["tie"] }.transpose.each do |tie|
            forms = tie.flat_map { |each| each["here"] }.uniq
            next if forms.size == 1

            raise MismatchError, "#{name}: tie: #{tie.first["stages"].join(" and ")} are of different forms, #{forms.join(" and ")}"
          end
        end
      end
    end
  end
end
