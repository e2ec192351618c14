# frozen_string_literal: true

# The gems of these programs: of the bundle that runs them, else of this checkout, from whatever folder they
# are started.

checkout = File.expand_path("../../Gemfile", __dir__)
ENV["BUNDLE_GEMFILE"] = checkout if ENV["BUNDLE_GEMFILE"].to_s.empty? && File.file?(checkout)
require "bundler/setup"
