/* Methods of others on the real model and news text, at a length that takes seconds. Orders of magnitude alone are asserted: the figures are those of the study's tables (KIVI 4 bit .0033, 2 bit .21
 * at 7,680 tokens). Skipped where the model or the text is not there. */
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_cache.h"
#include "bench/fidelity/make_cases.h"
#include "tests/unit/fidelity_fixture.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char model_path[] = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

enum { CONTEXT = 1024, POSITIONS = 64 };

struct real {
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct tokenizer *tok;
    struct text_source source;
    struct case_set set;
};

static void real_open(struct real *r)
{
    const char *shared = getenv("TIDEPOOL_SHARED");
    char texts[512];
    struct error err;
    snprintf(texts, sizeof(texts), "%s/data/longbench/multi_news.jsonl", shared ? shared : "../shared");
    if (access(model_path, R_OK) < 0 || access(texts, R_OK) < 0)
        cr_skip_test("skipped: %s or %s is not here", model_path, texts);
    const struct device_config config = {.n_threads = 2};
    cr_assert(cpu_device_ops()->open(&config, &r->device) >= 0 && cpu_device_ops()->stream_create(r->device, &r->stream) >= 0);
    const struct model_open_params p = {.path = model_path, .dev = cpu_device_ops(), .ops = cpu_kernel_ops(), .device = r->device, .stream = r->stream};
    cr_assert(model_open(&p, &r->model, &err) >= 0, "%s", err.text);
    cr_assert(tokenizer_open(model_path, &r->tok, &err) >= 0 && text_source_load(&r->source, texts, r->tok, &err) >= 0, "%s", err.text);
    case_set_init(&r->set, TASK_KL);
    const struct case_params cases = {.source = &r->source, .tok = r->tok, .seed = 7};
    cr_assert(make_kl_cases(&r->set, &cases, 1, CONTEXT, POSITIONS, &err) >= 0, "%s", err.text);
}

static void real_close(struct real *r)
{
    lab_cache_clear();
    case_set_fini(&r->set);
    text_source_fini(&r->source);
    tokenizer_close(r->tok);
    model_close(r->model);
    cpu_device_ops()->stream_free(r->stream);
    cpu_device_ops()->close(r->device);
}

static double kl_of(struct real *r, const struct fidelity_sink *full, const struct fidelity_methods *methods, const char *name, int budget, int fetch)
{
    struct fidelity_sink *sink = lab_run(lab_method(methods, name), r->model, r->set.cases, budget, fetch);
    const double kl = lab_run_kl(full, sink);
    fprintf(stderr, "%-22s KL %.5f, %.0f tokens attended, %.0f bytes fetched\n", name, kl, lab_run_attended(sink, r->model), sink->counts.bytes_fetched / POSITIONS);
    lab_run_free(sink);
    return kl;
}

Test(fidelity_model, test_methods_of_others_have_the_studys_order)
{
    struct real r;
    real_open(&r);
    struct fidelity_sink *full = lab_run(lab_method(&headinfer_methods, "headinfer"), r.model, r.set.cases, FIDELITY_ALL, FIDELITY_ALL);
    const double kivi4 = kl_of(&r, full, &kivi_methods, "kivi-4bit", FIDELITY_ALL, 0), kivi2 = kl_of(&r, full, &kivi_methods, "kivi-2bit", FIDELITY_ALL, 0);
    const double kvquant4 = kl_of(&r, full, &kvquant_methods, "kvquant-4bit", FIDELITY_ALL, 0), kvquant3 = kl_of(&r, full, &kvquant_methods, "kvquant-3bit", FIDELITY_ALL, 0);
    const double diffkv = kl_of(&r, full, &diffkv_methods, "diffkv", FIDELITY_ALL, 0), ttkv = kl_of(&r, full, &ttkv_methods, "ttkv", 128, 128);
    const double quest = kl_of(&r, full, &quest_methods, "quest", 128, 128), shadowkv = kl_of(&r, full, &shadowkv_methods, "shadowkv", 128, 128);
    const double evicted = kl_of(&r, full, &eviction_methods, "blockwise-snapkv-512", 128, 0);
    cr_expect(kivi4 > 2e-4 && kivi4 < 0.02);
    cr_expect(kivi2 > 0.02 && kivi2 < 1);
    cr_expect(kvquant4 > 1e-4 && kvquant4 < kvquant3 && kvquant3 < kivi2);
    cr_expect(diffkv > 1e-4 && diffkv < 0.1);
    cr_expect(shadowkv > 1e-4 && shadowkv < quest && shadowkv < ttkv && quest < 0.5 && ttkv < 0.5);
    cr_expect(evicted > shadowkv && evicted < 3);
    lab_run_free(full);
    real_close(&r);
}

Test(fidelity_model, test_drift_is_nothing_when_exact_and_small_when_consistent)
{
    struct real r;
    real_open(&r);
    struct fidelity_sink *exact = lab_run(lab_method(&drift_methods, "layer-major-exact"), r.model, r.set.cases, FIDELITY_ALL, 0);
    cr_expect(lab_run_value(exact, "drift_relative_l2") == 0 && lab_run_value(exact, "drift_jsd") == 0 && lab_run_value(exact, "drift_top1") == 1);
    cr_expect(lab_run_value(exact, "engine_numbers_different") == 0);
    struct fidelity_sink *consistent = lab_run(lab_method(&drift_methods, "layer-major-consistent"), r.model, r.set.cases, FIDELITY_ALL, 0);
    cr_expect(lab_run_value(consistent, "drift_relative_l2") > 1e-3 && lab_run_value(consistent, "drift_relative_l2") < 0.05);
    cr_expect(lab_run_value(consistent, "drift_cosine") > 0.999 && lab_run_value(consistent, "engine_numbers_different") == 0);
    cr_expect(lab_run_kl(exact, consistent) < 5e-3);
    lab_run_free(consistent);
    lab_run_free(exact);
    real_close(&r);
}
