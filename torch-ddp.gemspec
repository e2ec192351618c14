# frozen_string_literal: true

header = File.read(File.join(__dir__, "include/tddp/version.h"))
repository = "https://github.com/torch-ddp/torch-ddp"

Gem::Specification.new do |spec|
  spec.name = "torch-ddp"
  spec.version = header[/define TDDP_VERSION "([^"]+)"/, 1]
  spec.summary = "Distributed training for torch-rb"
  spec.description = "Torch::Distributed, DistributedDataParallel and torchrun for Ruby, on top of a C library " \
    "that drives Gloo and averages gradients while backward still runs."
  spec.authors = ["The torch-ddp authors"]
  spec.license = "MIT"
  spec.homepage = repository
  spec.metadata = {
    "source_code_uri" => "#{repository}/tree/v#{spec.version}",
    "changelog_uri" => "#{repository}/blob/v#{spec.version}/CHANGELOG.md",
    "documentation_uri" => "#{repository}/tree/v#{spec.version}/docs",
    "bug_tracker_uri" => "#{repository}/issues",
    "rubygems_mfa_required" => "true"
  }
  spec.required_ruby_version = ">= 3.1"

  # Sources only: what a build makes (lib/torch_ddp/native, *.so) is made again where the gem is installed.
  spec.files = Dir.chdir(__dir__) do
    Dir["CMakeLists.txt", "LICENSE.txt", "CHANGELOG.md", "README.md", "docs/*", "bin/*", "include/**/*.h",
      "src/**/*", "ext/torch_ddp/*.{rb,c,cc,h}", "lib/**/*.rb", "sig/*.rbs"]
      .select { |path| File.file?(path) && !path.start_with?("lib/torch_ddp/native/") }.sort
  end
  # Bundler builds no extension of a gem that a Gemfile names by its path, and RubyGems then says that they are not built, though
  # `rake compile` has put them into lib. A gem that is packaged has them, also from such a tree.
  built = File.exist?(File.join(__dir__, "lib/torch_ddp/ext.#{RbConfig::CONFIG["DLEXT"]}"))
  by_bundler = caller_locations.any? { |location| location.path&.end_with?("/bundler.rb") }
  spec.extensions = ["ext/torch_ddp/extconf.rb"] unless built && by_bundler
  spec.bindir = "bin"
  spec.executables = ["torchrun", "torchfrtrace", "torchtrace"]
  spec.require_paths = ["lib"]

  spec.add_dependency "torch-rb", ">= 0.12.2", "< 1"
end
