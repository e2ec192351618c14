/*
 * Garbage collector roots: Ruby objects that C needs while no Ruby object refers to them, such as a
 * pending work, a model that a graph may come to, or what libtorch's graph calls in backward. One
 * object that is always there marks those whose owner says so. Entered with the GVL held, which
 * guards the list; any thread may unpin.
 */
#include "torch_ddp.h"

#include <stdatomic.h>
#include <stdlib.h>

static tddp_rb_root *roots;

void tddp_rb_root_add(tddp_rb_root *root)
{
    root->next = roots;
    if (roots != NULL)
        roots->at = &root->next;
    root->at = &roots;
    roots = root;
}

void tddp_rb_root_remove(tddp_rb_root *root)
{
    if (root->at == NULL)
        return;
    *root->at = root->next;
    if (root->next != NULL)
        root->next->at = root->at;
    root->at = NULL;
}

static void mark_roots(void *nothing)
{
    (void)nothing;
    for (tddp_rb_root *root = roots, *next; root != NULL; root = next) {
        const tddp_rb_need need = root->need(root);
        next = root->next;
        if (need == TDDP_RB_NEEDED)
            rb_gc_mark(root->object);
        if (need == TDDP_RB_DONE) {
            tddp_rb_root_remove(root);
            if (root->removed != NULL)
                root->removed(root);
        }
    }
}

/* Not write-barrier protected, so that every minor collection marks it. */
static const rb_data_type_t keeper_type = {
    .wrap_struct_name = "Ruby objects that libtddp and libtorch need",
    .function = {.dmark = mark_roots},
};

/* --- roots that any thread may release -------------------------------------------------------- */

typedef struct pin {
    tddp_rb_root root;
    atomic_bool released;
} pin;

static tddp_rb_need pin_need(const tddp_rb_root *root)
{
    return atomic_load(&((const pin *)root)->released) ? TDDP_RB_DONE : TDDP_RB_NEEDED;
}

static void pin_free(tddp_rb_root *root)
{
    free(root);
}

tddp_rb_root *tddp_rb_pin(VALUE object)
{
    pin *made = malloc(sizeof(*made));
    if (made == NULL)
        rb_memerror();
    made->root = (tddp_rb_root){.object = object, .need = pin_need, .removed = pin_free};
    atomic_init(&made->released, false);
    tddp_rb_root_add(&made->root);
    return &made->root;
}

void tddp_rb_unpin(void *root)
{
    atomic_store(&((pin *)root)->released, true);
}

void tddp_rb_init_roots(void)
{
    rb_gc_register_mark_object(TypedData_Wrap_Struct(rb_cObject, &keeper_type, &roots));
}
