/* The commands of `tidepool`, one file each. argv[0] is the command's name. They return the exit status: 0, 1 (failed), 2 (wrong use). */
#pragma once

int serve_command(int argc, char **argv);
int plan_command(int argc, char **argv); /* does not return when it can run tidepool-plan */
int chat_command(int argc, char **argv);
int bench_command(int argc, char **argv);
int tokenize_command(int argc, char **argv);
