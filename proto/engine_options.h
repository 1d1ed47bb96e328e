/* Options of the engine that a worker runs, declared once: the worker obeys them, `tidepool plan` predicts with those that change what memory is needed, and `tidepool serve` hands all of them on.
 * A program's options hold a struct engine_options, and its set the group. */
#pragma once
#include "proto/base/options.h"

enum { ENGINE_RANKS_MAX = 64 };

/* Tags of engine_option_specs. */
enum {
    ENGINE_OPTION_SIZING = 1, /* the planner has it */
    ENGINE_OPTION_COMMON = 2, /* decides what is computed, and so has to be the same on all ranks of a worker */
};

/* Enumerations are indices into the lists of proto/option_choices.h. */
struct engine_options {
    int kv_format, selector, scorer, fetch_unit, prefill, prefill_order, bridge, device, weights, isa;
    int64_t budget, recent, fetch, chunk, context, max_running, tp, threads, memory_limit, page_cache;
    bool reuse_generated, graphs;
};

extern const struct option_spec engine_option_specs[]; /* ended by one without a name */

/* The group in the set of a program whose struct is `type` and has it as `engine`; tags: 0 for all of them. */
#define ENGINE_OPTION_GROUP(type, wanted_tags) \
    {.specs = engine_option_specs, .offset = offsetof(type, engine), .tags = (wanted_tags)}
