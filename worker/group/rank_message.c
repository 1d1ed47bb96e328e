#include "worker/group/rank_message.h"

#include "proto/wire/group.pb-c.h"
#include <errno.h>
#include <string.h>

/* A token id takes a byte in the frame and four in memory, once while the array grows. */
enum { EXPANDED_MAX = 64 << 20 };

static int bad(struct error *err, const char *field)
{
    return error_set(err, -EPROTO, "%s is out of its range", field);
}

static bool text_ok(const char *text, size_t max)
{
    return strnlen(text, max + 1) <= max;
}

static int take_hello(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Hello *p = (const void *)m->unpacked;
    m->version = p->version;
    m->degree = p->degree;
    m->rank = p->rank;
    m->settings = p->settings;
    return text_ok(p->settings, RANK_SETTINGS_MAX) ? 0 : bad(err, "settings");
}

static int take_welcome(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Welcome *p = (const void *)m->unpacked;
    m->communicator = p->communicator.data;
    return p->communicator.len == COLLECTIVE_ID_BYTES ? 0 : bad(err, "communicator");
}

static int take_loaded(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Loaded *p = (const void *)m->unpacked;
    m->backend = p->backend;
    m->model_name = p->model_name;
    m->model = p->model.data;
    if (!text_ok(p->backend, RANK_NAME_MAX) || !text_ok(p->model_name, RANK_NAME_MAX))
        return bad(err, "backend or model_name");
    return p->model.len == RANK_MODEL_BYTES ? 0 : bad(err, "model");
}

static int take_nothing(struct rank_message *m, struct error *err)
{
    (void)m, (void)err;
    return 0;
}

static int take_refusal(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Refusal *p = (const void *)m->unpacked;
    m->text = p->text;
    return text_ok(p->text, RANK_TEXT_MAX) ? 0 : bad(err, "text");
}

static int take_sequence(struct rank_message *m, uint32_t sequence, struct error *err)
{
    m->sequence = sequence;
    return sequence < RANK_SEQUENCES_MAX ? 0 : bad(err, "sequence");
}

/* The body's length bounds the arrays far below INT_MAX. */
static int take_create(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Create *p = (const void *)m->unpacked;
    if (p->n_prompt < 1 || p->n_prompt > INT32_MAX)
        return bad(err, "prompt");
    if (p->max_new > INT32_MAX)
        return bad(err, "max_new");
    if (p->n_answer > p->max_new)
        return bad(err, "answer");
    if (p->salt.len > RANK_SALT_MAX)
        return bad(err, "salt");
    m->request = (struct sequence_request){
        .prompt = (const int32_t *)p->prompt,
        .n_prompt = (int)p->n_prompt,
        .max_new = (int)p->max_new,
        .answer = (const int32_t *)p->answer,
        .n_answer = (int)p->n_answer,
        .salt = p->salt.data,
        .n_salt = p->salt.len,
        .no_cache = p->no_cache,
        .prompt_logprobs = p->prompt_logprobs,
        .tag = p->sequence,
    };
    return take_sequence(m, p->sequence, err);
}

static int take_prefill(struct rank_message *m, struct error *err)
{
    return take_sequence(m, ((const Tidepool__Group__Prefill *)(const void *)m->unpacked)->sequence, err);
}

static int take_decode(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Decode *p = (const void *)m->unpacked;
    if (p->n_sequences < 1 || p->n_sequences > RANK_SEQUENCES_MAX || p->n_tokens != p->n_sequences)
        return bad(err, "the number of sequences or tokens");
    for (size_t i = 0; i < p->n_sequences; i++)
        if (p->sequences[i] >= RANK_SEQUENCES_MAX)
            return bad(err, "sequences");
    m->sequences = p->sequences;
    m->tokens = (const int32_t *)p->tokens;
    m->n = (int)p->n_sequences;
    return 0;
}

static int take_free(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Free *p = (const void *)m->unpacked;
    m->retire_answer = p->retire_answer;
    return take_sequence(m, p->sequence, err);
}

static int take_agree(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Agree *p = (const void *)m->unpacked;
    if (p->n_values < 1 || p->n_values > RANK_SEQUENCES_MAX)
        return bad(err, "the number of values");
    m->values = p->values;
    m->n = (int)p->n_values;
    return 0;
}

static int take_ask(struct rank_message *m, struct error *err)
{
    return take_sequence(m, ((const Tidepool__Group__Ask *)(const void *)m->unpacked)->sequence, err);
}

static int take_figures(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Figures *p = (const void *)m->unpacked;
    m->figures = (struct sequence_stats){
        .bytes_loaded = p->bytes_loaded,
        .bytes_to_pool = p->bytes_to_pool,
        .pages_attended = p->pages_attended,
        .bytes_attended = p->bytes_attended,
        .page_hits = p->page_hits,
        .page_misses = p->page_misses,
        .bytes_missed = p->bytes_missed,
        .tokens_attended = p->tokens_attended,
        .private_blocks = (int)p->private_blocks,
    };
    return p->private_blocks <= INT32_MAX ? 0 : bad(err, "private_blocks");
}

static int take_usage(struct rank_message *m, struct error *err)
{
    const Tidepool__Group__Usage *p = (const void *)m->unpacked;
    (void)err;
    m->usage = (struct rank_usage){
        .device_bytes = p->device_bytes,
        .device_peak_bytes = p->device_peak_bytes,
        .page_cache_bytes = p->page_cache_bytes,
        .page_cache_used_bytes = p->page_cache_used_bytes,
        .page_cache_hits = p->page_cache_hits,
        .page_cache_misses = p->page_cache_misses,
    };
    return 0;
}

static const struct {
    const char *name;
    const ProtobufCMessageDescriptor *type;
    int (*take)(struct rank_message *m, struct error *err);
} frames[] = {
    [GROUP_HELLO - GROUP_HELLO] = {"Hello", &tidepool__group__hello__descriptor, take_hello},
    [GROUP_WELCOME - GROUP_HELLO] = {"Welcome", &tidepool__group__welcome__descriptor, take_welcome},
    [GROUP_LOADED - GROUP_HELLO] = {"Loaded", &tidepool__group__loaded__descriptor, take_loaded},
    [GROUP_START - GROUP_HELLO] = {"Start", &tidepool__group__start__descriptor, take_nothing},
    [GROUP_REFUSAL - GROUP_HELLO] = {"Refusal", &tidepool__group__refusal__descriptor, take_refusal},
    [GROUP_CREATE - GROUP_HELLO] = {"Create", &tidepool__group__create__descriptor, take_create},
    [GROUP_PREFILL - GROUP_HELLO] = {"Prefill", &tidepool__group__prefill__descriptor, take_prefill},
    [GROUP_DECODE - GROUP_HELLO] = {"Decode", &tidepool__group__decode__descriptor, take_decode},
    [GROUP_FREE - GROUP_HELLO] = {"Free", &tidepool__group__free__descriptor, take_free},
    [GROUP_STOP - GROUP_HELLO] = {"Stop", &tidepool__group__stop__descriptor, take_nothing},
    [GROUP_DRAIN - GROUP_HELLO] = {"Drain", &tidepool__group__drain__descriptor, take_nothing},
    [GROUP_AGREE - GROUP_HELLO] = {"Agree", &tidepool__group__agree__descriptor, take_agree},
    [GROUP_ASK - GROUP_HELLO] = {"Ask", &tidepool__group__ask__descriptor, take_ask},
    [GROUP_FIGURES - GROUP_HELLO] = {"Figures", &tidepool__group__figures__descriptor, take_figures},
    [GROUP_USAGE - GROUP_HELLO] = {"Usage", &tidepool__group__usage__descriptor, take_usage},
};

static bool known(uint16_t type)
{
    return type >= GROUP_HELLO && type < GROUP_FRAME_END;
}

const char *group_frame_name(uint16_t type)
{
    return known(type) ? frames[type - GROUP_HELLO].name : "unknown";
}

int rank_message_parse(const struct frame_header *header, const uint8_t *body, struct rank_message *ret_message, struct error *err)
{
    struct rank_message *m = ret_message;
    *m = (struct rank_message){0};
    if (!known(header->type))
        return error_set(err, -EPROTO, "a frame of type %d", header->type);
    m->type = (enum group_frame)header->type;
    capped_alloc_init(&m->alloc, EXPANDED_MAX);
    m->unpacked = protobuf_c_message_unpack(frames[m->type - GROUP_HELLO].type, &m->alloc.pb, header->body_bytes, body);
    if (!m->unpacked)
        return error_set(err, -EPROTO, "a %s that cannot be read", group_frame_name(m->type));
    struct error reason = {""};
    if (frames[m->type - GROUP_HELLO].take(m, &reason) == 0)
        return 0;
    rank_message_fini(m);
    return error_set(err, -EPROTO, "a %s of which %.400s", group_frame_name(header->type), reason.text);
}

void rank_message_fini(struct rank_message *m)
{
    if (m->unpacked)
        protobuf_c_message_free_unpacked(m->unpacked, &m->alloc.pb);
    *m = (struct rank_message){0};
}
