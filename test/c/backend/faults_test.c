/*
 * The `fake` backend: faults on demand in groups of two threads, over shared memory and over Gloo.
 * What groups make of failures is test/c/group's.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../group/pair.h"

static const char *const beneath[] = {"shm", "gloo"};

/* How many of them there are: Gloo may be missing. */
static int count_beneath(void)
{
    const tddp_backend_v1 *gloo;
    return tddp_backend_find("gloo", &gloo) ? 1 : 2;
}

static pair faulty_pair(int which, const char *faults)
{
    char text[128];
    snprintf(text, sizeof text, "over=%s,%s", beneath[which], faults);
    setenv("TDDP_FAKE", text, 1);
    setenv("TDDP_SHM", "0", 1); /* of gloo: shm doesn't ask */
    return make_pair(20000);
}

/* Both ranks' barriers, rank 1's first. */
static void both(pair *self, tddp_status statuses[2], char texts[2][1024])
{
    tddp_work *works[2] = {NULL};
    for (int rank = 1; rank >= 0; rank--) {
        statuses[rank] = tddp_barrier(self->groups[rank], &works[rank]);
    }
    for (int rank = 0; rank < 2; rank++) {
        statuses[rank] = statuses[rank] ? statuses[rank] : tddp_work_wait(works[rank], NULL);
        snprintf(texts[rank], sizeof texts[rank], "%s", tddp_error_message());
        tddp_work_release(works[rank]);
    }
}

TEST(the_nth_operation_of_a_rank_fails)
{
    static const struct {
        const char *faults;
        tddp_status status;
        const char *text;
    } cases[] = {
        {"fail_at=2,rank=1", TDDP_NETWORK, "asked to fail by TDDP_FAKE"},
        {"lose_at=2,rank=1", TDDP_PEER_LOST, "asked to lose a peer by TDDP_FAKE"},
        {"drop_at=2,rank=1", TDDP_TIMEOUT, "not done after 200 ms: dropped by TDDP_FAKE"},
    };
    char texts[2][1024];
    for (int which = 0; which < count_beneath(); which++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            tddp_status statuses[2];
            pair self = faulty_pair(which, cases[i].faults);
            both(&self, statuses, texts);
            CHECK_OK(statuses[0]);
            CHECK_OK(statuses[1]);
            limit_to(self.groups[1], 200);
            both(&self, statuses, texts);
            CHECK_STATUS(statuses[1], cases[i].status);
            CHECK_CONTAINS(texts[1], cases[i].text);
            CHECK(statuses[0] != TDDP_OK); /* nobody is left waiting */
            drop_pair(&self);
        }
    }
}

TEST(messages_fail_and_are_dropped)
{
    static const struct {
        const char *faults;
        tddp_status status;
    } cases[] = {
        {"p2p_fail_at=2,rank=0", TDDP_NETWORK},
        {"p2p_lose_at=2,rank=0", TDDP_PEER_LOST},
        {"p2p_drop_at=2,rank=0", TDDP_TIMEOUT},
        {"post_fail_at=2,rank=0", TDDP_NETWORK},
    };
    for (int which = 0; which < count_beneath(); which++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            int32_t numbers[4] = {7, 8, 0, 0};
            tddp_work *works[2];
            pair self = faulty_pair(which, cases[i].faults);
            for (int k = 0; k < 2; k++) {
                CHECK_OK(tddp_recv(self.groups[1], buffer_of(&numbers[2 + k], 1, TDDP_INT32), 0, 0,
                                   &works[k]));
            }
            CHECK_OK(tddp_send(self.groups[0], buffer_of(&numbers[0], 1, TDDP_INT32), 1, 0, NULL));
            CHECK_OK(tddp_work_wait(works[0], NULL));
            limit_to(self.groups[0], 200);
            CHECK_STATUS(
                tddp_send(self.groups[0], buffer_of(&numbers[1], 1, TDDP_INT32), 1, 0, NULL),
                cases[i].status);
            CHECK_INT(numbers[2], 7);
            CHECK(tddp_work_wait(works[1], NULL) != TDDP_OK); /* it was never sent */
            CHECK_INT(numbers[3], 0);
            tddp_work_release(works[0]);
            tddp_work_release(works[1]);
            drop_pair(&self);
        }
    }
}

/* What a caller leaves after its limit goes on where it was, also while it is only delayed. */
TEST(a_delay_goes_on_after_an_interruption)
{
    for (int which = 0; which < count_beneath(); which++) {
        float x[2] = {1, 2};
        tddp_work *works[2];
        pair self = faulty_pair(which, "delay_ms=150");
        int64_t start = tddp_now_ns();
        for (int each = 0; each < 2; each++) {
            tddp_op_args args = TDDP_OP_ARGS_INIT;
            args.kind = TDDP_OP_ALL_REDUCE;
            args.output = buffer_of(&x[each], 1, TDDP_FLOAT32);
            args.inline_us = 1000;
            CHECK_OK(tddp_submit(self.groups[each], &args, &works[each]));
            CHECK(each == 1 || !tddp_work_completed(works[each]));
        }
        for (int each = 0; each < 2; each++) {
            CHECK_OK(tddp_work_wait(works[each], NULL));
            CHECK_DOUBLE((double)x[each], 3, 0);
            tddp_work_release(works[each]);
        }
        CHECK(tddp_now_ns() - start >= 150 * TDDP_NS_PER_MS);
        drop_pair(&self);
    }
}

/* Nobody waits for it: the engine, or a thread of its own, learns of the abort. */
TEST(an_abort_ends_what_was_dropped)
{
    for (int which = 0; which < count_beneath(); which++) {
        pair self = faulty_pair(which, "drop_at=1,p2p_drop_at=1");
        int32_t number = 1;
        tddp_work *works[2];
        limit_to(self.groups[0], 600000);
        CHECK_OK(tddp_barrier(self.groups[0], &works[0]));
        CHECK_OK(tddp_send(self.groups[0], buffer_of(&number, 1, TDDP_INT32), 1, 0, &works[1]));
        tddp_group_shutdown(self.groups[0], 0);
        for (int i = 0; i < 2; i++) {
            CHECK_INT(tddp_work_completed(works[i]), 1);
            CHECK_STATUS(tddp_work_status(works[i]), TDDP_GROUP_CLOSED);
            tddp_work_release(works[i]);
        }
        drop_pair(&self);
    }
}

static void *create_one(void *data)
{
    tddp_group_opts *opts = data;
    tddp_group *group;
    setenv("TDDP_FAKE", "create_fail=1,rank=1", 1);
    CHECK(tddp_group_create(opts, NULL, &group) == TDDP_OK);
    return group;
}

/* A rank that refuses has the others not wait for it: they are told. */
TEST(a_rank_that_cannot_be_created_is_not_waited_for)
{
    tddp_store *store;
    tddp_group *group;
    pthread_t thread;
    void *made;
    CHECK_OK(tddp_hash_store_create(20000, &store));
    setenv("TDDP_FAKE", "create_fail=1,rank=1", 1);
    tddp_group_opts opts[2] = {TDDP_GROUP_OPTS_INIT, TDDP_GROUP_OPTS_INIT};
    for (int each = 0; each < 2; each++) {
        opts[each].backend = "fake";
        opts[each].store = store;
        opts[each].rank = each;
        opts[each].world_size = 2;
        opts[each].timeout_ms = 60000;
    }
    CHECK_INT(pthread_create(&thread, NULL, create_one, &opts[0]), 0);
    CHECK_STATUS(tddp_group_create(&opts[1], NULL, &group), TDDP_NETWORK);
    pthread_join(thread, &made);
    CHECK(tddp_barrier(made, NULL) != TDDP_OK);
    tddp_group_release(made);
    tddp_store_release(store);
}

TEST(what_is_beneath_is_checked)
{
    static const struct {
        const char *setting;
        tddp_status status;
        const char *text;
    } cases[] = {
        {"over=fake", TDDP_INVALID_ARGUMENT, "over=fake: expected one backend"},
        {"over=cpu:fake", TDDP_INVALID_ARGUMENT, "over=cpu:fake: expected one backend"},
        {"over=nothing_there", TDDP_UNAVAILABLE, "nothing_there"},
        {"over=", TDDP_INVALID_ARGUMENT, ""},
        {"over=a_name_that_is_longer_than_any_backend_has", TDDP_INVALID_ARGUMENT, "TDDP_FAKE"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tddp_store *store;
        tddp_group *group;
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        CHECK_OK(tddp_hash_store_create(5000, &store));
        setenv("TDDP_FAKE", cases[i].setting, 1);
        opts.backend = "fake";
        opts.store = store;
        CHECK_STATUS(tddp_group_create(&opts, NULL, &group), cases[i].status);
        CHECK_CONTAINS(tddp_error_message(), cases[i].text);
        tddp_store_release(store);
    }
}
