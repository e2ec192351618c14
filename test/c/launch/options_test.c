#include <stdio.h>
#include <string.h>

#include "check.h"
#include "launch/command/options.h"

/* One variable that the lookup knows, "NAME=value". */
static const char *variable;

static const char *lookup(const char *name)
{
    size_t length = strlen(name);
    return variable && strncmp(variable, name, length) == 0 && variable[length] == '='
               ? variable + length + 1
               : NULL;
}

static tddp_launch_options got;

/* Parses a command line that is split at its spaces. */
static tddp_status parse(const char *line)
{
    static char text[1024];
    static char *argv[64];
    int argc = 0;
    snprintf(text, sizeof text, "torchrun %s", line);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) {
        argv[argc++] = word;
    }
    argv[argc] = NULL;
    return tddp_launch_options_parse(argc, argv, lookup, &got);
}

static void refused(const char *line, const char *text)
{
    CHECK_STATUS(parse(line), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), text);
}

TEST(a_script_and_its_arguments)
{
    CHECK_OK(parse("train.rb --nproc-per-node=9 -x"));
    CHECK_TEXT(got.script, "train.rb");
    CHECK_INT(got.argument_count, 2);
    CHECK_TEXT(got.arguments[0], "--nproc-per-node=9");
    CHECK_INT(got.processes.number, 1);
    CHECK_INT(got.nodes, 1);
    CHECK_TEXT(got.role, "default");
    CHECK_DOUBLE(got.shutdown_timeout, 30, 0);
}

TEST(both_spellings_and_both_forms)
{
    const char *lines[] = {"--nproc-per-node=3 a.rb", "--nproc_per_node 3 a.rb",
                           "--nproc-per_node 3 -- a.rb"};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(parse(lines[i]));
        CHECK_INT(got.processes.number, 3);
        CHECK_TEXT(got.script, "a.rb");
        CHECK_INT(got.argument_count, 0);
    }
}

TEST(processes_are_a_number_or_counted)
{
    CHECK_OK(parse("--nproc-per-node=auto a"));
    CHECK_INT(got.processes.kind, TDDP_LAUNCH_PROCESSES_AUTO);
    CHECK_OK(parse("--nproc-per-node=gpu a"));
    CHECK_INT(got.processes.kind, TDDP_LAUNCH_PROCESSES_GPU);
    refused("--nproc-per-node=0 a", "--nproc-per-node=0: expected a number from 1 to 4096, auto");
    refused("--nproc_per_node=two a", "--nproc_per_node=two: expected a number");
    refused("--nproc-per-node=99999999999999999999 a", "expected a number");
}

TEST(nodes_are_a_fixed_number)
{
    CHECK_OK(parse("--nnodes=1:1 a"));
    CHECK_INT(got.nodes, 1);
    refused("--nnodes=1:4 a", "--nnodes=1:4: a number of nodes that changes while the job runs is "
                              "not supported; expected one number, such as 4");
    refused("--nnodes=4:1 a", "--nnodes=4:1: expected a number of nodes");
    refused("--nnodes=:4 a", "expected a number of nodes");
    refused("--nnodes=0 a", "expected a number from 1");
}

TEST(several_nodes_need_a_place_to_meet)
{
    CHECK_OK(parse("--nnodes=2 --node-rank=1 --rdzv-backend=c10d --rdzv-endpoint=host0:29503 "
                   "--rdzv-id=my-job --nproc-per-node=4 a.rb"));
    CHECK_INT(got.nodes, 2);
    CHECK_INT(got.node_rank, 1);
    CHECK_INT(got.backend, TDDP_LAUNCH_C10D);
    CHECK_TEXT(got.endpoint.host, "host0");
    CHECK_INT(got.endpoint.port, 29503);
    CHECK_TEXT(got.run_id, "my-job");
    CHECK_OK(parse("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=host0 a.rb"));
    CHECK_INT(got.endpoint.port, -1);
    CHECK_OK(parse("--nnodes=2 --node-rank=0 --master-addr=h --master-port=1 a.rb"));
    refused("--nnodes=2 a", "needs --node-rank");
    refused("--nnodes=2 --node-rank=0 a", "--master-addr=HOST");
    refused("--nnodes=2 --rdzv-backend=c10d a", "--rdzv-endpoint=HOST:PORT");
    refused("--nnodes=2 --node-rank=2 --master-addr=h a", "expected 0 to 1");
    refused("--nnodes=2 --standalone a", "--standalone is for one node");
    refused("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:0 a", "port 0");
}

TEST(endpoints)
{
    CHECK_OK(parse("--rdzv-endpoint=[fe80::1]:80 a"));
    CHECK_TEXT(got.endpoint.host, "fe80::1");
    CHECK_INT(got.endpoint.port, 80);
    CHECK_OK(parse("--rdzv-endpoint=::1 a"));
    CHECK_TEXT(got.endpoint.host, "::1");
    CHECK_INT(got.endpoint.port, -1);
    CHECK_OK(parse("--rdzv-endpoint=[::1] a"));
    CHECK_TEXT(got.endpoint.host, "::1");
    refused("--rdzv-endpoint=h:70000 a", "--rdzv-endpoint=h:70000: expected HOST or HOST:PORT");
    refused("--rdzv-endpoint=h: a", "expected HOST");
    refused("--rdzv-endpoint=:80 a", "expected HOST");
    refused("--rdzv-endpoint=[::1 a", "expected HOST");
    refused("--rdzv-endpoint=[::1]x a", "expected HOST");
}

TEST(rdzv_conf)
{
    CHECK_OK(parse("--rdzv-conf=join_timeout=7,heartbeat_timeout=2,is_host=true a"));
    CHECK_INT(got.conf.join_timeout, 7);
    CHECK_INT(got.conf.heartbeat_timeout, 2);
    CHECK_INT(got.conf.is_host, 1);
    refused("--rdzv-conf=join_timeout a", "KEY=VALUE");
    refused("--rdzv-conf=speed=3 a", "join_timeout");
    refused("--rdzv-conf=join_timeout=0 a", "join_timeout");
}

TEST(seconds)
{
    CHECK_OK(parse("--shutdown-timeout=0.5 --monitor-interval 5 a"));
    CHECK_DOUBLE(got.shutdown_timeout, 0.5, 0);
    refused("--shutdown-timeout=nan a", "expected seconds");
    refused("--shutdown-timeout=-1 a", "expected seconds");
    refused("--shutdown-timeout=1s a", "expected seconds");
    refused("--shutdown-timeout= a", "expected seconds");
}

TEST(unknown_flags_are_named_with_the_nearest)
{
    refused("--nproc-per-nod=2 a", "unknown flag --nproc-per-nod; did you mean --nproc-per-node?");
    refused("--nproc 2 a", "did you mean --nproc-per-node?");
    refused("--max_restart 2 a", "did you mean --max-restarts?");
    refused("--tee=3 a", "--tee is a flag of PyTorch's torchrun that this one does not have");
    refused("-x a", "unknown flag -x; see torchrun --help");
    refused(
        "--"
        "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx a",
        "unknown flag --xxxx");
}

TEST(missing_values_and_scripts)
{
    refused("", "no script given");
    refused("--standalone", "no script given");
    refused("--nproc-per-node", "--nproc-per-node needs a value");
    refused("--nproc-per-node --standalone a", "--nproc-per-node needs a value");
    refused("--standalone=1 a", "--standalone takes no value");
    refused("--no-ruby -e 1", "-e is Ruby code");
}

TEST(code_instead_of_a_script)
{
    CHECK_OK(parse("-e --code x y"));
    CHECK_TEXT(got.code, "--code");
    CHECK(got.script == NULL);
    CHECK_INT(got.argument_count, 2);
    CHECK_TEXT(got.arguments[0], "x");
}

TEST(defaults_from_the_environment)
{
    variable = "PET_NPROC_PER_NODE=5";
    CHECK_OK(parse("a"));
    CHECK_INT(got.processes.number, 5);
    CHECK_OK(parse("--nproc-per-node=2 a"));
    CHECK_INT(got.processes.number, 2);
    variable = "PET_NPROC_PER_NODE=many";
    refused("a", "PET_NPROC_PER_NODE=many: expected a number");
    variable = "PET_NO_PYTHON=1";
    CHECK_OK(parse("a"));
    CHECK_INT(got.no_ruby, 1);
    variable = "PET_STANDALONE=yes";
    refused("a", "PET_STANDALONE=yes: expected 0 or 1");
    variable = "PET_STANDALONE=";
    CHECK_OK(parse("a"));
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3";
    CHECK_OK(parse("a"));
    CHECK_DOUBLE(got.shutdown_timeout, 3, 0);
    variable = NULL;
}

TEST(help_and_version_need_no_script)
{
    CHECK_OK(parse("--help"));
    CHECK(got.help);
    CHECK_OK(parse("--version --nnodes=2"));
    CHECK(got.version);
}

TEST(every_flag_is_in_the_help)
{
    char *text = NULL;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    CHECK(stream != NULL);
    tddp_launch_options_help(stream);
    fclose(stream);
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        CHECK_CONTAINS(text, tddp_launch_flags[i].name);
    }
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        CHECK(strlen(line) <= 100);
    }
    free(text);
}
