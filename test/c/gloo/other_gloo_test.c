/* A process that exports another Gloo's symbols, as libtorch does as pytorch.org ships it. */
#include "world.h"

static int calls;

/* Gloo's gloo::transport::tcp::CreateDevice(); this program's symbols come before those of
 * libraries. */
void create_device(void) __asm__("_ZN4gloo9transport3tcp12CreateDeviceERKNS1_4attrE");
__attribute__((visibility("default"))) void create_device(void)
{
    calls++;
    abort();
}

#ifdef __SANITIZE_ADDRESS__
TEST(sanitizers_refuse_the_flag)
{
    check_skip("a sanitizer is in use");
}
#else
MULTI_TEST(the_module_uses_its_own, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    float x = (float)(rank + 1);
    CHECK_OK(tddp_all_reduce(group, buffer_of(&x, 1, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    CHECK_DOUBLE(x, 3, 0);
    CHECK_INT(calls, 0);
    leave(group, store);
}
#endif
