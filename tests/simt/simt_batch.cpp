/* Batches of copies. One operation of a stream, whose copies run in no order: with seeds other than 0 in one that is drawn. A copy that touches what another of its batch writes is reported. */
#include "tests/simt/simt_private.h"
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace simt {

struct Piece {
    char *dst;
    const char *src;
    size_t bytes;
};

static std::atomic<uint64_t> n_batches;

static bool overlap(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    return a < b + b_bytes && b < a + a_bytes;
}

static void check_piece(const Piece &p)
{
    size_t left;
    check_range("a copy of a batch writes beyond its destination", p.dst, p.bytes);
    check_range("a copy of a batch reads beyond its source", p.src, p.bytes);
    if (memory_is_read_only(p.dst))
        report("a copy of a batch writes to memory that was registered read-only", "");
    if (memory_find(p.dst, &left) == MEMORY_UNKNOWN || memory_find(p.src, &left) == MEMORY_UNKNOWN)
        report("a batch of copies uses pageable memory", "");
}

static void check_independent(const std::vector<Piece> &pieces)
{
    for (size_t i = 0; i < pieces.size(); i++)
        for (size_t j = 0; j < pieces.size(); j++)
            if ((j > i && overlap(pieces[i].dst, pieces[i].bytes, pieces[j].dst, pieces[j].bytes)) || overlap(pieces[i].dst, pieces[i].bytes, pieces[j].src, pieces[j].bytes))
                report("copies of one batch depend on each other", std::to_string(i) + " and " + std::to_string(j));
}

static void shuffle(std::vector<Piece> &pieces, uint64_t seed)
{
    Random random = {seed};
    for (size_t i = pieces.size(); seed && i > 1; i--)
        std::swap(pieces[i - 1], pieces[random.next() % i]);
}

} /* namespace simt */

using namespace simt;

void simt_refuse_batches(bool refuse)
{
    options().refuse_batches = refuse;
}

/* With one set of attributes for all: as it is used. */
cudaError_t cudaMemcpyBatchAsync(void *const *dsts, const void *const *srcs, const size_t *sizes, size_t count, struct cudaMemcpyAttributes *attrs, size_t *attrs_indices, size_t n_attrs,
                                 cudaStream_t stream)
{
    std::vector<Piece> pieces;
    if (options().refuse_batches)
        return set_error(cudaErrorNotSupported);
    if (count == 0 || n_attrs != 1 || attrs_indices[0] != 0 || attrs[0].srcAccessOrder != cudaMemcpySrcAccessOrderStream)
        return set_error(cudaErrorInvalidValue);
    for (size_t i = 0; i < count; i++) {
        pieces.push_back({(char *)dsts[i], (const char *)srcs[i], sizes[i]});
        check_piece(pieces[i]);
    }
    check_independent(pieces);
    shuffle(pieces, options().seed ? options().seed * 0x9E3779B97F4A7C15ull + ++n_batches : 0);
    return enqueue(stream, "batch of copies", [=] {
        for (const Piece &p : pieces)
            copy_now((void *)p.dst, p.src, p.bytes);
    });
}
