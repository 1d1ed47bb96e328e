/* Chat templates, rendered by Jinja2 itself in a helper process that can do nothing else: limits on CPU time, memory and files, no new
 * privileges, no network, no exec, and a system-call filter. One helper a template engine; it renders one request at a time and is killed and
 * started again when a render passes its deadline. All calls and callbacks on the loop's thread.
 * Semantics: transformers' apply_chat_template (ImmutableSandboxedEnvironment, trim_blocks, lstrip_blocks, loop controls, tojson without HTML escapes,
 * raise_exception, strftime_now, the generation tag). */
#pragma once
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define TEMPLATE_BYTES_MAX ((size_t)1 << 20)    /* of a template */
#define TEMPLATE_INPUT_MAX ((size_t)64 << 20)   /* of messages and options of one render */
#define TEMPLATE_OUTPUT_MAX ((size_t)64 << 20)  /* of one rendered text */
#define TEMPLATE_QUEUE_MAX 1024                 /* renders waiting or running */

struct template_engine;
struct template_render;

struct template_config {
    const char *text;   /* the Jinja template */
    const char *bos;    /* bos_token and eos_token inside the template; NULL: "" */
    const char *eos;
    const char *python; /* interpreter; NULL: $TIDEPOOL_PYTHON, else /usr/bin/python3 */
};

/* 0: `text` is the prompt. Otherwise `text` is the reason: -EINVAL what the template itself raised (a 400 for the client), or the error in the template;
 * -ETIMEDOUT the deadline; -ENOBUFS the output's limit; -EIO the helper died. `text` is valid during the call. The callback may start and cancel renders, but not
 * free the engine. */
typedef void template_cb(void *arg, int code, const char *text, size_t len);

/* Starts the helper (an interpreter that can import jinja2: config's, the environment's, Debian's) and compiles the template: blocks for some 100 ms, at program start only. -EINVAL for a template that Jinja refuses, with its message;
 * -ENOENT when the interpreter or jinja2 is missing. */
int template_engine_create(struct loop *loop, const struct template_config *config, struct template_engine **ret_engine, struct error *err);
/* The helper's process, or -1 while there is none; for tests and metrics. */
pid_t template_engine_pid(const struct template_engine *engine);
void template_engine_free(struct template_engine *engine); /* renders that are waiting are dropped without a callback */

/* `messages`: a JSON array. `options`: a JSON object whose members are variables of the template (add_generation_prompt, tools, documents,
 * chat_template_kwargs flattened by the caller). Both are copied. `cb` is called exactly once, never from inside this call, unless the render is cancelled.
 * -EAGAIN when the queue is full, -E2BIG, -ENOMEM. `deadline_us`: from now, waiting in the queue included. */
int template_render(struct template_engine *engine, const char *messages, size_t n_messages, const char *options, size_t n_options, uint64_t deadline_us,
                    template_cb *cb, void *arg, struct template_render **ret_render);
/* The caller no longer wants the answer: `cb` will not be called. Not after `cb`. */
void template_cancel(struct template_render *render);
