#include "router/api/metrics.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *written(struct buf *out, const struct metrics *m)
{
    buf_init(out, 1 << 20);
    metrics_write(m, out);
    return buf_cstr(out);
}

Test(metrics, test_metrics_histogram_is_cumulative_and_ends_in_inf)
{
    struct metrics m;
    struct buf out;
    metrics_init(&m);
    metrics_observe(&m.ttft, 0.0005);
    metrics_observe(&m.ttft, 0.001); /* bounds are inclusive */
    metrics_observe(&m.ttft, 0.03);
    metrics_observe(&m.ttft, 5000);
    const char *text = written(&out, &m);
    cr_assert(strstr(text, "# TYPE tidepool_time_to_first_token_seconds histogram\n"));
    cr_assert(strstr(text, "tidepool_time_to_first_token_seconds_bucket{le=\"0.001\"} 2\n"));
    cr_assert(strstr(text, "tidepool_time_to_first_token_seconds_bucket{le=\"0.02\"} 2\n"));
    cr_assert(strstr(text, "tidepool_time_to_first_token_seconds_bucket{le=\"0.04\"} 3\n"));
    cr_assert(strstr(text, "tidepool_time_to_first_token_seconds_bucket{le=\"640\"} 3\n"));
    cr_assert(strstr(text, "tidepool_time_to_first_token_seconds_bucket{le=\"+Inf\"} 4\n"));
    cr_assert(strstr(text, "tidepool_time_to_first_token_seconds_count 4\n"));
    buf_fini(&out);
}

Test(metrics, test_metrics_label_values_are_escaped)
{
    struct buf labels;
    buf_init(&labels, 1024);
    metrics_label(&labels, "worker", "a\"b\\c\nd");
    metrics_label(&labels, "x", "y");
    cr_assert_str_eq(buf_cstr(&labels), "worker=\"a\\\"b\\\\c\\nd\",x=\"y\"");
    buf_fini(&labels);
}

/* Every line is a comment or a sample whose name has the prefix, and every sample's family has been announced. */
Test(metrics, test_metrics_text_is_well_formed)
{
    struct metrics m;
    struct buf out;
    char family[128] = "";
    metrics_init(&m);
    m.requests[ENDPOINT_CHAT][2] = 3;
    m.prompt_tokens = 12345678901234ull;
    const char *text = written(&out, &m);
    cr_assert(strstr(text, "tidepool_prompt_tokens_total 12345678901234\n"));
    cr_assert(strstr(text, "tidepool_http_requests_total{endpoint=\"/v1/chat/completions\",status=\"2xx\"} 3\n"));
    char *copy = strdup(text), *save = NULL;
    for (char *line = strtok_r(copy, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (sscanf(line, "# TYPE %127s", family) == 1 || line[0] == '#')
            continue;
        cr_assert_eq(strncmp(line, family, strlen(family)), 0, "sample without TYPE: %s", line);
        cr_assert_eq(strncmp(line, "tidepool_", 9), 0);
        cr_assert_null(strchr(family, ':'));
    }
    free(copy);
    buf_fini(&out);
}
