/* tidepool-plan: `tidepool plan`. Everything is in worker/plan/. */
#include "worker/plan/plan_report.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OUT_BYTES_MAX = 1 << 20 };

int main(int argc, char **argv)
{
    struct plan_options options;
    struct error err = {""};
    struct buf out;
    int rc = options_parse(&plan_option_set, argc, argv, &options, NULL, &err);

    if (rc == 1)
        return 0;
    struct plan_report *report = rc == 0 ? calloc(1, sizeof *report) : NULL;
    if (rc == 0)
        rc = report ? plan_report_make(&options, report, &err) : error_set(&err, -1, "out of memory");
    if (rc < 0) {
        fprintf(stderr, "tidepool plan: %s\n", err.text);
        free(report);
        return 2;
    }
    buf_init(&out, OUT_BYTES_MAX);
    rc = options.json ? plan_report_json(report, &out) : plan_report_text(report, &out);
    if (rc == 0 && (fwrite(out.data, 1, out.len, stdout) != out.len || fflush(stdout) != 0))
        rc = -1;
    if (rc < 0)
        fprintf(stderr, "tidepool plan: the report cannot be written\n");
    buf_fini(&out);
    free(report);
    return rc < 0;
}
