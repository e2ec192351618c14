/**
 * @file version.h
 * @brief The version of libtddp and of the gem: CMake, the gemspec and Ruby all read it here.
 */
#ifndef TDDP_VERSION_H
#define TDDP_VERSION_H

#define TDDP_VERSION "0.4.0"

#endif
