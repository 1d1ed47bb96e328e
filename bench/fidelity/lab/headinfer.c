/* HeadInfer-like (arXiv 2502.12574): K and V of all heads but the one at work lie in host memory, in full precision, and every step moves all of them to the device. Nothing is lost;
 * its figure is the bytes. B and F mean nothing to it.
 *
 * Simplified: the split of heads between device and host is all host (its "everything offloaded" setting), and bytes are counted, not overlapped with compute. */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_attention.h"

static int attend(const struct lab_layer *l, void *arg)
{
    (void)arg;
    l->counters->bytes_slow += (double)l->n_new * l->n_kv_heads * l->n_rows * baseline_row_bytes(l, 16, 16);
    return lab_attend_all(l, l->k, l->v);
}

static const struct baseline headinfer = {.attend = attend};
static const struct fidelity_split everything = {FIDELITY_ALL, FIDELITY_ALL};

static const struct fidelity_method methods[] = {
    {
        .name = "headinfer",
        .text = "everything offloaded, everything fetched each step, bf16",
        .group = GROUP_BASELINE,
        .run = baseline_run,
        .arg = &headinfer,
        .tasks = ON_ALL,
        .splits = &everything,
        .n_splits = 1,
        .importance = 1,
    },
};
const struct fidelity_methods headinfer_methods = {methods, sizeof methods / sizeof *methods};
