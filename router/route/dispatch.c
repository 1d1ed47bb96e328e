/* The queue and the choice of worker. First in, first out: any worker can take any request, so nobody waits behind a request that has to wait
 * for something special. Requests are given out late, when a worker has room, so that the choice is made with what is known by then. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/route/route_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

void dispatch_kick(struct route *route)
{
    loop_timer_arm(route->dispatch_timer, 0);
}

int dispatch_check_length(uint32_t n_prompt, uint32_t max_tokens, uint32_t context_length, struct error *err)
{
    uint64_t answer = max_tokens ? max_tokens : 1;
    if (n_prompt + answer <= context_length)
        return 0;
    if (n_prompt >= context_length)
        return error_set(err, -EMSGSIZE, "this model's context holds %u tokens, but the prompt alone has %u; shorten it", context_length, n_prompt);
    return error_set(err, -EMSGSIZE,
                     "this model's context holds %u tokens, but the prompt has %u and max_tokens asks for %u more (at most %u fit); "
                     "shorten the prompt or ask for fewer",
                     context_length, n_prompt, max_tokens, context_length - n_prompt);
}

/* -- choice -- */

struct candidates {
    struct policy_candidate view[ROUTE_WORKERS_MAX];
    struct worker *workers[ROUTE_WORKERS_MAX];
    size_t n;
};

/* Longest prefix, in tokens, that the worker's store is believed to hold. Workers of one store and fingerprint share the answer. */
static uint32_t hit_tokens(struct route *route, struct route_request *request, const struct worker *worker, uint64_t now_us)
{
    uint32_t blocks[PREFIX_STORES_MAX];
    if (!worker->feed || !worker->prefix_reuse || request->job.no_cache || request->job.prompt_logprobs)
        return 0;
    const struct block_key *keys = prompt_block_keys(request->job.prompt, worker->fingerprint);
    if (!keys)
        return 0;
    int store = store_feed_number(worker->feed);
    prefix_index_match(route->index, keys, request->job.prompt->n_blocks, now_us, store + 1, blocks);
    return blocks[store] * PROMPT_BLOCK_TOKENS;
}

static const struct worker *same_hits(const struct candidates *found, const struct worker *worker)
{
    for (size_t i = 0; i < found->n; i++) {
        const struct worker *other = found->workers[i];
        if (other->feed == worker->feed && other->prefix_reuse == worker->prefix_reuse &&
            memcmp(other->fingerprint, worker->fingerprint, FINGERPRINT_BYTES) == 0)
            return other;
    }
    return NULL;
}

static void add_candidate(struct candidates *found, struct route_request *request, struct worker *worker, uint64_t now_us)
{
    const struct worker *twin = same_hits(found, worker);
    uint32_t hit = 0;
    for (size_t i = 0; twin && i < found->n; i++)
        if (found->workers[i] == twin)
            hit = found->view[i].hit_tokens;
    if (!twin)
        hit = hit_tokens(worker->route, request, worker, now_us);
    found->view[found->n] = (struct policy_candidate){.hit_tokens = hit, .load_tokens = worker->load_tokens, .last_sent = worker->last_sent};
    found->workers[found->n++] = worker;
}

static int check_fit(const struct route_request *request, const struct worker *worker, struct error *err)
{
    uint32_t max_tokens = request->max_tokens ? request->max_tokens : request->job.max_tokens;
    return dispatch_check_length(request->job.prompt->n, max_tokens, worker->context_length, err);
}

/* Workers that may take the request now. One that just failed it is asked again only if there is no other. */
static void find_candidates(struct route *route, struct route_request *request, struct candidates *ret_found)
{
    uint64_t now_us = clock_now_us();
    ret_found->n = 0;
    for (int avoid = 1; avoid >= 0 && ret_found->n == 0; avoid--)
        for (uint32_t i = 0; i < route->n_workers; i++)
            if (worker_takes(route->workers[i]) && check_fit(request, route->workers[i], NULL) == 0 && !(avoid && route->workers[i] == request->avoid))
                add_candidate(ret_found, request, route->workers[i], now_us);
}

/* -- sending -- */

/* The ids that end the answer: the caller's and the model's. */
static int set_stop_ids(struct route_request *request, const struct worker *worker)
{
    const struct route_job *job = &request->job;
    if (request->eos_ids)
        return 0;
    uint32_t *ids = malloc((job->n_stop_ids + worker->n_eos_ids + 1) * sizeof(*ids));
    if (!ids)
        return -ENOMEM;
    uint32_t n = 0;
    for (uint32_t i = 0; i < job->n_stop_ids; i++)
        ids[n++] = job->stop_ids[i];
    for (uint32_t i = 0; !job->ignore_eos && i < worker->n_eos_ids; i++)
        ids[n++] = worker->eos_ids[i];
    request->eos_ids = ids;
    request->n_eos_ids = n;
    return 0;
}

static void fill_sampling(const struct route_sampling *from, Tidepool__Engine__Sampling *to, Tidepool__Engine__LogitBias *bias,
                          Tidepool__Engine__LogitBias **bias_at)
{
    *to = (Tidepool__Engine__Sampling)TIDEPOOL__ENGINE__SAMPLING__INIT;
    to->temperature = from->temperature;
    to->top_k = from->top_k;
    to->top_p = from->top_p;
    to->min_p = from->min_p;
    to->presence_penalty = from->presence_penalty;
    to->frequency_penalty = from->frequency_penalty;
    to->repetition_penalty = from->repetition_penalty;
    to->seed = from->seed;
    to->logprobs = from->logprobs;
    to->n_logprobs = from->n_logprobs;
    for (uint32_t i = 0; i < from->n_logit_bias; i++) {
        bias[i] = (Tidepool__Engine__LogitBias)TIDEPOOL__ENGINE__LOGIT_BIAS__INIT;
        bias[i].token = from->logit_bias[i].id;
        bias[i].bias = from->logit_bias[i].bias;
        bias_at[i] = &bias[i];
    }
    to->logit_bias = bias_at;
    to->n_logit_bias = from->n_logit_bias;
}

static int send_generate(struct worker *worker, struct route_request *request)
{
    const struct route_job *job = &request->job;
    Tidepool__Engine__Generate message = TIDEPOOL__ENGINE__GENERATE__INIT;
    Tidepool__Engine__Sampling sampling;
    uint32_t n_bias = job->sampling.n_logit_bias;
    Tidepool__Engine__LogitBias *bias = malloc((n_bias + 1) * (sizeof(*bias) + sizeof(bias)));
    if (!bias)
        return -ENOMEM;
    fill_sampling(&job->sampling, &sampling, bias, (Tidepool__Engine__LogitBias **)(bias + n_bias));
    message.epoch = worker->route->epoch;
    message.prompt = job->prompt->tokens;
    message.n_prompt = job->prompt->n;
    message.generated = request->generated;
    message.n_generated = request->n_generated;
    message.max_tokens = request->max_tokens;
    message.min_tokens = job->min_tokens;
    message.stop_ids = request->eos_ids;
    message.n_stop_ids = request->n_eos_ids;
    message.sampling = &sampling;
    message.cache_salt.data = job->prompt->salt;
    message.cache_salt.len = job->prompt->n_salt;
    message.no_cache = job->no_cache;
    message.prompt_logprobs = job->prompt_logprobs && !request->prefilled_told;
    int rc = worker_link_send(worker, ENGINE_GENERATE, request->wire_id, &message.base);
    free(bias);
    return rc;
}

static void predict_blocks(struct route *route, struct route_request *request, const struct worker *worker)
{
    struct prompt *prompt = request->job.prompt;
    const struct block_key *keys = worker->feed && !request->job.no_cache ? prompt_block_keys(prompt, worker->fingerprint) : NULL;
    if (keys)
        prefix_index_predict(route->index, store_feed_number(worker->feed), keys, prompt->n_blocks, clock_now_us(), ROUTE_PREDICT_US);
}

/* From the queue into the worker's list. */
static void assign(struct route *route, struct route_request *request, struct worker *worker, uint32_t hit)
{
    request_unlink(request);
    request->place = REQUEST_SENT;
    request->worker = worker;
    request->avoid = NULL;
    request->wire_id = ++route->next_wire_id;
    uint32_t to_prefill = request->job.prompt->n - (hit < request->job.prompt->n ? hit : request->job.prompt->n);
    request->load_tokens = ROUTE_DECODE_LOAD_TOKENS + to_prefill;
    route_list_insert(worker->requests.prev, &request->link);
    request_table_add(request);
    worker->n_inflight++;
    worker->load_tokens += request->load_tokens;
    worker->last_sent = ++route->next_dispatch;
    worker->dispatched++;
    route->n_running++;
    route->counters.dispatched++;
}

/* Gives the request to a worker. After this it is running, moving, or ended. */
static void send_to(struct route *route, struct route_request *request, struct worker *worker, uint32_t hit)
{
    if (!request->max_tokens)
        request->max_tokens = request->job.max_tokens ? request->job.max_tokens : worker->context_length - request->job.prompt->n;
    if (set_stop_ids(request, worker) < 0) {
        request_fail(request, ROUTE_LOST, "out of memory");
        return;
    }
    assign(route, request, worker, hit);
    predict_blocks(route, request, worker);
    uint64_t wire_id = request->wire_id;
    int rc = send_generate(worker, request);
    if (rc < 0 && request_find(route, wire_id) == request) { /* not packed; otherwise the worker is lost and the request moving */
        if (rc == -EMSGSIZE)
            request_fail(request, ROUTE_TOO_LONG, "the request is larger than a message to a worker may be");
        else
            request_fail(request, ROUTE_LOST, "out of memory");
    }
}

/* True if it is too long for every ready worker: then it has been failed. */
static bool fail_unfit(struct route *route, struct route_request *request)
{
    struct error err;
    bool unfit = false;
    for (uint32_t i = 0; i < route->n_workers; i++) {
        if (route->workers[i]->state != WORKER_READY)
            continue;
        if (check_fit(request, route->workers[i], &err) == 0)
            return false;
        unfit = true;
    }
    if (unfit)
        request_fail(request, ROUTE_TOO_LONG, err.text);
    return unfit;
}

void dispatch_run(void *arg)
{
    struct route *route = arg;
    struct candidates *found = malloc(sizeof(*found));
    if (!found)
        return;
    request_settle_moved(route);
    while (!route_list_is_empty(&route->queue)) {
        struct route_request *request = ROUTE_REQUEST_OF(route->queue.next);
        find_candidates(route, request, found);
        if (found->n == 0 && fail_unfit(route, request))
            continue;
        if (found->n == 0)
            break;
        size_t chosen = route->config.policy->choose(found->view, found->n, request->job.prompt->n);
        ASSERT(chosen < found->n);
        send_to(route, request, found->workers[chosen], found->view[chosen].hit_tokens);
        request_settle_moved(route);
    }
    free(found);
}

/* -- waiting too long -- */

static bool expire(struct route *route, struct route_request *request, bool any_alive, uint64_t now_us)
{
    if (!any_alive && now_us - request->queued_us > route->config.worker_wait_us) {
        request_fail(request, ROUTE_NO_WORKER, "no worker is ready");
        return true;
    }
    if (now_us - request->submitted_us > route->config.queue_timeout_us && request->n_generated == 0) {
        request_fail(request, ROUTE_TIMEOUT, "the request waited too long for a worker");
        return true;
    }
    return false;
}

void dispatch_expire(struct route *route, uint64_t now_us)
{
    bool any_alive = route_n_ready(route) > 0;
    bool again = true;
    while (again) { /* from the start after each end, since it may have ended others */
        again = false;
        for (struct route_link *link = route->queue.next; link != &route->queue && !again; link = link->next)
            again = expire(route, ROUTE_REQUEST_OF(link), any_alive, now_us);
    }
}
