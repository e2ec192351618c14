/*
 * What -m runs: a program of a gem or a library of Ruby's, or a module of Python's.
 */
#ifndef TDDP_LAUNCH_MODULE_H
#define TDDP_LAUNCH_MODULE_H

#include <stdbool.h>

/* Whether a name is written as Python's modules in packages are: two words or more with dots. */
bool tddp_launch_module_is_python(const char *name);

/* Ruby code that takes a module's name off ARGV and runs it as the program. */
extern const char tddp_launch_module_code[];

#endif
