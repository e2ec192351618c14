/*
 * --print-completion. Filled from the table of flags.
 */
#include "launch/command/options.h"
