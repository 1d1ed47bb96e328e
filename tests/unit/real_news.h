/* News text for the real model: what the study of fidelity compared methods on. */
#pragma once
#include "bench/fidelity/make_cases.h"

/* One context of n_context tokens and the n_positions that follow; case_set_fini frees it. Where model or text is not there the test ends, skipped. */
void real_news_case(struct case_set *set, int n_context, int n_positions);
