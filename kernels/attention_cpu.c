// Owns attention of block rows on the CPU. The queries of one block that share a key head are one
// small matrix Q [M, D], M = B times heads per key head; keys come in tiles, those of the block first,
// then the context that some row of the block sees, with a running softmax over tiles. So a row's
// result depends on its block alone. Rows without blocks are taken LOOSE_ROWS at a time, as blocks that
// have no keys; the last bits of their results may depend on the rows beside them. The backward pass
// goes over blocks for dq, dk_block and dv_block, and then over tiles of context keys for dk_context and
// dv_context, blocks in order: no two threads add to the same element, and no sum depends on the number
// of threads.
#include "kernels/attention.h"

#include <cblas.h>
#include <math.h>

#include "base/log.h"
#include "kernels/cpu_internal.h"

enum {
    MAX_ROWS = 128,     // M at most
    MAX_HEAD_DIM = 512, // D
    TILE = 512,         // keys; half as many of heads wider than WIDE_HEAD
    WIDE_HEAD = 256,
    BACKWARD_TILE = 128, // context keys whose gradients one thread sums up
    LOOSE_ROWS = 16
};

struct buffers {
    float q[MAX_ROWS * MAX_HEAD_DIM];   // [M, D]
    float out[MAX_ROWS * MAX_HEAD_DIM]; // [M, D]; backward: dq
    float dout[MAX_ROWS * MAX_HEAD_DIM];
    float scores[MAX_ROWS * TILE]; // [M, tile]
    float dscores[MAX_ROWS * TILE];
    float k[TILE * WIDE_HEAD], v[TILE * WIDE_HEAD]; // [tile, D] where not fp32 in place
    float dk[TILE * WIDE_HEAD], dv[TILE * WIDE_HEAD];
    float max[MAX_ROWS], sum[MAX_ROWS], lse[MAX_ROWS], delta[MAX_ROWS];
};
_Static_assert(sizeof(struct buffers) <= CPU_WORKSPACE_PER_THREAD, "buffers of one thread");

// Some query heads of one key head in one block.
struct queries {
    const struct attention *op;
    struct buffers *buf;
    int64_t first_row, kv_head; // of the block
    int64_t first_head, heads;  // query heads
    int64_t rows; // M = B * heads; row m is slot m / heads, head first_head + m % heads
};

// A tile of keys and values, fp32, rows `stride` apart.
struct tile {
    bool own_block;
    int64_t first, count; // context positions, or slots
    const float *k, *v;   // [count, D]
    int64_t k_stride, v_stride;
};

static int64_t group_of(const struct attention *op)
{
    return op->heads / op->kv_heads;
}

// Rows of a block; the last one of loose rows may have less.
static int64_t block_rows(const struct attention *op)
{
    return op->block_size > 0 ? op->block_size : LOOSE_ROWS;
}

static int64_t block_count(const struct attention *op)
{
    return (op->rows + block_rows(op) - 1) / block_rows(op);
}

static int64_t heads_at_once(const struct attention *op)
{
    return min_i64(group_of(op), MAX_ROWS / block_rows(op));
}

static struct queries queries_make(const struct attention *op, struct buffers *buf, int64_t block,
                                   int64_t kv_head, int64_t head)
{
    int64_t heads = min_i64(group_of(op) - head, heads_at_once(op));
    int64_t first_row = block * block_rows(op);
    int64_t rows = min_i64(block_rows(op), op->rows - first_row);
    return (struct queries){op,    buf,         first_row, kv_head, kv_head * group_of(op) + head,
                            heads, rows * heads};
}

// Row of q, out or dout, and index into lse and delta, of row m.
static int64_t query_index(const struct queries *q, int64_t m)
{
    int64_t row = q->first_row + m / q->heads;
    return row * q->op->heads + q->first_head + m % q->heads;
}

static void load_queries(const struct queries *q, float *to, const void *from)
{
    int64_t d = q->op->head_dim;
    for (int64_t m = 0; m < q->rows; m++)
        piece_load(to + m * d, from, q->op->type, query_index(q, m) * d, d);
}

static void store_queries(const struct queries *q, void *to, const float *from)
{
    int64_t d = q->op->head_dim;
    for (int64_t m = 0; m < q->rows; m++)
        piece_store(to, from + m * d, q->op->type, query_index(q, m) * d, d);
}

// fp32 rows of one head: in place, or converted into the buffer.
static const float *head_rows(const struct attention *op, const void *base, int64_t row_stride,
                              int64_t first, int64_t count, int64_t kv_head, float *buffer,
                              int64_t *stride)
{
    int64_t d = op->head_dim;
    if (op->type == DTYPE_F32) {
        *stride = row_stride;
        return (const float *)base + first * row_stride + kv_head * d;
    }
    *stride = d;
    for (int64_t i = 0; i < count; i++)
        piece_load(buffer + i * d, base, op->type, (first + i) * row_stride + kv_head * d, d);
    return buffer;
}

static struct tile tile_make(const struct queries *q, bool own_block, int64_t first, int64_t count)
{
    const struct attention *op = q->op;
    struct tile tile = {.own_block = own_block, .first = first, .count = count};
    int64_t row = own_block ? q->first_row : first;
    tile.k = head_rows(op, own_block ? op->k_block : op->k_context, op->kv_heads * op->head_dim,
                       row, count, q->kv_head, q->buf->k, &tile.k_stride);
    tile.v = head_rows(op, own_block ? op->v_block : op->v_context,
                       own_block ? op->v_block_stride : op->v_context_stride, row, count,
                       q->kv_head, q->buf->v, &tile.v_stride);
    return tile;
}

// C [m, n] = alpha op(A) op(B) + beta C, small and in this thread.
static void multiply(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                     bool transpose_a, const float *b, int64_t ldb, bool transpose_b, float beta,
                     float *c, int64_t ldc)
{
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                transpose_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha, a, (int)lda,
                b, (int)ldb, beta, c, (int)ldc);
}

// The keys of the tile that row m sees, counted from the tile's first.
static void visible(const struct queries *q, const struct tile *tile, int64_t m, int64_t *begin,
                    int64_t *end)
{
    const struct attention *op = q->op;
    int64_t slot = m / q->heads;
    *begin = 0;
    *end = tile->count;
    if (tile->own_block) {
        if (op->causal)
            *end = slot + 1;
        return;
    }
    int64_t row = q->first_row + slot;
    *end = min_i64(*end, op->end[row] - tile->first);
    if (op->begin[row] > tile->first)
        *begin = op->begin[row] - tile->first;
    if (*end < *begin)
        *begin = *end = 0;
}

// scores = scale Q K^T, -inf where a row does not see the key
static void tile_scores(const struct queries *q, const struct tile *tile)
{
    int64_t d = q->op->head_dim, n = tile->count;
    multiply(q->rows, n, d, q->op->scale, q->buf->q, d, false, tile->k, tile->k_stride, true, 0.0f,
             q->buf->scores, n);
    for (int64_t m = 0; m < q->rows; m++) {
        int64_t begin, end;
        float *row = q->buf->scores + m * n;
        visible(q, tile, m, &begin, &end);
        for (int64_t i = 0; i < begin; i++)
            row[i] = -INFINITY;
        for (int64_t i = end; i < n; i++)
            row[i] = -INFINITY;
    }
}

static KERNEL_CLONES void scale(float *x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] *= factor;
}

// Takes a tile into the running softmax: out and sum are relative to the running max, or to 0 where a
// row, without a block, has seen nothing yet.
static void forward_tile(const struct queries *q, const struct tile *tile)
{
    struct buffers *buf = q->buf;
    int64_t d = q->op->head_dim, n = tile->count;
    tile_scores(q, tile);
    for (int64_t m = 0; m < q->rows; m++) {
        float *row = buf->scores + m * n;
        float max = piece_max(row, n), base, correction;
        max = max > buf->max[m] ? max : buf->max[m];
        base = max == -INFINITY ? 0.0f : max;
        correction = expf(buf->max[m] - base);
        piece_exp(row, row, base, 1.0f, n);
        buf->sum[m] = buf->sum[m] * correction + piece_sum(row, n);
        buf->max[m] = max;
        if (correction != 1.0f)
            scale(buf->out + m * d, correction, d);
    }
    multiply(q->rows, d, n, 1.0f, buf->scores, n, false, tile->v, tile->v_stride, false, 1.0f,
             buf->out, d);
}

// Calls a function for the block's own tile and every tile of the context that a row of it sees.
typedef void tile_fn(const struct queries *q, const struct tile *tile);

static void context_range(const struct attention *op, int64_t block, int64_t *begin, int64_t *end)
{
    int64_t first = block * block_rows(op), last = min_i64(first + block_rows(op), op->rows);
    *begin = op->context;
    *end = 0;
    for (int64_t row = first; row < last; row++) {
        BUG_UNLESS(op->begin[row] >= 0 && op->end[row] <= op->context);
        if (op->begin[row] >= op->end[row])
            continue;
        *begin = min_i64(*begin, op->begin[row]);
        *end = op->end[row] > *end ? op->end[row] : *end;
    }
}

static void each_tile(const struct queries *q, tile_fn *function)
{
    if (q->op->block_size > 0) {
        struct tile own = tile_make(q, true, 0, q->op->block_size);
        function(q, &own);
    }
    int64_t begin, end;
    context_range(q->op, q->first_row / block_rows(q->op), &begin, &end);
    int64_t keys = q->op->head_dim <= WIDE_HEAD ? TILE : TILE / 2;
    for (int64_t first = begin; first < end; first += keys) {
        struct tile tile = tile_make(q, false, first, min_i64(keys, end - first));
        function(q, &tile);
    }
}

static bool sees_nothing(const struct queries *q, int64_t m)
{
    int64_t row = q->first_row + m / q->heads;
    return q->op->block_size == 0 && q->op->begin[row] >= q->op->end[row];
}

static void forward_queries(const struct queries *q)
{
    struct buffers *buf = q->buf;
    int64_t d = q->op->head_dim;
    load_queries(q, buf->q, q->op->q);
    memset(buf->out, 0, (size_t)(q->rows * d) * sizeof(float));
    for (int64_t m = 0; m < q->rows; m++) {
        buf->max[m] = -INFINITY;
        buf->sum[m] = 0.0f;
    }
    each_tile(q, forward_tile);
    for (int64_t m = 0; m < q->rows; m++) {
        if (!sees_nothing(q, m)) // else zeros and -inf
            scale(buf->out + m * d, 1.0f / buf->sum[m], d);
        q->op->lse[query_index(q, m)] = buf->max[m] + logf(buf->sum[m]);
    }
    store_queries(q, q->op->out, buf->out);
}

// Elements of scores, were every key seen.
static int64_t work(const struct attention *op)
{
    return op->rows * op->heads * (op->context + op->block_size);
}

static void check(const struct attention *op)
{
    BUG_UNLESS(op->rows % block_rows(op) == 0 || op->block_size == 0);
    BUG_UNLESS(op->heads % op->kv_heads == 0);
    BUG_UNLESS(op->block_size <= MAX_ROWS && op->head_dim <= MAX_HEAD_DIM);
}

void attention_forward_cpu(struct stream *stream, const struct attention *op)
{
    check(op);
    int64_t blocks = block_count(op);
#pragma omp parallel for collapse(2) num_threads(team(stream, work(op))) schedule(dynamic)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t kv_head = 0; kv_head < op->kv_heads; kv_head++)
            for (int64_t head = 0; head < group_of(op); head += heads_at_once(op)) {
                struct queries q = queries_make(op, thread_workspace(stream), block, kv_head, head);
                forward_queries(&q);
            }
}

// ds = p (dp - delta) scale, where ds holds dp. Keys a row does not see give it nothing, not even a NaN.
static KERNEL_CLONES void score_gradients(float *ds, const float *p, float delta, float factor,
                                          int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ds[i] = p[i] == 0.0f ? 0.0f : p[i] * (ds[i] - delta) * factor;
}

// scores become the probabilities P, dscores = P (dout V^T - delta) scale
static void tile_gradients(const struct queries *q, const struct tile *tile)
{
    struct buffers *buf = q->buf;
    int64_t d = q->op->head_dim, n = tile->count;
    tile_scores(q, tile);
    multiply(q->rows, n, d, 1.0f, buf->dout, d, false, tile->v, tile->v_stride, true, 0.0f,
             buf->dscores, n);
    for (int64_t m = 0; m < q->rows; m++) {
        float *p = buf->scores + m * n, *ds = buf->dscores + m * n;
        piece_exp(p, p, buf->lse[m], 1.0f, n);
        score_gradients(ds, p, buf->delta[m], q->op->scale, n);
    }
}

static void add_dq(const struct queries *q, const struct tile *tile)
{
    int64_t d = q->op->head_dim, n = tile->count;
    multiply(q->rows, d, n, 1.0f, q->buf->dscores, n, false, tile->k, tile->k_stride, false, 1.0f,
             q->buf->out, d);
}

// dk [tile, D] += dscores^T Q, dv += P^T dout
static void add_dk_dv(const struct queries *q, const struct tile *tile, float *dk, float *dv)
{
    struct buffers *buf = q->buf;
    int64_t d = q->op->head_dim, n = tile->count;
    multiply(n, d, q->rows, 1.0f, buf->dscores, n, true, buf->q, d, false, 1.0f, dk, d);
    multiply(n, d, q->rows, 1.0f, buf->scores, n, true, buf->dout, d, false, 1.0f, dv, d);
}

static void backward_tile(const struct queries *q, const struct tile *tile)
{
    tile_gradients(q, tile);
    add_dq(q, tile);
    if (tile->own_block)
        add_dk_dv(q, tile, q->buf->dk, q->buf->dv);
}

static void load_backward(const struct queries *q)
{
    load_queries(q, q->buf->q, q->op->q);
    load_queries(q, q->buf->dout, q->op->dout);
    for (int64_t m = 0; m < q->rows; m++) {
        // Of -inf the exponential of a score of -inf would be NaN.
        q->buf->lse[m] = sees_nothing(q, m) ? 0.0f : q->op->lse[query_index(q, m)];
        q->buf->delta[m] = q->op->delta[query_index(q, m)];
    }
}

static void clear_dk_dv(const struct attention *op, struct buffers *buf, int64_t count)
{
    memset(buf->dk, 0, (size_t)(count * op->head_dim) * sizeof(float));
    memset(buf->dv, 0, (size_t)(count * op->head_dim) * sizeof(float));
}

// delta = sum over the head of dout * out
static void write_delta(const struct queries *q)
{
    int64_t d = q->op->head_dim;
    load_queries(q, q->buf->out, q->op->out);
    load_queries(q, q->buf->dout, q->op->dout);
    for (int64_t m = 0; m < q->rows; m++)
        q->op->delta[query_index(q, m)] = piece_dot(q->buf->out + m * d, q->buf->dout + m * d, d);
}

static void backward_block(const struct attention *op, struct buffers *buf, int64_t block,
                           int64_t kv_head)
{
    int64_t d = op->head_dim;
    clear_dk_dv(op, buf, op->block_size);
    for (int64_t head = 0; head < group_of(op); head += heads_at_once(op)) {
        struct queries q = queries_make(op, buf, block, kv_head, head);
        write_delta(&q);
        load_backward(&q);
        memset(buf->out, 0, (size_t)(q.rows * d) * sizeof(float));
        each_tile(&q, backward_tile);
        store_queries(&q, op->dq, buf->out);
    }
    for (int64_t slot = 0; slot < op->block_size; slot++) {
        int64_t row = block * op->block_size + slot;
        piece_store(op->dk_block, buf->dk + slot * d, op->type, (row * op->kv_heads + kv_head) * d,
                    d);
        piece_store(op->dv_block, buf->dv + slot * d, op->type,
                    row * op->v_block_stride + kv_head * d, d);
    }
}

// Adds to the gradients of context keys [first, first + count) of one head what every block gives.
static void backward_context(const struct attention *op, struct buffers *buf, int64_t first,
                             int64_t kv_head)
{
    int64_t d = op->head_dim, count = min_i64(BACKWARD_TILE, op->context - first);
    clear_dk_dv(op, buf, count);
    for (int64_t block = 0; block < block_count(op); block++) {
        int64_t begin, end;
        context_range(op, block, &begin, &end);
        begin = begin > first ? begin : first;
        end = min_i64(end, first + count);
        if (begin >= end)
            continue;
        for (int64_t head = 0; head < group_of(op); head += heads_at_once(op)) {
            struct queries q = queries_make(op, buf, block, kv_head, head);
            struct tile tile = tile_make(&q, false, begin, end - begin);
            load_backward(&q);
            tile_gradients(&q, &tile);
            add_dk_dv(&q, &tile, buf->dk + (begin - first) * d, buf->dv + (begin - first) * d);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t at = ((first + i) * op->kv_heads + kv_head) * d;
        for (int64_t j = 0; j < d; j++) {
            op->dk_context[at + j] += buf->dk[i * d + j];
            op->dv_context[at + j] += buf->dv[i * d + j];
        }
    }
}

void attention_backward_cpu(struct stream *stream, const struct attention *op)
{
    check(op);
    int64_t blocks = block_count(op);
#pragma omp parallel num_threads(team(stream, work(op)))
    {
        struct buffers *buf = thread_workspace(stream);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t kv_head = 0; kv_head < op->kv_heads; kv_head++)
                backward_block(op, buf, block, kv_head);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t first = 0; first < op->context; first += BACKWARD_TILE)
            for (int64_t kv_head = 0; kv_head < op->kv_heads; kv_head++)
                backward_context(op, buf, first, kv_head);
    }
}
