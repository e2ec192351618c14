# Finds libtorch under TDDP_LIBTORCH: Debian's packages under /usr, or an unpacked archive.
#
# Sets TDDP_LIBTORCH_INCLUDE_DIRS, TDDP_LIBTORCH_LIBRARIES, TDDP_LIBTORCH_VERSION and
# TDDP_LIBTORCH_CXX_STANDARD. libtorch's own CMake package is not used: it asks for every optional
# library that libtorch was built with.
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
      "torch/headeronly/version.h under ${TDDP_TORCH_INCLUDE_DIR}: is libtorch there whole?")
  endif()
  list(APPEND TDDP_LIBTORCH_VERSION ${CMAKE_MATCH_1})
endforeach()
list(JOIN TDDP_LIBTORCH_VERSION "." TDDP_LIBTORCH_VERSION)
if(TDDP_LIBTORCH_VERSION VERSION_LESS 2.13)
  set(TDDP_LIBTORCH_CXX_STANDARD 17)
else()
  set(TDDP_LIBTORCH_CXX_STANDARD 20)
endif()
message(STATUS "libtorch ${TDDP_LIBTORCH_VERSION} (${TDDP_LIB_torch})")
