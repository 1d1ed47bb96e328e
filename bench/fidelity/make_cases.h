/* The tasks, made from a text and a seed: the same cases on every machine. */
#pragma once
#include "bench/fidelity/case_set.h"
#include "bench/fidelity/text_source.h"

struct case_params {
    const struct text_source *source;
    const struct tokenizer *tok;
    uint64_t seed;
};

/* n contexts of n_prompt tokens of news, evenly spaced over the text's first TEXT_CHARACTERS characters (more if that is too short), each with n_rows tokens behind it that are fed
 * and compared. -ENODATA when the text is too short. */
int make_kl_cases(struct case_set *set, const struct case_params *p, int n, int n_prompt, int n_rows, struct error *err);

/* A list of 48 random words, news, the list again: `samples` cases for each of lengths [n_lengths], tokens of the whole. Every word after the fourth is asked; the line that
 * begins the second list comes behind the prompt, so that no selector has seen what will be asked. */
int make_recall_cases(struct case_set *set, const struct case_params *p, const int *lengths, int n_lengths, int samples, struct error *err);

/* Questions about one fact in n_tokens of news: a pass key, and one of six access codes, alternating. Each of the samples is two cases: the question at the end of the prompt, seen by the
 * selector, and behind the prompt. When the source has questions of its own (RULER), those. */
int make_needle_cases(struct case_set *set, const struct case_params *p, int samples, int n_tokens, struct error *err);

/* A generator of small numbers, splitmix64. */
struct draw {
    uint64_t state;
};
int draw_below(struct draw *d, int n); /* 0 .. n-1, n >= 1 */
