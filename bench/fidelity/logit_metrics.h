/* How far one distribution of the next token is from another, both given as logits. Sums in double, natural logarithms. */
#pragma once

/* log of the sum of exp(logits[i]); logits are finite or -inf, at least one finite. */
double logits_lse(const float *logits, int n);
/* Index of the largest, ties to the lower; NaN is never the largest. */
int logits_argmax(const float *logits, int n);

struct divergence {
    double kl;  /* KL(full || other), nats */
    double jsd; /* Jensen-Shannon divergence of the two, nats: at most log 2 */
};
/* full [n], other [n] and the lse of each. A token that `full` gives no probability counts nothing in kl; one that only `other` gives none makes it infinite. */
void logits_divergence(const float *full, double full_lse, const float *other, double other_lse, int n, struct divergence *ret);
