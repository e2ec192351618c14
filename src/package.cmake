# What other builds find us by: a CMake package (find_package(tddp), target tddp::tddp) and pkg-config.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tddp)
install(EXPORT tddp NAMESPACE tddp:: FILE tddpTargets.cmake DESTINATION ${package_dir})
file(WRITE ${CMAKE_BINARY_DIR}/tddpConfig.cmake
  "include(\"\${CMAKE_CURRENT_LIST_DIR}/tddpTargets.cmake\")\n")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tddpConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/tddpConfig.cmake ${CMAKE_BINARY_DIR}/tddpConfigVersion.cmake
  DESTINATION ${package_dir})

# The prefix is told relative to the file itself, so that an installation can be moved.
file(RELATIVE_PATH to_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
file(WRITE ${CMAKE_BINARY_DIR}/tddp.pc
"prefix=\${pcfiledir}/${to_prefix}
libdir=\${prefix}/${CMAKE_INSTALL_LIBDIR}
includedir=\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}

Name: tddp
Description: Process groups, collectives and gradient bucketing
Version: ${PROJECT_VERSION}
Libs: -L\${libdir} -ltddp
Cflags: -I\${includedir}
")
install(FILES ${CMAKE_BINARY_DIR}/tddp.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
