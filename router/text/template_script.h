/* template_helper.py, embedded in the program when it is built. */
#pragma once

extern const char template_script[]; /* NUL-terminated */
