/* `tidepool`: the command line. Each command is a file of its own. */
#include "deploy/commands.h"
#include "proto/base/base_assert.h"
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"serve", serve_command, "serve a model over an OpenAI-compatible API"},
    {"plan", plan_command, "predict the memory that a model and a context need"},
    {"chat", chat_command, "talk to a running server from the terminal"},
    {"bench", bench_command, "measure: `bench fidelity` compares methods of compression with full attention"},
    {"tokenize", tokenize_command, "turn text into a model's token ids, or ids into text"},
};

static int usage(FILE *out, int status)
{
    fprintf(out, "Usage: tidepool COMMAND [OPTION]...\n\nServes long-context language models on memory that would otherwise run out.\n\nCommands:\n");
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(out, "\n`tidepool COMMAND --help` lists a command's options and examples.\n\nExamples:\n"
                 "  tidepool serve --model models/SmolLM2-135M-Instruct.Q4_1.gguf --workers 2\n"
                 "  tidepool plan --model Llama-3.1-8B --context 131072 --device-memory 24G\n"
                 "  tidepool chat --message 'What is a tide pool?'\n");
    return status;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return usage(stderr, 2);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0)
        return usage(stdout, 0);
    if (strcmp(argv[1], "--version") == 0) {
        printf("tidepool %s\n", TIDEPOOL_VERSION);
        return 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "tidepool: no command \"%s\"\n\n", argv[1]);
    return usage(stderr, 2);
}
