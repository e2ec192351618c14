# frozen_string_literal: true

require "fileutils"

module Setup
  # A folder of the shape of the archives that pytorch.org ships, of the files of the libtorch that is here: include, lib and share/cmake
  # without a folder for the architecture, and without Gloo's headers.
  module LibtorchArchive
    HEADERS = %w[ATen c10 caffe2 torch].freeze

    module_function

    # @param folder [String] to be made
    # @param libtorch [Libtorch] whose files are linked to
    # @return [String] folder
    def make(folder, libtorch)
      include_dir = File.join(libtorch.prefix, "include")
      link(HEADERS.map { |name| File.join(include_dir, name) }.select { |path| File.directory?(path) }, File.join(folder, "include"))
      link(Dir.glob("#{libtorch.lib_dir}/lib{torch*,c10*,shm}.so"), File.join(folder, "lib"))
      config = File.join(folder, "share/cmake/Torch/TorchConfig.cmake")
      FileUtils.mkdir_p(File.dirname(config))
      File.write(config, "set(TORCH_CXX_FLAGS \"-D_GLIBCXX_USE_CXX11_ABI=1\")\n")
      File.write(File.join(folder, "build-version"), "#{libtorch.version}+cpu\n")
      folder
    end

    def link(paths, into)
      FileUtils.mkdir_p(into)
      FileUtils.ln_s(paths, into)
    end

    private_class_method :link
  end
end
