/* The event reader over every split of a stream into two pieces, and over single bytes. */
#include "deploy/sse.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char stream[] = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n"
                             ": keep-alive\n\n"
                             "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"caf\\u00e9 \"},\"finish_reason\":null}]}\r\n\r\n"
                             "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"noir\"},\"finish_reason\":null}]}\n\n"
                             "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
                             "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\"total_tokens\":10,"
                             "\"prompt_tokens_details\":{\"cached_tokens\":5},\"tidepool\":{\"bytes_loaded\":4096,\"bytes_attended\":512,\"bytes_missed\":128,\"worker\":\"w1\"}}}\n\n"
                             "data: [DONE]\n\n";

static void collect(const char *text, size_t len, void *arg)
{
    struct buf *out = arg;
    buf_append(out, text, len);
}

static void check(struct sse_reader *r, struct buf *out)
{
    cr_expect_str_eq(buf_cstr(out), "caf\xc3\xa9 noir");
    cr_expect_str_eq(r->finish_reason, "stop");
    cr_expect(r->finished);
    cr_expect_eq(r->usage.prompt_tokens, 7);
    cr_expect_eq(r->usage.cached_tokens, 5);
    cr_expect_eq(r->usage.completion_tokens, 3);
    cr_expect(r->usage.bytes_loaded == 4096 && r->usage.bytes_attended == 512 && r->usage.bytes_missed == 128);
    cr_expect_str_eq(r->usage.worker, "w1");
}

Test(sse, test_every_split_gives_the_same)
{
    for (size_t cut = 0; cut < sizeof(stream); cut++) {
        struct sse_reader r;
        struct buf out;
        buf_init(&out, 1 << 16);
        sse_reader_init(&r, collect, &out);
        cr_assert_eq(sse_reader_feed(&r, stream, cut), 0);
        cr_assert_eq(sse_reader_feed(&r, stream + cut, sizeof(stream) - 1 - (cut < sizeof(stream) - 1 ? cut : sizeof(stream) - 1)), 0);
        check(&r, &out);
        sse_reader_fini(&r);
        buf_fini(&out);
    }
}

Test(sse, test_broken_event_is_an_error)
{
    static const char bad[] = "data: {\"choices\":[\n\n";
    struct sse_reader r;
    struct buf out;
    buf_init(&out, 1 << 16);
    sse_reader_init(&r, collect, &out);
    cr_expect_eq(sse_reader_feed(&r, bad, strlen(bad)), -EBADMSG);
    sse_reader_fini(&r);
    buf_fini(&out);
}

Test(sse, test_error_event_and_error_body_give_the_message)
{
    static const char event[] = "data: {\"error\":{\"message\":\"pool is full\",\"type\":\"x\"}}\n\n";
    static const char body[] = "{\"error\":{\"message\":\"max_tokens must be positive\",\"param\":\"max_tokens\"}}";
    struct sse_reader r;
    struct buf out;
    buf_init(&out, 1 << 16);
    sse_reader_init(&r, collect, &out);
    cr_expect_eq(sse_reader_feed(&r, event, strlen(event)), 0);
    cr_expect_str_eq(buf_cstr(&r.error), "pool is full");
    sse_reader_error_body(&r, body, strlen(body));
    cr_expect_str_eq(buf_cstr(&r.error), "max_tokens must be positive");
    sse_reader_error_body(&r, "<html>", 6);
    cr_expect_str_eq(buf_cstr(&r.error), "<html>");
    sse_reader_fini(&r);
    buf_fini(&out);
}
