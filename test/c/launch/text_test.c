/* What nodes and coordinator say to each other, to text and back; and garbage, which is an error.
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "launch/rendezvous/text.h"

static tddp_launch_event event;
static tddp_launch_event read_event;
static tddp_launch_message message;
static tddp_launch_message read_message;

/* Encodes `event`, compares the text, decodes it again into `read_event`. */
static void check_event(const char *expected)
{
    tddp_bytes text = {0};
    CHECK_OK(tddp_launch_event_encode(&event, &text));
    CHECK_OK(tddp_bytes_append(&text, "", 1));
    CHECK_TEXT(text.data, expected);
    CHECK_OK(tddp_launch_event_decode(text.data, text.size - 1, &read_event));
    CHECK_INT(read_event.kind, event.kind);
    CHECK_INT(read_event.slot, event.slot);
    CHECK_INT(read_event.round, event.round);
    CHECK_INT(read_event.port, event.port);
    CHECK_TEXT(read_event.addr, event.addr);
    CHECK_TEXT(read_event.text, event.text);
    tddp_bytes_free(&text);
}

TEST(events)
{
    static const struct {
        tddp_launch_event event;
        const char *text;
    } cases[] = {
        {{.kind = TDDP_LAUNCH_EVENT_READY, .slot = 1, .round = 0}, "ready 1 0"},
        {{.kind = TDDP_LAUNCH_EVENT_BEAT, .slot = 2147483647}, "beat 2147483647"},
        {{.kind = TDDP_LAUNCH_EVENT_MASTER,
          .slot = 2,
          .round = 3,
          .port = 65535,
          .addr = "fe80::1"},
         "master 2 3 fe80::1 65535"},
        {{.kind = TDDP_LAUNCH_EVENT_FAILED, .slot = 2, .round = 3, .text = "a\n b\n"},
         "failed 2 3\na\n b\n"},
        {{.kind = TDDP_LAUNCH_EVENT_FAILED, .slot = 2, .round = 3}, "failed 2 3\n"},
        {{.kind = TDDP_LAUNCH_EVENT_DONE, .slot = 2, .round = 9}, "done 2 9"},
        {{.kind = TDDP_LAUNCH_EVENT_LEAVE, .slot = 2, .text = "told"}, "leave 2\ntold"},
        {{.kind = TDDP_LAUNCH_EVENT_BYE, .slot = 7}, "bye 7"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        event = cases[i].event;
        check_event(cases[i].text);
    }
}

TEST(a_join)
{
    event = (tddp_launch_event){.kind = TDDP_LAUNCH_EVENT_JOIN, .slot = 4};
    event.joiner = (tddp_launch_joiner){.id = "0123",
                                        .host = "gpu 1%",
                                        .role = "",
                                        .addr = "10.0.0.1",
                                        .pid = 1,
                                        .local_size = 8,
                                        .node_rank = -1,
                                        .last_rank = 2,
                                        .round = 5,
                                        .restart = 1,
                                        .nodes = 3,
                                        .hosting = true};
    check_event("join 4\nid=0123\nhost=gpu%201%25\nrole=%\naddr=10.0.0.1\npid=1\nlocal_size=8\n"
                "node_rank=-1\nlast_rank=2\nround=5\nrestart=1\nnodes=3\nhosting=1");
    CHECK_TEXT(read_event.joiner.host, "gpu 1%");
    CHECK_TEXT(read_event.joiner.role, "");
    CHECK_TEXT(read_event.joiner.id, "0123");
    CHECK_TEXT(read_event.joiner.addr, "10.0.0.1");
    CHECK_INT(read_event.joiner.pid, 1);
    CHECK_INT(read_event.joiner.local_size, 8);
    CHECK_INT(read_event.joiner.node_rank, -1);
    CHECK_INT(read_event.joiner.last_rank, 2);
    CHECK_INT(read_event.joiner.round, 5);
    CHECK_INT(read_event.joiner.restart, 1);
    CHECK_INT(read_event.joiner.nodes, 3);
    CHECK(read_event.joiner.hosting);
}

static tddp_status decode_event(const char *text)
{
    return tddp_launch_event_decode(text, strlen(text), &read_event);
}

TEST(what_is_no_event)
{
    static const char *const bad[] = {"",
                                      "join",
                                      "join ",
                                      "join 0\nlocal_size=1",
                                      "join 1",
                                      "join 1\n",
                                      "join 1\nlocal_size=0",
                                      "join 1\nlocal_size=65537",
                                      "join 1\nlocal_size=1\nnode_rank=-2",
                                      "join 1\nlocal_size=1 ",
                                      "join 1\nlocal_size=1\nhost=a b",
                                      "join 1\nlocal_size=1\nhost=",
                                      "join 1\nlocal_size=1\nhost=%0",
                                      "join 1\nlocal_size=1\nhost=%00",
                                      "join 1\nlocal_size=1\nhost=%zz",
                                      "join 1\nlocal_size=1\nx=1",
                                      "join 1\nlocal_size=1\nhosting=2",
                                      "join 1\nlocal_size=1\npid=99999999999999999999",
                                      "ready 1",
                                      "ready 1 -1",
                                      "ready 1 1 ",
                                      "ready 1 1\n",
                                      "ready -1 1",
                                      "ready 1 1000000001",
                                      "beat x",
                                      "beat 2147483648",
                                      "beat  1",
                                      "beat 1 ",
                                      "master 1 1 a",
                                      "master 1 1 a 0",
                                      "master 1 1 a 65536",
                                      "master 1 1  5",
                                      "failed 1",
                                      "failed 1 1 text",
                                      "leave",
                                      "leaving 1",
                                      "bye 1\nx",
                                      "status\nx"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (decode_event(bad[i]) != TDDP_PROTOCOL) {
            check_failed(__FILE__, __LINE__, "\"%s\" was taken", bad[i]);
        }
    }
    CHECK_STATUS(tddp_launch_event_decode("leave 1\na\0b", 11, &read_event), TDDP_PROTOCOL);
    CHECK_STATUS(tddp_launch_event_decode("beat 1\0", 7, &read_event), TDDP_PROTOCOL);
    CHECK_STATUS(decode_event("beat \x01x"), TDDP_PROTOCOL);
    CHECK_CONTAINS(tddp_error_message(), "\"beat ?x\" is no event of the rendezvous");
}

TEST(long_names_and_texts)
{
    static char text[TDDP_LAUNCH_TEXT_BYTES * 2];
    int head = snprintf(text, sizeof text, "leave 1\n");
    memset(text + head, 'x', sizeof text - (size_t)head - 1);
    CHECK_OK(decode_event(text));
    CHECK_INT(strlen(read_event.text), TDDP_LAUNCH_TEXT_BYTES - 1);
    head = snprintf(text, sizeof text, "join 1\nlocal_size=1\nhost=");
    memset(text + head, 'h', TDDP_LAUNCH_NAME_BYTES - 1);
    text[head + TDDP_LAUNCH_NAME_BYTES - 1] = '\0';
    CHECK_OK(decode_event(text));
    CHECK_INT(strlen(read_event.joiner.host), TDDP_LAUNCH_NAME_BYTES - 1);
    text[head + TDDP_LAUNCH_NAME_BYTES - 1] = 'h';
    text[head + TDDP_LAUNCH_NAME_BYTES] = '\0';
    CHECK_STATUS(decode_event(text), TDDP_PROTOCOL);
}

/* The same for messages. */
static void check_message(const char *expected)
{
    tddp_bytes text = {0};
    CHECK_OK(tddp_launch_message_encode(&message, &text));
    CHECK_OK(tddp_bytes_append(&text, "", 1));
    CHECK_TEXT(text.data, expected);
    CHECK_OK(tddp_launch_message_decode(text.data, text.size - 1, &read_message));
    CHECK_INT(read_message.kind, message.kind);
    CHECK_INT(read_message.how, message.how);
    CHECK_INT(read_message.round, message.round);
    CHECK_INT(read_message.restart, message.restart);
    CHECK_INT(read_message.slot, message.slot);
    CHECK_INT(read_message.port, message.port);
    CHECK_INT(read_message.count, message.count);
    CHECK_TEXT(read_message.addr, message.addr);
    CHECK_TEXT(read_message.text, message.text);
    for (int i = 0; i < message.count; i++) {
        CHECK_INT(read_message.members[i].slot, message.members[i].slot);
        CHECK_INT(read_message.members[i].local_size, message.members[i].local_size);
        CHECK_TEXT(read_message.members[i].role, message.members[i].role);
        CHECK_TEXT(read_message.members[i].host, message.members[i].host);
        CHECK_TEXT(read_message.members[i].addr, message.members[i].addr);
    }
    tddp_launch_message_free(&read_message);
    tddp_bytes_free(&text);
}

TEST(messages)
{
    static const struct {
        tddp_launch_message message;
        const char *text;
    } cases[] = {
        {{.kind = TDDP_LAUNCH_MESSAGE_MASTER, .round = 2, .addr = "10.0.0.1", .port = 1},
         "master 2 10.0.0.1 1"},
        {{.kind = TDDP_LAUNCH_MESSAGE_OVER,
          .round = 2,
          .how = TDDP_LAUNCH_HOW_FAILED,
          .text = "a\nb"},
         "over 2 failed\na\nb"},
        {{.kind = TDDP_LAUNCH_MESSAGE_OVER, .round = 2, .how = TDDP_LAUNCH_HOW_CHANGED},
         "over 2 changed\n"},
        {{.kind = TDDP_LAUNCH_MESSAGE_END, .how = TDDP_LAUNCH_HOW_DONE}, "end done\n"},
        {{.kind = TDDP_LAUNCH_MESSAGE_END, .how = TDDP_LAUNCH_HOW_STOPPED, .text = "x"},
         "end stopped\nx"},
        {{.kind = TDDP_LAUNCH_MESSAGE_REFUSE, .slot = 3, .text = "x"}, "refuse 3\nx"},
        {{.kind = TDDP_LAUNCH_MESSAGE_SPARE, .slot = 3, .text = "x"}, "spare 3\nx"},
        {{.kind = TDDP_LAUNCH_MESSAGE_REJOIN, .slot = 3, .text = "x"}, "rejoin 3\nx"},
        {{.kind = TDDP_LAUNCH_MESSAGE_STATUS, .text = "x"}, "status\nx"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        message = cases[i].message;
        check_message(cases[i].text);
    }
}

TEST(a_round)
{
    tddp_launch_member members[] = {
        {.slot = 2, .local_size = 8, .role = "my trainer", .host = "a", .addr = "10.0.0.1"},
        {.slot = 1, .local_size = 4096, .role = "", .host = "b", .addr = "fe80::1%eth0"}};
    message = (tddp_launch_message){
        .kind = TDDP_LAUNCH_MESSAGE_ROUND, .round = 3, .restart = 1, .count = 2};
    message.members = members;
    check_message("round 3 restart 1\n0 2 8 my%20trainer a 10.0.0.1\n1 1 4096 % b fe80::1%25eth0");
}

TEST(what_is_no_message)
{
    static const char *const bad[] = {"",
                                      "round",
                                      "round 1",
                                      "round 1 restart 0",
                                      "round 1 restart 0\n",
                                      "round 1 restart -1\n0 1 1 r h a",
                                      "round 1 restart 0\n1 1 1 r h a",
                                      "round 1 restart 0\n0 1 0 r h a",
                                      "round 1 restart 0\n0 1 1 r h",
                                      "round 1 restart 0\n0 1 1 r h a b",
                                      "round 1 restart 0\n0 1 1 r h a\n2 2 1 r h a",
                                      "round 1 restart 0\n0 1 1 r h a\n1 1 1 r h a",
                                      "round 1 restart 0\n0 1 1  h a",
                                      "round 1 restart 0\n0 1 1 r h a\n\n",
                                      "master 1 a",
                                      "master 1 a 0",
                                      "over 1 done\n",
                                      "over 1 stopped\n",
                                      "over 1",
                                      "over -1 failed\n",
                                      "end changed\n",
                                      "end",
                                      "end undone\n",
                                      "refuse\nx",
                                      "refuse 0\nx",
                                      "spare x",
                                      "rejoin -1\n",
                                      "status x",
                                      "statuses\n",
                                      "join 1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (tddp_launch_message_decode(bad[i], strlen(bad[i]), &read_message) != TDDP_PROTOCOL) {
            check_failed(__FILE__, __LINE__, "\"%s\" was taken", bad[i]);
        }
    }
}

/* Every good text cut anywhere, and with any one byte changed, is read or refused, never more. */
TEST(cuts_and_flips)
{
    static const char *const good[] = {
        "join 4\nid=0123\nhost=g%201\nrole=%\naddr=10.0.0.1\npid=1\nlocal_size=8\nhosting=1",
        "round 3 restart 1\n0 2 8 my%20trainer a 10.0.0.1\n1 1 4096 % b fe80::1%25eth0",
        "master 2 3 fe80::1 65535",
        "failed 2 3\na\n b\n",
        "over 2 failed\na\nb",
        "end done\n"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        size_t length = strlen(good[i]);
        for (size_t at = 0; at <= length; at++) {
            for (int byte = -1; byte < 256; byte++) {
                char *text = malloc(length + 1); /* exact, so that a sanitizer sees a step beyond */
                size_t size = byte < 0 || at == length ? at : length;
                CHECK(text != NULL);
                memcpy(text, good[i], length);
                char *exact = realloc(text, size ? size : 1);
                CHECK(exact != NULL);
                if (byte >= 0 && at < length) {
                    exact[at] = (char)byte;
                }
                (void)!tddp_launch_event_decode(exact, size, &read_event);
                if (tddp_launch_message_decode(exact, size, &read_message) == TDDP_OK) {
                    tddp_launch_message_free(&read_message);
                }
                free(exact);
            }
        }
    }
}

TEST(memory_that_is_short)
{
    const char *text = "round 3 restart 1\n0 2 8 r a 10.0.0.1\n1 1 4096 % b fe80::1";
    for (long nth = 1; nth < 6; nth++) {
        tddp_fail_allocation(nth);
        tddp_status status = tddp_launch_message_decode(text, strlen(text), &read_message);
        tddp_fail_allocation(0);
        if (status == TDDP_OK) {
            tddp_bytes bytes = {0};
            tddp_fail_allocation(1);
            CHECK_STATUS(tddp_launch_message_encode(&read_message, &bytes), TDDP_OUT_OF_MEMORY);
            tddp_fail_allocation(0);
            tddp_bytes_free(&bytes);
            tddp_launch_message_free(&read_message);
        } else {
            CHECK_STATUS(status, TDDP_OUT_OF_MEMORY);
        }
    }
}
