/* `tidepool plan` is tidepool-plan, which knows models and the cache; the launcher does not. */
#include "deploy/commands.h"
#include "deploy/program_folder.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int plan_command(int argc, char **argv)
{
    char path[PATH_MAX + 32], folder[PATH_MAX];
    int r = program_folder(folder, sizeof(folder));

    (void)argc;
    if (r >= 0) {
        snprintf(path, sizeof(path), "%s/tidepool-plan", folder);
        execv(path, argv);
        r = -errno;
    }
    fprintf(stderr, "tidepool plan: cannot run tidepool-plan, which belongs beside this program: %s\n", strerror(-r));
    return 1;
}
