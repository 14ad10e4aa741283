// Owns the loss over the vocabulary on any GPU: one CTA a row, which reads its two rows two or three
// times, and the results of a row from its record. softmax_loss_cluster_cuda.cu has the kernel for
// Hopper. Threads take elements in a fixed pattern and reductions have a fixed order, so results repeat
// bit for bit. A thread sums in fp32 (some hundred elements, eight at a time), what follows is fp64.
#include "kernels/softmax_loss_cuda.cuh"

#include "kernels/arguments.h"

enum { TILE = LOSS_THREADS * LOSS_ITEMS };

// A row as its CTA reads it.
struct row {
    const void *student, *teacher; // [V]; teacher NULL: none
    int32_t vocab;
    bool vectors; // student, teacher and gradient are aligned for LOSS_ITEMS elements at a time
};

// Element of item j of this thread in the tile that begins at `first`.
static __device__ __forceinline__ int32_t element_index(bool vectors, int32_t first, int j)
{
    int32_t thread = (int32_t)threadIdx.x;
    return vectors ? first + thread * LOSS_ITEMS + j : first + j * LOSS_THREADS + thread;
}

static __device__ __forceinline__ void load_vector(float x[LOSS_ITEMS], const float *from)
{
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j += 4) {
        float4 v = *(const float4 *)(from + j);
        x[j] = v.x;
        x[j + 1] = v.y;
        x[j + 2] = v.z;
        x[j + 3] = v.w;
    }
}

static __device__ __forceinline__ void load_vector(float x[LOSS_ITEMS], const bf16_t *from)
{
    uint4 v = *(const uint4 *)from;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[2 * j] = __uint_as_float(words[j] << 16);
        x[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    }
}

// -inf beyond the end and where there is no row.
template <typename Logit>
static __device__ __forceinline__ void load_items(float x[LOSS_ITEMS], const void *logits,
                                                  const struct row &row, int32_t first)
{
    const Logit *from = (const Logit *)logits;
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j++)
        x[j] = -INFINITY;
    if (from == NULL)
        return;
    int32_t at = element_index(row.vectors, first, 0);
    if (row.vectors && at + LOSS_ITEMS <= row.vocab) {
        load_vector(x, from + at);
        return;
    }
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j++) {
        int32_t i = element_index(row.vectors, first, j);
        if (i < row.vocab)
            x[j] = load(from, i);
    }
}

static __device__ __forceinline__ void store_vector(float *to, const float x[LOSS_ITEMS])
{
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j += 4)
        *(float4 *)(to + j) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
}

static __device__ __forceinline__ void store_vector(bf16_t *to, const float x[LOSS_ITEMS])
{
    __nv_bfloat162 pair[LOSS_ITEMS / 2];
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS / 2; j++)
        pair[j] = __floats2bfloat162_rn(x[2 * j], x[2 * j + 1]);
    *(uint4 *)to = *(const uint4 *)pair;
}

template <typename Out>
static __device__ __forceinline__ void store_items(Out *out, const float x[LOSS_ITEMS],
                                                   const struct row &row, int32_t first)
{
    int32_t at = element_index(row.vectors, first, 0);
    if (row.vectors && at + LOSS_ITEMS <= row.vocab) {
        store_vector(out + at, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j++) {
        int32_t i = element_index(row.vectors, first, j);
        if (i < row.vocab)
            store(out, i, x[j]);
    }
}

// Statistics of a row, the same for all threads.
template <typename Logit>
static __device__ struct loss_softmax softmax_of(const void *logits, const struct row &row)
{
    __shared__ struct loss_softmax parts[LOSS_WARPS];
    struct loss_running r = loss_running_make();
    float x[LOSS_ITEMS];
    for (int32_t first = 0; first < row.vocab; first += TILE) {
        load_items<Logit>(x, logits, row, first);
        loss_running_add(&r, x, first);
    }
    load_items<Logit>(x, logits, row, r.group);
    int32_t index = element_index(row.vectors, r.group, first_equal(x, r.max));
    struct loss_softmax s = loss_warp(r, index);
    __syncthreads(); // the last call's readers are done
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = s;
    __syncthreads();
    return loss_combine(parts, LOSS_WARPS);
}

static __device__ void subtract_at(float value[LOSS_ITEMS], const struct row &row, int32_t first,
                                   int32_t token, float target)
{
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j++)
        if (element_index(row.vectors, first, j) == token)
            value[j] -= target;
}

// One pass over the row: sums (not NULL: added to) and the gradient (out not NULL). The gradient may
// take the student's place: where its elements are narrower, a tile is read by all threads before any
// of it is written.
template <typename Logit, typename Out>
static __device__ void pass(const struct row &row, const struct loss_pair &pair,
                            const struct loss_needs &needs, float *sum,
                            const struct loss_gradient *g, const int32_t *token, Out *out)
{
    for (int32_t first = 0; first < row.vocab; first += TILE) {
        float z[LOSS_ITEMS], t[LOSS_ITEMS], tile[SUM_COUNT] = {0.0f}, value[LOSS_ITEMS];
        load_items<Logit>(z, row.student, row, first);
        load_items<Logit>(t, row.teacher, row, first);
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++) {
            struct loss_element e = loss_element_of(pair, needs, z[j], t[j]);
            if (sum != NULL)
                loss_add(tile, e, needs);
            if (out != NULL)
                value[j] = loss_gradient_at(*g, e);
        }
        if (sum != NULL)
#pragma unroll
            for (int i = 0; i < SUM_COUNT; i++)
                sum[i] += tile[i];
        if (out == NULL)
            continue;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (token[i] >= first && token[i] < first + TILE)
                subtract_at(value, row, first, token[i], g->target[i]);
        if (sizeof(Out) < sizeof(Logit) && (const void *)out == row.student)
            __syncthreads();
        store_items(out, value, row, first);
    }
}

static __device__ void reduce_sums(double total[SUM_COUNT], const float sum[SUM_COUNT],
                                   const struct loss_needs &needs)
{
    total[SUM_OVERLAP] = block_sum<LOSS_THREADS>((double)sum[SUM_OVERLAP]);
    total[SUM_KL] = block_sum<LOSS_THREADS>((double)sum[SUM_KL]);
    if (!loss_needs_sums(needs))
        return;
#pragma unroll
    for (int i = SUM_DISTANCE; i < SUM_COUNT; i++)
        total[i] = block_sum<LOSS_THREADS>((double)sum[i]);
}

template <typename Logit>
static __device__ struct row row_make(const struct softmax_loss &op, int64_t r, bool vectors)
{
    struct row row;
    row.student = (const Logit *)op.student + r * op.vocab;
    row.teacher = NULL;
    if (op.teacher != NULL)
        row.teacher = (const Logit *)op.teacher + op.teacher_row[r] * op.vocab;
    row.vocab = (int32_t)op.vocab;
    row.vectors = vectors;
    return row;
}

template <typename Logit, typename Out>
static __global__ void __launch_bounds__(LOSS_THREADS)
    loss_kernel(const __grid_constant__ struct softmax_loss op, struct loss_record *records,
                bool vectors)
{
    int64_t r = blockIdx.x;
    int32_t label = op.label[r];
    bug_unless(label < op.vocab);
    struct row row = row_make<Logit>(op, r, vectors);
    struct loss_record record = {};
    record.student = softmax_of<Logit>(row.student, row);
    record.teacher = {0.0f, 1.0f, -1};
    if (row.teacher != NULL)
        record.teacher = softmax_of<Logit>(row.teacher, row);
    // Read before the gradient may take their place.
    const int32_t token[2] = {record.teacher.argmax, label};
    record.top_logit = token[0] >= 0 ? load((const Logit *)row.student, token[0]) : 0.0f;
    record.label_logit = label >= 0 ? load((const Logit *)row.student, label) : 0.0f;
    __syncthreads();

    struct loss_needs needs = loss_needs_of(op.weight);
    struct loss_pair pair = loss_pair_of(record.student, record.teacher);
    float sum[SUM_COUNT] = {0.0f};
    bool wanted = op.gradient != NULL, two = wanted && loss_needs_sums(needs);
    if (two || !wanted)
        pass<Logit, Out>(row, pair, needs, sum, NULL, NULL, NULL);
    if (two)
        reduce_sums(record.sum, sum, needs);
    if (wanted) {
        struct loss_gradient g = loss_gradient_of(op, record.sum, label);
        Out *out = (Out *)op.gradient + r * op.gradient_stride;
        pass<Logit, Out>(row, pair, needs, two ? NULL : sum, &g, token, out);
    }
    if (!two)
        reduce_sums(record.sum, sum, needs);
    if (threadIdx.x == 0)
        records[r] = record;
}

static __device__ bool only_ce_data(const struct softmax_loss &op)
{
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        if (i != LOSS_CE_DATA && op.weight[i] != 0.0f)
            return false;
    return op.weight[LOSS_CE_DATA] != 0.0f;
}

static __device__ double nla_of(double tv, double overlap)
{
    return tv < 0.5 ? -log1p(-tv) : -log(overlap_at_least(overlap));
}

static __device__ void write_terms(const struct softmax_loss &op, const double *sum,
                                   double log_q_label, double log_q_top, int32_t label, int64_t r)
{
    double tv = 0.5 * sum[SUM_DISTANCE], lambda = loss_lambda(op, sum), loss = 0.0;
    double all[LOSS_TERM_COUNT];
    all[LOSS_KL] = sum[SUM_KL];
    all[LOSS_REVERSE_KL] = sum[SUM_REVERSE_KL];
    all[LOSS_JS] = 0.5 * (sum[SUM_KL_PM] + sum[SUM_KL_QM]);
    all[LOSS_CE_TEACHER] = -log_q_top;
    all[LOSS_CE_DATA] = label >= 0 ? -log_q_label : 0.0;
    all[LOSS_TV] = tv;
    all[LOSS_NLA] = op.weight[LOSS_NLA] != 0.0f ? nla_of(tv, sum[SUM_OVERLAP]) : 0.0;
    all[LOSS_LK] = lambda * sum[SUM_KL] + (1.0 - lambda) * tv;
    for (int i = 0; i < LOSS_TERM_COUNT; i++) {
        bool wanted = op.weight[i] != 0.0f;
        if (wanted)
            loss += (double)op.weight[i] * all[i];
        if (op.terms != NULL)
            op.terms[r * LOSS_TERM_COUNT + i] = wanted ? (float)all[i] : 0.0f;
    }
    op.loss[r] = (float)loss;
}

// log2 of the sum of 2^(x L) over the row.
static __device__ double log2_sum(const struct loss_softmax &s)
{
    return s.max == -INFINITY ? (double)NAN : (double)loss_reference(s.max) + log2((double)s.sum);
}

static __device__ void write_results(const struct softmax_loss &op, struct loss_record &record,
                                     int64_t r)
{
    const double l = (double)LOSS_L;
    bool teacher = op.teacher != NULL;
    int32_t label = op.label[r];
    double q_sum = log2_sum(record.student), p_sum = teacher ? log2_sum(record.teacher) : 0.0;
    double log_q_label = ((double)record.label_logit * l - q_sum) / l;
    double log_q_top = ((double)record.top_logit * l - q_sum) / l;
    // Guards against elements that are 0 in a row that has no distribution.
    if (isnan(loss_inverse(record.student)) || (teacher && isnan(loss_inverse(record.teacher))))
        for (int i = 0; i < SUM_COUNT; i++)
            record.sum[i] = (double)NAN;
    write_terms(op, record.sum, log_q_label, log_q_top, label, r);

    double q_label = label >= 0 ? exp(log_q_label) : 0.0;
    op.student_lse[r] = (float)(q_sum / l);
    op.student_argmax[r] = record.student.argmax;
    op.teacher_lse[r] = (float)(p_sum / l);
    op.teacher_argmax[r] = teacher ? record.teacher.argmax : label;
    op.overlap[r] = (float)(teacher ? record.sum[SUM_OVERLAP] : q_label);
    op.confidence[r] = (float)(teacher && !only_ce_data(op) ? exp(log_q_top) : q_label);
}

// A warp a row.
static __global__ void __launch_bounds__(LOSS_THREADS)
    finish_kernel(const __grid_constant__ struct softmax_loss op, const struct loss_record *records,
                  const struct loss_part *parts, int part_count)
{
    int64_t r = (int64_t)blockIdx.x * LOSS_WARPS + threadIdx.x / WARP;
    int lane = (int)threadIdx.x % WARP;
    if (r >= op.rows)
        return;
    double overlap = 0.0, kl = 0.0;
    for (int i = lane; i < part_count; i += WARP) {
        struct loss_part part = parts[r * part_count + i];
        overlap += (double)part.overlap;
        kl += (double)part.kl;
    }
    overlap = warp_sum(overlap);
    kl = warp_sum(kl);
    if (lane != 0)
        return;
    // Only what was written: a record has no logits of tokens that its row does not have.
    const struct loss_record *from = &records[r];
    struct loss_record record = {};
    record.student = from->student;
    record.teacher = from->teacher;
    if (op.label[r] >= 0)
        record.label_logit = from->label_logit;
    if (op.teacher != NULL)
        record.top_logit = from->top_logit;
    for (int i = 0; i < SUM_COUNT && part_count == 0; i++)
        record.sum[i] = from->sum[i];
    if (part_count > 0) {
        record.sum[SUM_OVERLAP] = overlap;
        double sums = log2((double)record.student.sum) - log2((double)record.teacher.sum);
        record.sum[SUM_KL] = (kl + sums) / (double)LOSS_L;
    }
    write_results(op, record, r);
}

void loss_finish(struct stream *stream, const struct softmax_loss *op,
                 const struct loss_record *records, const struct loss_part *parts, int part_count)
{
    unsigned grid = grid_size(divide_up(op->rows, LOSS_WARPS));
    finish_kernel<<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op, records, parts, part_count);
    launch_check();
}

// Whether all rows begin where LOSS_ITEMS elements can be read and written at once.
static bool has_vectors(const struct softmax_loss *op)
{
    size_t row = (size_t)op->vocab * dtype_size(op->logits_type);
    size_t out =
        op->gradient != NULL ? (size_t)op->gradient_stride * dtype_size(op->gradient_type) : 0;
    return ((uintptr_t)op->student | (uintptr_t)op->teacher | (uintptr_t)op->gradient | row | out) %
               16 ==
           0;
}

// One CTA a row.
static void loss_generic(struct stream *stream, const struct softmax_loss *op)
{
    unsigned grid = grid_size(op->rows);
    struct loss_record *records = (struct loss_record *)stream->workspace;
    bool logits = is_bf16(op->logits_type), vectors = has_vectors(op);
    bool gradient = op->gradient != NULL && is_bf16(op->gradient_type);
    if (logits && gradient)
        loss_kernel<bf16_t, bf16_t><<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op, records, vectors);
    else if (logits)
        loss_kernel<bf16_t, float><<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op, records, vectors);
    else if (gradient)
        loss_kernel<float, bf16_t><<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op, records, vectors);
    else
        loss_kernel<float, float><<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op, records, vectors);
    launch_check();
    loss_finish(stream, op, records, NULL, 0);
}

// The same call for rows [first, first + rows).
static struct softmax_loss rows_of(const struct softmax_loss *op, int64_t first, int64_t rows)
{
    struct softmax_loss part = *op;
    part.rows = rows;
    part.student =
        (const char *)op->student + (size_t)(first * op->vocab) * dtype_size(op->logits_type);
    part.teacher_row = op->teacher_row != NULL ? op->teacher_row + first : NULL;
    part.label = op->label + first;
    if (op->gradient != NULL)
        part.gradient = (char *)op->gradient +
                        (size_t)(first * op->gradient_stride) * dtype_size(op->gradient_type);
    part.loss = op->loss + first;
    part.terms = op->terms != NULL ? op->terms + first * LOSS_TERM_COUNT : NULL;
    part.student_lse = op->student_lse + first;
    part.teacher_lse = op->teacher_lse + first;
    part.overlap = op->overlap + first;
    part.confidence = op->confidence + first;
    part.student_argmax = op->student_argmax + first;
    part.teacher_argmax = op->teacher_argmax + first;
    return part;
}

// The workspace holds the records of so many rows at a time.
void softmax_loss_cuda(struct stream *stream, const struct softmax_loss *op)
{
    softmax_loss_check(op);
    int64_t most = (int64_t)(stream->workspace_bytes / LOSS_ROW_BYTES);
    for (int64_t first = 0; first < op->rows; first += most) {
        int64_t rows = op->rows - first < most ? op->rows - first : most;
        struct softmax_loss part = rows_of(op, first, rows);
        if (!loss_cluster(stream, &part))
            loss_generic(stream, &part);
    }
}
