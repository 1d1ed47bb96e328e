#include "tests/unit/real_news.h"
#include "tests/unit/real_model.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void real_news_case(struct case_set *set, int n_context, int n_positions)
{
    const char *shared = getenv("TIDEPOOL_SHARED");
    struct text_source source;
    struct tokenizer *tok;
    char texts[512];
    struct error err;
    snprintf(texts, sizeof(texts), "%s/data/longbench/multi_news.jsonl", shared ? shared : "../shared");
    if (access(REAL_MODEL_PATH, R_OK) < 0 || access(texts, R_OK) < 0)
        cr_skip_test("skipped: %s or %s is not here", REAL_MODEL_PATH, texts);
    cr_assert(tokenizer_open(REAL_MODEL_PATH, &tok, &err) >= 0 && text_source_load(&source, texts, tok, &err) >= 0, "%s", err.text);
    case_set_init(set, TASK_KL);
    const struct case_params cases = {.source = &source, .tok = tok, .seed = 7};
    cr_assert(make_kl_cases(set, &cases, 1, n_context, n_positions, &err) >= 0, "%s", err.text);
    text_source_fini(&source);
    tokenizer_close(tok);
}
