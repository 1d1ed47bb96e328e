#include "proto/option_choices.h"
#include "proto/block_layout.h"
#include <stddef.h>

#define COMMA ,

const char *const kv_format_choices[] = {"k8v4", "k8v8", "bf16", NULL};
const char *const fetch_unit_choices[] = {"16", "128", NULL};
const char *const prefill_choices[] = {"consistent", "exact", NULL};
const char *const prefill_order_choices[] = {"layer", "chunk", NULL};
const char *const bridge_choices[] = {"device", "host", "auto", NULL};
const char *const device_choices[] = {"auto", "cpu", "cuda", NULL};
const char *const weights_choices[] = {"auto", "bf16", "stored", NULL};
const char *const isa_choices[] = {"auto", "plain", "avx2", "avx512", NULL};
const char *const selector_choices[] = {SELECTOR_NAMES(COMMA), NULL};
const char *const scorer_choices[] = {SCORER_NAMES(COMMA), NULL};

int fetch_unit_tokens(int choice)
{
    return choice == 0 ? SUBPAGE_TOKENS : BLOCK_TOKENS;
}
