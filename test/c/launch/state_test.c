/* Entries and documents, to JSON and back; and garbage, which is an error. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "launch/rendezvous/state.h"

static char *text_of(const tddp_launch_entry *entry, const tddp_launch_state *state)
{
    tddp_bytes text = {0};
    CHECK_OK(entry ? tddp_launch_entry_write(entry, &text) : tddp_launch_state_write(state, &text));
    CHECK_OK(tddp_bytes_append(&text, "", 1));
    return text.data;
}

TEST(an_entry)
{
    static tddp_launch_entry entry = {.self = {.id = "0123",
                                               .host = "gpu 1%\"\\",
                                               .role = "",
                                               .addr = "fe80::1",
                                               .pid = INT64_C(1) << 40,
                                               .local_size = 8,
                                               .node_rank = -1,
                                               .hosting = true},
                                      .round = 5,
                                      .rank = 2,
                                      .ready = 6,
                                      .done = -1,
                                      .failed = 5,
                                      .probe = 9,
                                      .leaves = true,
                                      .master_round = 5,
                                      .master_port = 65535,
                                      .master_addr = "10.0.0.1",
                                      .text = "rank 1:\n exit\tcode 3\n",
                                      .leave_text = "told"};
    static tddp_launch_entry again;
    char *text = text_of(&entry, NULL);
    CHECK_OK(tddp_launch_entry_read(text, strlen(text), &again));
    CHECK_TEXT(again.self.id, "0123");
    CHECK_TEXT(again.self.host, "gpu 1%\"\\");
    CHECK_TEXT(again.self.role, "");
    CHECK_TEXT(again.self.addr, "fe80::1");
    CHECK_INT(again.self.pid, INT64_C(1) << 40);
    CHECK_INT(again.self.local_size, 8);
    CHECK_INT(again.self.node_rank, -1);
    CHECK(again.self.hosting && again.leaves && !again.ended);
    CHECK_INT(again.round, 5);
    CHECK_INT(again.rank, 2);
    CHECK_INT(again.ready, 6);
    CHECK_INT(again.done, -1);
    CHECK_INT(again.failed, 5);
    CHECK_INT(again.probe, 9);
    CHECK_INT(again.master_round, 5);
    CHECK_INT(again.master_port, 65535);
    CHECK_TEXT(again.master_addr, "10.0.0.1");
    CHECK_TEXT(again.text, "rank 1:\n exit\tcode 3\n");
    CHECK_TEXT(again.leave_text, "told");
    free(text);
}

TEST(a_document_of_no_to_three_members)
{
    for (int count = 0; count <= 3; count++) {
        tddp_launch_member members[3] = {
            {.id = "a", .host = "x", .local_size = 1, .node_rank = -1, .hosting = true},
            {.id = "b", .host = "y", .role = "r", .addr = "::1", .pid = 3, .local_size = 2},
            {.id = "c", .host = "z", .local_size = 3, .node_rank = 7},
        };
        tddp_launch_note note = {.id = "d", .refused = true, .text = "no"};
        tddp_launch_state state = {.started = INT64_C(1795276170000000),
                                   .job = "--nnodes=3",
                                   .stage = TDDP_LAUNCH_STAGE_ENDED,
                                   .round = count - 1,
                                   .restart = 2,
                                   .over = count - 1,
                                   .how = TDDP_LAUNCH_HOW_STOPPED,
                                   .text = "told",
                                   .members = members,
                                   .count = count,
                                   .notes = &note,
                                   .note_count = count ? 1 : 0};
        tddp_launch_state again;
        char *text = text_of(NULL, &state);
        CHECK_OK(tddp_launch_state_read(text, strlen(text), &again));
        char *second = text_of(NULL, &again);
        CHECK_TEXT(second, text);
        CHECK_INT(again.count, count);
        CHECK_INT(again.started, state.started);
        CHECK_INT(again.stage, TDDP_LAUNCH_STAGE_ENDED);
        CHECK_INT(again.how, TDDP_LAUNCH_HOW_STOPPED);
        CHECK_TEXT(again.text, "told");
        CHECK_INT(tddp_launch_state_rank(&again, "c"), count == 3 ? 2 : -1);
        if (count == 3) {
            CHECK_TEXT(again.members[1].addr, "::1");
            CHECK_INT(again.members[2].node_rank, 7);
            CHECK(again.notes[0].refused);
        }
        tddp_launch_state_free(&again);
        free(second);
        free(text);
    }
}

/* What is left out is as it may be. */
TEST(a_member_of_an_id_alone)
{
    static const char text[] = "{\"members\": [{\"id\": \"a\"}]}";
    tddp_launch_state state;
    tddp_launch_state again;
    CHECK_OK(tddp_launch_state_read(text, strlen(text), &state));
    CHECK_INT(state.members[0].local_size, 1);
    char *written = text_of(NULL, &state);
    CHECK_OK(tddp_launch_state_read(written, strlen(written), &again));
    tddp_launch_state_free(&again);
    tddp_launch_state_free(&state);
    free(written);
}

/* What is too long is cut, what is not known passed over. */
TEST(long_texts_and_unknown_keys)
{
    static tddp_launch_entry entry;
    char text[2048];
    (void)snprintf(text, sizeof text,
                   "{\"id\": \"a\", \"host\": \"%01000d\", \"more\": [1, {}, 2]}", 0);
    CHECK_STATUS(tddp_launch_entry_read(text, strlen(text), &entry), TDDP_PROTOCOL);
    (void)snprintf(text, sizeof text, "{\"id\": \"a\", \"host\": \"%01000d\", \"more\": [1, 2]}",
                   0);
    CHECK_OK(tddp_launch_entry_read(text, strlen(text), &entry));
    CHECK_INT(strlen(entry.self.host), TDDP_LAUNCH_NAME_BYTES - 1);
    CHECK_INT(entry.round, -1);
    CHECK_INT(entry.self.local_size, 1);
}

TEST(garbage)
{
    static const char *const entries[] = {
        "",
        "{",
        "[]x",
        "{\"id\": \"\"}",
        "{\"host\": \"a\"}",
        "{\"id\": \"a\", \"local_size\": 0}",
        "{\"id\": \"a\", \"local_size\": 65537}",
        "{\"id\": \"a\", \"round\": -2}",
        "{\"id\": \"a\", \"round\": 1.5}",
        "{\"id\": \"a\", \"hosting\": true}",
        "{\"id\": \"a\", \"master_port\": 65536}",
        "{\"id\": \"a\", \"pid\": \"x\"}",
    };
    static const char *const states[] = {
        "",
        "null x",
        "{\"stage\": 1, \"round\": 0",
        "{\"stage\": 3}",
        "{\"how\": \"\"}",
        "{\"members\": [{\"local_size\": 0}]}",
        "{\"other\": {}}",
    };
    static tddp_launch_entry entry;
    tddp_launch_state state;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        CHECK_STATUS(tddp_launch_entry_read(entries[i], strlen(entries[i]), &entry), TDDP_PROTOCOL);
    }
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        CHECK_STATUS(tddp_launch_state_read(states[i], strlen(states[i]), &state), TDDP_PROTOCOL);
    }
}

/* Every prefix of a text is refused, or read. */
TEST(texts_that_are_cut)
{
    tddp_launch_member member = {.id = "a", .local_size = 1, .node_rank = -1};
    tddp_launch_state state = {.round = 1, .members = &member, .count = 1};
    tddp_launch_state again;
    char *text = text_of(NULL, &state);
    for (size_t size = 0; size < strlen(text); size++) {
        CHECK_STATUS(tddp_launch_state_read(text, size, &again), TDDP_PROTOCOL);
    }
    free(text);
}
