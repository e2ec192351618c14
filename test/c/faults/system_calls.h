/*
 * System calls that fail on demand. A test linked with these stand-ins (see the CMakeLists beside
 * it) counts the calls that libtddp's rooms make, on all threads, and lets the nth one fail.
 */
#ifndef TDDP_TEST_SYSTEM_CALLS_H
#define TDDP_TEST_SYSTEM_CALLS_H

typedef enum calls_mode {
    CALLS_PASS,        /* nothing is touched */
    CALLS_FAIL_NTH,    /* the nth call fails, as it does when something has run out or broken */
    CALLS_INTERRUPTED, /* half of the calls that may return EINTR do */
    CALLS_SHORT,       /* every transfer moves one byte */
} calls_mode;

/* Starts counting anew. */
void calls_arm(calls_mode mode, long nth);

/* Calls counted since then. */
long calls_count(void);

/* The name of the call that failed, "" if none has. */
const char *calls_failed(void);

#endif
