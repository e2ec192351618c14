/**
 * @file version.h
 * @brief The version of libtddp, and of all that is built with it: they read it here.
 */
#ifndef TDDP_VERSION_H
#define TDDP_VERSION_H

#include <tddp/export.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The version of these headers. Below 1.0 a new minor version may change the ABI. */
#define TDDP_VERSION "0.4.0"
/** Its first number. */
#define TDDP_VERSION_MAJOR 0
/** Its second number. */
#define TDDP_VERSION_MINOR 4
/** Its third number. */
#define TDDP_VERSION_PATCH 0

/** The version of the library that runs, "0.4.0". Static. */
TDDP_API const char *tddp_version(void);

#ifdef __cplusplus
}
#endif

#endif
