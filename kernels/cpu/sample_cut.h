/* Where to cut a set of candidates: the shortest prefix, in the order of their keys, whose weights reach a target (top-k with weights of 1, top-p). Quickselect: expected
 * O(n), and no sort. Same code for every instruction set, sums in double. */
#pragma once
#include <stdint.h>

struct cut_candidate {
    uint64_t key; /* distinct; sorts by weight descending, then id ascending (sample_scan.h) */
    double weight;
};

/* Moves candidates with keys below the pivot to the front; returns how many there are and their weight. */
static int64_t cut_partition(struct cut_candidate *c, int64_t n, uint64_t pivot, double *ret_weight)
{
    int64_t front = 0;
    double weight = 0;
    for (int64_t i = 0; i < n; i++) {
        struct cut_candidate x = c[i];
        c[i] = c[front];
        c[front] = x;
        if (x.key < pivot) {
            weight += x.weight;
            front++;
        }
    }
    *ret_weight = weight;
    return front;
}

static uint64_t cut_median3(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* The last key of that prefix; the largest of all if they do not reach the target. n >= 1; c is reordered. */
static uint64_t cut_last(struct cut_candidate *c, int64_t n, double target)
{
    while (n > 1) {
        /* Never the least of them, so the front is neither empty nor everything. */
        uint64_t pivot = n == 2 ? (c[0].key > c[1].key ? c[0].key : c[1].key) : cut_median3(c[0].key, c[n / 2].key, c[n - 1].key);
        double weight;
        int64_t front = cut_partition(c, n, pivot, &weight);
        if (weight >= target) {
            n = front;
        } else {
            target -= weight;
            c += front;
            n -= front;
        }
    }
    return c[0].key;
}
