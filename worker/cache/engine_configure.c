#include "worker/cache/engine_configure.h"
#include "proto/option_choices.h"
#include "worker/cache/scorer.h"
#include "worker/cache/selector.h"

struct engine_config engine_configure(const struct engine_options *o)
{
    return (struct engine_config){
        .format = (enum kv_format)o->kv_format,
        .selector = selector_find(selector_choices[o->selector]),
        .budget = (int)o->budget,
        .recent = (int)o->recent,
        .fetch = (int)o->fetch,
        .fetch_unit = fetch_unit_tokens(o->fetch_unit),
        .scorer = scorer_find(scorer_choices[o->scorer]),
        .chunk = (int)o->chunk,
        .values = (enum prefill_values)o->prefill,
        .order = (enum prefill_order)o->prefill_order,
        .bridge = (enum bridge_place)o->bridge,
        .max_batch = (int)o->max_running,
        .reuse_generated = o->reuse_generated,
        .eager_steps = !o->graphs,
        .page_cache = o->page_cache == INT64_MAX ? PAGE_CACHE_AUTO : (size_t)o->page_cache,
    };
}
