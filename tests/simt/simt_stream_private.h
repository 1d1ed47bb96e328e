/* What simt_stream.cpp and simt_graph.cpp share: streams, marks, operations. */
#pragma once
#include "tests/simt/simt_private.h"
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

struct simt_capture;

struct simt_mark { /* one recording of an event */
    bool done = false;
    simt::check::Clock clock;
    std::shared_ptr<simt_capture> capture; /* it was recorded in a capture, which has its place in the graph */
    int point = 0;
};

struct simt_event {
    std::shared_ptr<simt_mark> mark;
};

struct simt_operation {
    const char *name;
    std::function<void()> run;
    std::shared_ptr<simt_mark> wait, record;
    simt::check::OperationId id;
};

struct simt_stream {
    std::deque<simt_operation> queue;
    uint64_t n_submitted = 0, n_done = 0, priority = 0;
    bool quit = false;
    std::thread thread;
    simt::check::StreamClock order;
    std::shared_ptr<simt_capture> capture; /* what is submitted is not run but becomes part of a graph */
};

namespace simt {

struct Streams {
    std::mutex lock;
    std::condition_variable changed;
    std::vector<simt_stream *> all;
    std::map<const void *, int> shared_limits;
    Random random = {0};
    uint64_t n_kernels = 0;
};
Streams &streams();

/* The lock of streams() is held for these. */
void submit_locked(simt_stream *stream, simt_operation operation);
/* The stream captures, or a wait makes it: takes the operation, or says why it cannot. */
bool is_captured(const simt_stream *stream, const simt_operation &operation);
cudaError_t capture_operation(simt_stream *stream, simt_operation operation);
/* A use of the stream that a capture does not allow: ends that, and returns its error; cudaSuccess where there is none. */
cudaError_t capture_forbids(const simt_stream *stream);
cudaError_t capture_forbids_any();
/* One that the thread may not make while it captures (cudaMalloc and its like). Takes the lock by itself. */
cudaError_t capture_forbids_thread();
/* A launch that breaks the device (simt_fail_launch), by its name. */
bool launch_breaks(const char *name);

} /* namespace simt */
