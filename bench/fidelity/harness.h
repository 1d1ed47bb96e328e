/* A whole run: opens model, text and store, makes the cases, runs the rows, writes the results after each. */
#pragma once
#include "bench/fidelity/fidelity_options.h"

/* 0 when every row came through, 1 when some failed, negative when there are no results. */
int harness_run(const struct fidelity_options *options, struct error *err);
/* Names the rows to stdout. */
int harness_list(const struct fidelity_options *options, struct error *err);
