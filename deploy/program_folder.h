/* Where the launcher finds the other programs: beside itself. */
#pragma once
#include <stddef.h>

/* The folder of the running program, without a slash at its end. The errno of /proc, -ENAMETOOLONG. */
int program_folder(char *ret_folder, size_t size);
