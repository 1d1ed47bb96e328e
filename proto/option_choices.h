/* Words of options that several programs take: the launcher hands them on, the planner predicts with them, the worker obeys. One list each, NULL-terminated, so that an
 * OPTION_ENUM's value is an index into it. */
#pragma once

extern const char *const kv_format_choices[];     /* in the order of enum kv_format */
extern const char *const fetch_unit_choices[];    /* fetch_unit_tokens */
extern const char *const prefill_choices[];       /* in the order of enum prefill_values */
extern const char *const prefill_order_choices[]; /* in the order of enum prefill_order */
extern const char *const bridge_choices[];        /* in the order of enum bridge_place */
extern const char *const weights_choices[];       /* of a GPU: chosen by its memory, expanded once, or as the file has them and expanded for each GEMM */
extern const char *const device_choices[];        /* in the order of enum backend_choice */
extern const char *const isa_choices[];           /* in the order of enum cpu_isa */
extern const char *const selector_choices[], *const scorer_choices[];

/* The names of the worker's selectors and scorers with a separator between, for help texts and messages: SELECTOR_NAMES(", "). */
#define SELECTOR_NAMES(separator) \
    "snapkv" separator "pyramidkv" separator "adakv" separator "chunkkv" separator "keydiff" separator "h2o" separator "tova" separator "streaming"
#define SCORER_NAMES(separator) "index2" separator "minmax" separator "mean" separator "meanvar" separator "recent" separator "oracle"

/* Tokens of a choice of fetch_unit_choices. */
int fetch_unit_tokens(int choice);
