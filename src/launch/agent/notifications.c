/*
 * Handles notifications from the other nodes, and tells them when this node leaves. A round that is
 * over here may have ended for a reason of this node's own, which it has sent before: then the
 * notification is the common outcome, and its text is not logged again. Main thread.
 */
#include "launch/agent/agent_state.h"

/* While this node's workers are being ended, for a reason of its own. */
static void note_end(tddp_launch_agent *agent, tddp_launch_notification notification,
                     const char *text)
{
    bool known = notification == TDDP_LAUNCH_NOTIFICATION_FAILED ||
                 notification == TDDP_LAUNCH_NOTIFICATION_ENDED;
    if (!known && agent->signal == 0) {
        tddp_launch_console_say(&agent->console, "%s", text);
    }
}

/* While nothing runs here: most likely what follows from what ended before. */
static void take_sequel(tddp_launch_agent *agent, tddp_launch_notification notification,
                        const char *text)
{
    bool known = agent->reported && (notification == TDDP_LAUNCH_NOTIFICATION_FAILED ||
                                     notification == TDDP_LAUNCH_NOTIFICATION_ENDED);
    if (agent->sequel == TDDP_LAUNCH_SEQUEL_END) {
        tddp_launch_agent_stop(agent, known ? TDDP_LAUNCH_CAUSE_SAID : TDDP_LAUNCH_CAUSE_FATAL,
                               SIGTERM);
        return;
    }
    if (!known) {
        tddp_launch_console_say(&agent->console, "%s", text);
    }
    tddp_launch_agent_say_sequel(agent);
}

/* A round is over, or all is. */
static void take_end(tddp_launch_agent *agent, tddp_launch_notification notification,
                     const char *text)
{
    agent->sequel = notification == TDDP_LAUNCH_NOTIFICATION_FAILED    ? TDDP_LAUNCH_SEQUEL_RESTART
                    : notification == TDDP_LAUNCH_NOTIFICATION_CHANGED ? TDDP_LAUNCH_SEQUEL_REGROUP
                                                                       : TDDP_LAUNCH_SEQUEL_END;
    if (agent->phase > TDDP_LAUNCH_LINGERING) {
        note_end(agent, notification, text);
        return;
    }
    (void)snprintf(agent->text, sizeof agent->text, "%s", text);
    if (agent->phase == TDDP_LAUNCH_JOINING) {
        take_sequel(agent, notification, text);
        return;
    }
    bool failed = notification == TDDP_LAUNCH_NOTIFICATION_FAILED ||
                  notification == TDDP_LAUNCH_NOTIFICATION_ENDED;
    tddp_launch_agent_stop(agent,
                           failed ? TDDP_LAUNCH_CAUSE_PEER
                           : notification == TDDP_LAUNCH_NOTIFICATION_CHANGED
                               ? TDDP_LAUNCH_CAUSE_CHANGED
                               : TDDP_LAUNCH_CAUSE_FATAL,
                           SIGTERM);
}

static void take_done(tddp_launch_agent *agent)
{
    agent->sequel = TDDP_LAUNCH_SEQUEL_END;
    if (agent->phase == TDDP_LAUNCH_JOINING) {
        tddp_launch_console_say(&agent->console,
                                "the job is done; this node was not needed for it any more");
    }
    if (agent->phase <= TDDP_LAUNCH_LINGERING) {
        tddp_launch_agent_sweep(agent);
    }
}

static void take_notification(tddp_launch_agent *agent, tddp_launch_notification notification,
                              const tddp_launch_world *world, const char *text)
{
    switch (notification) {
    case TDDP_LAUNCH_NOTIFICATION_JOINED:
        if (agent->phase == TDDP_LAUNCH_JOINING) {
            agent->world = *world;
            agent->sequel = TDDP_LAUNCH_SEQUEL_OPEN;
            agent->reported = false;
            tddp_launch_agent_start_workers(agent);
        }
        break;
    case TDDP_LAUNCH_NOTIFICATION_DONE:
        take_done(agent);
        break;
    case TDDP_LAUNCH_NOTIFICATION_STATUS:
        tddp_launch_console_say(&agent->console, "%s", text);
        break;
    case TDDP_LAUNCH_NOTIFICATION_FAILED:
    case TDDP_LAUNCH_NOTIFICATION_CHANGED:
    case TDDP_LAUNCH_NOTIFICATION_ENDED:
    case TDDP_LAUNCH_NOTIFICATION_STOPPED:
    case TDDP_LAUNCH_NOTIFICATION_ERROR:
        take_end(agent, notification, text);
        break;
    case TDDP_LAUNCH_NOTIFICATION_NONE:
        break;
    }
}

void tddp_launch_agent_on_notification(tddp_launch_agent *agent)
{
    char text[TDDP_LAUNCH_NOTIFICATION_BYTES];
    tddp_launch_world world;
    tddp_launch_notification notification;
    bool over = tddp_launch_rendezvous_over(agent->rendezvous);
    do {
        notification = tddp_launch_rendezvous_next(agent->rendezvous, &world, text);
        take_notification(agent, notification, &world, text);
    } while (notification != TDDP_LAUNCH_NOTIFICATION_NONE);
    if (over && agent->phase <= TDDP_LAUNCH_LINGERING) {
        /* Its last notification could not be queued: no other would follow. */
        (void)tddp_fail(TDDP_OUT_OF_MEMORY, "what has become of the other nodes is not known: out "
                                            "of memory");
        tddp_launch_agent_fail(agent);
    }
}

void tddp_launch_agent_send_leave(const tddp_launch_agent *agent, const char *what)
{
    char text[128];
    char node[24] = "a node"; /* before a first round it has no rank */
    if (agent->world.node_rank >= 0) {
        (void)snprintf(node, sizeof node, "node %d", agent->world.node_rank);
    }
    (void)snprintf(text, sizeof text, "%s %s", node, what);
    tddp_launch_rendezvous_request(agent->rendezvous, TDDP_LAUNCH_REQUEST_LEAVE, text);
}
