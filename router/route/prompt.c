#include "router/route/prompt.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int prompt_create(uint32_t *tokens, uint32_t n, const void *salt, size_t n_salt, struct prompt **ret_prompt)
{
    ASSERT(n >= 1 && n_salt <= PROMPT_SALT_MAX);
    struct prompt *prompt = calloc(1, sizeof(*prompt));
    if (!prompt)
        return -ENOMEM;
    prompt->refs = 1;
    prompt->tokens = tokens;
    prompt->n = n;
    prompt->n_blocks = n / PROMPT_BLOCK_TOKENS;
    prompt->n_salt = n_salt;
    if (n_salt)
        memcpy(prompt->salt, salt, n_salt);
    *ret_prompt = prompt;
    return 0;
}

struct prompt *prompt_ref(struct prompt *prompt)
{
    prompt->refs++;
    return prompt;
}

void prompt_unref(struct prompt *prompt)
{
    if (!prompt || --prompt->refs > 0)
        return;
    for (int i = 0; i < prompt->n_keys; i++)
        free(prompt->keys[i].keys);
    free(prompt->tokens);
    free(prompt);
}

const struct block_key *prompt_block_keys(struct prompt *prompt, const uint8_t fingerprint[FINGERPRINT_BYTES])
{
    for (int i = 0; i < prompt->n_keys; i++)
        if (memcmp(prompt->keys[i].fingerprint, fingerprint, FINGERPRINT_BYTES) == 0)
            return prompt->keys[i].keys;
    struct block_key *keys = prompt->n_keys < PROMPT_FINGERPRINTS_MAX ? malloc((prompt->n_blocks + 1) * sizeof(*keys)) : NULL;
    if (!keys)
        return NULL;
    struct block_key parent;
    block_key_root(fingerprint, prompt->salt, prompt->n_salt, &parent);
    for (uint32_t i = 0; i < prompt->n_blocks; i++) {
        block_key_next(&parent, (const int32_t *)prompt->tokens + (size_t)i * PROMPT_BLOCK_TOKENS, &keys[i]);
        parent = keys[i];
    }
    struct prompt_keys *entry = &prompt->keys[prompt->n_keys++];
    memcpy(entry->fingerprint, fingerprint, FINGERPRINT_BYTES);
    entry->keys = keys;
    return keys;
}
