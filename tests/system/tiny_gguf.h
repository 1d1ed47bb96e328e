/* A small random Llama in a GGUF file, with a context of 65,536: for tests of processes, where what is computed does not matter but must be the same each time.
 * 2 layers, 128 wide, 4 heads of 32 over 2 KV heads, 512 tokens, fp32. */
#pragma once

enum { TINY_GGUF_VOCAB = 512, TINY_GGUF_CONTEXT = 65536 };

/* Writes the file; fails the test if it cannot. */
void tiny_gguf_write(const char *path);
