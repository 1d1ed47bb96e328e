/* Shared by the files of router/api only. */
#pragma once
#include "proto/base/json_write.h"
#include "router/api/api_error.h"
#include "router/api/api_request.h"
#include "router/api/api_server.h"
#include "router/api/metrics.h"
#include "router/api/work_pool.h"
#include "router/http/http_exchange.h"

enum {
    API_REPLY_BYTES_MAX = 64 << 20,
    API_CHUNK_BYTES_MAX = 4 << 20,
    API_UNKNOWN_NAMES_MAX = 256,
    API_PROMPT_LOGPROBS_MAX = 400000, /* numbers in one message of a worker */
    API_RETRY_AFTER_S = 5,            /* when no worker is ready */
};

struct generation;

struct api {
    struct api_config config;
    struct http_server *http;
    struct work_pool *pool;
    struct loop_source *tick_timer;
    struct metrics metrics;
    struct generation *generations; /* list */
    uint32_t n_generations;
    int64_t started_s;              /* wall clock; "created" of the model */
    bool draining;
    char unknown_names[API_UNKNOWN_NAMES_MAX][64]; /* fields already logged */
    uint32_t n_unknown_names;
};

/* Logprobs as JSON pieces, taken out with every chunk. Chat: objects. Completions: four parallel arrays. All without brackets. */
struct logprob_log {
    struct buf content;                              /* chat */
    struct buf tokens, logprobs, tops, offsets;      /* completions */
    uint32_t n;                                      /* entries since the last take */
    uint64_t text_chars;                             /* characters before the next token, for text_offset */
};

struct choice {
    struct generation *g;
    uint32_t index;               /* in the answer */
    struct prompt *prompt;        /* borrowed from the generation */
    uint32_t prompt_index;
    struct route_request *request; /* NULL: not yet submitted, or ended */
    bool submitted, ended, role_sent, ids_begun;
    struct detok detok;
    struct stop_text *stop;
    struct buf text;              /* not yet sent; the whole answer when not streaming */
    struct buf ids;               /* return_token_ids: JSON numbers, not yet sent */
    struct logprob_log log;
    uint32_t n_tokens;
    const char *finish_reason;    /* "stop", "length"; NULL while running */
    int stop_index;               /* of the stop string that ended it, or -1 */
    int64_t stop_id;              /* stop token of the caller's that ended it, or -1 */
    uint64_t first_token_us, last_token_us;
    /* from the worker */
    bool prefilled;
    uint32_t cached_tokens, retries;
    uint64_t bytes_loaded, bytes_to_pool, bytes_attended, bytes_missed, queue_us, prefill_us;
    char worker[64];
};

struct generation {
    struct api *api;
    struct generation *prev, *next;
    struct http_exchange *exchange; /* NULL: the client has gone */
    struct api_request req;
    struct api_error err;
    char *body;
    size_t body_len;
    struct work work;
    bool working;                 /* a thread of the pool has it */
    struct template_render *render;
    char *rendered;
    size_t n_rendered;
    uint8_t fingerprints[PROMPT_FINGERPRINTS_MAX][FINGERPRINT_BYTES];
    int n_fingerprints;
    int tenant;
    struct token_ids ids;         /* tokenize: what is asked for */
    struct prompt **prompts;      /* [n_prompts] */
    uint32_t n_prompts;
    struct choice *choices;       /* [n_choices] */
    uint32_t n_choices, n_open;
    uint64_t start_us, seed;
    uint32_t retry_after_s;       /* of a 429 */
    int64_t created_s;
    char id[48];
};

/* -- generation.c -- */
/* Takes over the exchange. */
void generation_start(struct api *api, struct http_exchange *exchange, enum api_kind kind, int tenant);
void generation_free(struct generation *g);
/* Answers with g->err, or ends the stream with it, and frees. */
void generation_fail(struct generation *g);
/* Prompts are ready: choices are made and submitted. */
void generation_route(struct generation *g);
/* One choice has ended. Frees the generation with the last one. */
void generation_choice_ended(struct generation *g);
void generation_tick(struct api *api);

/* Frees after the caller has answered. */
void generation_answered(struct generation *g, int status);

/* -- prepare.c: from the body to prompts -- */
void prepare_start(struct generation *g);

/* -- choice.c -- */
int choice_init(struct choice *c, struct generation *g, uint32_t index, uint32_t prompt_index);
void choice_fini(struct choice *c);
/* Queues it; on failure g->err is set. */
int choice_submit(struct choice *c, bool admitted);

/* -- chat_format.c, completion_format.c, api_format.c -- */
enum chunk_part { CHUNK_ROLE, CHUNK_TEXT, CHUNK_FINISH };
void chat_chunk(struct choice *c, enum chunk_part part);
void completion_chunk(struct choice *c, enum chunk_part part);
int chat_answer(struct generation *g, struct buf *out);
int completion_answer(struct generation *g, struct buf *out);
/* "id", "object", "created", "model", ... of every answer and chunk. */
void format_head(const struct generation *g, struct json_writer *w, const char *object);
void format_usage(const struct generation *g, struct json_writer *w);
void format_finish_reason(const struct choice *c, struct json_writer *w);
/* "token_ids" and, with the first chunk, "prompt_token_ids"; nothing unless asked for. */
void format_token_ids(struct choice *c, struct json_writer *w);
void format_prompt_ids(const struct choice *c, struct json_writer *w);
/* Sends one event of the stream. */
void format_send(struct generation *g, struct buf *chunk, struct json_writer *w);
/* A chunk up to its "choices", and what follows them; the end sends it and frees the buffer. */
void format_chunk_begin(const struct generation *g, struct buf *chunk, struct json_writer *w, const char *object);
void format_chunk_end(struct generation *g, struct buf *chunk, struct json_writer *w);
/* A whole answer up to and with its "choices", and its end; that returns as json_write_end. */
void format_answer_begin(struct generation *g, struct buf *out, struct json_writer *w, const char *object, void (*write_choice)(struct choice *, struct json_writer *));
int format_answer_end(const struct generation *g, struct json_writer *w);

/* -- logprobs.c -- */
void logprobs_init(struct logprob_log *log);
void logprobs_fini(struct logprob_log *log);
/* `token` NULL logprob: has_logprob false (the first token of a prompt). bytes[n]: what the token stands for. */
int logprobs_add(struct choice *c, const struct route_token *token, bool has_logprob, const uint8_t *bytes, size_t n);
/* Writes the value of "logprobs" and empties the log; null when not asked for or nothing is there. */
void logprobs_write(struct choice *c, struct json_writer *w);

/* -- tokenize_handler.c, status_handler.c -- */
void tokenize_reply(struct generation *g); /* and frees */
void handle_detokenize(struct api *api, struct http_exchange *exchange);
void handle_models(struct api *api, struct http_exchange *exchange);
void handle_model(struct api *api, struct http_exchange *exchange, const char *name);
void handle_health(struct api *api, struct http_exchange *exchange);
void handle_live(struct api *api, struct http_exchange *exchange);
void handle_version(struct api *api, struct http_exchange *exchange);
void handle_metrics(struct api *api, struct http_exchange *exchange);

/* -- api_server.c -- */
void api_count(struct api *api, enum metrics_endpoint endpoint, int status);
/* Replies with the error; counts it. `retry_after_s` goes into Retry-After of a 429 or 503; 0: a default. */
void api_reply_error(struct api *api, struct http_exchange *exchange, enum metrics_endpoint endpoint, const struct api_error *err, uint32_t retry_after_s);
/* True for the served model, "" and no name at all; else the error is set. */
bool api_model_is_served(const struct api *api, const char *name, struct api_error *err);
void api_note_unknown(struct api *api, const struct api_request *req);

/* -- render.c: the variables of the template, and what to do with the rendered text -- */
int render_options(const struct api_request *req, struct buf *out);
/* The rendered text up to and with the last message's content. -EINVAL if it is not found there. */
int render_cut_at_final_message(const struct api_request *req, const char *text, size_t len, size_t *ret_len);
/* Encodes a rendered chat; BOS is added only if asked for and not there already. */
int render_encode(const struct tokenizer *tok, const char *text, size_t len, bool add_special, struct token_ids *ids, struct error *err);
/* Drops one of two BOS at the beginning. */
void render_drop_double_bos(const struct tokenizer *tok, struct token_ids *ids);
