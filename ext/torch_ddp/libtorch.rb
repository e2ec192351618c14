# frozen_string_literal: true

require "digest"

module Setup
  # The libtorch of this machine, and the torch-rb and rice versions that go with it.
  #
  # Needs no gem: the Gemfile, the Rakefile and extconf.rb all ask here.
  class Libtorch
    # torch-rb demands libtorch's minor version, and was written against the rice of its day; a newer rice
    # often no longer compiles it. Add a line here to follow a new libtorch.
    #          libtorch  torch-rb  rice
    VERSIONS = [
      ["1.13", "0.12.2", "4.0.4"],
      ["2.0", "0.13.2", "4.1.0"],
      ["2.1", "0.14.1", "4.1.0"],
      ["2.2", "0.15.0", "4.1.0"],
      ["2.3", "0.16.0", "4.1.0"],
      ["2.4", "0.17.1", "4.1.0"],
      ["2.5", "0.18.0", "4.3.3"],
      ["2.6", "0.19.1", "4.5.0"],
      ["2.7", "0.20.0", "4.5.0"],
      ["2.8", "0.21.0", "4.5.0"],
      ["2.9", "0.22.2", "4.7.0"],
      ["2.10", "0.23.1", "4.8.0"],
      ["2.12", "0.24.0", "4.8.0"],
      ["2.13", "0.25.0", "4.12.0"],
      ["2.14", "0.26.0", "4.12.0"],
      ["2.15", "0.27.0", "4.12.0"]
    ].map { |row| row.map(&:freeze).freeze }.freeze

    class NotFound < StandardError; end

    VERSION_HEADERS = %w[
      include/torch/csrc/api/include/torch/version.h
      include/torch/headeronly/version.h
    ].freeze

    class << self
      # @param prefix [String, nil] where to look; without it LIBTORCH of `env`, else /usr
      # @return [Libtorch]
      # @raise [NotFound] with what to do about it
      def find(prefix = nil, env: ENV)
        named = prefix || env["LIBTORCH"]
        named = nil if named && named.empty?
        new(File.expand_path(named || "/usr"), named: !named.nil?)
      end

      # @return [Libtorch, nil] as {find}, nil where there is none
      def find_or_nil(prefix = nil, env: ENV)
        find(prefix, env: env)
      rescue NotFound
        nil
      end

      # The table's answer for one libtorch.
      #
      # @param version [String] libtorch's version, "1.13.1" or "1.13"
      # @return [Hash] :torch_rb, :rice, and :warning where the table does not know this version
      # @raise [NotFound] for a libtorch older than all of the table
      def versions_for(version)
        wanted = Gem::Version.new(version.split(".").first(2).join("."))
        known, torch_rb, rice = VERSIONS.reverse_each.find { |row| Gem::Version.new(row[0]) <= wanted }
        unless known
          raise NotFound, "libtorch #{version} is too old: #{VERSIONS[0][0]} is the oldest that torch-rb and this gem support"
        end
        answer = {torch_rb: torch_rb, rice: rice}
        unless Gem::Version.new(known) == wanted
          answer[:warning] = "libtorch #{version} is not in the table of #{File.basename(__FILE__)}; trying torch-rb " \
            "#{torch_rb}, which is made for libtorch #{known}"
        end
        answer
      end
    end

    attr_reader :prefix, :version

    def initialize(prefix, named: true)
      @prefix = prefix
      header = VERSION_HEADERS.map { |path| File.join(prefix, path) }.find { |path| version_in(path) }
      unless header
        raise NotFound, "libtorch was not found: #{File.join(prefix, VERSION_HEADERS[0])} is missing or tells no version. " +
          (named ? "LIBTORCH (or --with-torch-dir) must name the folder that holds libtorch's include and lib." :
            "Install it (Debian: apt-get install libtorch-dev) or name its folder with LIBTORCH=/path.")
      end
      @version = version_in(header)
      unless lib_dir
        raise NotFound, "libtorch's headers are under #{prefix}, but its library libtorch_cpu.so is not: " \
          "looked in #{lib_dirs.join(", ")}"
      end
      return unless old_abi?

      raise NotFound, "libtorch #{@version} under #{prefix} has the C++ library's old ABI (_GLIBCXX_USE_CXX11_ABI=0), which torch-rb does not " \
        "go with: take the archive whose name begins with libtorch-cxx11-abi"
    end

    # @return [Array<String>] where libtorch's headers are, beyond the compiler's own folders
    def include_dirs
      base = File.join(@prefix, "include")
      dirs = [base, File.join(base, "torch/csrc/api/include")]
      # As a system folder again, /usr/include would stand before the C++ library's and break its headers.
      (base == "/usr/include") ? dirs.drop(1) : dirs
    end

    # @return [String, nil]
    def lib_dir
      lib_dirs.find { |dir| !Dir.glob("#{dir}/libtorch_cpu.{so,dylib}").empty? }
    end

    # @return [Integer] the C++ standard that its headers need
    def cxx_standard
      (Gem::Version.new(@version) < Gem::Version.new("2.13")) ? 17 : 20
    end

    def torch_rb
      versions[:torch_rb]
    end

    def rice
      versions[:rice]
    end

    # @return [String, nil] what to tell the user about an unknown libtorch
    def warning
      versions[:warning]
    end

    # Names what a compiled torch-rb depends on; part of the cache's folder names.
    def key
      parts = ["libtorch", @version]
      parts << Digest::SHA256.hexdigest(@prefix)[0, 8] unless @prefix == "/usr"
      "#{parts.join("-")}-torch-rb-#{torch_rb}-rice-#{rice}"
    end

    # The commands that install the gems that go with this libtorch.
    def install_commands
      ["gem install rice -v #{rice}", "gem install torch-rb -v #{torch_rb} -- --with-torch-dir=#{@prefix}"]
    end

    private

    def versions
      @versions ||= self.class.versions_for(@version)
    end

    def lib_dirs
      multiarch = Dir.glob(File.join(@prefix, "lib", "*-linux-gnu*"))
      [File.join(@prefix, "lib"), *multiarch, File.join(@prefix, "lib64")]
    end

    # An archive says how it was compiled.
    def old_abi?
      config = File.join(@prefix, "share/cmake/Torch/TorchConfig.cmake")
      File.file?(config) && File.read(config).include?("_GLIBCXX_USE_CXX11_ABI=0")
    end

    def version_in(header)
      return unless File.file?(header)

      text = File.read(header)
      numbers = %w[MAJOR MINOR PATCH].map { |part| text[/^\s*#\s*define\s+TORCH_VERSION_#{part}\s+(\d+)/, 1] }
      numbers.join(".") if numbers.all?
    end
  end
end
