/* See scenario.h. Runs on the test's thread; the scenario may start others. */
#include "faults/scenario.h"

#include <stdbool.h>
#include <stdio.h>
#include <time.h>

#include "backend/blocking.h"
#include "base/base.h"
#include "check.h"
#include "faults/leaks.h"
#include "faults/system_calls.h"

enum { MOST = 20000, IMPATIENT_MS = 100, PATIENT_MS = 5000 };

int scenario_patience_ms = PATIENT_MS;

typedef struct held {
    int descriptors;
    int threads;
} held;

static held hold(void)
{
    return (held){leaks_descriptors(), leaks_count("/proc/self/task")};
}

static void check_let_go(const held *before, const char *what, long nth)
{
    leaks_check_threads(before->threads);
    int descriptors = leaks_descriptors();
    if (descriptors != before->descriptors) {
        check_failed(__FILE__, __LINE__, "%s (%ld): %d descriptors, %d before", what, nth,
                     descriptors, before->descriptors);
    }
}

static void check_outcome(tddp_status status, const char *what, long nth)
{
    if (status && !tddp_error_message()[0]) {
        check_failed(__FILE__, __LINE__, "%s (%ld): %s without a text", what, nth,
                     tddp_status_name(status));
    }
    if (status == TDDP_INTERNAL || status == TDDP_INVALID_ARGUMENT) {
        check_failed(__FILE__, __LINE__, "%s (%ld): %s: %s", what, nth, tddp_status_name(status),
                     tddp_error_message());
    }
}

/* What is loaded once, and threads that a sanitizer starts, are there afterwards. */
static void warm_up(scenario body)
{
    tddp_blocking_idle_ms = 0; /* or each round would wait for idle threads to end */
    CHECK_OK(body());
}

void scenario_fail_system_calls(scenario body)
{
    warm_up(body);
    int failures = 0;
    for (long nth = 1; nth < MOST; nth++) {
        held before = hold();
        scenario_patience_ms = IMPATIENT_MS;
        calls_arm(CALLS_FAIL_NTH, nth);
        tddp_status status = body();
        const char *what = calls_failed();
        calls_arm(CALLS_PASS, 0);
        scenario_patience_ms = PATIENT_MS;
        check_let_go(&before, what, nth);
        if (!*what) {
            CHECK_OK(body());
            printf("%ld system calls, %d of them fatal\n", nth - 1, failures);
            CHECK(failures > 0);
            return;
        }
        check_outcome(status, what, nth);
        failures += status != TDDP_OK;
    }
    check_failed(__FILE__, __LINE__, "still failing after %d calls", MOST);
}

void scenario_fail_allocations(scenario body)
{
    warm_up(body);
    bool complete = false;
    int failures = 0;
    /* Threads allocate in no fixed order: a good run does not mean that all were tried. */
    for (long nth = 1; nth < MOST && !complete; nth++) {
        held before = hold();
        scenario_patience_ms = IMPATIENT_MS;
        tddp_fail_allocation(nth);
        tddp_status status = body();
        bool failed = tddp_fail_allocation(0);
        scenario_patience_ms = PATIENT_MS;
        check_let_go(&before, "allocation", nth);
        check_outcome(status, "allocation", nth);
        failures += status != TDDP_OK;
        /* On a slow machine the short time may be over, though no allocation failed. */
        complete = !failed && status == TDDP_OK;
    }
    CHECK(complete);
    CHECK_OK(body());
    CHECK(failures > 0);
}

void scenario_disturb(scenario body)
{
    warm_up(body);
    held before = hold();
    calls_arm(CALLS_INTERRUPTED, 0);
    tddp_status status = body();
    CHECK(calls_count() > 0);
    calls_arm(CALLS_PASS, 0);
    CHECK_OK(status);
    calls_arm(CALLS_SHORT, 0);
    status = body();
    CHECK(calls_count() > 0);
    calls_arm(CALLS_PASS, 0);
    CHECK_OK(status);
    check_let_go(&before, "disturbed", 0);
}
