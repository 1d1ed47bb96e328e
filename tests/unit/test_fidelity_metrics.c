/* Logits to figures, figures to rows, rows to files and back. */
#include "bench/fidelity/logit_metrics.h"
#include "bench/fidelity/results.h"
#include "bench/fidelity/svg_plot.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VOCAB = 4 };

static void expect_near(double got, double want, double tolerance, const char *what)
{
    cr_assert(fabs(got - want) <= tolerance, "%s: %.12g, want %.12g", what, got, want);
}

Test(fidelity_metrics, test_divergence_of_known_distributions)
{
    const float p[VOCAB] = {logf(0.5f), logf(0.25f), logf(0.125f), logf(0.125f)};
    const float q[VOCAB] = {logf(0.25f) + 3, logf(0.25f) + 3, logf(0.25f) + 3, logf(0.25f) + 3}; /* a constant added changes nothing */
    const double p_lse = logits_lse(p, VOCAB), q_lse = logits_lse(q, VOCAB);
    struct divergence d, back;
    expect_near(p_lse, 0, 1e-6, "lse");
    expect_near(q_lse, 3, 1e-6, "lse");
    logits_divergence(p, p_lse, q, q_lse, VOCAB, &d);
    expect_near(d.kl, 0.5 * log(2) - 2 * 0.125 * log(2), 1e-6, "KL to uniform");
    logits_divergence(q, q_lse, p, p_lse, VOCAB, &back);
    expect_near(back.jsd, d.jsd, 1e-9, "JSD is symmetric");
    double jsd = 0;
    for (int i = 0; i < VOCAB; i++) {
        const double a = exp(p[i]), b = 0.25, m = (a + b) / 2;
        jsd += 0.5 * (a * log(a / m) + b * log(b / m));
    }
    expect_near(d.jsd, jsd, 1e-7, "JSD");
}

Test(fidelity_metrics, test_divergence_at_the_ends)
{
    const float one[2] = {0, -200}, other[2] = {-200, 0};
    struct divergence d;
    logits_divergence(one, logits_lse(one, 2), one, logits_lse(one, 2), 2, &d);
    cr_assert(d.kl == 0 && d.jsd == 0, "equal logits differ by %g and %g", d.kl, d.jsd);
    logits_divergence(one, logits_lse(one, 2), other, logits_lse(other, 2), 2, &d);
    expect_near(d.kl, 200, 1e-3, "KL of disjoint ones");
    expect_near(d.jsd, log(2), 1e-6, "JSD of disjoint ones");
}

Test(fidelity_metrics, test_argmax_prefers_the_lower_and_skips_nan)
{
    const float ties[4] = {1, 5, 5, 2}, nans[4] = {NAN, -1, NAN, -2};
    cr_assert_eq(logits_argmax(ties, 4), 1);
    cr_assert_eq(logits_argmax(nans, 4), 1);
}

/* ---- the sink ---- */

static const int32_t tokens[] = {0, 1, 2, 3, 1, 0};

static void make_set(struct case_set *set, enum fidelity_task task)
{
    case_set_init(set, task);
    cr_assert_eq(case_set_add_label(set, "a"), 0);
    cr_assert_eq(case_set_add(set, tokens, 2, 3, &(struct case_info){.scored_first = 1, .n_scored = 2, .sample = 0}), 0);
    cr_assert_eq(case_set_add(set, tokens, 3, 2, &(struct case_info){.scored_first = 0, .n_scored = 2, .sample = 0}), 0);
    cr_assert_eq(case_set_add(set, tokens, 4, 1, &(struct case_info){.scored_first = 0, .n_scored = 1, .sample = 2}), 0);
    cr_assert_eq(case_set_alloc_reference(set, VOCAB), 0);
}

/* Logits that predict `token`. */
static const float *predict(int token)
{
    static float logits[VOCAB];
    for (int i = 0; i < VOCAB; i++)
        logits[i] = i == token ? 2 : 0;
    return logits;
}

static int32_t target(const struct case_set *set, int i, int row)
{
    return set->cases[i].tokens[set->cases[i].n_prompt + row + 1];
}

Test(fidelity_sink, test_words_right_and_samples_kept)
{
    struct case_set set;
    struct fidelity_sink sink;
    struct task_scores scores;
    bool right[3];
    make_set(&set, TASK_NEEDLE);
    cr_assert_eq(fidelity_sink_init(&sink, &set, VOCAB, false, &scores), 0);
    for (int i = 0; i < 3; i++)
        for (int row = 0; row < set.cases[i].n_fed; row++) {
            const bool wrong = i == 1 && row == 1;
            cr_assert_eq(fidelity_sink_logits(&sink, i, row, predict((target(&set, i, row) + wrong) % VOCAB)), 0);
        }
    cr_assert_eq(fidelity_sink_finish(&sink, right), 0);
    cr_assert(right[0] && !right[1] && right[2]);
    cr_assert(scores.right[0] == 2 && scores.asked[0] == 3);
    case_set_keep(&set, right);
    cr_assert_eq(set.n, 1, "the first sample failed in one of its cases: %d cases left", set.n);
    cr_assert_eq(set.cases[0].n_prompt, 4);
    fidelity_sink_fini(&sink);
    task_scores_fini(&scores);
    case_set_fini(&set);
}

Test(fidelity_sink, test_recall_counts_words)
{
    struct case_set set;
    struct fidelity_sink sink;
    struct task_scores scores;
    make_set(&set, TASK_RECALL);
    cr_assert_eq(fidelity_sink_init(&sink, &set, VOCAB, false, &scores), 0);
    for (int i = 0; i < 3; i++)
        for (int row = 0; row < set.cases[i].n_fed; row++)
            cr_assert_eq(fidelity_sink_logits(&sink, i, row, predict(row == 0 ? (target(&set, i, row) + 1) % VOCAB : target(&set, i, row))), 0);
    cr_assert_eq(fidelity_sink_finish(&sink, NULL), 0);
    /* Row 0 is wrong everywhere and scored in two cases; of five scored words three are right. */
    cr_assert(scores.right[0] == 3 && scores.asked[0] == 5, "%d of %d", (int)scores.right[0], (int)scores.asked[0]);
    fidelity_sink_fini(&sink);
    task_scores_fini(&scores);
    case_set_fini(&set);
}

Test(fidelity_sink, test_refuses_what_there_is_not)
{
    struct case_set set;
    struct fidelity_sink sink;
    struct task_scores scores;
    const float nan_logits[VOCAB] = {0, NAN, 0, 0}, infinite[VOCAB] = {0, INFINITY, 0, 0};
    make_set(&set, TASK_KL);
    cr_assert_eq(fidelity_sink_init(&sink, &set, VOCAB, true, &scores), 0);
    cr_assert_eq(fidelity_sink_logits(&sink, 3, 0, predict(0)), -EINVAL);
    cr_assert_eq(fidelity_sink_logits(&sink, -1, 0, predict(0)), -EINVAL);
    cr_assert_eq(fidelity_sink_logits(&sink, 0, 3, predict(0)), -EINVAL);
    cr_assert_eq(fidelity_sink_logits(&sink, 0, 0, nan_logits), -ERANGE);
    cr_assert_eq(fidelity_sink_logits(&sink, 0, 0, infinite), -ERANGE);
    cr_assert_eq(fidelity_sink_logits(&sink, 0, 0, predict(0)), 0);
    cr_assert_eq(fidelity_sink_logits(&sink, 0, 0, predict(0)), -EINVAL, "a row came twice");
    cr_assert_eq(fidelity_sink_finish(&sink, NULL), -ENODATA);
    fidelity_sink_fini(&sink);
    task_scores_fini(&scores);
    case_set_fini(&set);
}

Test(fidelity_sink, test_reference_is_zero_and_others_are_compared_with_it)
{
    struct case_set set;
    struct fidelity_sink sink;
    struct task_scores scores;
    struct row_result result;
    make_set(&set, TASK_KL);
    for (int pass = 0; pass < 2; pass++) {
        cr_assert_eq(fidelity_sink_init(&sink, &set, VOCAB, pass == 0, &scores), 0);
        for (int i = 0; i < 3; i++)
            for (int row = 0; row < set.cases[i].n_fed; row++)
                cr_assert_eq(fidelity_sink_logits(&sink, i, row, predict(pass && i == 2 ? 3 : 1)), 0);
        fidelity_sink_counts(&sink, &(struct fidelity_counts){.steps = 6, .attended = 6 * 2 * 3 * 50, .bytes_attended = 600, .bytes_fetched = 300});
        fidelity_sink_value(&sink, "drift", 1);
        fidelity_sink_value(&sink, "drift", 2);
        cr_assert_eq(fidelity_sink_finish(&sink, NULL), 0);
        row_result_init(&result);
        row_result_add(&result, &set, &scores, 2, 3);
        if (pass == 0)
            cr_assert(result.kl == 0 && result.jsd == 0 && result.top1 == 1);
        fidelity_sink_fini(&sink);
        task_scores_fini(&scores);
    }
    /* One of six positions predicts 3 where the reference predicts 1: both logits 2, the others 0. */
    const double p = exp(2) / (exp(2) + 3), other = 1 / (exp(2) + 3);
    expect_near(result.kl, (p - other) * 2 / 6, 1e-6, "KL");
    expect_near(result.top1, 5.0 / 6, 1e-9, "top-1");
    expect_near(result.attended, 50, 1e-9, "attended");
    expect_near(result.bytes_fetched, 50, 1e-9, "bytes");
    cr_assert(result.n_values == 1 && result.values[0].value == 1.5);
    case_set_fini(&set);
}

/* ---- rows ---- */

Test(fidelity_rows, test_patterns_and_budgets)
{
    static const int budgets[] = {64, 128};
    struct row_filter filter = {.patterns = "drop/snapkv,demote/snapkv@6*", .budgets = budgets, .n_budgets = 2, .task_budget = 64, .tasks = ON_ALL};
    struct row_list list;
    struct error err;
    cr_assert_eq(row_list_make(&list, &filter, &err), 0);
    cr_assert_eq(list.n, 4);
    cr_assert_str_eq(list.rows[0].name, "reference/full@0+all");
    cr_assert_str_eq(list.rows[1].name, "drop/snapkv@64+0");
    cr_assert_str_eq(list.rows[2].name, "drop/snapkv@128+0");
    cr_assert_str_eq(list.rows[3].name, "demote/snapkv@64+64");
    cr_assert(list.rows[1].tasks == ON_ALL && list.rows[2].tasks == ON_KL, "recall and needles at one budget alone");
    cr_assert_null(row_list_find(&list, "demote/snapkv@64+640", 20));
    cr_assert_eq(row_list_find(&list, "demote/snapkv@64+640", 19), &list.rows[3]);
    row_list_free(&list);
    filter.patterns = "no/such";
    cr_assert_eq(row_list_make(&list, &filter, &err), -EINVAL);
    cr_assert(strstr(err.text, "no/such"));
}

Test(fidelity_rows, test_names_are_unique)
{
    static const int budgets[] = {128, 256};
    const struct row_filter filter = {.importance_max = 2, .budgets = budgets, .n_budgets = 2, .task_budget = 256, .tasks = ON_ALL};
    struct row_list list;
    struct error err;
    cr_assert_eq(row_list_make(&list, &filter, &err), 0);
    for (int i = 0; i < list.n; i++) {
        cr_assert_eq(row_list_find(&list, list.rows[i].name, strlen(list.rows[i].name)), &list.rows[i], "%s is there twice", list.rows[i].name);
        cr_assert(list.rows[i].method->run && list.rows[i].method->text, "%s", list.rows[i].name);
    }
    row_list_free(&list);
}

Test(fidelity_rows, test_equal_rows_run_once)
{
    static const int budgets[] = {128, 256};
    const struct row_filter filter = {.importance_max = 2, .budgets = budgets, .n_budgets = 2, .task_budget = 256, .tasks = ON_ALL};
    struct row_list list;
    struct error err;
    cr_assert_eq(row_list_make(&list, &filter, &err), 0);
    struct fidelity_row *ran = row_list_find(&list, "default/snapkv@256+256", 22), *same = row_list_find(&list, "demote/snapkv@256+256", 21);
    struct fidelity_row *other_budget = row_list_find(&list, "demote/snapkv@128+128", 21), *other_selector = row_list_find(&list, "demote/adakv@256+256", 20);
    cr_assert(ran && same && other_budget && other_selector);
    cr_assert_null(row_list_twin(&list, same), "nothing has run");
    ran->result.done = true;
    cr_assert_eq(row_list_twin(&list, same), ran);
    cr_assert_null(row_list_twin(&list, other_budget));
    cr_assert_null(row_list_twin(&list, other_selector));
    ran->tasks = ON_KL;
    cr_assert_null(row_list_twin(&list, same), "it measured less");
    ran->tasks = ON_ALL;
    snprintf(ran->result.error, sizeof(ran->result.error), "failed");
    cr_assert_null(row_list_twin(&list, same));
    row_list_free(&list);
}

/* ---- results ---- */

static const int budgets_of_results[] = {64};
static const int lengths[] = {512};

static struct run_results make_results(struct row_list *list)
{
    const struct row_filter filter = {.patterns = "drop/snapkv,demote/snapkv", .budgets = budgets_of_results, .n_budgets = 1, .task_budget = 64, .tasks = ON_ALL};
    struct error err;
    cr_assert_eq(row_list_make(list, &filter, &err), 0);
    return (struct run_results){
        .settings = {.model = "tiny", .texts = "news.jsonl", .contexts = 1, .context_tokens = 768, .positions = 48, .recall_samples = 1, .needle_samples = 2,
                     .needle_tokens = 512, .lengths = lengths, .n_lengths = 1, .seed = 7},
        .list = list,
        .recall_labels = {"512"},
        .n_recall_labels = 1,
    };
}

static void fill_row(struct row_result *r, double kl)
{
    row_result_init(r);
    r->done = true;
    r->kl = kl;
    r->top1 = 0.5;
    r->recall[0] = r->recall_all = 0.25;
    r->attended = 128;
    r->bytes_fetched = 4096;
    r->values[r->n_values++] = (struct row_value){.name = "hidden_rel_l2", .value = 0.012};
}

static void folder_make(char folder[64])
{
    strcpy(folder, "/tmp/tidepool-test-XXXXXX");
    cr_assert(mkdtemp(folder));
}

static void folder_remove(const char *folder)
{
    char command[128];
    snprintf(command, sizeof(command), "rm -r '%s'", folder);
    cr_assert_eq(system(command), 0);
}

Test(fidelity_results, test_written_and_resumed)
{
    struct row_list list, again;
    struct run_results results = make_results(&list), second = make_results(&again);
    struct error err = {""};
    char folder[64];
    folder_make(folder);
    fill_row(&list.rows[0].result, 0);
    fill_row(&list.rows[1].result, 0.125);
    snprintf(list.rows[2].result.error, sizeof(list.rows[2].result.error), "no such selector");
    list.rows[2].result.done = true;
    cr_assert_eq(results_resume(&second, &again, folder, &err), 0, "nothing there yet");
    cr_assert_eq(results_write(&results, folder, &err), 0, "%s", err.text);
    cr_assert_eq(results_resume(&second, &again, folder, &err), 2, "%s", err.text);
    cr_assert(again.rows[1].result.done && again.rows[1].result.kl == 0.125 && again.rows[1].result.recall[0] == 0.25);
    cr_assert(isnan(again.rows[1].result.needle[0]), "a figure that was not measured");
    cr_assert(again.rows[1].result.n_values == 1 && again.rows[1].result.values[0].value == 0.012);
    cr_assert(!again.rows[2].result.done, "a row that failed runs again");
    second.settings.seed = 8;
    cr_assert_eq(results_resume(&second, &again, folder, &err), -EINVAL);
    cr_assert(strstr(err.text, "other settings"), "%s", err.text);
    folder_remove(folder);
    row_list_free(&list);
    row_list_free(&again);
}

Test(fidelity_results, test_json_and_markdown_say_the_same)
{
    struct row_list list;
    struct run_results results = make_results(&list);
    struct buf text;
    json_error_t problem;
    fill_row(&list.rows[0].result, 0);
    fill_row(&list.rows[1].result, 0.125);
    buf_init(&text, 1 << 20);
    cr_assert_eq(results_json(&results, &text), 0);
    json_t *root = json_loads(buf_cstr(&text), 0, &problem);
    cr_assert(root, "%s", problem.text);
    json_t *rows = json_object_get(root, "rows");
    cr_assert_eq(json_array_size(rows), 2, "rows that did not run are not there");
    json_t *row = json_array_get(rows, 1);
    cr_assert_str_eq(json_string_value(json_object_get(row, "name")), "drop/snapkv@64+0");
    cr_assert(json_number_value(json_object_get(row, "kl")) == 0.125);
    cr_assert(json_is_null(json_object_get(row, "perplexity")));
    json_decref(root);
    buf_clear(&text);
    cr_assert_eq(results_markdown(&results, &text), 0);
    cr_assert(strstr(buf_cstr(&text), "| snapkv | 64 | 0 | 128 | | 4 | 0.1250 |"), "%s", buf_cstr(&text));
    cr_assert(strstr(buf_cstr(&text), "\n\n| row | hidden_rel_l2 |\n|---|---|\n| snapkv@64+0 | 0.012 |\n"), "%s", buf_cstr(&text));
    buf_fini(&text);
    row_list_free(&list);
}

Test(fidelity_results, test_plots_are_whole_and_hold_no_nan)
{
    struct row_list list;
    struct run_results results = make_results(&list);
    for (int filled = 0; filled < 2; filled++) {
        for (int i = 0; fidelity_plots[i].name; i++) {
            struct buf text;
            buf_init(&text, 1 << 20);
            cr_assert_eq(fidelity_plots[i].write(&results, &text), 0);
            const char *svg = buf_cstr(&text);
            cr_assert(strncmp(svg, "<svg", 4) == 0 && strstr(svg, "</svg>"));
            cr_assert(!strstr(svg, "nan") && !strstr(svg, "inf\""), "%s", svg);
            buf_fini(&text);
        }
        fill_row(&list.rows[1].result, 0.125);
        fill_row(&list.rows[2].result, 0);
    }
    row_list_free(&list);
}

Test(fidelity_results, test_svg_leaves_out_what_an_axis_cannot_show)
{
    struct svg_plot *plot = calloc(1, sizeof(*plot));
    struct buf text;
    cr_assert(plot);
    buf_init(&text, 1 << 20);
    plot->title = "a < b & c";
    plot->x = (struct svg_axis){"x", true, true};
    plot->y = (struct svg_axis){"y", true, false};
    plot->n_series = 1;
    plot->series[0] = (struct svg_series){.label = "s", .line = true, .x = {1, 2, 0, INFINITY}, .y = {0.1, 0, 1, 1}, .n = 4};
    cr_assert_eq(svg_plot_write(plot, &text), 0);
    cr_assert(strstr(buf_cstr(&text), "a &lt; b &amp; c"));
    int circles = 0;
    for (const char *at = buf_cstr(&text); (at = strstr(at, "<circle")); at++)
        circles++;
    cr_assert_eq(circles, 2, "one point and the legend, not %d", circles);
    buf_fini(&text);
    free(plot);
}
