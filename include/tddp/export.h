/**
 * @file export.h
 * @brief Visibility and compiler annotations of every public declaration.
 */
#ifndef TDDP_EXPORT_H
#define TDDP_EXPORT_H

/** libtddp is built with -fvisibility=hidden: what carries TDDP_API is the library's surface. */
#define TDDP_API __attribute__((visibility("default")))

/** The result must be looked at: a status that is dropped is a fault that is lost. */
#define TDDP_NODISCARD __attribute__((warn_unused_result))

/** The compiler checks the arguments against the format, as of printf. */
#define TDDP_PRINTF(format_index, first_argument) \
    __attribute__((format(printf, format_index, first_argument)))

#endif
