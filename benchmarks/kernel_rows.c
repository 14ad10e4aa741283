// Owns the sizes at which ops are timed, their tensors and their arguments.
#include "benchmarks/kernel_rows.h"

#include <stdlib.h>

#include "base/log.h"

const struct sizes bench_sizes[] = {
    {"v4", 8192, 8192, 5120, 32, 8, 128, 17408, 5, 248320, 4224, 1730000000},
    {"qwen3-8b", 8192, 8192, 4096, 32, 8, 128, 12288, 5, 151936, 4224, 1050000000},
    {"smollm2", 2048, 2048, 576, 9, 3, 64, 1536, 3, 49152, 448, 12000000},
};
const int bench_size_count = sizeof(bench_sizes) / sizeof(bench_sizes[0]);

static void *take(struct bench *bench, enum dtype type, int64_t count)
{
    BUG_UNLESS(bench->tensor_count < BENCH_TENSORS);
    void *tensor = bench->backend->alloc((size_t)count * dtype_size(type));
    bench->tensors[bench->tensor_count++] = tensor;
    return tensor;
}

void bench_give_all(struct bench *bench)
{
    bench->backend->sync(bench->stream);
    while (bench->tensor_count > 0)
        bench->backend->free(bench->tensors[--bench->tensor_count]);
}

// Repeats what lies in the pattern over the tensor.
static void fill(const struct bench *bench, void *tensor, const void *pattern, size_t bytes,
                 size_t pattern_bytes)
{
    size_t done = bytes < pattern_bytes ? bytes : pattern_bytes;
    bench->backend->copy(bench->stream, tensor, pattern, done);
    while (done < bytes) {
        size_t more = bytes - done < done ? bytes - done : done;
        bench->backend->copy(bench->stream, (unsigned char *)tensor + done, tensor, more);
        done += more;
    }
}

// Tensors of the op: inputs (random), outputs, and those that are read and written (random).
void *bench_take_in(struct bench *bench, enum dtype type, int64_t count)
{
    void *tensor = take(bench, type, count);
    size_t size = dtype_size(type);
    fill(bench, tensor, bench->pattern[type == DTYPE_BF16], (size_t)count * size, PATTERN * size);
    bench->bytes += (double)count * (double)size;
    return tensor;
}

void *bench_take_out(struct bench *bench, enum dtype type, int64_t count)
{
    bench->bytes += (double)count * (double)dtype_size(type);
    return take(bench, type, count);
}

static void *take_changed(struct bench *bench, enum dtype type, int64_t count)
{
    bench->bytes += (double)count * (double)dtype_size(type);
    return bench_take_in(bench, type, count);
}

static void *take_positive(struct bench *bench, int64_t count)
{
    void *tensor = bench_take_out(bench, DTYPE_F32, count);
    fill(bench, tensor, bench->positive, (size_t)count * sizeof(float), PATTERN * sizeof(float));
    return tensor;
}

// [count] value[i] = first + i * step modulo limit
static int32_t *take_integers(struct bench *bench, int64_t count, int64_t step, int64_t limit)
{
    int32_t *values = memory_alloc((size_t)count, sizeof(*values));
    for (int64_t i = 0; i < count; i++)
        values[i] = (int32_t)(i * step % limit);
    int32_t *tensor = bench_take_out(bench, DTYPE_I32, count);
    bench->backend->copy_in(bench->stream, tensor, values, (size_t)count * sizeof(*values));
    bench->backend->sync(bench->stream);
    free(values);
    return tensor;
}

#define CALL(op_name, member)                                                                      \
    static void call_##op_name(const struct bench *bench, struct job *job)                         \
    {                                                                                              \
        bench->backend->kernels->op_name(bench->stream, &job->op.member);                          \
    }
CALL(gemm, gemm)
CALL(rms_norm_forward, rms_norm)
CALL(rms_norm_backward, rms_norm)
CALL(norm_rope_forward, norm_rope)
CALL(norm_rope_backward, norm_rope)
CALL(norm_chain, norm_chain)
CALL(norm_chain_backward, norm_chain_backward)
CALL(norm_split, norm_split)
CALL(swiglu_forward, swiglu)
CALL(swiglu_backward, swiglu)
CALL(gather_rows, gather_rows)
CALL(scatter_rows, scatter_rows)
CALL(gather_sum, gather_sum)
CALL(context_load, context_load)
CALL(diagonal_forward, diagonal)
CALL(diagonal_backward, diagonal)
CALL(vocab_scan, vocab_scan)
CALL(draft_overlap, draft_overlap)
CALL(adamw, adamw)
CALL(sum_squares, sum_squares)
CALL(convert, convert)
CALL(muon_momentum, muon_momentum)
CALL(muon_normalise, muon_normalise)
CALL(muon_update, muon_update)
CALL(average, average)
CALL(exchange, exchange)
#undef CALL

// A product y[m, n] of n weights: forward x W^T; dgrad dy W; wgrad dW += dy^T x in fp32.
static void bind_gemm(struct bench *bench, struct job *job, int64_t m, int64_t n, int64_t k,
                      enum dtype out, bool add, bool transpose_a, bool transpose_b)
{
    struct gemm *op = &job->op.gemm;
    *op = (struct gemm){.m = m,
                        .n = n,
                        .k = k,
                        .transpose_a = transpose_a,
                        .transpose_b = transpose_b,
                        .alpha = 1.0f,
                        .beta = add ? 1.0f : 0.0f,
                        .a_type = bench->type,
                        .b_type = bench->type,
                        .c_type = out};
    op->a = bench_take_in(bench, bench->type, m * k);
    op->b = bench_take_in(bench, bench->type, n * k);
    op->c = add ? take_changed(bench, out, m * n) : bench_take_out(bench, out, m * n);
    job->flops = 2.0 * (double)m * (double)n * (double)k;
    job->call = call_gemm;
    if (bench->backend->gemm_record == NULL || !(bench->tune_seconds > 0.0))
        return;
    bench->backend->gemm_record(bench->stream);
    call_gemm(bench, job);
    bench->backend->gemm_tune(bench->stream, bench->tune_seconds, bench->algorithms);
}

const char *const bench_passes[BENCH_PASSES] = {"forward", "dgrad", "wgrad"};

// From `in` to `out` features, over block rows or the row's tokens.
struct weight {
    const char *name;
    int64_t rows, in, out;
};

static void weights_of(const struct sizes *s, struct weight weights[BENCH_WEIGHTS])
{
    int64_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    weights[0] = (struct weight){"fc", s->t, s->l * s->h, s->h};
    weights[1] = (struct weight){"context_kv", s->t, s->h, 2 * kv};
    weights[2] = (struct weight){"qkv", s->n, s->h, q + 2 * kv};
    weights[3] = (struct weight){"o", s->n, q, s->h};
    weights[4] = (struct weight){"gate_up", s->n, s->h, 2 * s->i};
    weights[5] = (struct weight){"down", s->n, s->i, s->h};
}

const char *bench_weight_name(int weight, int pass)
{
    struct weight weights[BENCH_WEIGHTS];
    weights_of(&bench_sizes[0], weights);
    return weight == 0 && pass == 1 ? NULL : weights[weight].name; // features need no gradient
}

void bench_bind_weight(struct bench *bench, const struct sizes *s, int weight, int pass,
                       struct job *job)
{
    struct weight weights[BENCH_WEIGHTS];
    weights_of(s, weights);
    const struct weight *w = &weights[weight];
    if (pass == 0)
        bind_gemm(bench, job, w->rows, w->out, w->in, bench->type, false, false, true);
    else if (pass == 1)
        bind_gemm(bench, job, w->rows, w->in, w->out, bench->type, false, false, false);
    else
        bind_gemm(bench, job, w->out, w->in, w->rows, DTYPE_F32, true, true, false);
}

void bench_bind_square(struct bench *bench, int64_t side, struct job *job)
{
    bind_gemm(bench, job, side, side, side, bench->type, false, false, true);
}

static void bind_logits(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_gemm(bench, job, s->c, s->v, s->h, DTYPE_F32, false, false, true);
}

static void bind_logits_low(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_gemm(bench, job, s->c, s->v, s->h, bench->type, false, false, true);
}

static void bind_hidden_gradient(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_gemm(bench, job, s->c, s->h, s->v, DTYPE_F32, false, false, false);
}

// x in fp32 is the residual stream.
static void bind_norm(struct bench *bench, const struct sizes *s, struct job *job,
                      enum dtype x_type)
{
    job->op.rms_norm = (struct rms_norm){.rows = s->n,
                                         .width = s->h,
                                         .eps = 1e-6f,
                                         .type = bench->type,
                                         .x_type = x_type,
                                         .x = bench_take_in(bench, x_type, s->n * s->h),
                                         .weight = bench_take_in(bench, DTYPE_F32, s->h)};
}

static void norm_forward(struct bench *bench, const struct sizes *s, struct job *job,
                         enum dtype x_type)
{
    bind_norm(bench, s, job, x_type);
    job->op.rms_norm.y = bench_take_out(bench, bench->type, s->n * s->h);
    job->op.rms_norm.rstd = bench_take_out(bench, DTYPE_F32, s->n);
    job->call = call_rms_norm_forward;
}

static void bind_norm_forward(struct bench *bench, const struct sizes *s, struct job *job)
{
    norm_forward(bench, s, job, bench->type);
}

static void bind_norm_residual(struct bench *bench, const struct sizes *s, struct job *job)
{
    norm_forward(bench, s, job, DTYPE_F32);
}

static void norm_backward(struct bench *bench, const struct sizes *s, struct job *job,
                          enum dtype x_type)
{
    struct rms_norm *op = &job->op.rms_norm;
    bind_norm(bench, s, job, x_type);
    op->rstd = take_positive(bench, s->n);
    op->dy = bench_take_in(bench, bench->type, s->n * s->h);
    op->dweight = take_changed(bench, DTYPE_F32, s->h);
    op->scratch = take(bench, DTYPE_F32, RMS_NORM_PARTS * s->h);
    op->dx = bench_take_out(bench, bench->type, s->n * s->h);
    job->call = call_rms_norm_backward;
}

static void bind_norm_backward(struct bench *bench, const struct sizes *s, struct job *job)
{
    norm_backward(bench, s, job, bench->type);
}

static void bind_norm_backward_add(struct bench *bench, const struct sizes *s, struct job *job)
{
    norm_backward(bench, s, job, DTYPE_F32);
    job->op.rms_norm.dx_add = true;
    bench->bytes += (double)(s->n * s->h) * (double)dtype_size(bench->type);
    bench->backend->zero(bench->stream, job->op.rms_norm.dx,
                         (size_t)(s->n * s->h) * dtype_size(bench->type));
}

// `heads` heads of rows `stride` elements apart.
static void bind_rope(struct bench *bench, const struct sizes *s, struct job *job, int64_t rows,
                      int64_t heads, int64_t stride)
{
    int64_t half = s->head_dim / 2;
    struct norm_rope *op = &job->op.norm_rope;
    *op = (struct norm_rope){.rows = rows,
                             .heads = heads,
                             .head_dim = s->head_dim,
                             .eps = 1e-6f,
                             .type = bench->type,
                             .x_stride = stride,
                             .dx_stride = stride,
                             .table_rows = s->t};
    op->x = bench_take_in(bench, bench->type, rows * stride);
    // Of a row only the heads are read.
    bench->bytes -=
        (double)(rows * (stride - heads * s->head_dim)) * (double)dtype_size(bench->type);
    op->weight = bench_take_in(bench, DTYPE_F32, s->head_dim);
    op->positions = take_integers(bench, rows, 7, s->t);
    op->cos = bench_take_in(bench, DTYPE_F32, s->t * half);
    op->sin = bench_take_in(bench, DTYPE_F32, s->t * half);
}

static void rope_forward(struct bench *bench, struct job *job)
{
    struct norm_rope *op = &job->op.norm_rope;
    op->y = bench_take_out(bench, bench->type, op->rows * op->heads * op->head_dim);
    job->call = call_norm_rope_forward;
}

// In training dx is the place of x's heads in a buffer like that of x.
static void rope_backward(struct bench *bench, struct job *job, enum dtype dy_type)
{
    struct norm_rope *op = &job->op.norm_rope;
    int64_t count = op->rows * op->heads * op->head_dim;
    op->dy_type = dy_type;
    op->dy = bench_take_in(bench, dy_type, count);
    op->dx = take(bench, bench->type, op->rows * op->dx_stride);
    bench->bytes += (double)count * (double)dtype_size(bench->type);
    op->dweight = take_changed(bench, DTYPE_F32, op->head_dim);
    op->scratch = take(bench, DTYPE_F32, RMS_NORM_PARTS * op->head_dim);
    job->call = call_norm_rope_backward;
}

static int64_t qkv_width(const struct sizes *s)
{
    return (s->heads + 2 * s->kv_heads) * s->head_dim;
}

static void bind_rope_q(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_rope(bench, s, job, s->n, s->heads, qkv_width(s));
    rope_forward(bench, job);
}

static void bind_rope_k(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_rope(bench, s, job, s->n, s->kv_heads, qkv_width(s));
    rope_forward(bench, job);
}

static void bind_rope_q_backward(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_rope(bench, s, job, s->n, s->heads, qkv_width(s));
    rope_backward(bench, job, bench->type);
}

static void bind_rope_k_backward(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_rope(bench, s, job, s->n, s->kv_heads, qkv_width(s));
    rope_backward(bench, job, bench->type);
}

static void bind_rope_context_backward(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_rope(bench, s, job, s->t, s->kv_heads, 2 * s->kv_heads * s->head_dim);
    rope_backward(bench, job, DTYPE_F32);
}

static void bind_swiglu_forward(struct bench *bench, const struct sizes *s, struct job *job)
{
    job->op.swiglu = (struct swiglu){.rows = s->n,
                                     .width = s->i,
                                     .type = bench->type,
                                     .gate_up = bench_take_in(bench, bench->type, s->n * 2 * s->i),
                                     .y = bench_take_out(bench, bench->type, s->n * s->i)};
    job->call = call_swiglu_forward;
}

static void bind_swiglu_backward(struct bench *bench, const struct sizes *s, struct job *job)
{
    job->op.swiglu =
        (struct swiglu){.rows = s->n,
                        .width = s->i,
                        .type = bench->type,
                        .gate_up = bench_take_in(bench, bench->type, s->n * 2 * s->i),
                        .dy = bench_take_in(bench, bench->type, s->n * s->i),
                        .dgate_up = bench_take_out(bench, bench->type, s->n * 2 * s->i)};
    job->call = call_swiglu_backward;
}

static void bind_gather(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct gather_rows *op = &job->op.gather_rows;
    *op = (struct gather_rows){.rows = s->n,
                               .width = s->h,
                               .in_rows = s->t,
                               .in_stride = s->l * s->h,
                               .in_type = bench->type,
                               .out_type = bench->type,
                               .scale = 1.0f};
    op->in = bench_take_in(bench, bench->type, s->t * op->in_stride);
    op->index = take_integers(bench, s->n, 7, s->t);
    op->out = bench_take_out(bench, bench->type, s->n * s->h);
    bench->bytes -= (double)(s->t * op->in_stride - s->n * s->h) * (double)dtype_size(bench->type);
    job->call = call_gather_rows;
}

// One slot in 16 has no gradient.
static void bind_scatter(struct bench *bench, const struct sizes *s, struct job *job)
{
    int64_t rows = s->n / 16 * 15;
    job->op.scatter_rows =
        (struct scatter_rows){.rows = rows,
                              .width = s->h,
                              .in = bench_take_in(bench, DTYPE_F32, rows * s->h),
                              .in_type = DTYPE_F32,
                              .out_type = bench->type,
                              .index = take_integers(bench, rows, 7, s->n),
                              .scale = take_positive(bench, rows),
                              .out = bench_take_out(bench, bench->type, s->n * s->h),
                              .out_rows = s->n};
    job->call = call_scatter_rows;
}

static void bind_context(struct bench *bench, const struct sizes *s, struct job *job)
{
    for (int64_t l = 0; l < s->l; l++)
        job->planes[l] = (int32_t)l;
    job->op.context_load =
        (struct context_load){.tokens = s->t,
                              .layers = s->l,
                              .hidden = s->h,
                              .in = bench_take_in(bench, DTYPE_BF16, s->t * s->l * s->h),
                              .in_bytes = s->l * s->h * (int64_t)dtype_size(DTYPE_BF16),
                              .plane = job->planes,
                              .type = bench->type,
                              .out = bench_take_out(bench, bench->type, s->t * s->l * s->h)};
    job->call = call_context_load;
}

static void bind_float8_context(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_context(bench, s, job);
    struct context_load *op = &job->op.context_load;
    bench->bytes -= (double)(s->t * s->l * s->h); // a byte a value
    op->in_bytes = s->l * s->h;
    op->scales = take_positive(bench, s->t * s->l);
    op->scale_stride = s->l;
}

static void bind_noisy_context(struct bench *bench, const struct sizes *s, struct job *job)
{
    bind_context(bench, s, job);
    struct context_load *op = &job->op.context_load;
    op->noise = NOISE_KIND_UNIFORM;
    op->noise_std = 0.05f;
    op->noise_key = (const uint32_t *)take_integers(bench, 2 * s->t, 1, 1 << 30);
    op->positions = take_integers(bench, s->t, 1, s->t);
}

// From a step's output to the next step's normed input.
static void bind_next_step(struct bench *bench, const struct sizes *s, struct job *job)
{
    int64_t count = s->t * s->h;
    job->op.norm_chain = (struct norm_chain){.rows = s->t,
                                             .width = s->h,
                                             .eps = 1e-6f,
                                             .x_type = DTYPE_F32,
                                             .type = bench->type,
                                             .x = bench_take_in(bench, DTYPE_F32, count),
                                             .x_stride = s->h,
                                             .weight = bench_take_in(bench, DTYPE_F32, s->h),
                                             .wide = bench_take_out(bench, DTYPE_F32, count),
                                             .narrow = bench_take_out(bench, bench->type, count),
                                             .narrow_stride = s->h,
                                             .rstd = bench_take_out(bench, DTYPE_F32, s->t),
                                             .second_weight = bench_take_in(bench, DTYPE_F32, s->h),
                                             .second = bench_take_out(bench, bench->type, count),
                                             .second_rstd = bench_take_out(bench, DTYPE_F32, s->t)};
    job->call = call_norm_chain;
}

// One of three features side by side.
static void bind_feature_norm(struct bench *bench, const struct sizes *s, struct job *job)
{
    enum { FEATURES = 3 };
    int64_t stride = FEATURES * s->h;
    job->op.norm_chain =
        (struct norm_chain){.rows = s->t,
                            .width = s->h,
                            .eps = 1e-6f,
                            .x_type = bench->type,
                            .type = bench->type,
                            .x = bench_take_in(bench, bench->type, s->t * stride),
                            .x_stride = stride,
                            .weight = bench_take_in(bench, DTYPE_F32, s->h),
                            .narrow = bench_take_out(bench, bench->type, s->t * stride),
                            .narrow_stride = stride};
    bench->bytes -= 2.0 * (double)(s->t * (stride - s->h)) * (double)dtype_size(bench->type);
    job->call = call_norm_chain;
}

// Back from a step's normed input to the output of the step before.
static void bind_previous_step(struct bench *bench, const struct sizes *s, struct job *job)
{
    int64_t count = s->t * s->h;
    job->op.norm_chain_backward =
        (struct norm_chain_gradient){.rows = s->t,
                                     .width = s->h,
                                     .type = bench->type,
                                     .x = bench_take_in(bench, DTYPE_F32, count),
                                     .weight = bench_take_in(bench, DTYPE_F32, s->h),
                                     .rstd = take_positive(bench, s->t),
                                     .second_weight = bench_take_in(bench, DTYPE_F32, s->h),
                                     .second_rstd = take_positive(bench, s->t),
                                     .dsecond = bench_take_in(bench, bench->type, count),
                                     .dy = bench_take_in(bench, bench->type, count),
                                     .more = bench_take_in(bench, bench->type, count),
                                     .dx = bench_take_out(bench, bench->type, count),
                                     .dweight = take_changed(bench, DTYPE_F32, s->h),
                                     .second_dweight = take_changed(bench, DTYPE_F32, s->h),
                                     .scratch = take(bench, DTYPE_F32, RMS_NORM_PARTS * s->h)};
    job->call = call_norm_chain_backward;
}

// A feature's columns of fc.
static void bind_norm_split(struct bench *bench, const struct sizes *s, struct job *job)
{
    int64_t count = s->h * s->h;
    job->op.norm_split =
        (struct norm_split){.rows = s->h,
                            .width = s->h,
                            .sums = bench_take_in(bench, DTYPE_F32, count),
                            .weight = bench_take_in(bench, DTYPE_F32, s->h),
                            .matrix = bench_take_in(bench, bench->type, count),
                            .matrix_stride = s->h,
                            .type = bench->type,
                            .dmatrix = bench_take_out(bench, DTYPE_F32, count),
                            .dmatrix_stride = s->h,
                            .dweight = take_changed(bench, DTYPE_F32, s->h),
                            .scratch = take(bench, DTYPE_F32, RMS_NORM_PARTS * s->h)};
    job->call = call_norm_split;
}

// Gradients of queries by token, from the rows of three steps.
static void bind_gather_sum(struct bench *bench, const struct sizes *s, struct job *job)
{
    enum { STEPS = 3 };
    int64_t rows = STEPS * s->t, q = s->heads * s->head_dim, stride = qkv_width(s);
    job->op.gather_sum = (struct gather_sum){.rows = s->t,
                                             .width = q,
                                             .terms = STEPS,
                                             .in = bench_take_in(bench, bench->type, rows * stride),
                                             .in_rows = rows,
                                             .in_stride = stride,
                                             .in_type = bench->type,
                                             .from = take_integers(bench, rows, 1, rows),
                                             .from_stride = s->t,
                                             .out = bench_take_out(bench, bench->type, s->t * q),
                                             .out_stride = q,
                                             .out_type = bench->type};
    bench->bytes -= (double)(rows * (stride - q)) * (double)dtype_size(bench->type);
    job->call = call_gather_sum;
}

// The last of seven steps: a group's positions with a key of each of six.
static void bind_diagonal(struct bench *bench, const struct sizes *s, struct job *job)
{
    enum { ROWS = 2340, STEPS = 6 };
    int64_t queries = ROWS * s->heads * s->head_dim, keys = ROWS * s->kv_heads * s->head_dim;
    struct diagonal *op = &job->op.diagonal;
    *op = (struct diagonal){.rows = ROWS,
                            .steps = STEPS,
                            .heads = s->heads,
                            .kv_heads = s->kv_heads,
                            .head_dim = s->head_dim,
                            .scale = 0.1f,
                            .type = bench->type,
                            .k_step = keys,
                            .k_stride = s->kv_heads * s->head_dim,
                            .v_step = keys,
                            .v_stride = s->kv_heads * s->head_dim};
    op->q = bench_take_in(bench, bench->type, queries);
    op->k = bench_take_in(bench, bench->type, STEPS * keys);
    op->v = bench_take_in(bench, bench->type, STEPS * keys);
}

static void bind_diagonal_forward(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct diagonal *op = &job->op.diagonal;
    bind_diagonal(bench, s, job);
    op->out = take_changed(bench, bench->type, op->rows * op->heads * op->head_dim);
    op->lse = take_changed(bench, DTYPE_F32, op->rows * op->heads);
    job->call = call_diagonal_forward;
}

static void bind_diagonal_backward(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct diagonal *op = &job->op.diagonal;
    bind_diagonal(bench, s, job);
    int64_t queries = op->rows * op->heads * op->head_dim;
    int64_t keys = op->steps * op->rows * op->kv_heads * op->head_dim;
    op->out = bench_take_in(bench, bench->type, queries);
    op->lse = take_positive(bench, op->rows * op->heads);
    op->dout = bench_take_in(bench, bench->type, queries);
    op->dq = take_changed(bench, bench->type, queries);
    op->dk = take_changed(bench, DTYPE_F32, keys);
    op->dv = take_changed(bench, DTYPE_F32, keys);
    job->call = call_diagonal_backward;
}

// Tokens that a draft vocabulary keeps.
static int64_t kept_of(const struct sizes *s)
{
    return s->v > 64000 ? 32000 : s->v / 2;
}

static void vocab_scan_of(struct bench *bench, const struct sizes *s, struct job *job,
                          enum dtype type)
{
    int64_t kept = kept_of(s), others = s->v - kept, rows = s->c / 4;
    job->op.vocab_scan =
        (struct vocab_scan){.rows = rows,
                            .kept = kept,
                            .others = others,
                            .logits_type = type,
                            .kept_logits = bench_take_in(bench, type, rows * kept),
                            .other_logits = bench_take_in(bench, type, rows * others),
                            .ids = take_integers(bench, s->v, 1, s->v),
                            .lse = bench_take_out(bench, DTYPE_F32, rows),
                            .argmax = bench_take_out(bench, DTYPE_I32, rows)};
    job->call = call_vocab_scan;
}

static void bind_vocab_scan(struct bench *bench, const struct sizes *s, struct job *job)
{
    vocab_scan_of(bench, s, job, DTYPE_F32);
}

static void bind_vocab_scan_low(struct bench *bench, const struct sizes *s, struct job *job)
{
    vocab_scan_of(bench, s, job, bench->type);
}

// Each teacher row has a student row.
static void draft_overlap_of(struct bench *bench, const struct sizes *s, struct job *job,
                             enum dtype type)
{
    int64_t vocab = kept_of(s), rows = s->c / 2;
    job->op.draft_overlap =
        (struct draft_overlap){.rows = rows,
                               .vocab = vocab,
                               .logits_type = type,
                               .student = bench_take_in(bench, type, rows * vocab),
                               .teacher = bench_take_in(bench, type, rows * vocab),
                               .teacher_row = take_integers(bench, rows, 1, rows),
                               .teacher_lse = take_positive(bench, rows),
                               .overlap = bench_take_out(bench, DTYPE_F32, rows)};
    job->call = call_draft_overlap;
}

static void bind_draft_overlap(struct bench *bench, const struct sizes *s, struct job *job)
{
    draft_overlap_of(bench, s, job, DTYPE_F32);
}

static void bind_draft_overlap_low(struct bench *bench, const struct sizes *s, struct job *job)
{
    draft_overlap_of(bench, s, job, bench->type);
}

static void bind_adamw(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct adamw *op = &job->op.adamw;
    *op = (struct adamw){.count = s->parameters,
                         .copy_type = DTYPE_BF16,
                         .lr = 1e-4,
                         .beta1 = 0.9,
                         .beta2 = 0.999,
                         .eps = 1e-8,
                         .grad_scale = 1.0,
                         .step = 10};
    op->param = take_changed(bench, DTYPE_F32, op->count);
    op->m = take_changed(bench, DTYPE_F32, op->count);
    op->v = take_positive(bench, op->count);
    bench->bytes += (double)op->count * sizeof(float);
    op->grad = bench_take_in(bench, DTYPE_F32, op->count);
    op->copy = bench_take_out(bench, DTYPE_BF16, op->count);
    job->call = call_adamw;
}

static void bind_sum_squares(struct bench *bench, const struct sizes *s, struct job *job)
{
    job->op.sum_squares =
        (struct sum_squares){.count = s->parameters,
                             .x = bench_take_in(bench, DTYPE_F32, s->parameters),
                             .result = bench_take_out(bench, DTYPE_F64, 1),
                             .scratch = take(bench, DTYPE_F64, SUM_SQUARES_PARTS)};
    job->call = call_sum_squares;
}

static void bind_convert(struct bench *bench, const struct sizes *s, struct job *job)
{
    job->op.convert = (struct convert){.count = s->t * s->h,
                                       .from = bench_take_in(bench, DTYPE_F32, s->t * s->h),
                                       .to = bench_take_out(bench, DTYPE_BF16, s->t * s->h),
                                       .from_type = DTYPE_F32,
                                       .to_type = DTYPE_BF16};
    job->call = call_convert;
}

static void bind_muon_momentum(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct muon_momentum *op = &job->op.muon_momentum;
    *op = (struct muon_momentum){.count = s->parameters, .momentum = 0.95, .grad_scale = 1.0};
    op->grad = take_changed(bench, DTYPE_F32, op->count);
    op->m = take_changed(bench, DTYPE_F32, op->count);
    job->call = call_muon_momentum;
}

static void bind_muon_normalise(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct muon_normalise *op = &job->op.muon_normalise;
    *op = (struct muon_normalise){.count = s->parameters, .to_type = bench->type};
    op->from = bench_take_in(bench, DTYPE_F32, op->count);
    op->squares = take(bench, DTYPE_F64, 1);
    op->to = bench_take_out(bench, bench->type, op->count);
    job->call = call_muon_normalise;
}

static void bind_muon_update(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct muon_update *op = &job->op.muon_update;
    *op = (struct muon_update){.count = s->parameters,
                               .x_type = bench->type,
                               .copy_type = DTYPE_BF16,
                               .keep = 1.0,
                               .step = 1e-4};
    op->param = take_changed(bench, DTYPE_F32, op->count);
    op->x = bench_take_in(bench, bench->type, op->count);
    op->copy = bench_take_out(bench, DTYPE_BF16, op->count);
    job->call = call_muon_update;
}

static void bind_average(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct average *op = &job->op.average;
    *op = (struct average){.count = s->parameters, .share = 0.001};
    op->average = take_changed(bench, DTYPE_F32, op->count);
    op->x = bench_take_in(bench, DTYPE_F32, op->count);
    job->call = call_average;
}

static void bind_exchange(struct bench *bench, const struct sizes *s, struct job *job)
{
    struct exchange *op = &job->op.exchange;
    *op = (struct exchange){.count = s->parameters};
    op->a = take_changed(bench, DTYPE_F32, op->count);
    op->b = take_changed(bench, DTYPE_F32, op->count);
    job->call = call_exchange;
}

void bench_bind_call(struct bench *bench, struct job *job)
{
    job->op.convert = (struct convert){.count = 8,
                                       .from = bench_take_in(bench, DTYPE_F32, 8),
                                       .to = bench_take_out(bench, DTYPE_BF16, 8),
                                       .from_type = DTYPE_F32,
                                       .to_type = DTYPE_BF16};
    job->call = call_convert;
}

const struct row bench_rows[] = {
    {"gemm", "logits", bind_logits},
    {"gemm", "logits_low", bind_logits_low},
    {"gemm", "hidden_gradient", bind_hidden_gradient},
    {"rms_norm_forward", "rows", bind_norm_forward},
    {"rms_norm_forward", "residual", bind_norm_residual},
    {"rms_norm_backward", "rows", bind_norm_backward},
    {"rms_norm_backward", "residual", bind_norm_backward_add},
    {"norm_rope_forward", "q", bind_rope_q},
    {"norm_rope_forward", "k", bind_rope_k},
    {"norm_rope_backward", "q", bind_rope_q_backward},
    {"norm_rope_backward", "k", bind_rope_k_backward},
    {"norm_rope_backward", "context", bind_rope_context_backward},
    {"swiglu_forward", "rows", bind_swiglu_forward},
    {"swiglu_backward", "rows", bind_swiglu_backward},
    {"gather_rows", "plane", bind_gather},
    {"scatter_rows", "gradient", bind_scatter},
    {"context_load", "plain", bind_context},
    {"context_load", "noise", bind_noisy_context},
    {"context_load", "float8", bind_float8_context},
    {"norm_chain", "step", bind_next_step},
    {"norm_chain", "feature", bind_feature_norm},
    {"norm_chain_backward", "step", bind_previous_step},
    {"norm_split", "fc", bind_norm_split},
    {"gather_sum", "tokens", bind_gather_sum},
    {"diagonal_forward", "steps", bind_diagonal_forward},
    {"diagonal_backward", "steps", bind_diagonal_backward},
    {"vocab_scan", "fp32", bind_vocab_scan},
    {"vocab_scan", "low", bind_vocab_scan_low},
    {"draft_overlap", "fp32", bind_draft_overlap},
    {"draft_overlap", "low", bind_draft_overlap_low},
    {"adamw", "all", bind_adamw},
    {"sum_squares", "all", bind_sum_squares},
    {"convert", "context", bind_convert},
    {"muon_momentum", "all", bind_muon_momentum},
    {"muon_normalise", "all", bind_muon_normalise},
    {"muon_update", "all", bind_muon_update},
    {"average", "all", bind_average},
    {"exchange", "all", bind_exchange},
};
const int bench_row_count = sizeof(bench_rows) / sizeof(bench_rows[0]);
