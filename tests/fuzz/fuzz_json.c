/* Any bytes: walking every value, skipping, and raw text agree on what is accepted, and nothing is read outside the input. */
#include "formats/json.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void walk(struct json *j)
{
    struct json_str s;
    double number;
    bool flag;
    switch (json_peek(j)) {
    case JSON_OBJECT:
        json_object(j);
        while (json_next_key(j, &s))
            walk(j);
        break;
    case JSON_ARRAY:
        json_array(j);
        while (json_next_item(j))
            walk(j);
        break;
    case JSON_STRING: json_string(j, &s); break;
    case JSON_NUMBER: json_double(j, &number); break;
    case JSON_BOOL: json_bool(j, &flag); break;
    case JSON_NULL: json_null(j); break;
    case JSON_ERROR: break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct json walked, skipped;
    struct json_str raw;
    json_init(&walked, (const char *)data, size);
    json_init(&skipped, (const char *)data, size);
    walk(&walked);
    int a = json_end(&walked);
    json_raw(&skipped, &raw);
    int b = json_end(&skipped);
    /* Skipping does not look for duplicate keys; in all else the two agree. */
    if (a == 0 ? b != 0 : b == 0 && strcmp(walked.error_text, "duplicate key") != 0)
        abort();
    json_fini(&walked);
    json_fini(&skipped);
    return 0;
}
