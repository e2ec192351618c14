# frozen_string_literal: true

require_relative "gems"
require_relative "system_packages"

module Setup
  # Makes the documentation's pages in build/docs.
  class Docs
    FOLDER = File.join(ROOT, "build/docs")

    # @raise [Failure]
    def self.make(libtorch)
      SystemPackages.ensure!(SystemPackages::DOCS, why: "makes the C reference")
      raise Failure, "step failed: yard could not be installed" unless Gems.new(libtorch).ensure_group!(Gems::DOCS)

      Console.step("documentation: the guide, the Ruby API and the C API", *Gems.exec(RbConfig.ruby, "ext/setup/docs/site.rb", FOLDER),
        env: Gems::DOCS, log: "docs", cure: "mend the comment or the link that the log names")
      Console.say "open #{FOLDER}/index.html"
    end
  end
end
