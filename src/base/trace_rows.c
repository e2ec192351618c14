/*
 * Where spans are shown. A viewer draws the spans of one row as a flame graph, so two of them must
 * be disjoint or nested; spans that overlap otherwise (concurrent operations of two groups, or
 * sends and receives) are placed in further rows of their lane. Used under trace.c's lock.
 *
 * Each row remembers its last spans only: one that overlaps an older one is drawn badly, no more.
 */
#include <string.h>

#include "base/trace_parts.h"

enum { LANES = 16, ROWS = 8, REMEMBERED = 16, NAME_BYTES = 64 };

typedef struct row {
    struct {
        int64_t start;
        int64_t end;
    } spans[REMEMBERED];
    size_t count;
} row;

typedef struct lane {
    char name[NAME_BYTES];
    row rows[ROWS];
} lane;

struct tddp_trace_rows {
    lane lanes[LANES];
    int count;
};

static int add_lane(tddp_trace_rows *rows, const char *name)
{
    size_t length = strnlen(name, NAME_BYTES - 1);
    memcpy(rows->lanes[rows->count].name, name, length);
    rows->lanes[rows->count].name[length] = '\0';
    return rows->count++;
}

tddp_trace_rows *tddp_trace_rows_create(void)
{
    tddp_trace_rows *rows = tddp_alloc(sizeof *rows);
    if (rows) {
        /* These two are shown first and together, in whatever order they arrive. */
        (void)add_lane(rows, "training");
        (void)add_lane(rows, "communication");
    }
    return rows;
}

static int find_lane(tddp_trace_rows *rows, const char *name)
{
    for (int i = 0; i < rows->count; i++) {
        if (strncmp(rows->lanes[i].name, name, NAME_BYTES - 1) == 0) {
            return i;
        }
    }
    if (rows->count == LANES) {
        return LANES - 1;
    }
    return add_lane(rows, rows->count == LANES - 1 ? "other lanes" : name);
}

static bool fits(const row *self, int64_t start, int64_t end)
{
    size_t known = self->count < REMEMBERED ? self->count : REMEMBERED;
    for (size_t i = 0; i < known; i++) {
        int64_t its_start = self->spans[i].start;
        int64_t its_end = self->spans[i].end;
        bool disjoint = its_end <= start || end <= its_start;
        bool nested =
            (start <= its_start && its_end <= end) || (its_start <= start && end <= its_end);
        if (!disjoint && !nested) {
            return false;
        }
    }
    return true;
}

tddp_trace_place tddp_trace_rows_place(tddp_trace_rows *rows, const char *name, int64_t start_ns,
                                       int64_t end_ns)
{
    int index = find_lane(rows, name);
    lane *found = &rows->lanes[index];
    int at = 0;
    while (at < ROWS - 1 && !fits(&found->rows[at], start_ns, end_ns)) {
        at++;
    }
    row *taken = &found->rows[at];
    bool fresh = taken->count == 0;
    taken->spans[taken->count % REMEMBERED].start = start_ns;
    taken->spans[taken->count % REMEMBERED].end = end_ns;
    taken->count++;
    return (tddp_trace_place){found->name, at, index * ROWS + at + 1, fresh};
}
