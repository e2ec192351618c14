/* The flight recorder: what it contains, as JSON that others can read; its ring; its files; its
 * cost; dumps beside running operations. */
#include <dirent.h>
#include <sys/stat.h>

#include "args.h"
#include "processes.h"

enum { TEXT_BYTES = 1 << 21 };

static char text[TEXT_BYTES];

static const char *folder(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/tddp_recorder_test_XXXXXX");
    CHECK(mkdtemp(path));
    return path;
}

static void remove_folder(const char *path)
{
    DIR *entries = opendir(path);
    CHECK(entries != NULL);
    for (struct dirent *each = readdir(entries); each; each = readdir(entries)) {
        char name[400];
        snprintf(name, sizeof name, "%s/%s", path, each->d_name);
        if (each->d_name[0] != '.') {
            unlink(name);
        }
    }
    closedir(entries);
    CHECK_INT(rmdir(path), 0);
}

static int files_in(const char *path)
{
    int count = 0;
    DIR *entries = opendir(path);
    CHECK(entries != NULL);
    for (struct dirent *each = readdir(entries); each; each = readdir(entries)) {
        count += each->d_name[0] != '.';
    }
    closedir(entries);
    return count;
}

static const char *in(const char *path, const char *name)
{
    static char full[400];
    snprintf(full, sizeof full, "%s/%s", path, name);
    return full;
}

/* --- a reader of JSON that takes nothing but what the standard allows ------------------------ */

static const char *value(const char *at);

static const char *space(const char *at)
{
    return at + strspn(at, " \n\t\r");
}

static const char *string(const char *at)
{
    CHECK(*at == '"');
    for (at++; *at != '"'; at++) {
        CHECK((unsigned char)*at >= 0x20);
        if (*at == '\\') {
            at++;
            CHECK(*at && strchr("\"\\/bfnrtu", *at) != NULL);
            if (*at == 'u') {
                CHECK_INT(strspn(at + 1, "0123456789abcdefABCDEF") >= 4, 1);
                at += 4;
            }
        }
    }
    return at + 1;
}

static const char *list(const char *at, char end, int pairs)
{
    at = space(at + 1);
    while (*at != end) {
        if (pairs) {
            at = space(string(at));
            CHECK(*at == ':');
            at = space(at + 1);
        }
        at = space(value(at));
        CHECK(*at == ',' || *at == end);
        if (*at == ',') {
            at = space(at + 1);
            CHECK(*at != end);
        }
    }
    return at + 1;
}

static const char *value(const char *at)
{
    static const char *const words[] = {"true", "false", "null"};
    if (*at == '{') {
        return list(at, '}', 1);
    }
    if (*at == '[') {
        return list(at, ']', 0);
    }
    if (*at == '"') {
        return string(at);
    }
    for (size_t i = 0; i < 3; i++) {
        if (strncmp(at, words[i], strlen(words[i])) == 0) {
            return at + strlen(words[i]);
        }
    }
    char *end;
    (void)strtod(at, &end);
    CHECK(end > at);
    return end;
}

static const char *load(const char *path)
{
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    size_t size = fread(text, 1, sizeof text - 1, file);
    text[size] = '\0';
    fclose(file);
    CHECK(*space(value(space(text))) == '\0');
    return text;
}

static int occurrences(const char *what)
{
    int count = 0;
    for (const char *at = strstr(text, what); at; at = strstr(at + 1, what)) {
        count++;
    }
    return count;
}

/* --- the tests ------------------------------------------------------------------------------- */

TEST(each_operation_is_recorded)
{
    tddp_store *store;
    const char *path = folder();
    tddp_group *group = lone_group(NULL, 5000, &store);
    float x[6] = {0};
    tddp_op_args args = sum_args(buffer_of(x, 3, TDDP_FLOAT32));
    args.reduce = TDDP_REDUCE_MAX;
    args.description = "a \"name\"\t\\ \xc3\xa4 \xff [3]";
    CHECK_OK(tddp_submit(group, &args, NULL));
    CHECK_OK(tddp_broadcast(group, buffer_of(x, 2, TDDP_INT16), 0, NULL));
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_OK(tddp_all_gather(group, buffer_of(x, 1, TDDP_FLOAT64),
                             buffer_of(x + 2, 1, TDDP_FLOAT64), NULL));
    CHECK_OK(tddp_group_dump(group, in(path, "one")));
    (void)load(in(path, "one"));
    CHECK_CONTAINS(text, "\"version\": \"2.10\", \"rank\": 0, \"world_size\": 1, \"host\": \"");
    char part[512];
    snprintf(part, sizeof part, "\"pid\": %d", (int)getpid());
    CHECK_CONTAINS(text, part);
    CHECK_CONTAINS(text, "\"name\": \"default_pg\", \"desc\": \"default_pg\", \"backend\": "
                         "\"fake\", \"rank\": 0, \"size\": 1, \"ranks\": \"[0]\"");
    CHECK_CONTAINS(text, "\"last_enqueued_collective\": 4, \"last_started_collective\": 4, "
                         "\"last_completed_collective\": 4, \"dropped\": 0, \"messages\": 0, "
                         "\"failure\": null");
    CHECK_CONTAINS(text, "{\"record_id\": 0, \"pg_id\": 0, \"process_group\": [\"default_pg\", "
                         "\"default_pg\"], \"collective_seq_id\": 1, \"p2p_seq_id\": 0, \"op_id\": "
                         "1, \"profiling_name\": \"fake:all_reduce\", \"time_created_ns\": ");
    CHECK_CONTAINS(text, "\"input_sizes\": [[3]], \"input_dtypes\": [\"float32\"], "
                         "\"output_sizes\": [[3]], \"output_dtypes\": [\"float32\"], \"state\": "
                         "\"completed\", \"retired\": true, \"timeout_ms\": 5000, \"is_p2p\": "
                         "false, \"thread_id\": \"");
    CHECK_CONTAINS(text, "\"root\": null, \"peer\": null, \"tag\": null, \"reduce_op\": \"max\", "
                         "\"status\": \"TDDP_OK\", \"description\": \"a \\\"name\\\"\\u0009\\\\ "
                         "\xc3\xa4 \\ufffd [3]\", \"fingerprint\": ");
    CHECK_CONTAINS(text, "\"fake:broadcast\"");
    CHECK_CONTAINS(text, "[[2]], \"input_dtypes\": [\"int16\"]");
    CHECK_CONTAINS(text, "\"root\": 0, ");
    CHECK_CONTAINS(text, "\"fake:barrier\"");
    CHECK_CONTAINS(text, "\"input_sizes\": [], \"input_dtypes\": [], \"output_sizes\": [], ");
    CHECK_INT(occurrences("\"record_id\""), 4);
    CHECK_INT(occurrences("null, \"time_discovered_completed_ns\""), 0);
    CHECK_INT(files_in(path), 1);
    CHECK_STATUS(tddp_group_dump(group, "/nowhere/at/all"), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "/nowhere/at/all");
    CHECK_STATUS(tddp_group_dump(group, ""), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_group_dump(NULL, "x"), TDDP_INVALID_ARGUMENT);
    drop(group, store);
    remove_folder(path);
}

static void messages(int rank, int world_size, tddp_store *store, void *data)
{
    const char *path = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 5000);
    int32_t x = 0;
    if (rank == 0) {
        CHECK_OK(tddp_send(group, buffer_of(&x, 1, TDDP_INT32), 1, 7, NULL));
    } else {
        tddp_work *open;
        CHECK_OK(tddp_recv(group, buffer_of(&x, 1, TDDP_INT32), TDDP_ANY_SOURCE, 7, NULL));
        CHECK_OK(tddp_recv(group, buffer_of(&x, 1, TDDP_INT32), 0, 9, &open));
        CHECK_OK(tddp_group_dump(group, in(path, "messages")));
        (void)load(in(path, "messages"));
        CHECK_CONTAINS(text, "\"messages\": 1");
        CHECK_CONTAINS(text, "\"collective_seq_id\": 0, \"p2p_seq_id\": 1, \"op_id\": 1, "
                             "\"profiling_name\": \"fake:recv 1<-any\"");
        CHECK_CONTAINS(text, "\"profiling_name\": \"fake:recv 1<-0\"");
        CHECK_CONTAINS(text, "\"input_sizes\": [], \"input_dtypes\": [], \"output_sizes\": [[1]], "
                             "\"output_dtypes\": [\"int32\"], \"state\": \"completed\"");
        CHECK_CONTAINS(text, "\"state\": \"started\", \"retired\": false");
        CHECK_CONTAINS(text, "\"is_p2p\": true");
        CHECK_CONTAINS(text, "\"root\": null, \"peer\": 0, \"tag\": 9");
        CHECK_CONTAINS(text, "\"root\": null, \"peer\": null, \"tag\": 7");
        tddp_group_shutdown(group, 0);
        CHECK_STATUS(tddp_work_wait(open, NULL), TDDP_GROUP_CLOSED);
        tddp_work_release(open);
    }
    tddp_group_release(group);
}

TEST(messages_are_recorded_separately)
{
    const char *path = folder();
    run_ranks(2, messages, (void *)path);
    remove_folder(path);
}

TEST(the_ring_keeps_the_last)
{
    setenv("TDDP_FR_BUFFER_SIZE", "8", 1);
    tddp_store *store;
    const char *path = folder();
    tddp_group *group = lone_group(NULL, 5000, &store);
    for (int i = 0; i < 29; i++) {
        CHECK_OK(tddp_barrier(group, NULL));
    }
    CHECK_OK(tddp_group_dump(group, in(path, "ring")));
    (void)load(in(path, "ring"));
    CHECK_INT(occurrences("\"record_id\""), 8);
    CHECK_CONTAINS(text, "\"dropped\": 21");
    const char *at = text;
    for (int i = 21; i < 29; i++) {
        char part[64];
        snprintf(part, sizeof part, "{\"record_id\": %d,", i);
        at = strstr(at, part);
        CHECK(at != NULL);
    }
    drop(group, store);
    remove_folder(path);
}

TEST(two_thousand_are_kept_unless_another_number_is_given)
{
    tddp_store *store;
    const char *path = folder();
    tddp_group *group = lone_group(NULL, 5000, &store);
    for (int i = 0; i < 2003; i++) {
        CHECK_OK(tddp_barrier(group, NULL));
    }
    CHECK_OK(tddp_group_dump(group, in(path, "ring")));
    (void)load(in(path, "ring"));
    CHECK_INT(occurrences("\"record_id\""), 2000);
    CHECK_CONTAINS(text, "\"dropped\": 3");
    drop(group, store);
    remove_folder(path);
}

/* By our name and by both of PyTorch's. */
TEST(it_can_be_turned_off)
{
    static const char *const names[] = {"TDDP_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE",
                                        "TORCH_NCCL_TRACE_BUFFER_SIZE"};
    const char *path = folder();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        setenv(names[i], "0", 1);
        tddp_store *store;
        tddp_group *group = lone_group(NULL, 5000, &store);
        CHECK_OK(tddp_barrier(group, NULL));
        CHECK_OK(tddp_group_dump(group, in(path, "off")));
        (void)load(in(path, "off"));
        CHECK_CONTAINS(text, "\"entries\": []");
        drop(group, store);
        unsetenv(names[i]);
    }
    remove_folder(path);
}

static void check_failure_writes(const char *variable)
{
    const char *path = folder();
    tddp_store *store;
    setenv(variable, path, 1);
    setenv("TDDP_FAKE", "fail_at=2", 1);
    tddp_group *group = lone_group(NULL, 5000, &store);
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_INT(files_in(path), 0);
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_NETWORK);
    /* The file exists before the failure is returned. */
    CHECK_INT(files_in(path), 1);
    (void)load(in(path, "tddp_trace_rank_0"));
    CHECK_CONTAINS(text, "\"failure\": \"barrier 2 of group \\\"default_pg\\\" on rank 0 of 1: "
                         "asked to fail by TDDP_FAKE\"");
    CHECK_CONTAINS(text, "\"state\": \"failed\", \"retired\": true");
    CHECK_CONTAINS(text, "\"status\": \"TDDP_NETWORK\"");
    drop(group, store);
    remove_folder(path);
}

TEST(a_failure_writes_its_file)
{
    check_failure_writes("TDDP_FR_DUMP");
}

TEST(a_failure_writes_its_file_by_pytorchs_name)
{
    check_failure_writes("TORCH_FR_DUMP_TEMP_FILE");
}

static void stalls(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        limit_to(group, 200);
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_TIMEOUT);
    } else {
        CHECK_UNTIL(has_failed(group));
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_PEER_LOST);
    }
    tddp_group_release(group);
}

TEST(a_timeout_writes_the_files_of_all_ranks)
{
    const char *path = folder();
    char prefix[128];
    snprintf(prefix, sizeof prefix, "%s/run_", path);
    setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", prefix, 1);
    run_ranks(2, stalls, NULL);
    CHECK_INT(files_in(path), 2);
    (void)load(in(path, "run_0"));
    CHECK_CONTAINS(text, "not done after 200 ms");
    CHECK_CONTAINS(text, "\"ranks\": \"[0, 1]\", \"members\": [{\"rank\": 0, \"global_rank\": 0, ");
    (void)load(in(path, "run_1"));
    CHECK_CONTAINS(text, "failed first, in barrier 2: ");
    CHECK_INT(occurrences("\"record_id\""), 1);
    remove_folder(path);
}

TEST(all_groups_of_a_rank_share_a_file)
{
    const char *path = folder();
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *other;
    int files = -1;
    opts.backend = "fake";
    opts.name = "another";
    opts.store = store;
    opts.parent = group;
    CHECK_OK(tddp_group_create(&opts, NULL, &other));
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_OK(tddp_barrier(other, NULL));
    CHECK_OK(tddp_barrier(other, NULL));
    CHECK_OK(tddp_recorder_dump_all(path, &files));
    CHECK_INT(files, 1);
    (void)load(in(path, "tddp_trace_rank_0"));
    CHECK_CONTAINS(text, "\"0\": {\"name\": \"default_pg\"");
    CHECK_CONTAINS(text, "\"1\": {\"name\": \"another\"");
    CHECK_INT(occurrences("\"pg_id\": 0"), 1);
    CHECK_INT(occurrences("\"pg_id\": 1"), 2);
    CHECK_OK(tddp_recorder_dump_all(NULL, &files));
    CHECK_INT(files, 0);
    CHECK_STATUS(tddp_recorder_dump_all("", &files), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_recorder_dump_all("/nowhere/at/", &files), TDDP_SYSTEM);
    tddp_group_release(other);
    drop(group, store);
    CHECK_OK(tddp_recorder_dump_all(path, &files));
    CHECK_INT(files, 0);
    remove_folder(path);
}

typedef struct dumping {
    tddp_group *group;
    const char *path;
    _Atomic int stop;
} dumping;

static void *dump_on(void *data)
{
    dumping *self = data;
    char name[128];
    snprintf(name, sizeof name, "%s/on", self->path);
    while (!self->stop) {
        CHECK_OK(tddp_group_dump(self->group, name));
        CHECK_OK(tddp_recorder_dump_all(self->path, NULL));
    }
    return NULL;
}

TEST(dumps_run_beside_operations)
{
    setenv("TDDP_FR_BUFFER_SIZE", "50", 1);
    tddp_store *store;
    dumping self = {.path = folder()};
    pthread_t threads[2];
    self.group = lone_group(NULL, 5000, &store);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, dump_on, &self), 0);
    }
    double end = now() + 0.5;
    while (now() < end) {
        CHECK_OK(tddp_barrier(self.group, NULL));
        char name[128];
        snprintf(name, sizeof name, "%s/on", self.path);
        if (access(name, R_OK) == 0) {
            (void)load(name);
        }
    }
    self.stop = 1;
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    drop(self.group, store);
    remove_folder(self.path);
}

/* From base's private header: the nth allocation from now fails. */
bool tddp_fail_allocation(long nth);

TEST(a_dump_may_find_no_memory)
{
    const char *path = folder();
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    int failures = 0;
    CHECK_OK(tddp_barrier(group, NULL));
    for (long nth = 1; nth < 30; nth++) {
        int files = -1;
        tddp_fail_allocation(nth);
        tddp_status status = tddp_recorder_dump_all(path, &files);
        tddp_fail_allocation(0);
        if (status) {
            CHECK_STATUS(status, TDDP_OUT_OF_MEMORY);
            CHECK_INT(files, -1);
            failures++;
        }
    }
    CHECK(failures > 5);
    CHECK_INT(files_in(path), 1);
    drop(group, store);
    remove_folder(path);
}
