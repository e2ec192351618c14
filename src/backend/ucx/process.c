/*
 * UCX in this process: its configuration, and the context of which all workers are. Made by the
 * first thread that opens a group, for the life of the process.
 *
 * The process is the host language's: UCX has no handler of signals and errors, prints nothing, and
 * does not patch functions that allocate memory, unless the environment says otherwise. Invariant:
 * a child of this process never calls UCX, whose thread and connections it does not have.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <ucm/api/ucm.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>

#include "backend/ucx/ucx.h"

/* Process-wide, as UCX's own state is. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ucp_context_h context;
static pid_t owner;

tddp_status tddp_ucx_fail(ucs_status_t status, const char *what)
{
    return tddp_fail(status == UCS_ERR_NO_MEMORY ? TDDP_OUT_OF_MEMORY : TDDP_NETWORK, "%s: %s",
                     what, ucs_status_string(status));
}

/*
 * The constructor of libucs calls this function of libucm, and thereby patches mmap(2) and others,
 * while other threads may execute them. This one comes first, as the loader looks for symbols in
 * the library that it was asked for before it does in those that this one needs. Networks that
 * access memory by themselves need the patches.
 */
TDDP_API void ucm_set_global_opts(const ucm_global_config_t *opts)
{
    void (*set_opts)(const ucm_global_config_t *);
    ucm_global_config_t own = *opts;
    *(void **)&set_opts = dlsym(RTLD_NEXT, "ucm_set_global_opts");
    if (access("/sys/class/infiniband", F_OK) != 0 && !getenv("UCX_MEM_EVENTS") &&
        !getenv("UCX_MEM_MMAP_HOOK_MODE")) {
        own.enable_events = 0;
        own.mmap_hook_mode = UCM_MMAP_HOOK_NONE;
    }
    if (set_opts) {
        set_opts(&own);
    }
}

/* The constructor of libucs has taken these signals, if the environment let it. */
static void give_signals_back(void)
{
    if (!getenv("UCX_HANDLE_ERRORS") && !getenv("UCX_ERROR_SIGNALS")) {
        for (unsigned i = 0; i < ucs_global_opts.error_signals.count; i++) {
            ucs_debug_disable_signal(ucs_global_opts.error_signals.signals[i]);
        }
        (void)ucs_global_opts_set_value("HANDLE_ERRORS", "none");
    }
    if (!getenv("UCX_DEBUG_SIGNO")) {
        ucs_debug_disable_signal((int)ucs_global_opts.debug_signo);
    }
    if (!getenv("UCX_LOG_LEVEL")) {
        (void)ucs_global_opts_set_value("LOG_LEVEL", "fatal");
    }
}

/* The environment's choice counts. A name that this version of UCX does not know is left out. */
static void set(ucp_config_t *config, const char *name, const char *value)
{
    char variable[64];
    (void)snprintf(variable, sizeof variable, "UCX_%s", name);
    if (!getenv(variable)) {
        (void)ucp_config_modify(config, name, value);
    }
}

static void configure(ucp_config_t *config, int seconds)
{
    char value[32];
    set(config, "TLS", "^shm");      /* ranks of one host have shared memory of their own */
    set(config, "TCP_CONN_NB", "y"); /* nothing here blocks */
    set(config, "CONN_NB", "y");     /* its name for 1.13 */
    set(config, "WARN_INVALID_CONFIG", "n");
    const char *interfaces = getenv("GLOO_SOCKET_IFNAME");
    if (interfaces && *interfaces) {
        set(config, "NET_DEVICES", interfaces);
    }
    if (seconds > 0) {
        (void)snprintf(value, sizeof value, "%ds", seconds / 3 > 0 ? seconds / 3 : 1);
        set(config, "KEEPALIVE_INTERVAL", value);
    }
}

static tddp_status make_context(int seconds)
{
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) {
        return tddp_ucx_fail(status, "UCX's configuration");
    }
    configure(config, seconds);
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
                                 .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP,
                                 .name = "tddp"};
    status = ucp_init(&params, config, &context);
    ucp_config_release(config);
    return status == UCS_OK ? TDDP_OK : tddp_ucx_fail(status, "cannot start UCX");
}

tddp_status tddp_ucx_context(int peer_timeout, ucp_context_h *out)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&lock);
    if (!context) {
        owner = getpid();
        give_signals_back();
        status = make_context(peer_timeout);
    } else if (owner != getpid()) {
        status = tddp_fail(TDDP_UNAVAILABLE,
                           "process %d, of which this one is a fork, has used UCX, which serves no "
                           "forked process: fork before the first group, or execute a program",
                           (int)owner);
    }
    *out = context;
    pthread_mutex_unlock(&lock);
    return status;
}
