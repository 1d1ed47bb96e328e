/* protobuf-c has no limits of its own; these are the inputs that reliability rests on being refused. */
#include "proto/base/buf.h"
#include "proto/base/capped_alloc.h"
#include "proto/wire/engine.pb-c.h"
#include "proto/wire/store.pb-c.h"
#include <criterion/criterion.h>
#include <string.h>

enum { MESSAGE_MEMORY_MAX = 8 << 20 };

/* n times the same bytes; the caller frees. */
static struct buf repeated(const char *piece, size_t n_piece, size_t n)
{
    struct buf b;
    buf_init(&b, n_piece * n);
    for (size_t i = 0; i < n; i++)
        cr_assert_eq(buf_append(&b, piece, n_piece), 0);
    return b;
}

static void check_refused(const ProtobufCMessageDescriptor *type, struct buf *bytes)
{
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, MESSAGE_MEMORY_MAX);
    cr_assert_null(protobuf_c_message_unpack(type, &alloc.pb, bytes->len, bytes->data));
    cr_assert_eq(alloc.used, 0, "a refused message leaves nothing behind");
    buf_fini(bytes);
}

Test(wire_message, test_a_megabyte_of_empty_submessages_is_refused)
{
    struct buf bytes = repeated("\x0a\x00", 2, 1 << 19);
    check_refused(&tidepool__store__reserve__descriptor, &bytes);
}

Test(wire_message, test_a_megabyte_of_empty_keys_is_refused)
{
    struct buf bytes = repeated("\x0a\x00", 2, 1 << 19);
    check_refused(&tidepool__store__lookup__descriptor, &bytes);
}

Test(wire_message, test_a_megabyte_of_unknown_fields_is_refused)
{
    struct buf bytes = repeated("\x78\x00", 2, 1 << 19);
    check_refused(&tidepool__store__stats__descriptor, &bytes);
}

Test(wire_message, test_a_long_prompt_fits)
{
    enum { N_TOKENS = 131072 };
    uint32_t *tokens = malloc(N_TOKENS * sizeof(*tokens));
    for (int i = 0; i < N_TOKENS; i++)
        tokens[i] = 49151;
    Tidepool__Engine__Generate generate = TIDEPOOL__ENGINE__GENERATE__INIT;
    generate.prompt = tokens;
    generate.n_prompt = N_TOKENS;
    size_t n = tidepool__engine__generate__get_packed_size(&generate);
    uint8_t *bytes = malloc(n);
    tidepool__engine__generate__pack(&generate, bytes);
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, MESSAGE_MEMORY_MAX);
    Tidepool__Engine__Generate *got = tidepool__engine__generate__unpack(&alloc.pb, n, bytes);
    cr_assert_not_null(got);
    cr_assert_eq(got->n_prompt, N_TOKENS);
    cr_assert(memcmp(got->prompt, tokens, N_TOKENS * sizeof(*tokens)) == 0);
    tidepool__engine__generate__free_unpacked(got, &alloc.pb);
    cr_assert_eq(alloc.used, 0);
    free(bytes);
    free(tokens);
}
