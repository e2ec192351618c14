# frozen_string_literal: true

require_relative "gems"
require_relative "system_packages"

module Setup
  # Makes the documentation's pages in build/docs.
  class Docs
    FOLDER = File.join(ROOT, "build/docs")

    class << self
      # @raise [Failure]
      def make(libtorch)
        SystemPackages.ensure!(SystemPackages::DOCS, why: "makes the C reference")
        run(libtorch, "the guide, the Ruby API and the C API", "site.rb", FOLDER)
        Console.say "open #{FOLDER}/index.html"
      end

      # @raise [Failure]
      def write_signatures(libtorch)
        run(libtorch, "signatures", "signatures.rb")
      end

      private

      def run(libtorch, title, script, *arguments)
        raise Failure, "step failed: yard could not be installed" unless Gems.new(libtorch).ensure_group!(Gems::DOCS)

        Console.step("documentation: #{title}", *Gems.exec(RbConfig.ruby, "ext/setup/docs/#{script}", *arguments), env: Gems::DOCS, log: "docs",
          cure: "mend the comment or the link that the log names")
      end
    end
  end
end
