#include "tests/unit/real_model.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <unistd.h>

bool real_model_open(struct real_model *m, int n_threads, enum cpu_isa isa)
{
    const struct device_config config = {.n_threads = n_threads, .isa = isa};
    struct error err;
    if (access(REAL_MODEL_PATH, R_OK) < 0)
        cr_skip_test("skipped: %s is not here", REAL_MODEL_PATH);
    const int r = cpu_device_ops()->open(&config, &m->device);
    if (r == -ENODEV)
        return false;
    cr_assert(r >= 0 && cpu_device_ops()->stream_create(m->device, &m->stream) >= 0);
    const struct model_open_params p = {.path = REAL_MODEL_PATH, .dev = cpu_device_ops(), .ops = cpu_kernel_ops(), .device = m->device, .stream = m->stream};
    cr_assert(model_open(&p, &m->model, &err) >= 0, "%s", err.text);
    return true;
}

void real_model_close(struct real_model *m)
{
    model_close(m->model);
    cpu_device_ops()->stream_free(m->stream);
    cpu_device_ops()->close(m->device);
}

struct sequence *real_model_prefilled(struct engine *engine, const struct sequence_request *request)
{
    struct sequence *seq;
    struct error err;
    int r = sequence_create(engine, request, &seq, &err);
    cr_assert(r >= 0, "%s", err.text);
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    cr_assert(r == 0, "prefill gives %d", r);
    return seq;
}
