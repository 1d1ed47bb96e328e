/* The model that deploy/get-model.sh fetches, on the CPU, for tests of what must hold for a real one. Failures are Criterion assertions. */
#pragma once
#include "kernels/kernels.h"
#include "worker/cache/engine.h"
#include "worker/model/model.h"

#define REAL_MODEL_PATH "models/SmolLM2-135M-Instruct.Q4_1.gguf"

struct real_model {
    struct device *device;
    struct stream *stream;
    struct model *model;
};

/* False when this processor lacks the instruction set. Where the model is not there the test ends, skipped. */
bool real_model_open(struct real_model *m, int n_threads, enum cpu_isa isa);
void real_model_close(struct real_model *m);
/* A sequence whose prompt is done. */
struct sequence *real_model_prefilled(struct engine *engine, const struct sequence_request *request);
