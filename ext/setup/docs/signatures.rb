# frozen_string_literal: true

require "set" # YARD on Ruby 3.1
require "yard"
require_relative "overloads"

# RBS signatures of the public Ruby API, made of the types in its comments. Types of torch-rb are in sig/torch.rbs, by hand.
class Signatures
  ROOT = File.expand_path("../../..", __dir__)
  FILE = File.join(ROOT, "sig/torch-ddp.rbs")
  NOTE = <<~TEXT
    # Made of the comments in lib by `rake sig`: change those.

    # What operations take: a group, or what stands for none (GroupMember::NON_GROUP_MEMBER) and for the default group.
    type Torch::Distributed::group = ::Torch::Distributed::ProcessGroup | ::Torch::Distributed::GroupMember::Placeholder

    class Torch::Distributed::GroupMember::Placeholder
    end
  TEXT

  GENERIC = {"Array" => "[untyped]", "Hash" => "[untyped, untyped]", "Enumerable" => "[untyped]", "Enumerator" => "[untyped, untyped]",
             "Struct" => "[untyped]", "Range" => "[untyped]", "Set" => "[untyped]"}.freeze
  PLAIN = {"Boolean" => "bool", "Object" => "untyped", "void" => "void", "self" => "self", "nil" => "nil", "true" => "true", "false" => "false"}.freeze
  CORE = %w[String Symbol Integer Float Numeric Proc Class Module IO Exception StandardError Random Time Regexp Binding Thread Logger Method].freeze

  # @return [Array<String>] types in comments that are neither Ruby's, nor torch-rb's, nor this repository's
  attr_reader :unknown

  def initialize
    @unknown = []
    @stubs = File.read(File.join(ROOT, "sig/torch.rbs")).scan(/^\s*(?:class|module) (\S+)/).flatten
  end

  # @return [String]
  def text
    Dir.chdir(ROOT) { YARD.parse(["lib/torch/**/*.rb", "lib/torch_dl.rb"], [], YARD::Logger::ERROR) } if YARD::Registry.all(:method).empty?
    spaces = YARD::Registry.all(:module, :class).reject { |space| hidden?(space) }.sort_by(&:path)
    NOTE + spaces.map { |space| namespace(space) }.join
  end

  # @return [Boolean] whether it is no part of the public API
  def hidden?(object)
    return false if object.root?

    object.visibility != :public || object.tag(:api)&.text == "private" || hidden?(object.namespace)
  end

  private

  def namespace(space)
    lines = mixins(space) + constants(space) + methods(space)
    stubbed = @stubs.include?(space.path)
    return "" if stubbed && lines.empty?

    head = "#{space.type} #{space.path}"
    head += superclass(space) if space.type == :class && !stubbed
    "\n#{head}\n#{lines.map { |line| "  #{line}\n" }.join}end\n"
  end

  def superclass(space)
    parent = space.superclass
    parent = parent.superclass while parent.is_a?(YARD::CodeObjects::ClassObject) && hidden?(parent)
    return "" if parent.nil? || %w[Object BasicObject].include?(parent.path)

    " < #{constant(parent.path, space)}"
  end

  def mixins(space)
    {"include" => space.instance_mixins, "extend" => space.class_mixins}.flat_map do |word, mods|
      mods.filter_map do |mod|
        known = !mod.is_a?(YARD::CodeObjects::Proxy) && !hidden?(mod)
        "#{word} #{known ? "::#{mod.path}" : mod.path + GENERIC[mod.path].to_s}" if known || GENERIC.key?(mod.path)
      end
    end
  end

  def constants(space)
    space.constants(included: false, inherited: false).reject { |each| hidden?(each) }.map do |each|
      aliased = (each.value =~ /\A[A-Z][\w:]*\z/) && YARD::Registry.resolve(space, each.value)
      next "#{each.name}: #{literal(each.value)}" unless aliased.is_a?(YARD::CodeObjects::NamespaceObject)

      "#{aliased.type} #{each.name} = ::#{aliased.path}"
    end
  end

  def literal(value)
    case value
    when /\A["']/, /\A<</ then "String"
    when /\A:/ then "Symbol"
    when /\A[\d_ *+-]+\z/ then "Integer"
    when /\A(\[|%[wi])/ then "Array[untyped]"
    when /\A\{/ then "Hash[untyped, untyped]"
    else "untyped"
    end
  end

  def methods(space)
    space.meths(included: false, inherited: false).reject { |each| hidden?(each) || each.name.to_s.start_with?("_") }.sort_by { |each| [each.scope, each.name] }
      .map { |method| "def #{"self." if method.scope == :class}#{method.name}: #{forms(method).uniq.join(" | ")}" }
  end

  # Overloads, or the method itself; of an alias those of what it stands for.
  def forms(method)
    method = original(method)
    overloads = method.tags(:overload).reject { |each| each.parameters.nil? }
    return [form(method, method)] if overloads.empty?

    overloads.map { |overload| form(method, overload) }
  end

  def original(method)
    name = method.namespace.aliases[method] or return method
    other = method.namespace.child(name: name, scope: method.scope)
    other ? original(other) : method
  end

  def form(method, source)
    types = (method.tags(:param) + source.tags(:param)).to_h { |tag| [tag.name.to_s.sub(/\A[*&]+/, ""), tag.types] }
    parameters = source.parameters.empty? ? method_parameters(method) : source.parameters
    list = parameters.filter_map { |name, default| parameter(name.to_s, default, types, method) }
    "(#{list.join(", ")})#{block(method, source)} -> #{result(method, source)}"
  end

  # Of a writer YARD knows no parameters.
  def method_parameters(method)
    return method.parameters unless method.parameters.empty? && method.name.end_with?("=") && !method.name.end_with?("==")

    [["value", nil]]
  end

  def parameter(name, default, types, method)
    bare = name.delete_suffix(":").sub(/\A[*&]+/, "")
    type = union(types[bare], method).gsub("::Torch::Distributed::ProcessGroup", "::Torch::Distributed::group")
    type = type.include?(" | ") ? "(#{type})?" : "#{type}?" if default == "nil" && !type.match?(/\?\z|untyped|nil/)
    optional = default ? "?" : ""
    case name
    when "..." then "*untyped, **untyped"
    when /\A&/, "*", "**" then (name.size > 2 || name.start_with?("&")) ? nil : "#{name}untyped"
    when /\A\*\*/ then "**untyped"
    when /\A\*/ then "*#{(types[bare]&.first =~ /\AArray<(.*)>\z/) ? union([$1], method) : "untyped"}"
    when /:\z/ then "#{optional}#{bare}: #{type}"
    else "#{optional}#{type}#{" #{bare}" unless reserved?(bare)}"
    end
  end

  def reserved?(name)
    !name.match?(/\A[a-z_]\w*\z/) || %w[end def class module type out in untyped void self nil true false bool].include?(name)
  end

  def block(method, source)
    tags = %i[yield yieldparam yieldreturn].flat_map { |name| source.tags(name) + method.tags(name) }
    named = (source.parameters + method.parameters).any? { |name, _| name.to_s.start_with?("&") || name.to_s == "..." }
    yields = method.source.to_s.match?(/\byield\b|\bblock_given\?/)
    (tags.any? || named || yields) ? " ?{ (*untyped) -> untyped }" : ""
  end

  def result(method, source)
    return "void" if method.name == :initialize
    return "untyped" if method.name.match?(/\w=\z/) # what it returns is the caller's value
    return "bool" if method.name.end_with?("?") && !(source.tag(:return) || method.tag(:return))

    type = union((source.tag(:return) || method.tag(:return))&.types, method)
    (type.match?(/\A[^(\[]* \| /) || type.match?(/\][^)]* \| /)) ? "(#{type})" : type
  end

  # --- types

  # @param types [Array<String>, nil] as YARD has them
  def union(types, method)
    return "untyped" if types.nil? || types.empty?

    found = YARD::Tags::TypesExplainer::Parser.parse(types.join(", ")).map { |type| convert(type, method) }.uniq
    return "untyped" if found.include?("untyped")
    return "void" if found.include?("void")

    rest = found - ["nil"]
    text = (%w[true false] - rest).empty? ? ["bool", *(rest - %w[true false])].join(" | ") : rest.join(" | ")
    return "nil" if rest.empty?
    return text if rest.size == found.size

    (rest.size > 1) ? "(#{text})?" : "#{text}?"
  rescue SyntaxError
    @unknown << "#{method.path}: #{types.join(", ")}"
    "untyped"
  end

  def convert(type, method)
    case type
    when YARD::Tags::TypesExplainer::HashCollectionType
      pairs = type.key_value_pairs
      "Hash[#{inner(pairs.flat_map(&:first), method)}, #{inner(pairs.flat_map(&:last), method)}]"
    when YARD::Tags::TypesExplainer::FixedCollectionType then "[#{type.types.map { |each| convert(each, method) }.join(", ")}]"
    when YARD::Tags::TypesExplainer::CollectionType
      (type.name == "Array") ? "Array[#{inner(type.types, method)}]" : constant(type.name, method)
    when YARD::Tags::TypesExplainer::LiteralType, YARD::Tags::TypesExplainer::DuckType then literal_type(type.name)
    else constant(type.name, method)
    end
  end

  def literal_type(name)
    name.match?(/\A:[a-z_]\w*\z|\A"[^"]*"\z|\A\d+\z/) ? name : PLAIN.fetch(name, "untyped")
  end

  def inner(types, method)
    found = types.map { |type| convert(type, method) }.uniq
    return "untyped" if found.include?("untyped") || found.empty?

    rest = found - ["nil"]
    (rest.size == found.size) ? found.join(" | ") : "(#{rest.join(" | ")})?"
  end

  def constant(name, from)
    return literal_type(name) if name.match?(/\A[:"#\d]/)
    return PLAIN[name] if PLAIN.key?(name)
    return name + GENERIC[name] if GENERIC.key?(name)

    name = name.delete_prefix("::")
    scopes(from).each do |scope|
      path = [scope, name].reject(&:empty?).join("::")
      return "::#{path}" if @stubs.include?(path)

      found = YARD::Registry.at(path)
      return hidden?(found) ? "untyped" : "::#{path}" if found.is_a?(YARD::CodeObjects::NamespaceObject)
    end
    return name if CORE.include?(name)

    @unknown << "#{from.path}: #{name}"
    "untyped"
  end

  # Where Ruby looks for a name: "Torch::Distributed::Store", "Torch::Distributed", "Torch", "".
  def scopes(from)
    parts = (from.is_a?(YARD::CodeObjects::NamespaceObject) ? from : from.namespace).path.split("::")
    parts.size.downto(0).map { |size| parts.first(size).join("::") }
  end
end

if $PROGRAM_NAME == __FILE__
  signatures = Signatures.new
  File.write(Signatures::FILE, signatures.text)
  warn signatures.unknown.uniq
end
