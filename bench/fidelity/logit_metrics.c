#include "bench/fidelity/logit_metrics.h"
#include <math.h>

int logits_argmax(const float *logits, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best] || logits[best] != logits[best])
            best = i;
    return best;
}

double logits_lse(const float *logits, int n)
{
    const float max = logits[logits_argmax(logits, n)];
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)expf(logits[i] - max);
    return (double)max + log(sum);
}

/* Differences are taken of the logits, not of probabilities, so that equal logits give exactly 0. */
void logits_divergence(const float *full, double full_lse, const float *other, double other_lse, int n, struct divergence *ret)
{
    double kl = 0, jsd = 0;
    for (int i = 0; i < n; i++) {
        const double log_p = (double)full[i] - full_lse, log_q = (double)other[i] - other_lse;
        const double p = (double)expf((float)log_p), q = (double)expf((float)log_q);
        if (p > 0)
            kl += p * (log_p - log_q);
        /* p log(p/m) + q log(q/m) with m = (p+q)/2, by the ratio r = q/p, which is exact where the two agree. */
        if (p > 0 && q > 0) {
            const double d = log_q - log_p;
            const double log_half = log1p(0.5 * expm1(d)); /* log(m/p) */
            jsd += 0.5 * (-p * log_half + q * (d - log_half));
        } else {
            jsd += 0.5 * (p + q) * M_LN2;
        }
    }
    ret->kl = kl;
    ret->jsd = jsd;
}
