/* Steps of a stream (device_ops.step_begin): what the ops of a step submit, as it is noted, and the CUDA graphs that are kept of it. One a stream that has opened them; the streams beside it
 * (stream_side_open) are part of its steps.
 *
 * A step's ops are called once without submitting anything (quiet): each submission only notes what it is, to the byte, and small arguments go to a region of the step's own, at places that
 * follow from the sequence of calls. When a graph of that very record is kept, the arguments are copied and the graph is launched. When the record has been seen, the ops run once more into a
 * capture, and what they note must be the record again. Else they run as without steps (eager), and the record is remembered. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#ifdef __cplusplus
extern "C" {
#endif

enum step_mode { STEP_NONE, STEP_QUIET, STEP_CAPTURE, STEP_EAGER };

enum {
    STEP_GRAPHS = 8,                 /* records that are remembered, with a graph or without */
    STEP_RECORD_BYTES_MAX = 16 << 20, /* of one: a step of 100 layers has a twentieth of it */
};

struct step_record {
    uint8_t *bytes;
    size_t n, room;
};

struct step_graph {
    struct step_record record; /* n 0: unused */
    cudaGraphExec_t exec;      /* or NULL: it was seen, and not captured yet */
    bool refused;              /* it could not be captured */
    uint64_t used;             /* when, in steps */
};

struct step {
    enum step_mode mode;
    bool blocked;               /* something of the step cannot be part of a graph */
    struct step_record record;  /* of the quiet pass */
    size_t compared;            /* of it, by the capture */
    struct step_graph graphs[STEP_GRAPHS];
    struct step_graph *captured; /* the one at work */
    uint8_t *args_host, *args_device;
    size_t args_bytes, args_used;
    cudaEvent_t args_sent;      /* the region of the host may be written again */
    cudaEvent_t fork, launched, joined[STREAM_SIDES_MAX];
    struct step_stats stats;
};

/* The step that submissions to the stream are a part of, in the passes that note them; else NULL. */
static inline struct step *step_noting(const struct stream *s)
{
    struct step *step = s->main->step;
    return step && (step->mode == STEP_QUIET || step->mode == STEP_CAPTURE) ? step : NULL;
}

/* What follows belongs to one submission of this kind; then its parts. */
void step_note_begin(struct step *step, const struct stream *s, int kind);
void step_note(struct step *step, const void *part, size_t bytes);
/* 0 where no step is noted; else the step cannot become a graph, and -EAGAIN: the op ends, and the step runs once more, eagerly. */
int step_block(const struct stream *s);

int cuda_steps_open(struct stream *s, void *memory, size_t bytes);
void cuda_steps_close(struct stream *s);
int cuda_step_begin(struct stream *s);
int cuda_step_end(struct stream *s, int result);
void cuda_step_stats(const struct stream *s, struct step_stats *ret);

#ifdef __cplusplus
}
#endif
