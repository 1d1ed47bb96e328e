/* Real processes for tests: started with their stderr in a pipe, ended with the test whatever happens to it. Waiting is for events, with a deadline. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { CHILD_LOG_MAX = 1 << 20 };

struct child {
    pid_t pid;
    int log_fd;                /* read end of its stderr */
    char *log;                 /* [CHILD_LOG_MAX] what it wrote so far, NUL-terminated */
    size_t log_len, log_seen;  /* child_wait_line searches from log_seen */
};

/* Starts argv[0]; fails the test if it cannot. `limit_fsize` > 0 sets RLIMIT_FSIZE. */
void child_start(struct child *child, const char *const *argv, long limit_fsize);
/* Reads until a line contains `text` and returns true; later calls search behind it. False: the deadline passed or the process ended first. */
bool child_wait_line(struct child *child, const char *text, int timeout_ms);
/* Waits for the end and returns the exit status, or 128 + signal; -1 at the deadline. */
int child_wait(struct child *child, int timeout_ms);
/* Kills it if it still runs, and frees. */
void child_end(struct child *child);

/* A new folder of mode 0700; path [64]. folder_remove deletes it and the files in it. */
void folder_make(char *ret_path);
void folder_remove(const char *path);
/* The path of a program of this build. */
const char *program_path(const char *name);
