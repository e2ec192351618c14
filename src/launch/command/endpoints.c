/*
 * The value of --rdzv-endpoint. Pure: no thread, no global.
 */
#include <string.h>
#include <strings.h>

#include "base/base.h"
#include "launch/command/options.h"

bool tddp_launch_endpoint_read(const char *text, tddp_launch_endpoint *out)
{
    tddp_launch_endpoint endpoint = {.port = -1};
    bool bracketed = text[0] == '[';
    const char *host = text + bracketed;
    const char *end = bracketed ? strchr(text, ']') : strchr(text, ':');
    if (bracketed && !end) {
        return false;
    }
    if (!end || (!bracketed && strchr(end + 1, ':'))) {
        end = text + strlen(text);
    }
    const char *rest = bracketed ? end + 1 : end;
    size_t length = (size_t)(end - host);
    int64_t port = -1;
    if (length == 0 || length >= sizeof endpoint.host || (*rest != '\0' && *rest != ':') ||
        (*rest == ':' && !tddp_parse_int(rest + 1, 0, 65535, &port))) {
        return false;
    }
    memcpy(endpoint.host, host, length);
    endpoint.port = (int)port;
    *out = endpoint;
    return true;
}

void tddp_launch_endpoint_text(const tddp_launch_endpoint *endpoint, char *text, size_t size)
{
    (void)snprintf(text, size, strchr(endpoint->host, ':') ? "[%s]:%d" : "%s:%d", endpoint->host,
                   endpoint->port);
}

tddp_status tddp_launch_endpoints_store(const char *source, const char *value,
                                        tddp_launch_options *out)
{
    tddp_launch_endpoint found[TDDP_LAUNCH_MAX_ENDPOINTS];
    char part[TDDP_LAUNCH_PART_BYTES];
    int count = 0;
    const char *at = value;
    if (strchr(value, '@')) { /* a password may stand before it, so the value is not shown */
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: there is an @ in it: expected HOST or HOST:PORT; name and password "
                         "for etcd stand in --rdzv-conf (username, password)",
                         source);
    }
    while (*at != '\0') { /* none at all: as if not given, which is PyTorch's default */
        bool more = count < TDDP_LAUNCH_MAX_ENDPOINTS;
        if (!more || !tddp_launch_list_next(&at, part) ||
            !tddp_launch_endpoint_read(part, &found[count])) {
            return tddp_launch_value_refuse(source, value,
                                            "HOST or HOST:PORT, the port from 0 to 65535, or up to "
                                            "7 of these with commas between them");
        }
        for (int i = 0; i < count; i++) {
            if (found[i].port == found[count].port &&
                strcasecmp(found[i].host, found[count].host) == 0) {
                return tddp_fail(TDDP_INVALID_ARGUMENT,
                                 "%s=%.256s: %s is there twice; expected different endpoints",
                                 source, value, part);
            }
        }
        count++;
    }
    memcpy(out->endpoints, found, (size_t)count * sizeof *found);
    out->endpoint_count = count;
    return TDDP_OK;
}
