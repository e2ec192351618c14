#include <ctype.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "launch/command/flags.h"
#include "options_play.h"

TEST(a_script_and_its_arguments)
{
    CHECK_OK(parse("train.rb --nproc-per-node=9 -x"));
    CHECK_TEXT(got.script, "train.rb");
    CHECK_INT(got.argument_count, 2);
    CHECK_TEXT(got.arguments[0], "--nproc-per-node=9");
    CHECK_INT(got.processes, 1);
    CHECK_INT(got.max_nodes, 1);
    CHECK_TEXT(got.role, "default");
    CHECK_DOUBLE(got.shutdown_timeout, 30, 0);
}

TEST(both_spellings_and_both_forms)
{
    const char *lines[] = {"--nproc-per-node=3 a.rb", "--nproc_per_node 3 a.rb",
                           "--nproc-per_node 3 -- a.rb"};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(parse(lines[i]));
        CHECK_INT(got.processes, 3);
        CHECK_TEXT(got.script, "a.rb");
        CHECK_INT(got.argument_count, 0);
    }
}

TEST(processes_are_a_number_or_counted)
{
    CHECK_OK(parse("--nproc-per-node=auto a"));
    CHECK_INT(got.processes, TDDP_LAUNCH_PROCESSES_AUTO);
    CHECK_OK(parse("--nproc-per-node=gpu a"));
    CHECK_INT(got.processes, TDDP_LAUNCH_PROCESSES_GPU);
    refused("--nproc-per-node=0 a",
            "--nproc-per-node=0: expected N|auto|cpu|gpu, from 1 to 4096; see torchrun "
            "--help");
    refused("--nproc_per_node=two a", "--nproc_per_node=two: expected N|auto");
    refused("--nproc-per-node=99999999999999999999 a", "expected N|auto");
    refused("--nproc-per-node=xpu a", "expected N|auto");
}

TEST(nodes_are_a_number_or_a_range)
{
    CHECK_OK(parse("--nnodes=1:1 a"));
    CHECK_INT(got.min_nodes, 1);
    CHECK_INT(got.max_nodes, 1);
    CHECK_OK(parse("--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=h a"));
    CHECK_INT(got.min_nodes, 2);
    CHECK_INT(got.max_nodes, 4);
    refused("--nnodes=1:4 a", "--nnodes=1:4 needs --rdzv-backend=c10d (or etcd)");
    refused("--nnodes=4:1 a", "--nnodes=4:1: expected N|MIN:MAX, from 1 to 65536");
    refused("--nnodes=:4 a", "expected N|MIN:MAX");
    refused("--nnodes=0:4 a", "expected N|MIN:MAX");
    refused("--nnodes=1:2:3 a", "expected N|MIN:MAX");
    refused("--nnodes=111111111111111111111111:2 a", "expected N|MIN:MAX");
    refused("--nnodes=0 a", "expected N|MIN:MAX, from 1");
}

static int streams_of(const tddp_launch_by_rank *list, int local_rank)
{
    return list->of[local_rank] & 3;
}

TEST(streams_for_all_or_by_local_rank)
{
    CHECK_OK(parse("--redirects=3 -t 1:2,0:3 a"));
    CHECK_INT(streams_of(&got.redirects, 7), 3);
    CHECK_INT(got.tee.highest, 1);
    CHECK_INT(streams_of(&got.tee, 0), 3);
    CHECK_INT(streams_of(&got.tee, 1), 2);
    CHECK_INT(streams_of(&got.tee, 2), 0);
    const char *forms[] = {"-r3 a", "-r=3 a", "-r 3 a", "--redirects 3 a"};
    for (int i = 0; i < 4; i++) {
        CHECK_OK(parse(forms[i]));
        CHECK_INT(streams_of(&got.redirects, 0), 3);
        CHECK_TEXT(got.script, "a");
    }
    refused("--tee=4 a", "--tee=4: expected 0|1|2|3|RANK:N,...");
    refused("-t 0:4 a", "-t=0:4: expected 0|1");
    refused("--tee=0:1,a:1 b", "expected 0|1");
    refused("--tee=1 --redirects=1:1,1 b", "--redirects=1:1,1: expected 0|1");
    CHECK_OK(parse("--tee= --redirects=2:0 a"));
    CHECK(!got.tee.given);
    CHECK(got.redirects.given);
    CHECK_INT(streams_of(&got.redirects, 2), 0);
    refused("--tee=0:1,0:2 a", "--tee=0:1,0:2: expected 0|1");
}

TEST(a_text_that_is_too_long)
{
    char flags[300];
    (void)snprintf(flags, sizeof flags, "--rdzv-id=%0256d a", 0);
    CHECK_OK(parse(flags));
    (void)snprintf(flags, sizeof flags, "--rdzv-id=%0257d a", 0);
    refused(flags, ": expected ID, from 1 to 256 bytes; see torchrun --help");
}

TEST(local_ranks)
{
    CHECK_OK(parse("a"));
    CHECK(!got.local_ranks_filter.given);
    CHECK_OK(parse("--nproc-per-node=3 --local-ranks-filter=2,0 a"));
    CHECK(got.local_ranks_filter.of[0] != 0);
    CHECK(got.local_ranks_filter.of[1] == 0);
    CHECK_OK(tddp_launch_options_check_local(&got, 3));
    CHECK_STATUS(tddp_launch_options_check_local(&got, 2), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "--local-ranks-filter names local rank 2: expected 0 to "
                                         "1, since this node runs 2 workers");
    CHECK_OK(parse("--tee=1:3 a"));
    CHECK_STATUS(tddp_launch_options_check_local(&got, 1), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "--tee names local rank 1: expected 0 to 0, since this "
                                         "node runs 1 worker");
    CHECK_OK(parse("--redirects=3:3 a"));
    CHECK_STATUS(tddp_launch_options_check_local(&got, 3), TDDP_INVALID_ARGUMENT);
    refused("--local-ranks-filter=0,x a", "--local-ranks-filter=0,x: expected RANK,...");
    refused("--local-ranks-filter=1,1 a", "--local-ranks-filter=1,1: expected RANK,...");
    refused("--local-ranks-filter=, a", "expected RANK,...");
    CHECK_OK(parse("--local-ranks-filter= a"));
    CHECK(!got.local_ranks_filter.given);
}

static bool matches(const char *line)
{
    return tddp_launch_filters_match(&got.out_filters, line, strlen(line));
}

TEST(filters)
{
    CHECK_OK(parse("--duplicate-stdout-filters=apple,a,,b,,,[x] a"));
    CHECK_INT(got.out_filters.count, 3);
    CHECK(matches("an apple a day"));
    CHECK(matches("1a,b,2"));
    CHECK(matches("1,[x]"));
    CHECK(!matches("a;b"));
    CHECK(!tddp_launch_filters_match(&got.out_filters, "apple", 4));
    CHECK_OK(parse("--duplicate-stderr-filters=[] --duplicate-stdout-filters=,a, a"));
    CHECK_INT(got.err_filters.count, 0);
    CHECK(!tddp_launch_filters_match(&got.err_filters, "", 0));
    CHECK_INT(got.out_filters.count, 1);
    char long_text[1100];
    memset(long_text, 'x', sizeof long_text);
    memcpy(long_text, "--duplicate-stdout-filters=", 27);
    long_text[sizeof long_text - 1] = '\0';
    char *argv[] = {"torchrun", long_text, "a", NULL};
    CHECK_STATUS(tddp_launch_options_parse(3, argv, lookup, &got), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "expected TEXT,...");
}

TEST(signals_to_handle)
{
    CHECK_OK(parse("a"));
    CHECK_INT(got.signal_count, 4);
    CHECK_INT(got.signals[0], SIGTERM);
    CHECK_OK(parse("--signals-to-handle=SIGTERM,usr1,sigUSR2,15 a"));
    CHECK_INT(got.signal_count, 4);
    CHECK_INT(got.signals[0], SIGTERM);
    CHECK_INT(got.signals[1], SIGUSR1);
    CHECK_INT(got.signals[2], SIGUSR2);
    CHECK_INT(got.signals[3], SIGTERM);
    refused("--signals-to-handle=SIGFOO a", "--signals-to-handle=SIGFOO: expected SIGNAL,...");
    refused("--signals-to-handle=SIGTERM,KILL a",
            "--signals-to-handle=SIGTERM,KILL: expected SIGNAL,...");
    refused("--signals-to-handle=SIGSEGV a", "expected SIGNAL,...");
    refused("--signals-to-handle=99 a", "expected SIGNAL,...");
}

TEST(words_out_of_a_list)
{
    CHECK_OK(parse("--numa-binding=core-complex --start-method=fork --event-log-handler=null a"));
    CHECK_INT(got.numa_binding, TDDP_LAUNCH_BINDING_CORE_COMPLEX);
    CHECK_OK(parse("--numa-binding=cores a"));
    CHECK_INT(got.numa_binding, TDDP_LAUNCH_BINDING_CORES);
    refused("--numa-binding=nod a", "--numa-binding=nod: expected none|node|socket|exclusive|"
                                    "core-complex|cores");
    refused("--start-method=thread a", "expected spawn|fork|forkserver");
    refused("--event-log-handler=console a", "--event-log-handler=console: expected null;");
    refused("--logs-specs=mine a", "--logs-specs=mine: expected default;");
    refused("--rdzv-backend=zeus a", "--rdzv-backend=zeus: expected static|c10d|etcd");
    refused("--print-completion=tcsh", "expected bash|zsh|fish");
}

TEST(addresses)
{
    CHECK_OK(parse("--local-addr=fe80::1 a"));
    CHECK_TEXT(got.local_addr, "fe80::1");
    refused("--local-addr=10.0.0.1:80 a", "--local-addr=10.0.0.1:80: expected HOST");
    CHECK_OK(parse("--local-addr=[::1] a"));
    CHECK_TEXT(got.local_addr, "::1");
    refused("--local-addr=a,b a", "--local-addr=a,b: expected HOST");
    refused("--local-addr= a", "expected HOST");
}

TEST(seconds)
{
    CHECK_OK(parse("--shutdown-timeout=0.5 --monitor-interval 5 a"));
    CHECK_DOUBLE(got.shutdown_timeout, 0.5, 0);
    refused("--shutdown-timeout=nan a", "expected SECONDS, from 0 to 86400");
    refused("--shutdown-timeout=-1 a", "expected SECONDS, from 0 to 86400");
    refused("--shutdown-timeout=1s a", "expected SECONDS, from 0 to 86400");
    refused("--shutdown-timeout= a", "expected SECONDS, from 0 to 86400");
}

/* As Python's argparse, which PyTorch's torchrun uses. */
TEST(flags_may_be_abbreviated)
{
    CHECK_OK(parse("--nproc 3 --max_r=2 --stand a.rb"));
    CHECK_INT(got.processes, 3);
    CHECK_INT(got.max_restarts, 2);
    CHECK(got.standalone);
    CHECK_OK(parse("--nproc_per=4 --nnode 1 --no-p a"));
    CHECK_INT(got.processes, 4);
    CHECK(got.no_ruby);
    refused("--no a", "--no may be one of --no-ruby, --node-rank; expected one of them");
    refused("--rdzv a", "--rdzv may be one of --rdzv-backend, --rdzv-endpoint, --rdzv-id, ");
    refused("--=2 a", "unknown flag --; flags of the script");
    refused("--nproc=0 a", "--nproc=0: expected N|auto");
    CHECK_OK(parse("a --nproc 3"));
    CHECK_INT(got.processes, 1);
}

TEST(the_health_check_listens_on_loopback_or_where_it_is_told)
{
    CHECK_OK(parse("a"));
    CHECK_INT(got.health.port, -1);
    CHECK_OK(parse("--health-check-port=8080 a"));
    CHECK_INT(got.health.port, 8080);
    CHECK_TEXT(got.health.host, "");
    CHECK_OK(parse("--health-check-port [::1]:0 a"));
    CHECK_INT(got.health.port, 0);
    CHECK_TEXT(got.health.host, "::1");
    refused("--health-check-port=8080x a", "expected [ADDRESS:]PORT");
    refused("--health-check-port=myhost:8080 a", "--health-check-port=myhost:8080: expected");
}

TEST(unknown_flags_are_named)
{
    refused("--nproc-per-nodes=2 a",
            "unknown flag --nproc-per-nodes; flags of the script stand after");
    refused("--epochs=3 a", "unknown flag --epochs; flags of the script stand after it; see");
    refused("-x a", "unknown flag -x; flags of the script");
    refused("-mx a", "unknown flag -mx");
    refused("-exit a", "unknown flag -exit");
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
    refused("--no-ruby -e 1", "-e cannot go with --no-ruby; leave one of them out");
}

TEST(code_instead_of_a_script)
{
    CHECK_OK(parse("-e --code x y"));
    CHECK_TEXT(got.code, "--code");
    CHECK(got.script == NULL);
    CHECK_INT(got.argument_count, 2);
    CHECK_TEXT(got.arguments[0], "x");
    CHECK_OK(parse("--nproc-per-node=2 -c --code -c y"));
    CHECK_TEXT(got.code, "--code");
    CHECK_INT(got.argument_count, 2);
    CHECK_TEXT(got.arguments[0], "-c");
}

TEST(modules)
{
    CHECK_OK(parse("-m --nproc-per-node=2 my_gem/train x"));
    CHECK_TEXT(got.module, "my_gem/train");
    CHECK(got.script == NULL);
    CHECK_INT(got.argument_count, 1);
    refused("-m", "no module given; expected torchrun [FLAGS] -m NAME");
    refused("-m -e 1", "-e cannot go with -m");
    refused("--module --no-python a", "-m cannot go with --no-ruby");
    refused("--run-path -m a", "-m cannot go with --run-path");
    CHECK_OK(parse("--run-path a.rb"));
    CHECK_TEXT(got.script, "a.rb");
}

TEST(a_check_needs_no_script)
{
    CHECK_OK(parse("--check"));
    CHECK_INT(got.processes, 2);
    CHECK_OK(parse("--check --nproc-per-node=3"));
    CHECK_INT(got.processes, 3);
    CHECK_OK(parse("--check --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h"));
    CHECK_INT(got.processes, 1);
    refused("--check a.rb", "--check runs a program of its own; leave out a.rb");
    refused("--check -e 1", "--check cannot go with -e");
    refused("--check --no-ruby", "--check cannot go with --no-ruby");
}

TEST(defaults_from_the_environment)
{
    variable = "PET_NPROC_PER_NODE=5";
    CHECK_OK(parse("a"));
    CHECK_INT(got.processes, 5);
    CHECK_OK(parse("--nproc-per-node=2 a"));
    CHECK_INT(got.processes, 2);
    variable = "PET_NPROC_PER_NODE=many";
    refused("a", "PET_NPROC_PER_NODE=many: expected N|auto");
    variable = "PET_NO_PYTHON=1";
    CHECK_OK(parse("a"));
    CHECK_INT(got.no_ruby, 1);
    variable = "PET_STANDALONE=perhaps";
    refused("a", "PET_STANDALONE=perhaps: expected 0|1");
    variable = "PET_STANDALONE=";
    CHECK_OK(parse("a"));
    variable = "PET_REDIRECTS=0:1";
    CHECK_OK(parse("a"));
    CHECK_INT(streams_of(&got.redirects, 0), 1);
    CHECK_OK(parse("-r 2 a"));
    CHECK_INT(streams_of(&got.redirects, 0), 2);
    variable = "PET_MODULE=1";
    CHECK_OK(parse("a"));
    CHECK_TEXT(got.module, "a");
    variable = "PET_CHECK=1";
    CHECK_OK(parse("a"));
    CHECK(!got.check);
    variable = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=${rank}:";
    CHECK_OK(parse("a"));
    CHECK_TEXT(got.line_prefix, "${rank}:");
    CHECK_OK(parse("--log-line-prefix-template=x a"));
    CHECK_TEXT(got.line_prefix, "x");
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
        char name[TDDP_LAUNCH_WORD_BYTES];
        for (int j = 0; tddp_launch_word(tddp_launch_flags[i].names, j, name); j++) {
            CHECK(isupper((unsigned char)*name) || strstr(text, name));
        }
    }
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        CHECK(strlen(line) <= 100);
    }
    free(text);
}
