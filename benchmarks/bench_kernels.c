// Times ops one by one at the sizes of real models, on random data, beside what the device can do: a
// copy and a large product are measured first. With --sizes cases it times the rows of the table of
// kernel cases instead. What it prints is defined in benchmarks/README.md.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/log.h"
#include "base/rng.h"
#include "kernels/gemm_algorithms.h"
#include "tests/kernel_cases.h"
#include "version.h"

enum {
    WARM_UP = 2,
    LEAST_RUNS = 10,
    MOST_RUNS = STREAM_TIME_SLOTS / 2, // each has two marks
    FLUSH_BYTES = 128 << 20,           // more than the last-level cache of the machines we know
    PATTERN = 1 << 20,                 // random numbers, repeated in larger tensors
    TENSORS = 16,
    NAME = 192
};
static const double enough_seconds = 0.1;

// Sizes of a model's drafter and of a step.
struct sizes {
    const char *name;
    int64_t n; // block rows of a group
    int64_t t; // tokens of a row
    int64_t h; // hidden
    int64_t heads, kv_heads, head_dim;
    int64_t i;          // intermediate
    int64_t l;          // captured layers
    int64_t v;          // vocabulary
    int64_t c;          // rows of a chunk of the loss
    int64_t parameters; // trained
};

static const struct sizes all_sizes[] = {
    {"v4", 8192, 8192, 5120, 32, 8, 128, 17408, 5, 248320, 4224, 1730000000},
    {"qwen3-8b", 8192, 8192, 4096, 32, 8, 128, 12288, 5, 151936, 4224, 1050000000},
    {"smollm2", 2048, 2048, 576, 9, 3, 64, 1536, 3, 49152, 448, 12000000},
};

struct bench {
    const struct backend *backend;
    struct stream *stream;
    enum dtype type;     // of what the ops compute with
    const char *only;    // parts of the names that are timed; NULL: all
    double tune_seconds; // for choosing the algorithm of a product
    FILE *csv;           // NULL: none
    void *flush;         // [FLUSH_BYTES]
    void *pattern[2];    // [PATTERN] standard normal, fp32 and bf16, on the device
    void *positive;      // [PATTERN] their absolute values, fp32
    struct gemm_algorithms *algorithms;
    double copy_rate, flop_rate; // ceilings: bytes and operations a second
    char device[128];
    // of the op that is being timed
    void *tensors[TENSORS];
    int tensor_count;
    double bytes; // that must be moved: inputs read once, outputs written once
};

// An op with its arguments, ready to be called.
struct job {
    union {
        struct gemm gemm;
        struct rms_norm rms_norm;
        struct norm_rope norm_rope;
        struct swiglu swiglu;
        struct gather_rows gather_rows;
        struct scatter_rows scatter_rows;
        struct context_load context_load;
        struct adamw adamw;
        struct sum_squares sum_squares;
        struct convert convert;
    } op;
    int32_t planes[8];
    const struct kernel_case *kernel_case; // instead of op
    struct kernel_run *run;
    void (*call)(const struct bench *bench, struct job *job);
    double flops;
};

static void *take(struct bench *bench, enum dtype type, int64_t count)
{
    BUG_UNLESS(bench->tensor_count < TENSORS);
    void *tensor = bench->backend->alloc((size_t)count * dtype_size(type));
    bench->tensors[bench->tensor_count++] = tensor;
    return tensor;
}

static void give_all(struct bench *bench)
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
static void *take_in(struct bench *bench, enum dtype type, int64_t count)
{
    void *tensor = take(bench, type, count);
    size_t size = dtype_size(type);
    fill(bench, tensor, bench->pattern[type == DTYPE_BF16], (size_t)count * size, PATTERN * size);
    bench->bytes += (double)count * (double)size;
    return tensor;
}

static void *take_out(struct bench *bench, enum dtype type, int64_t count)
{
    bench->bytes += (double)count * (double)dtype_size(type);
    return take(bench, type, count);
}

static void *take_changed(struct bench *bench, enum dtype type, int64_t count)
{
    bench->bytes += (double)count * (double)dtype_size(type);
    return take_in(bench, type, count);
}

static void *take_positive(struct bench *bench, int64_t count)
{
    void *tensor = take_out(bench, DTYPE_F32, count);
    fill(bench, tensor, bench->positive, (size_t)count * sizeof(float), PATTERN * sizeof(float));
    return tensor;
}

// [count] value[i] = first + i * step modulo limit
static int32_t *take_integers(struct bench *bench, int64_t count, int64_t step, int64_t limit)
{
    int32_t *values = memory_alloc((size_t)count, sizeof(*values));
    for (int64_t i = 0; i < count; i++)
        values[i] = (int32_t)(i * step % limit);
    int32_t *tensor = take_out(bench, DTYPE_I32, count);
    bench->backend->copy_in(bench->stream, tensor, values, (size_t)count * sizeof(*values));
    bench->backend->sync(bench->stream);
    free(values);
    return tensor;
}

static void call_gemm(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->gemm(bench->stream, &job->op.gemm);
}

static void call_rms_norm_forward(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->rms_norm_forward(bench->stream, &job->op.rms_norm);
}

static void call_rms_norm_backward(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->rms_norm_backward(bench->stream, &job->op.rms_norm);
}

static void call_norm_rope_forward(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->norm_rope_forward(bench->stream, &job->op.norm_rope);
}

static void call_norm_rope_backward(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->norm_rope_backward(bench->stream, &job->op.norm_rope);
}

static void call_swiglu_forward(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->swiglu_forward(bench->stream, &job->op.swiglu);
}

static void call_swiglu_backward(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->swiglu_backward(bench->stream, &job->op.swiglu);
}

static void call_gather_rows(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->gather_rows(bench->stream, &job->op.gather_rows);
}

static void call_scatter_rows(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->scatter_rows(bench->stream, &job->op.scatter_rows);
}

static void call_context_load(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->context_load(bench->stream, &job->op.context_load);
}

static void call_adamw(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->adamw(bench->stream, &job->op.adamw);
}

static void call_sum_squares(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->sum_squares(bench->stream, &job->op.sum_squares);
}

static void call_convert(const struct bench *bench, struct job *job)
{
    bench->backend->kernels->convert(bench->stream, &job->op.convert);
}

static void call_case(const struct bench *bench, struct job *job)
{
    (void)bench;
    kernel_case_call(job->kernel_case, job->run);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct times {
    double median, least, quartiles; // seconds; third quartile minus first
    int runs;
};

// Before each run the cache is overwritten; device time between two marks.
static struct times times_of(const struct bench *bench, struct job *job)
{
    const struct backend *backend = bench->backend;
    double seconds[MOST_RUNS] = {0}, total = 0.0;
    struct times times = {0};
    for (int i = 0; i < WARM_UP; i++)
        job->call(bench, job);
    backend->sync(bench->stream);
    while (times.runs < LEAST_RUNS || (times.runs < MOST_RUNS && total < enough_seconds)) {
        backend->zero(bench->stream, bench->flush, FLUSH_BYTES);
        backend->time_mark(bench->stream, 0);
        job->call(bench, job);
        backend->time_mark(bench->stream, 1);
        backend->sync(bench->stream);
        seconds[times.runs] = backend->time_between(bench->stream, 0, 1);
        total += seconds[times.runs++];
    }
    qsort(seconds, (size_t)times.runs, sizeof(seconds[0]), by_value);
    times.median = seconds[times.runs / 2];
    times.least = seconds[0];
    times.quartiles = seconds[times.runs * 3 / 4] - seconds[times.runs / 4];
    return times;
}

// One line of the table, and of the CSV file. Share of the ceiling of what the op is bound by.
static void print_row(const struct bench *bench, const char *name, const struct job *job,
                      const struct times *times)
{
    double rate = bench->bytes / times->median, flops = job->flops / times->median;
    double by_bytes = bench->copy_rate > 0.0 ? rate / bench->copy_rate : 0.0;
    double by_flops = bench->flop_rate > 0.0 ? flops / bench->flop_rate : 0.0;
    double share = by_flops > by_bytes ? by_flops : by_bytes;
    printf("%-46s %9.3f ms %8.3f TFLOP/s %7.1f GB/s %5.1f %%\n", name, times->median * 1e3,
           flops * 1e-12, rate * 1e-9, share * 100.0);
    fflush(stdout);
    if (bench->csv == NULL)
        return;
    fprintf(bench->csv, "%s,%.6f,%.6f,%.6f,%d,%.3f,%.3f,%.4f,%s,%s\n", name, times->median * 1e3,
            times->least * 1e3, times->quartiles * 1e3, times->runs, rate * 1e-9, flops * 1e-9,
            share, DTRAIN_COMMIT, bench->device);
    fflush(bench->csv);
}

// Binds the arguments of an op at some sizes.
typedef void bind_fn(struct bench *bench, const struct sizes *s, struct job *job);

struct row {
    const char *op, *variant;
    bind_fn *bind;
};

static bool fits(const struct bench *bench, double bytes)
{
    size_t left, all;
    bench->backend->memory(&left, &all);
    return bytes < 0.9 * (double)left;
}

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
    op->a = take_in(bench, bench->type, m * k);
    op->b = take_in(bench, bench->type, n * k);
    op->c = add ? take_changed(bench, out, m * n) : take_out(bench, out, m * n);
    job->flops = 2.0 * (double)m * (double)n * (double)k;
    job->call = call_gemm;
    if (bench->backend->gemm_record == NULL || !(bench->tune_seconds > 0.0))
        return;
    bench->backend->gemm_record(bench->stream);
    call_gemm(bench, job);
    bench->backend->gemm_tune(bench->stream, bench->tune_seconds, bench->algorithms);
}

static void linear(struct bench *bench, struct job *job, int64_t rows, int64_t in, int64_t out,
                   const char *pass)
{
    if (strcmp(pass, "forward") == 0)
        bind_gemm(bench, job, rows, out, in, bench->type, false, false, true);
    else if (strcmp(pass, "dgrad") == 0)
        bind_gemm(bench, job, rows, in, out, bench->type, false, false, false);
    else
        bind_gemm(bench, job, out, in, rows, DTYPE_F32, true, true, false);
}

// Weights of a drafter's layer: from `in` to `out` features, over block rows or the row's tokens.
struct weight {
    const char *name;
    int64_t rows, in, out;
};

enum { WEIGHTS = 6 };

static void weights_of(const struct sizes *s, struct weight weights[WEIGHTS])
{
    int64_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    weights[0] = (struct weight){"fc", s->t, s->l * s->h, s->h};
    weights[1] = (struct weight){"context_kv", s->t, s->h, 2 * kv};
    weights[2] = (struct weight){"qkv", s->n, s->h, q + 2 * kv};
    weights[3] = (struct weight){"o", s->n, q, s->h};
    weights[4] = (struct weight){"gate_up", s->n, s->h, 2 * s->i};
    weights[5] = (struct weight){"down", s->n, s->i, s->h};
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
                                         .x = take_in(bench, x_type, s->n * s->h),
                                         .weight = take_in(bench, DTYPE_F32, s->h)};
}

static void norm_forward(struct bench *bench, const struct sizes *s, struct job *job,
                         enum dtype x_type)
{
    bind_norm(bench, s, job, x_type);
    job->op.rms_norm.y = take_out(bench, bench->type, s->n * s->h);
    job->op.rms_norm.rstd = take_out(bench, DTYPE_F32, s->n);
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
    op->dy = take_in(bench, bench->type, s->n * s->h);
    op->dweight = take_changed(bench, DTYPE_F32, s->h);
    op->scratch = take(bench, DTYPE_F32, RMS_NORM_PARTS * s->h);
    op->dx = take_out(bench, bench->type, s->n * s->h);
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
    op->x = take_in(bench, bench->type, rows * stride);
    // Of a row only the heads are read.
    bench->bytes -=
        (double)(rows * (stride - heads * s->head_dim)) * (double)dtype_size(bench->type);
    op->weight = take_in(bench, DTYPE_F32, s->head_dim);
    op->positions = take_integers(bench, rows, 7, s->t);
    op->cos = take_in(bench, DTYPE_F32, s->t * half);
    op->sin = take_in(bench, DTYPE_F32, s->t * half);
}

static void rope_forward(struct bench *bench, struct job *job)
{
    struct norm_rope *op = &job->op.norm_rope;
    op->y = take_out(bench, bench->type, op->rows * op->heads * op->head_dim);
    job->call = call_norm_rope_forward;
}

// In training dx is the place of x's heads in a buffer like that of x.
static void rope_backward(struct bench *bench, struct job *job, enum dtype dy_type)
{
    struct norm_rope *op = &job->op.norm_rope;
    int64_t count = op->rows * op->heads * op->head_dim;
    op->dy_type = dy_type;
    op->dy = take_in(bench, dy_type, count);
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
                                     .gate_up = take_in(bench, bench->type, s->n * 2 * s->i),
                                     .y = take_out(bench, bench->type, s->n * s->i)};
    job->call = call_swiglu_forward;
}

static void bind_swiglu_backward(struct bench *bench, const struct sizes *s, struct job *job)
{
    job->op.swiglu = (struct swiglu){.rows = s->n,
                                     .width = s->i,
                                     .type = bench->type,
                                     .gate_up = take_in(bench, bench->type, s->n * 2 * s->i),
                                     .dy = take_in(bench, bench->type, s->n * s->i),
                                     .dgate_up = take_out(bench, bench->type, s->n * 2 * s->i)};
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
    op->in = take_in(bench, bench->type, s->t * op->in_stride);
    op->index = take_integers(bench, s->n, 7, s->t);
    op->out = take_out(bench, bench->type, s->n * s->h);
    bench->bytes -= (double)(s->t * op->in_stride - s->n * s->h) * (double)dtype_size(bench->type);
    job->call = call_gather_rows;
}

// One slot in 16 has no gradient.
static void bind_scatter(struct bench *bench, const struct sizes *s, struct job *job)
{
    int64_t rows = s->n / 16 * 15;
    job->op.scatter_rows = (struct scatter_rows){.rows = rows,
                                                 .width = s->h,
                                                 .in = take_in(bench, DTYPE_F32, rows * s->h),
                                                 .in_type = DTYPE_F32,
                                                 .out_type = bench->type,
                                                 .index = take_integers(bench, rows, 7, s->n),
                                                 .scale = take_positive(bench, rows),
                                                 .out = take_out(bench, bench->type, s->n * s->h),
                                                 .out_rows = s->n};
    job->call = call_scatter_rows;
}

static void bind_context(struct bench *bench, const struct sizes *s, struct job *job)
{
    for (int64_t l = 0; l < s->l; l++)
        job->planes[l] = (int32_t)l;
    job->op.context_load =
        (struct context_load){.tokens = s->t,
                              .planes = s->l,
                              .layers = s->l,
                              .hidden = s->h,
                              .in = take_in(bench, DTYPE_BF16, s->t * s->l * s->h),
                              .plane = job->planes,
                              .type = bench->type,
                              .out = take_out(bench, bench->type, s->t * s->l * s->h)};
    job->call = call_context_load;
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
    op->grad = take_in(bench, DTYPE_F32, op->count);
    op->copy = take_out(bench, DTYPE_BF16, op->count);
    job->call = call_adamw;
}

static void bind_sum_squares(struct bench *bench, const struct sizes *s, struct job *job)
{
    job->op.sum_squares =
        (struct sum_squares){.count = s->parameters,
                             .x = take_in(bench, DTYPE_F32, s->parameters),
                             .result = take_out(bench, DTYPE_F64, 1),
                             .scratch = take(bench, DTYPE_F64, SUM_SQUARES_PARTS)};
    job->call = call_sum_squares;
}

static void bind_convert(struct bench *bench, const struct sizes *s, struct job *job)
{
    job->op.convert = (struct convert){.count = s->t * s->h,
                                       .from = take_in(bench, DTYPE_F32, s->t * s->h),
                                       .to = take_out(bench, DTYPE_BF16, s->t * s->h),
                                       .from_type = DTYPE_F32,
                                       .to_type = DTYPE_BF16};
    job->call = call_convert;
}

static const struct row rows[] = {
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
    {"adamw", "all", bind_adamw},
    {"sum_squares", "all", bind_sum_squares},
    {"convert", "context", bind_convert},
};

// Whether the name has one of the parts, which commas separate.
static bool wanted(const struct bench *bench, const char *name)
{
    for (const char *part = bench->only; part != NULL && *part != '\0';) {
        char one[NAME];
        size_t length = strcspn(part, ",");
        snprintf(one, sizeof(one), "%.*s", (int)length, part);
        if (strstr(name, one) != NULL)
            return true;
        part += length + (part[length] == ',');
    }
    return bench->only == NULL;
}

static void time_job(struct bench *bench, const char *name, struct job *job)
{
    struct times times = times_of(bench, job);
    print_row(bench, name, job, &times);
    give_all(bench);
    bench->bytes = 0.0;
}

static void bench_weights(struct bench *bench, const struct sizes *s)
{
    static const char *const passes[] = {"forward", "dgrad", "wgrad"};
    struct weight weights[WEIGHTS];
    weights_of(s, weights);
    for (int i = 0; i < WEIGHTS; i++)
        for (size_t pass = 0; pass < sizeof(passes) / sizeof(passes[0]); pass++) {
            struct job job = {0};
            char name[NAME];
            if (i == 0 && pass == 1)
                continue; // the features need no gradient
            snprintf(name, sizeof(name), "gemm/%s/%s/%s", weights[i].name, passes[pass], s->name);
            if (!wanted(bench, name))
                continue;
            linear(bench, &job, weights[i].rows, weights[i].in, weights[i].out, passes[pass]);
            time_job(bench, name, &job);
        }
}

// What the largest op needs: the parameters with their moments, gradient and copy.
static void bench_sizes(struct bench *bench, const struct sizes *s)
{
    bench_weights(bench, s);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct job job = {0};
        char name[NAME];
        snprintf(name, sizeof(name), "%s/%s/%s", rows[i].op, rows[i].variant, s->name);
        if (!wanted(bench, name))
            continue;
        if (rows[i].bind == bind_adamw && !fits(bench, 18.0 * (double)s->parameters)) {
            printf("%-46s left out: not enough memory\n", name);
            continue;
        }
        rows[i].bind(bench, s, &job);
        time_job(bench, name, &job);
    }
}

// Bytes that a case must read and write at least once.
static double bytes_of(const struct kernel_run *run)
{
    double bytes = 0.0;
    for (int i = 0; i < run->count; i++) {
        const struct kernel_tensor *tensor = &run->tensors[i];
        double size = (double)(tensor->rows * tensor->columns) * (double)dtype_size(tensor->type);
        if (tensor->role != TENSOR_SCRATCH)
            bytes += tensor->role == TENSOR_CHANGED ? 2.0 * size : size;
    }
    return bytes;
}

static void bench_cases(struct bench *bench)
{
    for (int i = 0; i < kernel_case_count; i++) {
        struct kernel_run run;
        struct job job = {.kernel_case = &kernel_cases[i], .run = &run, .call = call_case};
        char name[CASE_NAME];
        kernel_case_name(&kernel_cases[i], name);
        if (!wanted(bench, name))
            continue;
        kernel_case_build(&kernel_cases[i], &run);
        kernel_run_send(&run, bench->backend, bench->stream);
        job.flops = kernel_case_flops(&kernel_cases[i]);
        bench->bytes = bytes_of(&run);
        time_job(bench, name, &job);
        kernel_run_free_device(&run);
        kernel_run_release(&run);
    }
}

static void call_copy(const struct bench *bench, struct job *job)
{
    struct convert *op = &job->op.convert;
    bench->backend->copy(bench->stream, op->to, op->from, (size_t)op->count);
}

// The least that a call takes: a conversion of 8 elements.
static void measure_call(struct bench *bench)
{
    struct job job = {.call = call_convert};
    job.op.convert = (struct convert){.count = 8,
                                      .from = take_in(bench, DTYPE_F32, 8),
                                      .to = take_out(bench, DTYPE_BF16, 8),
                                      .from_type = DTYPE_F32,
                                      .to_type = DTYPE_BF16};
    time_job(bench, "ceiling/call", &job);
}

// A copy of 2 GiB (CPU: 256 MiB), and a product of 8192 x 8192 x 8192 (CPU: 1024).
static void measure_ceilings(struct bench *bench)
{
    bool cpu = strcmp(bench->backend->name, "cpu") == 0;
    int64_t side = cpu ? 1024 : 8192, bytes = cpu ? 1 << 28 : (int64_t)1 << 31;
    struct job job = {.call = call_copy};
    job.op.convert = (struct convert){.count = bytes,
                                      .from = take_in(bench, DTYPE_F32, bytes / 4),
                                      .to = take_out(bench, DTYPE_F32, bytes / 4)};
    struct times times = times_of(bench, &job);
    bench->copy_rate = bench->bytes / times.median;
    print_row(bench, "ceiling/copy", &job, &times);
    give_all(bench);
    bench->bytes = 0.0;

    job = (struct job){0};
    bind_gemm(bench, &job, side, side, side, bench->type, false, false, true);
    times = times_of(bench, &job);
    bench->flop_rate = job.flops / times.median;
    print_row(bench, "ceiling/gemm", &job, &times);
    give_all(bench);
    bench->bytes = 0.0;
    measure_call(bench);
}

static void *send(const struct bench *bench, const void *values, size_t bytes)
{
    void *device = bench->backend->alloc(bytes);
    bench->backend->copy_in(bench->stream, device, values, bytes);
    bench->backend->sync(bench->stream);
    return device;
}

static void make_patterns(struct bench *bench)
{
    struct rng_key key = rng_key_make(1, 0, 0, RNG_TEST);
    float *values = memory_alloc(PATTERN, sizeof(*values));
    bf16 *rounded = memory_alloc(PATTERN, sizeof(*rounded));
    for (int i = 0; i < PATTERN; i++) {
        values[i] = rng_normal(key, (uint64_t)i);
        rounded[i] = bf16_from_float(values[i]);
    }
    bench->pattern[0] = send(bench, values, PATTERN * sizeof(*values));
    bench->pattern[1] = send(bench, rounded, PATTERN * sizeof(*rounded));
    for (int i = 0; i < PATTERN; i++)
        values[i] = values[i] < 0.0f ? -values[i] : values[i];
    bench->positive = send(bench, values, PATTERN * sizeof(*values));
    free(values);
    free(rounded);
}

struct arguments {
    const char *device, *sizes, *type, *csv;
    int threads;
};

static int usage(const char *why)
{
    fprintf(stderr,
            "bench_kernels: %s\n"
            "usage: bench_kernels [--device cpu|cuda] [--threads N] [--sizes NAME|cases|all]\n"
            "                     [--type bf16|fp32] [--only PARTS_OF_NAMES] [--tune SECONDS]\n"
            "                     [--csv FILE]\n",
            why);
    return 2;
}

static int parse(int argc, char **argv, struct arguments *arguments, struct bench *bench)
{
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value == NULL)
            return usage("an option without its value");
        if (strcmp(name, "--device") == 0)
            arguments->device = value;
        else if (strcmp(name, "--sizes") == 0)
            arguments->sizes = value;
        else if (strcmp(name, "--type") == 0)
            arguments->type = value;
        else if (strcmp(name, "--csv") == 0)
            arguments->csv = value;
        else if (strcmp(name, "--only") == 0)
            bench->only = value;
        else if (strcmp(name, "--tune") == 0)
            bench->tune_seconds = strtod(value, NULL);
        else if (strcmp(name, "--threads") == 0)
            arguments->threads = (int)strtol(value, NULL, 10);
        else
            return usage("an unknown option");
    }
    if (arguments->threads < 1)
        return usage("--threads takes a number from 1");
    return 0;
}

static int bench_open(struct bench *bench, const struct arguments *arguments)
{
    struct error why = {{0}};
    bool cuda = strcmp(arguments->device, "cuda") == 0;
    char library[128];
    if (!cuda && strcmp(arguments->device, "cpu") != 0)
        return usage("--device takes cpu or cuda");
    bench->backend = cuda ? backend_cuda(&why) : backend_cpu();
    if (bench->backend == NULL)
        return usage(why.text);
    const char *type = arguments->type != NULL ? arguments->type : cuda ? "bf16" : "fp32";
    if (strcmp(type, "bf16") != 0 && strcmp(type, "fp32") != 0)
        return usage("--type takes bf16 or fp32");
    bench->type = strcmp(type, "bf16") == 0 ? DTYPE_BF16 : DTYPE_F32;
    struct stream_options options = {
        .threads = arguments->threads,
        .workspace_bytes = bench->backend->stream_workspace_bytes(arguments->threads)};
    bench->stream = bench->backend->stream_open(&options);
    bench->flush = bench->backend->alloc(FLUSH_BYTES);
    bench->algorithms = memory_alloc(1, sizeof(*bench->algorithms));
    bench->backend->describe(bench->device, sizeof(bench->device), library, sizeof(library));
    make_patterns(bench);
    printf("%s, %s, %s, commit %s\n", bench->device, library, type, DTRAIN_COMMIT);
    if (arguments->csv == NULL)
        return 0;
    bench->csv = fopen(arguments->csv, "we");
    if (bench->csv == NULL)
        return usage("the file of --csv can not be written");
    fprintf(bench->csv,
            "case,median_ms,least_ms,quartiles_ms,runs,gbytes_per_s,gflops,share,commit,"
            "device\n");
    return 0;
}

static void bench_close(struct bench *bench)
{
    bench->backend->free(bench->flush);
    bench->backend->free(bench->pattern[0]);
    bench->backend->free(bench->pattern[1]);
    bench->backend->free(bench->positive);
    bench->backend->stream_close(bench->stream);
    free(bench->algorithms);
    if (bench->csv != NULL)
        fclose(bench->csv);
}

static bool known_sizes(const char *name)
{
    for (size_t i = 0; i < sizeof(all_sizes) / sizeof(all_sizes[0]); i++)
        if (strcmp(name, all_sizes[i].name) == 0)
            return true;
    return strcmp(name, "all") == 0 || strcmp(name, "cases") == 0;
}

int main(int argc, char **argv)
{
    struct arguments arguments = {.device = "cpu", .threads = 1};
    struct bench bench = {.tune_seconds = 0.2};
    if (parse(argc, argv, &arguments, &bench) != 0)
        return 2;
    if (arguments.sizes != NULL && !known_sizes(arguments.sizes))
        return usage("--sizes takes v4, qwen3-8b, smollm2, all or cases");
    if (bench_open(&bench, &arguments) != 0)
        return 2;
    // A CPU takes minutes at the larger sizes.
    const char *sizes = arguments.sizes != NULL                   ? arguments.sizes
                        : strcmp(bench.backend->name, "cpu") == 0 ? "smollm2"
                                                                  : "all";
    measure_ceilings(&bench);
    for (size_t i = 0; i < sizeof(all_sizes) / sizeof(all_sizes[0]); i++)
        if (strcmp(sizes, "all") == 0 || strcmp(sizes, all_sizes[i].name) == 0)
            bench_sizes(&bench, &all_sizes[i]);
    if (strcmp(sizes, "cases") == 0)
        bench_cases(&bench);
    bench_close(&bench);
    return 0;
}
