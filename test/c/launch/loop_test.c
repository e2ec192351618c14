#include <string.h>
#include <unistd.h>

#include "check.h"
#include "launch/loop/loop.h"

/* A pipe that a source of a test watches, and what was called. */
typedef struct channel {
    const char *name;
    int ends[2];
    tddp_launch_source source;
    void (*act)(void); /* in the callback, before its end; or NULL */
    tddp_status status;
} channel;

static tddp_launch_loop loop;
static char called[64];
static channel one = {.name = "1"};
static channel two = {.name = "2"};
static channel three = {.name = "3"};

static tddp_status note(void *data)
{
    channel *self = data;
    tddp_add_text(called, sizeof called, "%s", self->name);
    if (self->act) {
        self->act();
    }
    return self->status;
}

static void open_channel(channel *self, tddp_launch_priority priority)
{
    CHECK_INT(pipe(self->ends), 0);
    self->source = (tddp_launch_source){
        .fd = self->ends[0],
        .events = POLLIN,
        .priority = priority,
        .callback = note,
        .data = self,
    };
    CHECK_OK(tddp_launch_loop_add(&loop, &self->source));
}

static void fill(const channel *self)
{
    CHECK_INT(write(self->ends[1], "x", 1), 1);
}

static void close_channel(channel *self)
{
    tddp_launch_loop_remove(&loop, &self->source);
    tddp_close(self->ends[0]);
    tddp_close(self->ends[1]);
}

/* All three are ready. */
static void open_all(void)
{
    open_channel(&one, TDDP_LAUNCH_PRIORITY_EVENT);
    open_channel(&two, TDDP_LAUNCH_PRIORITY_EVENT);
    open_channel(&three, TDDP_LAUNCH_PRIORITY_EVENT);
    fill(&one);
    fill(&two);
    fill(&three);
}

static void close_all(void)
{
    close_channel(&one);
    close_channel(&two);
    close_channel(&three);
    tddp_launch_loop_free(&loop);
}

static void check_turn(const char *expected)
{
    called[0] = '\0';
    CHECK_OK(tddp_launch_loop_turn(&loop));
    CHECK_TEXT(called, expected);
}

TEST(those_that_are_ready_are_called_by_priority_and_then_by_age)
{
    open_channel(&one, TDDP_LAUNCH_PRIORITY_REQUEST);
    open_channel(&two, TDDP_LAUNCH_PRIORITY_SIGNAL);
    open_channel(&three, TDDP_LAUNCH_PRIORITY_STREAM);
    fill(&one);
    fill(&three);
    check_turn("31");
    fill(&two);
    check_turn("321");
    close_channel(&three);
    open_channel(&three, TDDP_LAUNCH_PRIORITY_SIGNAL);
    fill(&three);
    check_turn("231");
    close_all();
}

static void remove_one(void)
{
    tddp_launch_loop_remove(&loop, &one.source);
}

static void remove_two(void)
{
    tddp_launch_loop_remove(&loop, &two.source);
}

TEST(a_source_removes_itself)
{
    one.act = remove_one;
    open_all();
    check_turn("123");
    check_turn("23");
    close_all();
}

TEST(the_next_ready_one_is_removed)
{
    one.act = remove_two;
    open_all();
    check_turn("13");
    check_turn("13");
    close_all();
}

static void wait_for_nothing(void)
{
    two.source.events = 0;
}

TEST(the_next_ready_one_waits_for_nothing_any_more)
{
    one.act = wait_for_nothing;
    open_all();
    check_turn("13");
    two.source.events = POLLIN;
    one.act = NULL;
    check_turn("123");
    close_all();
}

static channel added[40];

static void add_many(void)
{
    for (size_t i = 0; i < sizeof added / sizeof *added; i++) {
        added[i].name = "+";
        open_channel(&added[i], TDDP_LAUNCH_PRIORITY_STREAM);
        fill(&added[i]);
    }
    one.act = NULL;
}

/* More than there was room for. */
TEST(sources_that_are_added_take_part_in_the_next_turn)
{
    one.act = add_many;
    open_all();
    check_turn("123");
    check_turn("++++++++++++++++++++++++++++++++++++++++123");
    for (size_t i = 0; i < sizeof added / sizeof *added; i++) {
        close_channel(&added[i]);
    }
    close_all();
}

/* The other end of the pipe that two had, so that its descriptor has the old number. */
static void replace_two(void)
{
    int before = two.ends[0];
    close_channel(&two);
    open_channel(&two, TDDP_LAUNCH_PRIORITY_EVENT);
    CHECK_INT(two.ends[0], before);
    one.act = NULL;
}

TEST(a_number_that_is_used_again_is_another_descriptor)
{
    one.act = replace_two;
    open_all();
    check_turn("13");
    check_turn("13");
    fill(&two);
    check_turn("132");
    close_all();
}

static void at_once_again(void)
{
    two.source.time = tddp_now_ns();
}

TEST(a_time_that_is_set_again_by_its_own_callback_starves_nobody)
{
    two.act = at_once_again;
    open_channel(&one, TDDP_LAUNCH_PRIORITY_DEADLINE);
    two.source = (tddp_launch_source){.fd = -1,
                                      .time = 1,
                                      .priority = TDDP_LAUNCH_PRIORITY_EVENT,
                                      .callback = note,
                                      .data = &two};
    CHECK_OK(tddp_launch_loop_add(&loop, &two.source));
    check_turn("2");
    fill(&one);
    check_turn("21");
    check_turn("21");
    two.act = NULL;
    check_turn("21");
    check_turn("1");
    tddp_launch_loop_remove(&loop, &two.source);
    close_channel(&one);
    tddp_launch_loop_free(&loop);
}

TEST(a_descriptor_and_a_time_are_one_call)
{
    open_channel(&one, TDDP_LAUNCH_PRIORITY_EVENT);
    fill(&one);
    one.source.time = 1;
    check_turn("1");
    CHECK_INT(one.source.time, 0);
    check_turn("1");
    close_channel(&one);
    tddp_launch_loop_free(&loop);
}

/* One that waits for nothing wakes nobody, not even with its end, which poll(2) reports anyway. */
TEST(an_idle_loop_does_not_wake)
{
    enum { LATER_MS = 100 };
    open_all();
    one.source.events = two.source.events = 0;
    close_channel(&three);
    CHECK_INT(close(two.ends[1]), 0);
    two.ends[1] = -1;
    open_channel(&three, TDDP_LAUNCH_PRIORITY_EVENT);
    int64_t start = tddp_now_ns();
    three.source.time = start + LATER_MS * TDDP_NS_PER_MS;
    check_turn("3"); /* which is one poll(2) */
    CHECK(tddp_now_ns() - start >= LATER_MS * TDDP_NS_PER_MS);
    close_all();
}

TEST(a_callback_that_fails_ends_its_source_and_the_turn)
{
    open_all();
    two.source.time = 1;
    two.status = TDDP_OUT_OF_MEMORY;
    called[0] = '\0';
    CHECK_STATUS(tddp_launch_loop_turn(&loop), TDDP_OUT_OF_MEMORY);
    CHECK_TEXT(called, "12");
    CHECK_INT(two.source.events, 0);
    check_turn("13");
    two.source.events = POLLIN;
    two.act = remove_two;
    CHECK_STATUS(tddp_launch_loop_turn(&loop), TDDP_OUT_OF_MEMORY);
    check_turn("13");
    close_all();
}

TEST(short_memory_costs_the_new_source_alone)
{
    open_channel(&one, TDDP_LAUNCH_PRIORITY_EVENT);
    fill(&one);
    while (loop.count < 16) { /* a power of two: there is no more room */
        added[loop.count] = (channel){.source = {.fd = -1, .callback = note}};
        CHECK_OK(tddp_launch_loop_add(&loop, &added[loop.count].source));
    }
    tddp_fail_allocation(1);
    CHECK_STATUS(tddp_launch_loop_add(&loop, &two.source), TDDP_OUT_OF_MEMORY);
    tddp_fail_allocation(0);
    check_turn("1");
    tddp_launch_loop_remove(&loop, &two.source);
    close_channel(&one);
    tddp_launch_loop_free(&loop);
}
