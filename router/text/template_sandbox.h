/* Starts the template helper as a process that can do little, and the system-call filter that it puts on itself once Python is loaded. */
#pragma once
#include "proto/base/buf.h"
#include "proto/base/error.h"
#include <sys/types.h>

#define TEMPLATE_MEMORY_MAX ((size_t)2 << 30) /* address space of the helper */

/* Starts `python` with the embedded script: a session of its own, killed when this process dies, no new privileges, no core, no file growth, an empty
 * environment but for TZ, and no descriptor but its end of a socket as standard input and output. *ret_fd is ours, non-blocking. Does not
 * wait for Python: what goes wrong there comes as an answer or as the socket's end. */
int template_sandbox_start(const char *python, int *ret_fd, pid_t *ret_pid, struct error *err);
/* Appends the filter (struct sock_filter[], as hexadecimal digits): what computing needs is allowed, all else fails with EPERM. */
int template_sandbox_filter(struct buf *out);
/* Lets the helper use `seconds` more of CPU time before it is ended. */
int template_sandbox_allow_cpu(pid_t pid, unsigned seconds);
