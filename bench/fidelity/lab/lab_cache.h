/* Prompts that were prefilled once and serve every method: exact, in one shot. Kept in memory up to a limit, the least recently used go first. Owner thread of the device. */
#pragma once
#include "bench/fidelity/lab/lab.h"
#include "bench/fidelity/method.h"

/* Borrowed until the next call. A case is known by its address and its tokens'. */
int lab_cache_context(struct model *model, const struct fidelity_case *c, const struct lab_context **ret_context);
/* Gives back everything; before the model is closed. */
void lab_cache_clear(void);
