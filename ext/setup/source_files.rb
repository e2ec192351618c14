# frozen_string_literal: true

require "open3"
require_relative "console"

module Setup
  # The files of this checkout that git tracks or would track: no build products.
  module SourceFiles
    module_function

    # @return [Array<String>] paths below the checkout
    # @raise [Failure] outside a git checkout
    def all
      out, status = Open3.capture2("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
      raise Failure, "step failed: git does not list the sources of #{ROOT}\n  likely cure: run it in a git checkout" unless status.success?

      out.split("\0").select { |path| File.file?(File.join(ROOT, path)) }
    end

    # @param patterns [Array<String>] as for File.fnmatch, with ** and {a,b}
    def matching(patterns)
      all.select { |path| patterns.any? { |pattern| File.fnmatch?(pattern, path, File::FNM_PATHNAME | File::FNM_EXTGLOB) } }.sort
    end
  end
end
