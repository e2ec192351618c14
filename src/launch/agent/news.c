/*
 * What news of the other nodes does to the agent, and what they are told of its leaving. A round
 * that is over here may be so for a reason of this node's own, told before: then the news is what
 * all make of it, and its text need not be said again. Main thread.
 */
#include "launch/agent/agent_state.h"

/* While this node's workers are being ended, for a reason of its own. */
static void note_end(tddp_launch_agent *agent, tddp_launch_news news, const char *text)
{
    bool known = news == TDDP_LAUNCH_NEWS_FAILED || news == TDDP_LAUNCH_NEWS_ENDED;
    if (!known && agent->signal == 0) {
        tddp_launch_console_say(&agent->console, "%s", text);
    }
}

/* While nothing runs here: most likely what follows from what ended before. */
static void take_sequel(tddp_launch_agent *agent, tddp_launch_news news, const char *text)
{
    bool known =
        agent->reported && (news == TDDP_LAUNCH_NEWS_FAILED || news == TDDP_LAUNCH_NEWS_ENDED);
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
static void take_end(tddp_launch_agent *agent, tddp_launch_news news, const char *text)
{
    agent->sequel = news == TDDP_LAUNCH_NEWS_FAILED    ? TDDP_LAUNCH_SEQUEL_RESTART
                    : news == TDDP_LAUNCH_NEWS_CHANGED ? TDDP_LAUNCH_SEQUEL_REGROUP
                                                       : TDDP_LAUNCH_SEQUEL_END;
    if (agent->phase > TDDP_LAUNCH_LINGERING) {
        note_end(agent, news, text);
        return;
    }
    (void)snprintf(agent->text, sizeof agent->text, "%s", text);
    if (agent->phase == TDDP_LAUNCH_JOINING) {
        take_sequel(agent, news, text);
        return;
    }
    bool failed = news == TDDP_LAUNCH_NEWS_FAILED || news == TDDP_LAUNCH_NEWS_ENDED;
    tddp_launch_agent_stop(agent,
                           failed                             ? TDDP_LAUNCH_CAUSE_PEER
                           : news == TDDP_LAUNCH_NEWS_CHANGED ? TDDP_LAUNCH_CAUSE_CHANGED
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

static void take_news(tddp_launch_agent *agent, tddp_launch_news news,
                      const tddp_launch_world *world, const char *text)
{
    switch (news) {
    case TDDP_LAUNCH_NEWS_JOINED:
        if (agent->phase == TDDP_LAUNCH_JOINING) {
            agent->world = *world;
            agent->sequel = TDDP_LAUNCH_SEQUEL_OPEN;
            agent->reported = false;
            tddp_launch_agent_start_workers(agent);
        }
        break;
    case TDDP_LAUNCH_NEWS_DONE:
        take_done(agent);
        break;
    case TDDP_LAUNCH_NEWS_STATUS:
        (void)snprintf(agent->told, sizeof agent->told, "%.*s", (int)sizeof agent->told - 1, text);
        tddp_launch_console_say(&agent->console, "%s", text);
        break;
    case TDDP_LAUNCH_NEWS_FAILED:
    case TDDP_LAUNCH_NEWS_CHANGED:
    case TDDP_LAUNCH_NEWS_ENDED:
    case TDDP_LAUNCH_NEWS_STOPPED:
    case TDDP_LAUNCH_NEWS_ERROR:
        take_end(agent, news, text);
        break;
    case TDDP_LAUNCH_NEWS_NONE:
        break;
    }
}

void tddp_launch_agent_on_news(tddp_launch_agent *agent)
{
    char text[TDDP_LAUNCH_NEWS_BYTES];
    tddp_launch_world world;
    tddp_launch_news news = TDDP_LAUNCH_NEWS_NONE;
    bool over = agent->rendezvous && tddp_launch_rendezvous_over(agent->rendezvous);
    do {
        if (agent->rendezvous) {
            news = tddp_launch_rendezvous_next(agent->rendezvous, &world, text);
        }
        take_news(agent, news, &world, text);
    } while (news != TDDP_LAUNCH_NEWS_NONE);
    if (over && agent->phase <= TDDP_LAUNCH_LINGERING) {
        /* Its last news could not be passed on: nothing else would ever come. */
        (void)tddp_fail(TDDP_OUT_OF_MEMORY, "what has become of the other nodes is not known: out "
                                            "of memory");
        tddp_launch_agent_fail(agent);
    }
}

void tddp_launch_agent_tell_leave(const tddp_launch_agent *agent, const char *what)
{
    char text[128];
    char node[24] = "a node"; /* before a first round it has no rank */
    if (agent->world.node_rank >= 0) {
        (void)snprintf(node, sizeof node, "node %d", agent->world.node_rank);
    }
    (void)snprintf(text, sizeof text, "%s %s", node, what);
    tddp_launch_rendezvous_report(agent->rendezvous, TDDP_LAUNCH_NODE_LEAVE, text);
}
