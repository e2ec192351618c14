#include "machine.h"
#include "options_play.h"

TEST(several_nodes_need_a_place_to_meet)
{
    CHECK_OK(parse("--nnodes=2 --node-rank=1 --rdzv-backend=c10d --rdzv-endpoint=host0:29503 "
                   "--rdzv-id=my-job --nproc-per-node=4 a.rb"));
    CHECK_INT(got.max_nodes, 2);
    CHECK_INT(got.node_rank, 1);
    CHECK_INT(got.backend, TDDP_LAUNCH_C10D);
    CHECK_TEXT(got.endpoints[0].host, "host0");
    CHECK_INT(got.endpoints[0].port, 29503);
    CHECK_TEXT(got.run_id, "my-job");
    CHECK_OK(parse("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=host0 a.rb"));
    CHECK_INT(got.endpoints[0].port, 29400);
    CHECK_OK(parse("--nnodes=2 --node-rank=0 --master-addr=h --master-port=1 a.rb"));
    CHECK_INT(got.endpoint_count, 1);
    CHECK_TEXT(got.endpoints[0].host, "h");
    CHECK_INT(got.endpoints[0].port, 1);
    CHECK_OK(parse("--nnodes=2 --node-rank=0 --master-addr=[::1] a.rb"));
    CHECK_TEXT(got.endpoints[0].host, "::1");
    CHECK_INT(got.endpoints[0].port, 29500);
    refused("--nnodes=2 --node-rank=0 --master-addr=h:80 a", "--master-addr=h:80: expected HOST");
    refused("--nnodes=2 a", "needs --node-rank");
    refused("--nnodes=2 --node-rank=0 a", "--master-addr=HOST");
    refused("--nnodes=2 --rdzv-backend=c10d a", "--rdzv-endpoint=HOST:PORT");
    refused("--nnodes=2 --node-rank=2 --master-addr=h a", "expected 0 to 1");
    refused("--nnodes=2 --standalone a", "--standalone is for one node");
    refused("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:0 a",
            "--nnodes=2 needs a port from 1 to 65535 with each endpoint");
}

TEST(endpoints)
{
    CHECK_OK(parse("--rdzv-endpoint=[fe80::1]:80 a"));
    CHECK_TEXT(got.endpoints[0].host, "fe80::1");
    CHECK_INT(got.endpoints[0].port, 80);
    CHECK_OK(parse("--rdzv-endpoint=::1 a"));
    CHECK_TEXT(got.endpoints[0].host, "::1");
    CHECK_INT(got.endpoints[0].port, 0); /* one node alone: any */
    CHECK_OK(parse("--rdzv-endpoint=[::1] a"));
    CHECK_TEXT(got.endpoints[0].host, "::1");
    CHECK_OK(parse("--standalone --rdzv-endpoint=h:1 a"));
    CHECK_INT(got.endpoint_count, 0);
    refused("--rdzv-endpoint=h:70000 a", "--rdzv-endpoint=h:70000: expected HOST[:PORT],...");
    refused("--rdzv-endpoint=h: a", "expected HOST[:PORT],...");
    refused("--rdzv-endpoint=:80 a", "expected HOST[:PORT],...");
    refused("--rdzv-endpoint=, a", "expected HOST[:PORT],...");
    CHECK_OK(parse("--rdzv-endpoint= a"));
    CHECK_INT(got.endpoint_count, 0);
    refused("--nnodes=2 --node-rank=0 --rdzv-endpoint= a",
            "needs --master-addr=HOST and --master-port=PORT, the same");
    refused("--rdzv-endpoint=[::1 a", "expected HOST[:PORT],...");
    refused("--rdzv-endpoint=[::1]x a", "expected HOST[:PORT],...");
}

TEST(several_endpoints)
{
    CHECK_OK(parse("--nnodes=3 --rdzv-backend=etcd --rdzv-id=j "
                   "--rdzv-endpoint=a:1,[::1]:2379,fe80::2 x"));
    CHECK_INT(got.endpoint_count, 3);
    CHECK_TEXT(got.endpoints[0].host, "a");
    CHECK_INT(got.endpoints[0].port, 1);
    CHECK_TEXT(got.endpoints[1].host, "::1");
    CHECK_INT(got.endpoints[1].port, 2379);
    CHECK_TEXT(got.endpoints[2].host, "fe80::2");
    CHECK_INT(got.endpoints[2].port, 2379);
    CHECK_OK(parse("--rdzv-backend=etcd --rdzv-endpoint=a,b,c,d,e,f,g x"));
    CHECK_INT(got.endpoint_count, 7);
    refused("--rdzv-backend=etcd --rdzv-endpoint=a,b,c,d,e,f,g,h x", "expected HOST[:PORT],...");
    refused("--rdzv-backend=etcd --rdzv-endpoint=a,,b x", "expected HOST[:PORT],...");
    refused("--rdzv-endpoint=a,b x", "more than one --rdzv-endpoint needs --rdzv-backend=etcd");
    refused("--rdzv-backend=c10d --rdzv-endpoint=a,b x",
            "more than one --rdzv-endpoint needs --rdzv-backend=etcd");
    refused("--nnodes=2 --rdzv-backend=etcd --rdzv-id=j --rdzv-endpoint=a,b:0 x",
            "needs a port from 1 to 65535 with each endpoint");
}

TEST(etcd)
{
    CHECK_OK(
        parse("--nnodes=1:3 --rdzv-backend=etcd --rdzv-endpoint=h --rdzv-id=j --rdzv-conf="
              "protocol=https,cacert=/ca.pem,cert=/c.pem,key=/k.pem,username=u,password=p=w x"));
    CHECK_INT(got.backend, TDDP_LAUNCH_ETCD);
    CHECK(got.conf.etcd.https);
    CHECK_TEXT(got.conf.etcd.cacert, "/ca.pem");
    CHECK_TEXT(got.conf.etcd.cert, "/c.pem");
    CHECK_TEXT(got.conf.etcd.key, "/k.pem");
    CHECK_TEXT(got.conf.etcd.username, "u");
    CHECK_TEXT(got.conf.etcd.password, "p=w");
    CHECK_OK(parse("--rdzv-backend=etcd --rdzv-conf=protocol=http x"));
    CHECK(!got.conf.etcd.https);
    refused("--rdzv-backend=etcd --rdzv-conf=protocol=ftp x",
            "--rdzv-conf: protocol: expected http|https");
    refused("--rdzv-conf=cert=/c.pem x", "cert needs --rdzv-backend=etcd");
    refused("--rdzv-backend=etcd-v2 x", "--rdzv-backend=etcd-v2: expected static|c10d|etcd");
    refused("--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=h x", "needs --rdzv-id=ID");
    refused("--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=h --rdzv-id=j "
            "--rdzv-conf=heartbeat_timeout=2 x",
            "needs a heartbeat_timeout of at least 3 s with etcd");
    refused("--nnodes=2 --rdzv-backend=etcd --rdzv-id=j x", "--rdzv-endpoint=HOST:PORT");
}

TEST(rdzv_conf)
{
    CHECK_OK(parse("--rdzv-conf=join_timeout=7,heartbeat_timeout=2,is_host=true,store_type=tcp,"
                   "use_libuv=0,last_call_timeout=3,close_timeout=4,read_timeout=5,"
                   "keep_alive_interval=6,keep_alive_max_attempt=8,report_interval=9 a"));
    CHECK_INT(got.conf.join_timeout, 7);
    CHECK_INT(got.conf.heartbeat_timeout, 2);
    CHECK_INT(got.conf.is_host, 1);
    CHECK_INT(got.conf.last_call_timeout, 3);
    CHECK_INT(got.conf.close_timeout, 4);
    CHECK_INT(got.conf.report_interval, 9);
    CHECK_INT(got.conf.read_timeout, 5);
    CHECK_INT(got.conf.keep_alive_interval, 6);
    CHECK_INT(got.conf.keep_alive_max_attempt, 8);
    CHECK_OK(parse("--rdzv-conf=timeout=90, a"));
    CHECK_INT(got.conf.join_timeout, 90);
    CHECK_INT(got.conf.last_call_timeout, 30);
    CHECK_INT(tddp_launch_silence_s(&got), 0); /* static */
    CHECK_OK(parse("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h --rdzv-id=j a"));
    CHECK_INT(tddp_launch_silence_s(&got), 30);
    CHECK_OK(parse("--rdzv-conf=keep_alive_max_attempt=4 a"));
    CHECK_INT(tddp_launch_silence_s(&got), 20); /* intervals of 5 s, PyTorch's default */
    CHECK_OK(parse("--rdzv-conf=heartbeat_timeout=7 a"));
    CHECK_INT(tddp_launch_silence_s(&got), 7);
    CHECK_INT(got.conf.report_interval, 10);
    CHECK_INT(got.conf.is_host, -1);
    refused("--rdzv-conf=join_timeout a", "KEY=VALUE");
    refused("--rdzv-conf=speed=3 a", "--rdzv-conf: unknown key speed; expected KEY=VALUE");
    refused("--rdzv-conf=join_timeout=0 a",
            "--rdzv-conf: join_timeout: expected SECONDS, from 1 to 86400");
    refused("--rdzv-conf=keep_alive_max_attempt=1001 a", "expected N, from 1 to 1000");
    CHECK_OK(parse("--rdzv-conf=keep_alive_interval=86400,keep_alive_max_attempt=1000 a"));
    CHECK_INT(tddp_launch_silence_s(&got), 86400000);
    refused("--rdzv-conf=is_host=maybe a", "--rdzv-conf: is_host: expected 0|1");
    refused("--rdzv-conf=store_type=file a", "--rdzv-conf: store_type: expected tcp");
}

/* Neither by what is printed nor by ps. */
TEST(a_password_is_not_shown)
{
    static const char *const mistakes[] = {
        "u,password=s3cret,join_timeot=5",
        "u,password=s3cret,join_timeout",
        "u,password=s3cret,join_timeout=x",
        "u,password=s3,s3cret",
        "u,password=s3,s3cret=1",
        "u,password=s3,join_timeout=s3cret",
        "u;password=s3cret",
        "u,join_timeout=5;password=s3cret",
        "u,is_host=1 password=s3cret",
        "u,passwort=s3cret",
        "u,password:s3cret",
        "u,password:s3cret=1",
        "u,protocol=password=s3cret",
        "u,store_type=s3cret/x",
    };
    char line[256];
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        (void)snprintf(line, sizeof line,
                       "--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=h --rdzv-id=j "
                       "--rdzv-conf=username=%s a",
                       mistakes[i]);
        for (char *space = line; (space = strstr(space, "1 password"));) {
            *++space = '\t'; /* parse() splits at spaces */
        }
        CHECK_STATUS(parse(line), TDDP_INVALID_ARGUMENT);
        CHECK(!strstr(tddp_error_message(), "s3cret"));
        CHECK_CONTAINS(tddp_error_message(), "--rdzv-conf: ");
    }
    refused("--rdzv-endpoint=u:s3cret@h:2379 a", "--rdzv-endpoint: expected HOST[:PORT],...");
    CHECK(!strstr(tddp_error_message(), "s3cret"));
}

/* A value is not shown whatever its key: it may stand under the wrong one. */
TEST(a_malformed_value_is_not_shown)
{
    static const char *const keys[] = {"join_timeout", "is_host", "use_libuv", "store_type",
                                       "protocol",     "cacert",  "username",  "password_file"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        char line[128];
        (void)snprintf(line, sizeof line, "--rdzv-conf=%s=s3cret= a", keys[i]);
        refused(line, keys[i]);
        CHECK(!strstr(tddp_error_message(), "s3cret"));
    }
}

TEST(a_password_in_a_file)
{
    char *root = machine_make();
    char line[256];
    char expected[300];
    machine_file(root, "open sesame, =\nanother line\n", "password");
    machine_file(root, "\n", "empty");
    (void)snprintf(line, sizeof line,
                   "--rdzv-backend=etcd --rdzv-conf=username=u,password_file=%s/password x", root);
    CHECK_OK(parse(line));
    CHECK_TEXT(got.conf.etcd.password, "open sesame, =");
    (void)snprintf(line, sizeof line, "--rdzv-conf=password_file=%s/password x", root);
    refused(line, "password_file needs --rdzv-backend=etcd");
    memset(expected, 'x', 260);
    expected[260] = '\0';
    machine_file(root, expected, "long");
    static const char *const wrong[] = {"empty", "long", "absent"};
    for (int i = 0; i < 3; i++) {
        (void)snprintf(line, sizeof line, "--rdzv-backend=etcd --rdzv-conf=password_file=%s/%s x",
                       root, wrong[i]);
        refused(line, "--rdzv-conf: password_file: expected FILE; see torchrun --help");
    }
    machine_remove(root);
}

TEST(a_password_does_not_stay_in_the_command_line)
{
    char flag[] = "--rdzv-conf=username=u,password=s3cret,join_timeout=7";
    char name[] = "--rdzv-conf";
    char value[] = "password=s3,cret=";
    char script[] = "a";
    char *joined[] = {"torchrun", flag, script, NULL};
    char *apart[] = {"torchrun", name, value, script, NULL};
    CHECK_STATUS(tddp_launch_options_parse(3, joined, lookup, &got), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "username needs --rdzv-backend=etcd");
    CHECK_TEXT(flag, "--rdzv-conf=username=u,password=*********************");
    CHECK_STATUS(tddp_launch_options_parse(4, apart, lookup, &got), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(value, "password=********");
}
