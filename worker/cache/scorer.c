/* The registry of scorers. */
#include "worker/cache/scorer.h"
#include "proto/base/base_assert.h"
#include "proto/option_choices.h"
#include <string.h>

static const struct scorer_ops *const scorers[] = {&scorer_index2, &scorer_minmax, &scorer_mean, &scorer_meanvar, &scorer_recent, &scorer_oracle};

const struct scorer_ops *scorer_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(scorers); i++)
        if (strcmp(scorers[i]->name, name) == 0)
            return scorers[i];
    return NULL;
}

const char *scorer_names(void)
{
    return SCORER_NAMES(", ");
}
