// Owns the streams that run late.
#include "tests/support/lazy_backend.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"

typedef void run_op_fn(struct stream *stream, const void *op);

struct lazy;

// One of: an op, a copy (from NULL: zeros), a wait for another stream, a mark.
struct task {
    run_op_fn *run;
    void *op;
    void *to;
    const void *from;
    size_t bytes;
    struct lazy *other;
    size_t other_count; // of its tasks, to be done before
    int slot;           // of a mark, else -1
};

struct lazy {
    struct stream *real;
    struct task *tasks;
    size_t count, done;
    bool at_once;
    bool marked[STREAM_TIME_SLOTS];
    int pending[STREAM_TIME_SLOTS]; // marks that have not run
};

static bool early_copies;

static struct lazy *lazy_of(struct stream *stream)
{
    return (struct lazy *)stream;
}

static void run_until(struct lazy *lazy, size_t count)
{
    while (lazy->done < count) {
        struct task *task = &lazy->tasks[lazy->done++];
        if (task->run != NULL)
            task->run(lazy->real, task->op);
        else if (task->other != NULL)
            run_until(task->other, task->other_count);
        else if (task->slot >= 0)
            lazy->pending[task->slot]--;
        else if (task->from != NULL)
            memmove(task->to, task->from, task->bytes);
        else
            memset(task->to, 0, task->bytes);
        free(task->op);
    }
}

static void queue(struct stream *stream, const struct task *task)
{
    struct lazy *lazy = lazy_of(stream);
    lazy->tasks = memory_resize(lazy->tasks, lazy->count + 1, sizeof(*lazy->tasks));
    lazy->tasks[lazy->count++] = *task;
    if (lazy->at_once)
        run_until(lazy, lazy->count);
}

static void queue_op(struct stream *stream, run_op_fn *run, const void *op, size_t size)
{
    void *copy = memory_alloc(1, size);
    memcpy(copy, op, size);
    queue(stream, &(struct task){.run = run, .op = copy, .slot = -1});
}

#define LAZY_OP(name, type)                                                                        \
    static void run_##name(struct stream *stream, const void *op)                                  \
    {                                                                                              \
        kernels_cpu.name(stream, op);                                                              \
    }                                                                                              \
    static void lazy_##name(struct stream *stream, const struct type *op)                          \
    {                                                                                              \
        queue_op(stream, run_##name, op, sizeof(*op));                                             \
    }
LAZY_OP(gemm, gemm)
LAZY_OP(rms_norm_forward, rms_norm)
LAZY_OP(rms_norm_backward, rms_norm)
LAZY_OP(norm_rope_forward, norm_rope)
LAZY_OP(norm_rope_backward, norm_rope)
LAZY_OP(norm_chain, norm_chain)
LAZY_OP(norm_chain_backward, norm_chain_gradient)
LAZY_OP(norm_split, norm_split)
LAZY_OP(swiglu_forward, swiglu)
LAZY_OP(swiglu_backward, swiglu)
LAZY_OP(gather_rows, gather_rows)
LAZY_OP(scatter_rows, scatter_rows)
LAZY_OP(add_rows, add_rows)
LAZY_OP(sum_rows, sum_rows)
LAZY_OP(gather_sum, gather_sum)
LAZY_OP(clear_rows, clear_rows)
LAZY_OP(context_load, context_load)
LAZY_OP(attention_forward, attention)
LAZY_OP(attention_backward, attention)
LAZY_OP(diagonal_forward, diagonal)
LAZY_OP(diagonal_backward, diagonal)
LAZY_OP(softmax_loss, softmax_loss)
LAZY_OP(vocab_scan, vocab_scan)
LAZY_OP(draft_overlap, draft_overlap)
LAZY_OP(mask_rows, mask_rows)
LAZY_OP(adamw, adamw)
LAZY_OP(sum_squares, sum_squares)
LAZY_OP(convert, convert)
LAZY_OP(muon_momentum, muon_momentum)
LAZY_OP(muon_normalise, muon_normalise)
LAZY_OP(muon_update, muon_update)
LAZY_OP(average, average)
LAZY_OP(exchange, exchange)

static void copy(struct stream *stream, void *to, const void *from, size_t bytes)
{
    queue(stream, &(struct task){.to = to, .from = from, .bytes = bytes, .slot = -1});
}

static void zero(struct stream *stream, void *to, size_t bytes)
{
    queue(stream, &(struct task){.to = to, .bytes = bytes, .slot = -1});
}

static void sync_stream(struct stream *stream)
{
    run_until(lazy_of(stream), lazy_of(stream)->count);
}

static struct stream *open_stream(const struct stream_options *options)
{
    struct lazy *lazy = memory_alloc(1, sizeof(*lazy));
    lazy->real = backend_cpu()->stream_open(options);
    lazy->at_once = early_copies && options->workspace_bytes == 0;
    return (struct stream *)lazy;
}

static void close_stream(struct stream *stream)
{
    struct lazy *lazy = lazy_of(stream);
    sync_stream(stream);
    backend_cpu()->stream_close(lazy->real);
    free(lazy->tasks);
    free(lazy);
}

static void stream_wait(struct stream *waiter, struct stream *other)
{
    queue(waiter, &(struct task){
                      .other = lazy_of(other), .other_count = lazy_of(other)->count, .slot = -1});
}

static void time_mark(struct stream *stream, int slot)
{
    lazy_of(stream)->marked[slot] = true;
    lazy_of(stream)->pending[slot]++;
    queue(stream, &(struct task){.slot = slot});
}

static double time_between(struct stream *stream, int from, int to)
{
    const struct lazy *lazy = lazy_of(stream);
    BUG_UNLESS(lazy->marked[from] && lazy->marked[to]);
    BUG_UNLESS(lazy->pending[from] == 0 && lazy->pending[to] == 0);
    return 1.0;
}

// NaN everywhere.
static void *poisoned_alloc(size_t bytes)
{
    void *memory = backend_cpu()->alloc(bytes);
    memset(memory, 0xff, bytes);
    return memory;
}

const struct backend *lazy_backend(bool early)
{
    static struct kernels kernels;
    static struct backend backend;
#define LAZY_MEMBER(op) kernels.op = lazy_##op;
    KERNEL_LIST(LAZY_MEMBER)
    early_copies = early;
    backend = *backend_cpu();
    backend.kernels = &kernels;
    backend.alloc = poisoned_alloc;
    backend.copy_in = backend.copy_out = backend.copy = copy;
    backend.zero = zero;
    backend.sync = sync_stream;
    backend.stream_open = open_stream;
    backend.stream_close = close_stream;
    backend.stream_wait = stream_wait;
    backend.time_mark = time_mark;
    backend.time_between = time_between;
    return &backend;
}
