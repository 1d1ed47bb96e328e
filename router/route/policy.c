#include "router/route/policy.h"
#include "proto/base/base_assert.h"
#include <string.h>

const struct policy_ops *policy_find(const char *name)
{
    static const struct policy_ops *const all[] = {&policy_prefix, &policy_least_loaded, &policy_round_robin};
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        if (strcmp(all[i]->name, name) == 0)
            return all[i];
    return NULL;
}
