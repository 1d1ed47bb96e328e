/* What `tidepool plan` says: computed once, printed as a table or as JSON. One thread. */
#pragma once
#include "proto/base/buf.h"
#include "worker/cache/memory_plan.h"
#include "worker/model/model_weights.h"
#include "worker/plan/plan_options.h"

/* layer: one layer over the whole prompt before the next; full KV of one layer, the hidden states of all tokens between layers.
 * chunk: one chunk through all layers; full KV of every layer.
 * one_shot: the whole prompt as one chunk through all layers; full KV of every layer, and Q, K, V and hidden states of the whole prompt (the MLP runs over 512 tokens
 * at a time even so). Each is what the engine takes when it is configured so. */
enum plan_order { PLAN_LAYER, PLAN_CHUNK, PLAN_ONE_SHOT, PLAN_ORDER_COUNT };
extern const char *const plan_order_names[PLAN_ORDER_COUNT]; /* "layer-major", ... */

struct plan_report {
    const struct plan_options *options;
    struct model_config whole, model;       /* model: the part of rank 0, which is the largest; the whole with --tp 1 */
    struct model_weights_size stored, bf16; /* stored: zeros for a model without files */
    size_t weights;                         /* device bytes of the dtype asked for */
    const char *weights_name;               /* "stored", "q4_k" */
    char device[128];                       /* as the device calls itself: "cpu avx2 2 threads" */
    int context, n_prompt;
    struct memory_plan orders[PLAN_ORDER_COUNT];
    struct memory_fit fits[PLAN_ORDER_COUNT];  /* with device_memory */
    int longest[PLAN_ORDER_COUNT];
};

/* -EINVAL and the errno of opening files, with a text that names the option. */
int plan_report_make(const struct plan_options *options, struct plan_report *ret_report, struct error *err);
/* plan_model.c: configuration and sizes of the weights, from files or the known models. */
int plan_model_read(const struct plan_options *options, const struct kernel_ops *ops, struct plan_report *report, struct error *err);
/* Appends to `out`: -ENOBUFS, -ENOMEM. */
int plan_report_text(const struct plan_report *report, struct buf *out);
int plan_report_json(const struct plan_report *report, struct buf *out);
