/* Stream capture and graphs. While a stream captures, what is submitted to it is kept in the order of submission, with the stream (lane) that it came to; other streams join by waiting for a
 * captured event. A launch submits all of it again: the lane of the origin to the stream that launches, every other lane to a stream of the graph's own, with fresh marks for the events. So
 * what a graph orders is what its events ordered, and lanes run concurrently as streams do, for the race checker too.
 * Illegal uses are the errors that CUDA gives; a graph that is destroyed while it runs, and a captured copy of pageable memory, are reported. */
#include "tests/simt/simt_stream_private.h"

struct simt_captured {
    size_t lane;
    simt_operation operation; /* without marks */
    int wait, record;         /* points of the capture; -1: none */
};

typedef std::vector<uint64_t> simt_reached; /* operations of each lane that come before */

struct simt_capture {
    simt_stream *origin;
    std::thread::id thread;
    bool ended = false, invalid = false;
    std::vector<simt_stream *> streams; /* of each lane; the origin's is 0 */
    std::vector<simt_reached> reached;  /* by the end of each lane */
    std::vector<simt_reached> points;   /* by each recorded event */
    std::vector<simt_captured> operations;
};

struct simt_graph {
    std::vector<simt_captured> operations;
    size_t n_lanes, n_points;
};

struct simt_graph_exec {
    simt_graph graph;
    std::vector<simt_stream *> lanes; /* [n_lanes - 1] of its own */
    std::shared_ptr<simt_mark> launched; /* done when the newest launch is */
};

namespace simt {

static thread_local std::weak_ptr<simt_capture> captured_by_thread;

static cudaError_t invalidate(simt_capture &c, cudaError_t error)
{
    c.invalid = true;
    return set_error(error);
}

bool is_captured(const simt_stream *stream, const simt_operation &operation)
{
    return stream->capture || (operation.wait && operation.wait->capture);
}

static size_t lane_of(simt_capture &c, simt_stream *stream)
{
    for (size_t i = 0; i < c.streams.size(); i++)
        if (c.streams[i] == stream)
            return i;
    c.streams.push_back(stream);
    c.reached.emplace_back();
    return c.streams.size() - 1;
}

static void reach(simt_reached &to, const simt_reached &from)
{
    if (to.size() < from.size())
        to.resize(from.size());
    for (size_t i = 0; i < from.size(); i++)
        to[i] = std::max(to[i], from[i]);
}

/* What a wait of a stream means for the captures of both sides. */
static cudaError_t capture_wait(simt_stream *stream, const simt_mark &mark)
{
    if (!mark.capture) /* recorded outside */
        return invalidate(*stream->capture, cudaErrorStreamCaptureIsolation);
    if (mark.capture->ended)
        return stream->capture ? invalidate(*stream->capture, cudaErrorCapturedEvent) : set_error(cudaErrorCapturedEvent);
    if (stream->capture && stream->capture != mark.capture) {
        invalidate(*stream->capture, cudaErrorStreamCaptureMerge);
        return invalidate(*mark.capture, cudaErrorStreamCaptureMerge);
    }
    stream->capture = mark.capture;
    return cudaSuccess;
}

cudaError_t capture_operation(simt_stream *stream, simt_operation operation)
{
    if (operation.wait) {
        const cudaError_t error = capture_wait(stream, *operation.wait);
        if (error != cudaSuccess)
            return error;
    }
    simt_capture &c = *stream->capture;
    if (c.invalid)
        return set_error(cudaErrorStreamCaptureInvalidated);
    const size_t lane = lane_of(c, stream);
    int wait = -1, record = -1;
    if (operation.wait) {
        wait = operation.wait->point;
        reach(c.reached[lane], c.points[(size_t)wait]);
    }
    if (c.reached[lane].size() <= lane)
        c.reached[lane].resize(lane + 1);
    c.reached[lane][lane]++;
    if (operation.record) {
        operation.record->capture = stream->capture;
        operation.record->point = record = (int)c.points.size();
        c.points.push_back(c.reached[lane]);
    }
    operation.wait = operation.record = nullptr;
    c.operations.push_back({lane, std::move(operation), wait, record});
    return cudaSuccess;
}

cudaError_t capture_forbids(const simt_stream *stream)
{
    return stream->capture ? invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t capture_forbids_any()
{
    for (const simt_stream *s : streams().all)
        if (s->capture)
            return capture_forbids(s);
    return cudaSuccess;
}

cudaError_t capture_forbids_thread()
{
    const std::shared_ptr<simt_capture> c = captured_by_thread.lock();
    if (!c)
        return cudaSuccess;
    std::lock_guard<std::mutex> guard(streams().lock);
    return c->ended ? cudaSuccess : invalidate(*c, cudaErrorStreamCaptureUnsupported);
}

/* Every lane's end comes before the origin's. */
static bool is_joined(const simt_capture &c)
{
    simt_reached origin = c.reached[0];
    origin.resize(c.reached.size());
    for (size_t i = 1; i < c.reached.size(); i++)
        if (origin[i] < c.reached[i][i])
            return false;
    return true;
}

static cudaError_t capture_result(const simt_capture &c)
{
    if (c.invalid)
        return set_error(cudaErrorStreamCaptureInvalidated);
    return is_joined(c) ? cudaSuccess : set_error(cudaErrorStreamCaptureUnjoined);
}

/* Submits one captured operation again. */
static void replay(const simt_captured &captured, simt_stream *stream, const std::vector<std::shared_ptr<simt_mark>> &marks)
{
    simt_operation operation = captured.operation;
    if (captured.wait >= 0)
        operation.wait = marks[(size_t)captured.wait];
    if (captured.record >= 0)
        operation.record = marks[(size_t)captured.record];
    submit_locked(stream, std::move(operation));
}

} /* namespace simt */

using namespace simt;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    std::lock_guard<std::mutex> guard(streams().lock);
    if (device_error() != cudaSuccess)
        return device_error();
    if (stream->capture || mode != cudaStreamCaptureModeThreadLocal)
        return set_error(cudaErrorInvalidValue); /* the other modes are not emulated */
    stream->capture = std::make_shared<simt_capture>();
    stream->capture->origin = stream;
    stream->capture->thread = std::this_thread::get_id();
    stream->capture->streams = {stream};
    stream->capture->reached.resize(1);
    captured_by_thread = stream->capture;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret_graph)
{
    std::lock_guard<std::mutex> guard(streams().lock);
    const std::shared_ptr<simt_capture> c = stream->capture;
    *ret_graph = nullptr;
    if (!c || c->origin != stream)
        return set_error(cudaErrorStreamCaptureUnmatched);
    if (c->thread != std::this_thread::get_id())
        return set_error(cudaErrorStreamCaptureWrongThread);
    for (simt_stream *s : c->streams)
        s->capture = nullptr;
    c->ended = true;
    const cudaError_t error = capture_result(*c);
    if (error == cudaSuccess)
        *ret_graph = new simt_graph{c->operations, c->streams.size(), c->points.size()};
    return error;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret_exec, cudaGraph_t graph, unsigned long long flags)
{
    if (capture_forbids_thread() != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    if (device_error() != cudaSuccess)
        return device_error();
    if (flags != 0 && flags != cudaGraphInstantiateFlagUseNodePriority)
        return set_error(cudaErrorInvalidValue);
    simt_graph_exec *exec = new simt_graph_exec{*graph, {}, nullptr};
    for (size_t i = 1; i < graph->n_lanes; i++) {
        cudaStream_t lane;
        cudaStreamCreateWithFlags(&lane, cudaStreamNonBlocking);
        exec->lanes.push_back(lane);
    }
    *ret_exec = exec;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(streams().lock);
    if (device_error() != cudaSuccess)
        return device_error();
    if (stream->capture)
        report("a graph is launched into a capture", "which is not emulated");
    std::vector<std::shared_ptr<simt_mark>> marks(exec->graph.n_points);
    for (std::shared_ptr<simt_mark> &mark : marks)
        mark = std::make_shared<simt_mark>();
    if (exec->launched) /* one launch after the other, whatever the streams */
        submit_locked(stream, {"graph launch", nullptr, exec->launched, nullptr, {}});
    for (const simt_captured &captured : exec->graph.operations) {
        launch_breaks(captured.operation.name);
        replay(captured, captured.lane == 0 ? stream : exec->lanes[captured.lane - 1], marks);
    }
    exec->launched = std::make_shared<simt_mark>();
    submit_locked(stream, {"graph end", nullptr, nullptr, exec->launched, {}});
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

/* CUDA frees it when it is done; here whoever does not wait is told so. */
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    {
        std::lock_guard<std::mutex> guard(streams().lock);
        if (exec->launched && !exec->launched->done && device_error() == cudaSuccess)
            report("a graph is destroyed while it runs", "");
    }
    for (simt_stream *lane : exec->lanes)
        cudaStreamDestroy(lane);
    delete exec;
    return cudaSuccess;
}
