#include "tests/unit/rank_run.h"
#include "worker/cache/memory_plan.h"
#include "worker/model/model.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_RANKS = 8 };
static const uint64_t deadline_us = 60000000;

/* In processes other than the test's own nothing may be asserted; what fails is said here and in the exit status. */
#define TRY(cond, ...)                                                      \
    do {                                                                    \
        if (!(cond)) {                                                      \
            fprintf(stderr, "rank %d: %s: ", r->rank, #cond);               \
            fprintf(stderr, __VA_ARGS__);                                   \
            fprintf(stderr, "\n");                                          \
            return -1;                                                      \
        }                                                                   \
    } while (0)

struct rank {
    const struct rank_run *run;
    int rank;
    const uint8_t *id;
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct collective *collective;
    struct engine *engine;
    uint8_t *fingerprint;       /* [FINGERPRINT_BYTES], where the test's process reads it */
    size_t stream_bytes;        /* MEM_WORKSPACE of the stream itself, which no plan counts */
    struct error err;
};

static int open_model(struct rank *r)
{
    const struct kernel_backend *b = r->run->backend;
    const struct device_config device = {.n_threads = 1};
    TRY(b->device->open(&device, &r->device) == 0 && b->device->stream_create(r->device, &r->stream) == 0, "no device");
    struct device_memory_stats stats;
    struct device_properties properties;
    b->device->memory_stats(r->device, &stats);
    b->device->properties(r->device, &properties);
    r->stream_bytes = stats.now[MEM_WORKSPACE] - properties.fixed_bytes;
    const struct model_open_params open = {
        .path = r->run->path, .rank = r->rank, .n_ranks = r->run->n_ranks, .dev = b->device, .ops = b->ops, .device = r->device, .stream = r->stream};
    TRY(model_open(&open, &r->model, &r->err) >= 0, "%s", r->err.text);
    return 0;
}

static int join_group(struct rank *r)
{
    const struct kernel_backend *b = r->run->backend;
    struct collective_config config = {
        .device = r->device, .rank = r->rank, .n_ranks = r->run->n_ranks, .gather_columns = model_gather_columns(&r->model->config), .deadline_us = deadline_us};
    if (r->run->n_ranks == 1)
        return 0;
    memcpy(config.id, r->id, sizeof(config.id));
    TRY(b->collective->open(&config, &r->collective, &r->err) == 0, "%s", r->err.text);
    model_join(r->model, b->collective, r->collective);
    return 0;
}

/* What a plan and a measurement of the file say is what is held. */
static int check_memory(struct rank *r)
{
    const struct rank_run *run = r->run;
    const struct model_weights_params params = {.config = &r->model->config, .ops = run->backend->ops};
    struct model_weights_params p = params;
    struct weight_source source;
    struct model_weights_size size;
    struct device_memory_stats stats;
    struct memory_plan plan;
    const struct memory_plan_params plan_params = {.model = &r->model->config, .dev = run->backend->device, .ops = run->backend->ops, .collective = run->backend->collective,
        .device = r->device, .stream = r->stream, .engine = run->config, .n_prompt = run->n_prompt, .max_new = run->n_decode};
    TRY(weight_source_open(run->path, &source, &r->err) == 0, "%s", r->err.text);
    p.source = &source;
    TRY(model_weights_measure(&p, WEIGHT_BF16, &size, &r->err) == 0, "%s", r->err.text);
    weight_source_close(&source);
    run->backend->device->memory_stats(r->device, &stats);
    TRY(stats.now[MEM_WEIGHTS] == size.device_bytes, "%zu bytes of weights, measured %zu", stats.now[MEM_WEIGHTS], size.device_bytes);
    TRY(memory_plan_init(&plan_params, &plan, &r->err) == 0, "%s", r->err.text);
    stats.peak[MEM_WORKSPACE] -= r->stream_bytes;
    for (int tag = MEM_WEIGHTS + 1; tag < MEM_TAG_COUNT; tag++)
        TRY(stats.peak[tag] == plan.peak[tag], "%s: at most %zu bytes, planned %zu", mem_tag_name((enum mem_tag)tag), stats.peak[tag], plan.peak[tag]);
    return 0;
}

static int read_row(struct rank *r, const struct sequence *seq, int row, struct rank_answer *answer)
{
    const struct device_ops *dev = r->run->backend->device;
    float *logits = answer->logits + (size_t)row * (size_t)answer->n_vocab;
    TRY(sequence_logits(seq), "no logits");
    TRY(dev->copy(r->stream, logits, sequence_logits(seq), (size_t)answer->n_vocab * sizeof(float)) == 0 && dev->stream_sync(r->stream) == 0, "copy");
    int best = 0;
    for (int i = 1; i < answer->n_vocab; i++)
        best = logits[i] > logits[best] ? i : best;
    answer->tokens[row] = best;
    return 0;
}

static int n_sequences(const struct rank_run *run)
{
    return run->n_sequences ? run->n_sequences : 1;
}

/* The first prompt is judged where there are several: what one request needs is what was planned then. */
static int prefill(struct rank *r, int i, struct sequence **ret_seq)
{
    const struct rank_run *run = r->run;
    const struct sequence_request request = {
        .prompt = run->prompt, .n_prompt = run->n_prompt - RANK_RUN_SHORTER * i, .max_new = run->n_decode, .prompt_logprobs = i == 0 && run->n_sequences > 1};
    int result;
    TRY(sequence_create(r->engine, &request, ret_seq, &r->err) >= 0, "%s", r->err.text);
    while ((result = sequence_prefill_step(*ret_seq)) > 0)
        ;
    TRY(result == 0, "prefill gives %d", result);
    return 0;
}

static int decode(struct rank *r, struct sequence **seqs, int n, struct rank_answer *answer)
{
    const int rows = r->run->n_decode + 1;
    for (int step = 0; step < r->run->n_decode; step++) {
        int32_t next[RANK_RUN_SEQUENCES];
        for (int i = 0; i < n; i++)
            next[i] = answer->tokens[i * rows + step];
        const int result = engine_decode(r->engine, seqs, next, n);
        TRY(result >= 0, "step %d gives %d", step, result);
        for (int i = 0; i < n; i++)
            if (read_row(r, seqs[i], i * rows + step + 1, answer) < 0)
                return -1;
    }
    return 0;
}

static int answer_prompts(struct rank *r, struct rank_answer *answer)
{
    const struct rank_run *run = r->run;
    struct sequence *seqs[RANK_RUN_SEQUENCES];
    const int n = n_sequences(run);
    run->backend->device->reset_peaks(r->device);
    TRY(engine_create(&run->config, r->model, NULL, &r->engine, &r->err) >= 0, "%s", r->err.text);
    engine_fingerprint(r->engine, r->fingerprint);
    for (int i = 0; i < n; i++)
        if (prefill(r, i, &seqs[i]) < 0 || read_row(r, seqs[i], i * (run->n_decode + 1), answer) < 0)
            return -1;
    if (answer->n_logprobs)
        memcpy(answer->logprobs, sequence_prompt_logprobs(seqs[0]), (size_t)answer->n_logprobs * sizeof(float));
    int result = decode(r, seqs, n, answer);
    if (result == 0 && n == 1)
        result = check_memory(r);
    for (int i = 0; i < n; i++)
        sequence_free(seqs[i]);
    engine_free(r->engine);
    return result;
}

static int close_all(struct rank *r)
{
    const struct kernel_backend *b = r->run->backend;
    TRY(!r->collective || b->collective->status(r->collective) == 0, "a broken group");
    b->collective->close(r->collective);
    model_close(r->model);
    b->device->stream_free(r->stream);
    b->device->close(r->device);
    return 0;
}

/* One rank's answer in shared memory, in whole cache lines. */
static size_t answer_bytes(const struct rank_answer *shape)
{
    const size_t n = (size_t)shape->n_rows * sizeof(int32_t) + ((size_t)shape->n_rows * (size_t)shape->n_vocab + (size_t)shape->n_logprobs) * sizeof(float);
    return (n + 63) / 64 * 64;
}

static struct rank_answer answer_at(char *memory, const struct rank_answer *shape, int rank)
{
    struct rank_answer answer = *shape;
    answer.tokens = (int32_t *)(memory + answer_bytes(shape) * (size_t)rank);
    answer.logits = (float *)(answer.tokens + shape->n_rows);
    answer.logprobs = answer.logits + (size_t)shape->n_rows * (size_t)shape->n_vocab;
    return answer;
}

static int run_rank(const struct rank_run *run, int rank, const uint8_t *id, struct rank_answer answer, uint8_t *fingerprint)
{
    struct rank r = {.run = run, .rank = rank, .id = id, .fingerprint = fingerprint};
    return open_model(&r) < 0 || join_group(&r) < 0 || answer_prompts(&r, &answer) < 0 ? -1 : close_all(&r);
}

static void wait_for(pid_t child, int rank)
{
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d failed", rank);
}

/* Every rank is forked, so that a backend that cannot be forked once it is open never has to be. */
void rank_run(const struct rank_run *run, struct rank_answer *ret_answer)
{
    struct model_config config;
    struct error err = {0};
    uint8_t id[COLLECTIVE_ID_BYTES] = {0};
    pid_t ranks[MOST_RANKS];
    cr_assert(run->n_ranks <= MOST_RANKS && run->n_sequences <= RANK_RUN_SEQUENCES);
    cr_assert_eq(model_config_load(run->path, &config, &err), 0, "%s", err.text);
    const struct rank_answer shape = {.n_rows = n_sequences(run) * (run->n_decode + 1), .n_vocab = config.n_vocab, .n_logprobs = run->n_sequences > 1 ? run->n_prompt - 1 : 0};
    const size_t bytes = answer_bytes(&shape), all = (bytes + FINGERPRINT_BYTES) * (size_t)run->n_ranks;
    char *memory = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert(memory != MAP_FAILED);
    uint8_t *const fingerprints = (uint8_t *)memory + bytes * (size_t)run->n_ranks;
    if (run->n_ranks > 1)
        cr_assert_eq(run->backend->collective->make_id(run->n_ranks, id, &err), 0, "%s", err.text);
    for (int rank = 0; rank < run->n_ranks; rank++)
        if ((ranks[rank] = fork()) == 0)
            _exit(run_rank(run, rank, id, answer_at(memory, &shape, rank), fingerprints + FINGERPRINT_BYTES * rank) == 0 ? 0 : 1);
    for (int rank = 0; rank < run->n_ranks; rank++)
        wait_for(ranks[rank], rank);
    for (int rank = 1; rank < run->n_ranks; rank++)
        cr_assert(memcmp(memory, memory + bytes * (size_t)rank, bytes) == 0, "rank %d has other bits than rank 0", rank);
    for (int rank = 1; rank < run->n_ranks; rank++)
        cr_assert(memcmp(fingerprints + FINGERPRINT_BYTES * (rank - 1), fingerprints + FINGERPRINT_BYTES * rank, FINGERPRINT_BYTES) != 0, "ranks %d and %d share their blocks", rank - 1, rank);
    *ret_answer = answer_at(memory, &shape, 0);
    ret_answer->memory = memory;
    ret_answer->bytes = all;
    memcpy(ret_answer->fingerprint, fingerprints, FINGERPRINT_BYTES);
}

void rank_answer_free(struct rank_answer *answer)
{
    munmap(answer->memory, answer->bytes);
}

static double row_divergence(const float *p, const float *q, int n)
{
    double p_max = (double)p[0], q_max = (double)q[0], p_sum = 0, q_sum = 0, kl = 0;
    for (int i = 1; i < n; i++) {
        p_max = fmax(p_max, (double)p[i]);
        q_max = fmax(q_max, (double)q[i]);
    }
    for (int i = 0; i < n; i++) {
        p_sum += exp((double)p[i] - p_max);
        q_sum += exp((double)q[i] - q_max);
    }
    const double p_log = p_max + log(p_sum), q_log = q_max + log(q_sum);
    for (int i = 0; i < n; i++)
        kl += exp((double)p[i] - p_log) * ((double)p[i] - p_log - (double)q[i] + q_log);
    return kl;
}

double rank_answers_compare(const struct rank_answer *want, const struct rank_answer *got, double logprob_tolerance)
{
    double most = 0;
    for (int i = 0; i < want->n_rows; i++) {
        const size_t at = (size_t)i * (size_t)want->n_vocab;
        cr_assert_eq(want->tokens[i], got->tokens[i], "row %d draws %d, with one rank %d", i, got->tokens[i], want->tokens[i]);
        most = fmax(most, row_divergence(want->logits + at, got->logits + at, want->n_vocab));
    }
    for (int i = 0; i < want->n_logprobs; i++)
        cr_assert_lt(fabs((double)want->logprobs[i] - (double)got->logprobs[i]), logprob_tolerance, "log-probability %d is %g, with one rank %g", i, (double)got->logprobs[i], (double)want->logprobs[i]);
    return most;
}
