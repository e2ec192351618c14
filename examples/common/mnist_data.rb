# frozen_string_literal: true

require "digest"
require "fileutils"

# The MNIST images and labels: fetching them once, checking them, and reading them as tensors.
#
# The four files lie in one folder, uncompressed, in the IDX format: a magic number, the counts as 32-bit
# numbers with the highest byte first, then one byte for each pixel or label. As a program it fetches them:
#
#   ruby examples/common/mnist_data.rb [FOLDER]
module MNISTData
  class Error < StandardError; end

  # A source that could not be reached; another one may be.
  class Unreachable < Error; end

  # Name, magic number, what is counted (images with rows and columns), SHA-256 of the whole file.
  DataFile = Struct.new(:name, :magic, :dimensions, :sha256) do
    def header_size
      4 + 4 * dimensions.size
    end

    def size
      header_size + dimensions.inject(:*)
    end
  end

  FILES = {
    train_images: DataFile.new("train-images-idx3-ubyte", 2051, [60_000, 28, 28],
      "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    train_labels: DataFile.new("train-labels-idx1-ubyte", 2049, [60_000],
      "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    test_images: DataFile.new("t10k-images-idx3-ubyte", 2051, [10_000, 28, 28],
      "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    test_labels: DataFile.new("t10k-labels-idx1-ubyte", 2049, [10_000],
      "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2")
  }.freeze

  # Mean and standard deviation of the training images' pixels, of 1.
  MEAN = 0.1307
  STD = 0.3081

  module_function

  # Brings what is missing into the folder; whole files stay as they are. Several processes may call it at
  # once: one fetches, the others wait.
  #
  # @param dir [String]
  # @yieldparam line [String] what is being done
  # @raise [Error] for a file that is there but not right, and when no source can be reached
  def fetch(dir, files: FILES, sources: nil, &say)
    return dir if complete?(dir, files)

    require_relative "mnist_download"
    FileUtils.mkdir_p(dir)
    File.open(File.join(dir, ".lock"), File::RDWR | File::CREAT) do |lock|
      lock.flock(File::LOCK_EX)
      MNISTDownload.new(dir, files, sources, say || proc {}).run unless complete?(dir, files)
    end
    dir
  end

  # Reads the four files as tensors.
  #
  # @param dir [String]
  # @return [Hash{Symbol => Torch::Tensor}] :train_images and :test_images (float32, N x 1 x 28 x 28, with mean 0
  #   and variance 1 over the training set), :train_labels and :test_labels (int64)
  # @raise [Error] naming the file, what was expected and found, and the cure
  def load(dir, files: FILES)
    require "torch"
    files.to_h do |name, file|
      body = read(dir, file)
      tensor = Torch::ByteTensor.new(Torch::ByteStorage.from_buffer(body))
      # Both calls copy, so nothing keeps pointing into the string.
      [name, name.end_with?("images") ? images(tensor, file.dimensions) : tensor.to(dtype: :int64)]
    end
  end

  # @return [String] the pixels or labels of a file that is as it should be
  def read(dir, file)
    path = File.join(dir, file.name)
    unless File.file?(path)
      raise Error, "#{path} is missing: `rake mnist` fetches it, and so does `ruby examples/common/mnist_data.rb #{dir}`"
    end
    bytes = File.binread(path)
    check(path, bytes, file)
    bytes.byteslice(file.header_size, bytes.bytesize)
  end

  # @raise [Error] unless the bytes are the file's
  def check(path, bytes, file)
    found = bytes.byteslice(0, file.header_size).unpack("N*")
    complain(path, "magic number #{file.magic}", found[0] || "an empty file") unless found[0] == file.magic
    complain(path, "#{file.size} bytes", "#{bytes.bytesize} bytes") unless bytes.bytesize == file.size
    complain(path, "counts #{file.dimensions}", found.drop(1)) unless found.drop(1) == file.dimensions
    sum = Digest::SHA256.hexdigest(bytes)
    complain(path, "SHA-256 #{file.sha256}", sum) unless sum == file.sha256
  end

  # @return [Boolean] whether all files are there with their right sizes; {load} looks into them
  def complete?(dir, files = FILES)
    files.each_value.all? { |file| File.size?(File.join(dir, file.name)) == file.size }
  end

  def images(tensor, dimensions)
    count, rows, columns = dimensions
    tensor.to(dtype: :float32).div!(255).sub!(MEAN).div!(STD).reshape(count, 1, rows, columns)
  end

  def complain(path, expected, found)
    raise Error, "#{path} is not what it should be: expected #{expected}, found #{found}. Delete it; `rake mnist` or " \
      "`ruby examples/common/mnist_data.rb #{File.dirname(path)}` fetches it again"
  end

  private_class_method :read, :images, :complain
end

if $0 == __FILE__
  begin
    MNISTData.fetch(ARGV.fetch(0, File.expand_path("../mnist/data", __dir__))) { |line| puts line }
  rescue MNISTData::Error => e
    abort e.message
  end
end
