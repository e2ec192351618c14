/*
 * Texts for terminals and logs. What other processes and nodes have written (their errors, names
 * and keys) must not act on the terminal that shows it. Pure, any thread, no allocation.
 */
#include "base/base.h"

/* The bytes of the control character at `at`, 0 if it is none: C0 but for newline and tab, DEL, and
 * C1 as UTF-8 or as a byte of its own, which is what terminals without UTF-8 act on. */
static size_t control_length(const unsigned char *at)
{
    bool kept = at[0] == '\n' || at[0] == '\t';
    if (at[0] == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0) {
        return 2;
    }
    return (at[0] < 0x20 && !kept) || at[0] == 0x7f || (at[0] >= 0x80 && at[0] < 0xa0) ? 1 : 0;
}

char *tddp_mask_controls(char *text)
{
    const unsigned char *from = (const unsigned char *)text;
    char *to = text;
    while (*from != '\0') {
        if (from[0] == '\r' && from[1] == '\n') { /* the end of a line elsewhere */
            from++;
            continue;
        }
        size_t control = control_length(from);
        if (control > 0) {
            *to++ = '?';
            from += control;
            continue;
        }
        size_t left = tddp_utf8_length(from);
        do {
            *to++ = (char)*from++;
        } while (left-- > 1);
    }
    *to = '\0';
    return text;
}
