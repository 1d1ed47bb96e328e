/* The default: the key index that lies in the block beside the keys, two bits a key dimension.
 *
 *     z[h, t] = scale * q[h] . (min_t + step_t * (64 c_t + 31.5))     c: the top two bits of the rotated key's 8-bit code, each read as the middle of its quarter
 *     e[h]    = log sum over the page's slow tokens t of exp z[h, t]
 *
 * The query has 127 levels a side, so that the dot product is an exact integer. It sees every token, which is what finds a sharp one in a page of others, and costs no memory of
 * the sequence's own: block and index are shared by all that share the prefix. d/4 bytes and two fp16 a token. The idea of a low-bit index instead of summaries is YAKV's
 * (arXiv 2604.08426); that it can be the upper bits of the code itself was measured here. */
#include "worker/cache/scorer.h"

const struct scorer_ops scorer_index2 = {
    .name = "index2",
    .kernel = PAGE_SCORER_INDEX2,
};
