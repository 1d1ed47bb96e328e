/* Methods of others on the real model and news text, at a length that takes seconds. Orders of magnitude alone are asserted: the figures are those of the study's tables (KIVI 4 bit .0033, 2 bit .21
 * at 7,680 tokens). Skipped where the model or the text is not there. */
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_cache.h"
#include "tests/unit/fidelity_fixture.h"
#include "tests/unit/real_model.h"
#include "tests/unit/real_news.h"
#include <criterion/criterion.h>
#include <stdio.h>

enum { CONTEXT = 1024, POSITIONS = 64 };

struct real {
    struct real_model m;
    struct case_set set;
};

static void real_open(struct real *r)
{
    real_news_case(&r->set, CONTEXT, POSITIONS);
    cr_assert(real_model_open(&r->m, 2, CPU_ISA_AUTO));
}

static void real_close(struct real *r)
{
    lab_cache_clear();
    case_set_fini(&r->set);
    real_model_close(&r->m);
}

static double kl_of(struct real *r, const struct fidelity_sink *full, const struct fidelity_methods *methods, const char *name, int budget, int fetch)
{
    struct fidelity_sink *sink = lab_run(lab_method(methods, name), r->m.model, r->set.cases, budget, fetch);
    const double kl = lab_run_kl(full, sink);
    fprintf(stderr, "%-22s KL %.5f, %.0f tokens attended, %.0f bytes fetched\n", name, kl, lab_run_attended(sink, r->m.model), sink->counts.bytes_fetched / POSITIONS);
    lab_run_free(sink);
    return kl;
}

Test(fidelity_model, test_methods_of_others_have_the_studys_order)
{
    struct real r;
    real_open(&r);
    struct fidelity_sink *full = lab_run(lab_method(&headinfer_methods, "headinfer"), r.m.model, r.set.cases, FIDELITY_ALL, FIDELITY_ALL);
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
    struct fidelity_sink *exact = lab_run(lab_method(&drift_methods, "layer-major-exact"), r.m.model, r.set.cases, FIDELITY_ALL, 0);
    cr_expect(lab_run_value(exact, "drift_relative_l2") == 0 && lab_run_value(exact, "drift_jsd") == 0 && lab_run_value(exact, "drift_top1") == 1);
    cr_expect(lab_run_value(exact, "engine_numbers_different") == 0);
    struct fidelity_sink *consistent = lab_run(lab_method(&drift_methods, "layer-major-consistent"), r.m.model, r.set.cases, FIDELITY_ALL, 0);
    cr_expect(lab_run_value(consistent, "drift_relative_l2") > 1e-3 && lab_run_value(consistent, "drift_relative_l2") < 0.05);
    cr_expect(lab_run_value(consistent, "drift_cosine") > 0.999 && lab_run_value(consistent, "engine_numbers_different") == 0);
    cr_expect(lab_run_kl(exact, consistent) < 5e-3);
    lab_run_free(consistent);
    lab_run_free(exact);
    real_close(&r);
}
