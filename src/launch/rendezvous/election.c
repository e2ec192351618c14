/*
 * An endpoint's part in the election (the rules are in election.h): it looks after its own store's
 * vote, stands for leader when there is a vacancy, renews its leases while it leads. Called by one
 * thread, the host's for elections. Invariant: at most one election of a job leads at a time,
 * whatever is lost, late or started again, as long as clocks run at the same pace.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/election.h"

enum {
    STAGGER_MS = 200,       /* between the candidates of a vacancy, so that mostly one stands */
    MOST_PAUSE_MS = 400,    /* after a lost vote */
    LOOK_MS = 100,          /* at one's own vote */
    RENEWALS = 5,           /* in a lease */
    LOOKS = 20,             /* in a short one */
    TRIES = 3,              /* to raise a number that others raise too */
    HIGHEST_TERM = 99999999 /* that is believed: no job has as many leaders */
};

void tddp_launch_election_init(tddp_launch_election *election,
                               const tddp_launch_election_opts *opts)
{
    *election = (tddp_launch_election){.opts = *opts, .random = opts->seed * 2 + 1};
    election->begin_ns = opts->now(opts->context);
}

static int64_t now(const tddp_launch_election *election)
{
    return election->opts.now(election->opts.context);
}

static int majority(const tddp_launch_election *election)
{
    return election->opts.count / 2 + 1;
}

int64_t tddp_launch_election_pause_ns(const tddp_launch_election *election)
{
    int64_t short_ns = election->opts.lease_ns / LOOKS;
    return short_ns < LOOK_MS * TDDP_NS_PER_MS ? short_ns : LOOK_MS * TDDP_NS_PER_MS;
}

bool tddp_launch_election_leads(const tddp_launch_election *election)
{
    return election->leads && now(election) < election->until_ns;
}

/* Whether a lease is somebody's; whose, and of which term. */
static bool is_given(const char *lease, int *endpoint, int *term)
{
    int64_t count;
    /* The widths keep what is no lease from being more than a number holds. */
    return sscanf(lease, "%2d %9d %18" SCNd64, endpoint, term, &count) == 3 && *term >= 0;
}

static bool is_vacant(const char *lease)
{
    return strcmp(lease, "free") == 0 || strcmp(lease, "young") == 0;
}

/* Whether a lease is ours, of this term. */
static bool is_ours(const tddp_launch_election *election, const char *lease)
{
    int endpoint;
    int term;
    return is_given(lease, &endpoint, &term) && endpoint == election->opts.self &&
           term == election->term;
}

static void write_lease(const tddp_launch_election *election, char *lease)
{
    (void)snprintf(lease, TDDP_LAUNCH_LEASE_BYTES, "%d %d %" PRId64, election->opts.self,
                   election->term, election->renewals);
}

/* Swaps a voter's lease; true if it is `desired` then. What it is otherwise is noted. */
static bool swap(tddp_launch_election *election, int voter, const char *expected,
                 const char *desired)
{
    tddp_launch_vote *vote = &election->votes[voter];
    char present[TDDP_LAUNCH_LEASE_BYTES];
    vote->answers = election->opts.exchange(election->opts.context, voter, "lease", expected,
                                            desired, present) == TDDP_OK;
    if (vote->answers) {
        (void)snprintf(vote->lease, sizeof vote->lease, "%s", present);
    }
    return vote->answers && strcmp(present, desired) == 0;
}

/* Raises a voter's `term`; false if it may be lower still. */
static bool raise_term(const tddp_launch_election *election, int voter, int term)
{
    char present[TDDP_LAUNCH_LEASE_BYTES];
    char expected[TDDP_LAUNCH_LEASE_BYTES] = "";
    char desired[16];
    (void)snprintf(desired, sizeof desired, "%d", term);
    for (int i = 0; i < TRIES; i++) {
        int64_t have;
        if (election->opts.exchange(election->opts.context, voter, "term", expected, desired,
                                    present) != TDDP_OK) {
            return false;
        }
        if (tddp_parse_int(present, 0, INT32_MAX, &have) && have >= term) {
            return true;
        }
        (void)snprintf(expected, sizeof expected, "%s", present);
    }
    return false;
}

/* Makes a lease vacant that is known to be `lease`; the voter's own election says of which kind.
 * What is no lease at all would be nobody's to renew, and stay for ever. */
static void take_away(tddp_launch_election *election, int voter, const char *lease)
{
    char copy[TDDP_LAUNCH_LEASE_BYTES];
    int endpoint;
    int term;
    (void)snprintf(copy, sizeof copy, "%s", lease);
    if (is_given(copy, &endpoint, &term) ? raise_term(election, voter, term) : !is_vacant(copy)) {
        (void)swap(election, voter, copy, "");
    }
}

/* --- the voter ------------------------------------------------------------------------------- */

static void look_after_vote(tddp_launch_election *election)
{
    int self = election->opts.self;
    int64_t begin = now(election);
    bool young = begin - election->begin_ns < election->opts.lease_ns;
    const char *vacant = young ? "young" : "free";
    const char *lease = election->votes[self].lease;
    (void)swap(election, self, "", vacant);
    if (!election->votes[self].answers) {
        return;
    }
    if (strcmp(lease, "young") == 0 && !young) {
        (void)swap(election, self, "young", "free");
    }
    if (strcmp(lease, election->seen) != 0) {
        (void)snprintf(election->seen, sizeof election->seen, "%s", lease);
        election->seen_ns = now(election); /* later than it was written */
    } else if (begin - election->seen_ns >= election->opts.lease_ns) {
        take_away(election, self, lease);
    }
}

/* --- the leader ------------------------------------------------------------------------------ */

/* Until when a majority of the leases is ours: that of the majority's oldest renewal. */
static void count_leases(tddp_launch_election *election)
{
    int64_t oldest = 0;
    for (int i = 0; i < election->opts.count; i++) {
        int newer = 0;
        int64_t held = election->votes[i].held_ns;
        for (int j = 0; j < election->opts.count; j++) {
            newer += election->votes[j].held_ns >= held;
        }
        oldest = newer >= majority(election) && held > oldest ? held : oldest;
    }
    election->until_ns = oldest + election->opts.lease_ns - election->opts.lease_ns / 10;
}

/* Renews one lease, or takes it if it has become free. A young one is left: if this leader were
 * deposed without knowing it yet, what that store forgot may be the next leader's vote. */
static void renew_one(tddp_launch_election *election, int voter)
{
    tddp_launch_vote *vote = &election->votes[voter];
    char lease[TDDP_LAUNCH_LEASE_BYTES];
    char expected[TDDP_LAUNCH_LEASE_BYTES];
    write_lease(election, lease);
    for (int i = 0; i < 2; i++) { /* once more if it is not what it was when last seen */
        (void)snprintf(expected, sizeof expected, "%s", vote->lease);
        bool ours = is_ours(election, expected);
        int64_t sent = now(election);
        if (swap(election, voter, ours ? expected : "free", lease)) {
            vote->held_ns = sent;
            return;
        }
        if (!vote->answers) {
            return;
        }
    }
}

static void renew(tddp_launch_election *election)
{
    int64_t begin = now(election);
    election->renew_ns = begin + election->opts.lease_ns / RENEWALS;
    election->renewals++;
    renew_one(election, election->opts.self);
    for (int i = 0; i < election->opts.count; i++) {
        if (i != election->opts.self) {
            renew_one(election, i);
        }
    }
    if (now(election) < election->until_ns) { /* else it was deposed meanwhile, and stays so */
        count_leases(election);
    }
}

/* --- the candidate --------------------------------------------------------------------------- */

/* Learns one vote; `*term` becomes the highest seen. */
static void look_at(tddp_launch_election *election, int voter)
{
    tddp_launch_vote *vote = &election->votes[voter];
    static const char *const keys[] = {"lease", "term", "ended"};
    char values[3][TDDP_LAUNCH_LEASE_BYTES];
    int endpoint;
    int64_t term;
    int given;
    vote->answers = true;
    for (int i = 0; i < 3 && vote->answers; i++) {
        vote->answers = election->opts.exchange(election->opts.context, voter, keys[i], "", NULL,
                                                values[i]) == TDDP_OK;
    }
    if (!vote->answers) {
        return;
    }
    (void)snprintf(vote->lease, sizeof vote->lease, "%s", values[0]);
    vote->ended = values[2][0] != '\0';
    if (tddp_parse_int(values[1], 0, HIGHEST_TERM, &term) && term > election->term) {
        election->term = (int)term;
    }
    if (is_given(values[0], &endpoint, &given) && given <= HIGHEST_TERM && given > election->term) {
        election->term = given;
    }
}

/* Whether votes that count are vacant: of a majority, or of all where some are young. */
static bool is_vacancy(const tddp_launch_election *election)
{
    int vacant = 0;
    int mature = 0;
    for (int i = 0; i < election->opts.count; i++) {
        const tddp_launch_vote *vote = &election->votes[i];
        bool counts = vote->answers && !vote->ended && is_vacant(vote->lease);
        vacant += counts;
        mature += counts && strcmp(vote->lease, "free") == 0;
    }
    const tddp_launch_vote *own = &election->votes[election->opts.self];
    return own->answers && !own->ended && is_vacant(own->lease) &&
           (vacant == election->opts.count || mature >= majority(election));
}

static uint64_t random_below(tddp_launch_election *election, uint64_t below)
{
    election->random =
        election->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (election->random >> 33) % below;
}

/* Asks one voter for its lease; whether it was given. */
static bool ask(tddp_launch_election *election, int voter, const char *lease, int *mature)
{
    tddp_launch_vote *vote = &election->votes[voter];
    bool young = strcmp(vote->lease, "young") == 0;
    int64_t sent = now(election);
    vote->held_ns = 0;
    if (!vote->answers || vote->ended || !is_vacant(vote->lease) ||
        !swap(election, voter, young ? "young" : "free", lease)) {
        return false;
    }
    vote->held_ns = sent;
    *mature += !young;
    return true;
}

static void give_back(tddp_launch_election *election)
{
    for (int i = 0; i < election->opts.count; i++) {
        tddp_launch_vote *vote = &election->votes[i];
        if (vote->held_ns) {
            vote->held_ns = 0;
            take_away(election, i, vote->lease);
            if (vote->answers && is_ours(election, vote->lease)) {
                take_away(election, i, vote->lease); /* a renewal had arrived, unanswered */
            }
        }
    }
}

static void stand(tddp_launch_election *election)
{
    char lease[TDDP_LAUNCH_LEASE_BYTES];
    int mature = 0;
    election->term++;
    election->renewals = 0;
    write_lease(election, lease);
    bool own = ask(election, election->opts.self, lease, &mature);
    int given = own;
    for (int i = 0; own && i < election->opts.count; i++) {
        given += i != election->opts.self && ask(election, i, lease, &mature);
    }
    count_leases(election);
    election->leads = own && (given == election->opts.count || mature >= majority(election)) &&
                      now(election) < election->until_ns;
    if (!election->leads) {
        uint64_t pause = 1 + random_below(election, MOST_PAUSE_MS);
        give_back(election);
        election->pause_ns = now(election) + (int64_t)pause * TDDP_NS_PER_MS;
    }
    election->renew_ns = now(election) + election->opts.lease_ns / RENEWALS;
    election->try_ns = 0;
}

static void look_for_vacancy(tddp_launch_election *election)
{
    const tddp_launch_vote *own = &election->votes[election->opts.self];
    if (!own->answers || !is_vacant(own->lease)) {
        election->try_ns = 0; /* there is a leader, or was a moment ago */
        return;
    }
    for (int i = 0; i < election->opts.count; i++) {
        look_at(election, i);
    }
    int64_t moment = now(election);
    if (!is_vacancy(election) || moment < election->pause_ns) {
        election->try_ns = 0;
    } else if (election->try_ns == 0) {
        election->try_ns = moment + election->opts.self * STAGGER_MS * TDDP_NS_PER_MS;
    }
    if (election->try_ns != 0 && moment >= election->try_ns) {
        stand(election);
    }
}

/* For good: what leases there are run out, and the next time has another TERM. */
static void depose_if_late(tddp_launch_election *election)
{
    if (election->leads && now(election) >= election->until_ns) {
        election->leads = false;
        for (int i = 0; i < election->opts.count; i++) {
            election->votes[i].held_ns = 0;
        }
    }
}

void tddp_launch_election_step(tddp_launch_election *election)
{
    look_after_vote(election);
    depose_if_late(election);
    if (election->leads && now(election) >= election->renew_ns) {
        renew(election);
        depose_if_late(election);
    }
    if (!election->leads) {
        look_for_vacancy(election);
    }
}

/* --- ends ------------------------------------------------------------------------------------ */

void tddp_launch_election_resign(tddp_launch_election *election)
{
    if (election->leads) {
        election->leads = false;
        give_back(election);
    }
}

bool tddp_launch_election_end(tddp_launch_election *election, const char *message)
{
    bool all = true;
    for (int i = 0; i < election->opts.count; i++) {
        char present[TDDP_LAUNCH_LEASE_BYTES];
        tddp_launch_vote *vote = &election->votes[i];
        vote->ended = vote->ended || election->opts.exchange(election->opts.context, i, "ended", "",
                                                             message, present) == TDDP_OK;
        all = all && vote->ended;
    }
    return all;
}
