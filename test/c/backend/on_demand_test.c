/* Connections that are made when an operation first needs them: who asks, who connects, who waits.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/on_demand.h"
#include "base/base.h"
#include "events.h"

enum { WAITERS = 6 };

/* A group's part and a backend's in one. */
typedef struct both {
    tddp_on_demand *on_demand;
    tddp_eventcount events;
    bool starts; /* as soon as it is asked */
    tddp_status outcome;
    atomic_int asked;
    atomic_int connected;
    bool waits_for_cancel;
} both;

static void ask(void *data)
{
    both *self = data;
    atomic_fetch_add(&self->asked, 1);
    if (self->starts) {
        tddp_on_demand_start(self->on_demand);
    }
}

static tddp_status connect_now(void *context, const tddp_wait *wait, tddp_cancel *given_up)
{
    both *self = context;
    atomic_fetch_add(&self->connected, 1);
    if (self->waits_for_cancel) {
        CHECK_UNTIL(tddp_cancel_triggered(wait->cancel));
        CHECK_UNTIL(tddp_cancel_triggered(given_up));
        return tddp_fail(TDDP_CANCELED, "canceled");
    }
    return self->outcome ? tddp_fail(self->outcome, "as the test wants it") : TDDP_OK;
}

static void create(both *self)
{
    CHECK_OK(tddp_on_demand_create(20000, ask, self, &self->on_demand));
    CHECK_OK(tddp_on_demand_add(self->on_demand, connect_now, self, &self->events));
}

static void destroy(both *self)
{
    tddp_on_demand_end(self->on_demand, 0);
    tddp_on_demand_free(self->on_demand);
}

/* As backends wait: only an event, or the deadline, lets it look again. */
static tddp_status await(both *self, int64_t ms)
{
    const int64_t deadline = tddp_deadline_after_ms(ms);
    for (;;) {
        const uint32_t seen = tddp_eventcount_read(&self->events);
        const tddp_status status = tddp_on_demand_check(self->on_demand, deadline);
        if (status != TDDP_CANCELED) {
            return status;
        }
        tddp_eventcount_wait(&self->events, seen, 0, deadline - tddp_now_ns());
    }
}

TEST(who_waits_asks_once_and_all_that_was_added_connects)
{
    both it = {.starts = true};
    create(&it);
    CHECK_OK(tddp_on_demand_add(it.on_demand, connect_now, &it, &it.events));
    CHECK_INT(atomic_load(&it.connected), 0);
    CHECK_OK(await(&it, 20000));
    CHECK_OK(await(&it, 0));
    CHECK_INT(atomic_load(&it.asked), 1);
    CHECK_INT(atomic_load(&it.connected), 2);
    destroy(&it);
}

/* Another rank asked first. */
TEST(who_is_asked_connects)
{
    both it = {.starts = true};
    create(&it);
    tddp_on_demand_start(it.on_demand);
    tddp_on_demand_start(it.on_demand);
    CHECK_UNTIL(await(&it, 0) == TDDP_OK);
    CHECK_INT(atomic_load(&it.connected), 1);
    destroy(&it);
}

TEST(an_error_is_that_of_all_who_wait)
{
    both it = {.starts = true, .outcome = TDDP_PEER_LOST};
    create(&it);
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(await(&it, 20000), TDDP_PEER_LOST);
        CHECK_TEXT(tddp_error_message(), "as the test wants it");
    }
    CHECK_INT(atomic_load(&it.connected), 1);
    destroy(&it);
}

TEST(ranks_that_cannot_be_asked)
{
    both it = {.starts = false};
    create(&it);
    CHECK_STATUS(await(&it, 1), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "have not connected to each other");
    tddp_on_demand_fail(it.on_demand, TDDP_NETWORK, "the store is gone");
    CHECK_STATUS(await(&it, 20000), TDDP_NETWORK);
    CHECK_TEXT(tddp_error_message(), "the store is gone");
    tddp_on_demand_start(it.on_demand);
    CHECK_INT(atomic_load(&it.connected), 0);
    CHECK_INT(atomic_load(&it.asked), 1);
    destroy(&it);
}

/* A look does not wait; connecting goes on. */
TEST(a_look_while_ranks_connect)
{
    both it = {.starts = false};
    create(&it);
    const int64_t deadline = tddp_deadline_after_ms(20000);
    CHECK_STATUS(tddp_on_demand_check(it.on_demand, deadline), TDDP_CANCELED);
    CHECK_INT(atomic_load(&it.asked), 1);
    tddp_on_demand_start(it.on_demand);
    CHECK_OK(await(&it, 20000));
    CHECK_INT(atomic_load(&it.connected), 1);
    CHECK_OK(tddp_on_demand_check(it.on_demand, 0));
    destroy(&it);
}

/* Nothing is connected, and nothing ends. */
TEST(without_use)
{
    both it = {.starts = true};
    CHECK_OK(tddp_on_demand_create(20000, ask, &it, &it.on_demand));
    tddp_on_demand_start(it.on_demand);
    destroy(&it);
    tddp_on_demand_end(NULL, 0);
    tddp_on_demand_free(NULL);
}

static void *waiter(void *data)
{
    both *self = data;
    const tddp_status status = await(self, 20000);
    CHECK(self->waits_for_cancel ? status == TDDP_GROUP_FAILED : status == TDDP_OK);
    return NULL;
}

static void wait_in_threads(both *self)
{
    pthread_t threads[WAITERS];
    for (int i = 0; i < WAITERS; i++) {
        CHECK_OK(tddp_thread_start(&threads[i], "waiter", waiter, self));
    }
    if (self->waits_for_cancel) {
        CHECK_UNTIL(atomic_load(&self->connected) == 1);
        tddp_on_demand_stop(self->on_demand);
    }
    for (int i = 0; i < WAITERS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(atomic_load(&self->connected), 1);
}

TEST(several_threads_wait)
{
    for (int i = 0; i < 50; i++) {
        both it = {.starts = true};
        create(&it);
        wait_in_threads(&it);
        CHECK_INT(atomic_load(&it.asked), 1);
        destroy(&it);
    }
}

TEST(an_abort_ends_connecting_and_waiting)
{
    for (int i = 0; i < 20; i++) {
        both it = {.starts = true, .waits_for_cancel = true};
        create(&it);
        wait_in_threads(&it);
        destroy(&it);
    }
}

TEST(the_end_waits_for_what_connects)
{
    for (int i = 0; i < 50; i++) {
        both it = {.starts = true};
        create(&it);
        tddp_on_demand_start(it.on_demand);
        tddp_on_demand_end(it.on_demand, 20000);
        CHECK_INT(atomic_load(&it.connected), 1);
        CHECK_OK(await(&it, 0));
        tddp_on_demand_free(it.on_demand);
    }
}

TEST(memory_that_is_short)
{
    tddp_status status = TDDP_OUT_OF_MEMORY;
    for (long nth = 1; status; nth++) {
        both it = {.starts = true};
        tddp_fail_allocation(nth);
        status = tddp_on_demand_create(20000, ask, &it, &it.on_demand);
        status = status ? status : tddp_on_demand_add(it.on_demand, connect_now, &it, &it.events);
        status = status ? status : await(&it, 20000);
        tddp_fail_allocation(0);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
        destroy(&it);
        CHECK(nth < 20);
    }
}
