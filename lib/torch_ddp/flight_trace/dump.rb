# frozen_string_literal: true

require "json"

module TorchDDP
  module FlightTrace
    # A file that is not a flight recorder's.
    class Unreadable < StandardError; end

    # What one rank wrote; the fields are described in include/tddp/recorder.h.
    class Dump
      # One operation of one rank.
      Entry = Struct.new(:rank, :group, :fields) do
        def [](name) = fields[name]
        def p2p? = self["is_p2p"]
        def number = p2p? ? self["p2p_seq_id"] : self["collective_seq_id"]
        # "all_reduce" of "gloo:all_reduce", "send" of "gloo:send 0->1".
        def kind = self["profiling_name"].to_s.split(":", 2).last.to_s.split(" ").first.to_s
        def state = self["state"]
        def failed? = state == "failed"
        def waiting? = state == "started"
        def ended_ns = self["time_discovered_completed_ns"]

        # What all ranks must agree on. Sizes may differ between ranks where parts do.
        def signature
          uneven = %w[all_gather gather scatter all_to_all reduce_scatter].include?(kind)
          [kind, self["input_dtypes"].to_a.first || self["output_dtypes"].to_a.first, self["reduce_op"], self["root"],
            self["fingerprint"], uneven ? nil : self["input_sizes"]]
        end

        def to_s
          details = [size, self["reduce_op"], self["root"] && "root #{self["root"]}", self["tag"]&.nonzero? && "tag #{self["tag"]}",
            self["description"]].select { |each| each }
          "#{kind} #{number}#{" (#{details.join(", ")})" unless details.empty?}"
        end

        def size
          sizes, types = self["input_sizes"].to_a.empty? ? [self["output_sizes"], self["output_dtypes"]] : [self["input_sizes"], self["input_dtypes"]]
          return if sizes.to_a.empty?

          count = sizes.flatten.sum
          "#{count} #{types.to_a.first} #{(count == 1) ? "element" : "elements"}"
        end
      end

      # A group as one rank knows it.
      Group = Struct.new(:name, :rank, :size, :members, :status, :entries) do
        def collectives = entries.reject(&:p2p?)
        def messages = entries.select(&:p2p?)
        def last_completed = status.fetch("last_completed_collective", -1)
        def last_started = status.fetch("last_started_collective", -1)
      end

      # Ranks of a group at most: all of them are counted.
      RANKS = 1 << 20
      # What fields are; those that are not named here are shown or compared as they are.
      SIZES = ->(value) { value.nil? || (value.is_a?(Array) && value.flatten.all?(Integer)) }
      NUMBER = 0..(2**63)
      MAYBE_NUMBER = ->(value) { value.nil? || value.is_a?(Integer) }
      MAYBE_LIST = ->(value) { value.nil? || value.is_a?(Array) }
      MAYBE_TEXT = ->(value) { value.nil? || value.is_a?(String) }
      ENTRY = {
        "state" => String, "profiling_name" => MAYBE_TEXT, "time_discovered_completed_ns" => MAYBE_NUMBER, "input_sizes" => SIZES,
        "output_sizes" => SIZES, "input_dtypes" => MAYBE_LIST, "output_dtypes" => MAYBE_LIST, "tag" => MAYBE_NUMBER, "root" => MAYBE_NUMBER,
        "peer" => MAYBE_NUMBER
      }.freeze
      MEMBERS = ->(value) { value.nil? || (value.is_a?(Array) && value.all? { |each| each.is_a?(Hash) && each["rank"].is_a?(Integer) }) }
      CONFIG = {"name" => String, "rank" => MAYBE_NUMBER, "size" => ->(value) { value.nil? || (0..RANKS) === value }, "members" => MEMBERS}.freeze
      private_constant :RANKS, :SIZES, :NUMBER, :MAYBE_NUMBER, :MAYBE_LIST, :MAYBE_TEXT, :ENTRY, :MEMBERS, :CONFIG

      attr_reader :path, :rank, :host, :pid, :written_ns, :groups

      def initialize(path)
        @path = path
        data = JSON.parse(File.read(path))
        unless data.is_a?(Hash) && data["pg_config"].is_a?(Hash) && data["entries"].is_a?(Array)
          raise Unreadable, "#{path}: expected a flight recorder's JSON with pg_config and entries"
        end

        check("the rank", data["rank"], Integer)
        check("pg_status", data.fetch("pg_status", {}), ->(value) { value.is_a?(Hash) && value.values.all?(Hash) })
        data["entries"].each { |entry| check_entry(entry) }
        @rank, @host, @pid, @written_ns = data.values_at("rank", "host", "pid", "written_ns")
        @groups = data["pg_config"].to_h { |id, config| [check_fields("a group", config, CONFIG)["name"], read_group(id, config, data)] }
      rescue JSON::ParserError, EncodingError => e
        raise Unreadable, "#{path}: not JSON (#{e.message[0, 80]}): was it cut short, or is it something else?"
      rescue SystemCallError => e
        raise Unreadable, e.message
      end

      private

      def check_entry(entry)
        check_fields("an operation", entry, ENTRY)
        number = entry["is_p2p"] ? "p2p_seq_id" : "collective_seq_id"
        check("#{number} of an operation", entry[number], ->(value) { value.is_a?(Integer) && NUMBER.cover?(value) })
      end

      def check_fields(what, value, kinds)
        check(what, value, Hash)
        kinds.each { |name, kind| check("#{name} of #{what}", value[name], kind) }
        value
      end

      def check(what, value, kind)
        raise Unreadable, "#{@path}: #{what} cannot be #{value.inspect[0, 80]}" unless kind === value
      end

      def read_group(id, config, data)
        group = Group.new(config["name"], config["rank"] || data["rank"], config["size"], config["members"] || [],
          data.fetch("pg_status", {}).fetch(id, {}), [])
        group.entries = data["entries"].select { |entry| entry["pg_id"].to_s == id }
          .map { |entry| Entry.new(group.rank, group.name, entry) }
        group
      end
    end
  end
end
