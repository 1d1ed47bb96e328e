/* tidepool-fidelity, which `tidepool bench fidelity` runs. Everything is in harness.h. */
#include "bench/fidelity/harness.h"
#include <stdio.h>

int main(int argc, char **argv)
{
    struct fidelity_options options;
    struct error err = {""};
    int r = options_parse(&fidelity_option_set, argc, argv, &options, NULL, &err);
    if (r > 0)
        return 0;
    if (r == 0)
        r = fidelity_options_derive(&options, &err);
    if (r < 0) {
        fprintf(stderr, "tidepool bench fidelity: %s\n", err.text);
        return 2;
    }
    r = options.list ? harness_list(&options, &err) : harness_run(&options, &err);
    if (r < 0)
        fprintf(stderr, "tidepool bench fidelity: %s\n", err.text);
    return r != 0;
}
