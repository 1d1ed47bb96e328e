/* The registry of selectors. */
#include "worker/cache/selector.h"
#include "proto/base/base_assert.h"
#include "proto/option_choices.h"
#include <string.h>

static const struct selector_ops *const selectors[] = {&selector_snapkv, &selector_pyramidkv, &selector_adakv, &selector_chunkkv,
                                                      &selector_keydiff, &selector_h2o, &selector_tova, &selector_streaming};

const struct selector_ops *selector_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(selectors); i++)
        if (strcmp(selectors[i]->name, name) == 0)
            return selectors[i];
    return NULL;
}

const char *selector_names(void)
{
    return SELECTOR_NAMES(", ");
}
