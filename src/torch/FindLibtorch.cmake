# Finds libtorch under TDDP_LIBTORCH: Debian's packages under /usr, or an unpacked archive.
#
# Sets TDDP_LIBTORCH_INCLUDE_DIRS, TDDP_LIBTORCH_LIBRARIES, TDDP_LIBTORCH_VERSION and
# TDDP_LIBTORCH_CXX_STANDARD. libtorch's own CMake package is not used: it asks for every optional
# library that libtorch was built with. TDDP_LIBTORCH_CUDA: whether the shim is built with CUDA; then
# the libraries and include directories contain CUDA's.
find_path(TDDP_TORCH_INCLUDE_DIR torch/csrc/api/include/torch/torch.h
  HINTS ${TDDP_LIBTORCH} PATH_SUFFIXES include NO_DEFAULT_PATH)
find_path(TDDP_TORCH_INCLUDE_DIR torch/csrc/api/include/torch/torch.h)
foreach(library torch torch_cpu c10)
  find_library(TDDP_LIB_${library} ${library}
    HINTS ${TDDP_LIBTORCH} PATH_SUFFIXES lib lib/${CMAKE_LIBRARY_ARCHITECTURE})
  if(NOT TDDP_LIB_${library})
    message(FATAL_ERROR "lib${library} was not found under ${TDDP_LIBTORCH}: "
      "install libtorch-dev or set TDDP_LIBTORCH to where libtorch is")
  endif()
  list(APPEND TDDP_LIBTORCH_LIBRARIES ${TDDP_LIB_${library}})
endforeach()
if(NOT TDDP_TORCH_INCLUDE_DIR)
  message(FATAL_ERROR "libtorch's headers were not found under ${TDDP_LIBTORCH}: "
    "install libtorch-dev or set TDDP_LIBTORCH to where libtorch is")
endif()
set(TDDP_LIBTORCH_INCLUDE_DIRS
  ${TDDP_TORCH_INCLUDE_DIR} ${TDDP_TORCH_INCLUDE_DIR}/torch/csrc/api/include)

# Newer libtorch keeps the numbers in the second of these, which the first includes.
set(version_lines)
foreach(header torch/csrc/api/include/torch/version.h torch/headeronly/version.h)
  if(EXISTS ${TDDP_TORCH_INCLUDE_DIR}/${header})
    file(STRINGS ${TDDP_TORCH_INCLUDE_DIR}/${header} lines
      REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    list(APPEND version_lines ${lines})
  endif()
endforeach()
set(TDDP_LIBTORCH_VERSION)
foreach(part MAJOR MINOR PATCH)
  if(NOT version_lines MATCHES "TORCH_VERSION_${part} ([0-9]+)")
    message(FATAL_ERROR "libtorch's version was not found in torch/version.h or "
      "torch/headeronly/version.h under ${TDDP_TORCH_INCLUDE_DIR}: is libtorch complete there?")
  endif()
  list(APPEND TDDP_LIBTORCH_VERSION ${CMAKE_MATCH_1})
endforeach()
list(JOIN TDDP_LIBTORCH_VERSION "." TDDP_LIBTORCH_VERSION)
if(TDDP_LIBTORCH_VERSION VERSION_LESS 2.13)
  set(TDDP_LIBTORCH_CXX_STANDARD 17)
else()
  set(TDDP_LIBTORCH_CXX_STANDARD 20)
endif()

# An archive says how it was compiled.
set(torch_config ${TDDP_TORCH_INCLUDE_DIR}/../share/cmake/Torch/TorchConfig.cmake)
if(EXISTS ${torch_config})
  file(STRINGS ${torch_config} old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(old_abi)
    message(FATAL_ERROR "libtorch under ${TDDP_LIBTORCH} has the C++ library's old ABI (_GLIBCXX_USE_CXX11_ABI=0): "
      "take the archive whose name begins with libtorch-cxx11-abi")
  endif()
endif()

# A libtorch with CUDA includes these two libraries. CUDA's headers are an installed toolkit's, or those of the wheels beside
# libtorch's, where each of CUDA's libraries has a folder; not every wheel with the first header has what it includes.
get_filename_component(libtorch_dir ${TDDP_LIB_torch} DIRECTORY)
set(TDDP_LIBTORCH_CUDA OFF)
set(cuda_lacks)
if(NOT TDDP_CUDA STREQUAL "OFF")
  foreach(library torch_cuda c10_cuda)
    find_library(TDDP_LIB_${library} ${library} PATHS ${libtorch_dir} NO_DEFAULT_PATH)
    if(NOT TDDP_LIB_${library})
      list(APPEND cuda_lacks "lib${library}")
    endif()
  endforeach()
  file(GLOB beside_wheel ${TDDP_TORCH_INCLUDE_DIR}/../../nvidia/*/include)
  set(TDDP_CUDA_INCLUDE_DIR "" CACHE PATH "The folder of CUDA's headers")
  foreach(folder ${TDDP_TORCH_INCLUDE_DIR} ${beside_wheel} $ENV{CUDA_HOME}/include /usr/local/cuda/include /usr/include)
    if(NOT TDDP_CUDA_INCLUDE_DIR AND EXISTS ${folder}/cuda_runtime_api.h AND EXISTS ${folder}/crt/host_defines.h)
      set(TDDP_CUDA_INCLUDE_DIR ${folder})
    endif()
  endforeach()
  if(NOT TDDP_CUDA_INCLUDE_DIR)
    list(APPEND cuda_lacks "cuda_runtime_api.h")
  endif()
  list(JOIN cuda_lacks ", " cuda_lacks)
  if(NOT cuda_lacks)
    set(TDDP_LIBTORCH_CUDA ON)
    list(APPEND TDDP_LIBTORCH_INCLUDE_DIRS ${TDDP_CUDA_INCLUDE_DIR} ${beside_wheel})
    list(APPEND TDDP_LIBTORCH_LIBRARIES ${TDDP_LIB_torch_cuda} ${TDDP_LIB_c10_cuda})
  elseif(TDDP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TDDP_CUDA is ON, but this was not found: ${cuda_lacks}. Name a libtorch for CUDA with "
      "TDDP_LIBTORCH and the folder of CUDA's headers with TDDP_CUDA_INCLUDE_DIR")
  elseif(TDDP_LIB_torch_cuda)
    message(WARNING "libtorch is one for CUDA, but the shim is built without its CUDA part, for want of ${cuda_lacks}: "
      "name the folder of CUDA's headers with TDDP_CUDA_INCLUDE_DIR")
  endif()
endif()
message(STATUS "libtorch ${TDDP_LIBTORCH_VERSION} (${TDDP_LIB_torch}), the shim's CUDA part: ${TDDP_LIBTORCH_CUDA}")
