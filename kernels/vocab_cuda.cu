// Owns the teacher's numbers over the whole vocabulary, beside a draft vocabulary, on CUDA: a CTA a row.
// Threads take elements in a fixed pattern and reductions have a fixed order, so results repeat bit for
// bit.
#include "kernels/vocab.h"

#include "kernels/cuda_vector.cuh"
#include "kernels/softmax_loss_cuda.cuh"

enum { TILE = LOSS_THREADS * LOSS_ITEMS, MASK_THREADS = 256 };

// Element j of this thread in the tile that begins at `first`: of packs of LOSS_ITEMS, or each by itself.
template <bool PACKS> static __device__ __forceinline__ int32_t element_index(int32_t first, int j)
{
    int32_t thread = (int32_t)threadIdx.x;
    return PACKS ? first + thread * LOSS_ITEMS + j : first + j * LOSS_THREADS + thread;
}

// -inf beyond the end.
template <bool PACKS, typename Logit>
static __device__ __forceinline__ void tile_load(float (&x)[LOSS_ITEMS], const Logit *row,
                                                 int32_t count, int32_t first)
{
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j++)
        x[j] = -INFINITY;
    if constexpr (PACKS) {
        int32_t at = element_index<PACKS>(first, 0);
        if (at >= count)
            return;
        struct pack<Logit, LOSS_ITEMS> p = pack_load<LOSS_ITEMS>(row + at);
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++)
            x[j] = pack_value(p, j);
    } else {
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++) {
            int32_t at = element_index<PACKS>(first, j);
            if (at < count)
                x[j] = load(row, at);
        }
    }
}

// Statistics of a row, the same for all threads.
template <bool PACKS, typename Logit>
static __device__ __forceinline__ struct loss_softmax row_scan(const Logit *row, int32_t count)
{
    __shared__ struct loss_softmax parts[LOSS_WARPS];
    struct loss_running r = loss_running_make();
    float x[LOSS_ITEMS];
    for (int32_t first = 0; first < count; first += TILE) {
        tile_load<PACKS>(x, row, count, first);
        loss_running_add(&r, x, first);
    }
    tile_load<PACKS>(x, row, count, r.group);
    struct loss_softmax s = loss_warp(r, element_index<PACKS>(r.group, first_equal(x, r.max)));
    __syncthreads(); // the last call's readers are done
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = s;
    __syncthreads();
    return loss_combine(parts, LOSS_WARPS);
}

static __device__ __forceinline__ float softmax_lse(const struct loss_softmax &s)
{
    if (s.max == -INFINITY)
        return NAN;
    return (float)((double)s.max + log((double)s.sum));
}

template <typename Logit, bool PACKS>
static __global__ void __launch_bounds__(LOSS_THREADS) scan_kernel(struct vocab_scan op)
{
    int64_t row = blockIdx.x;
    struct loss_softmax part[2];
    part[0] = row_scan<PACKS>((const Logit *)op.kept_logits + row * op.kept, (int32_t)op.kept);
    part[1] = row_scan<PACKS>((const Logit *)op.other_logits + row * op.others, (int32_t)op.others);
    if (threadIdx.x != 0)
        return;
    bool other = part[1].max > part[0].max;
    if (part[1].max == part[0].max && part[0].max > -INFINITY)
        other = op.ids[op.kept + part[1].argmax] < op.ids[part[0].argmax];
    struct loss_softmax all = loss_combine(part, 2);
    op.lse[row] = softmax_lse(all);
    op.argmax[row] = (int32_t)(other ? op.kept : 0) + part[other].argmax;
}

template <typename Logit>
static void scan_launch(struct stream *stream, const struct vocab_scan *op)
{
    bool packs = packs_at(op->kept_logits) && packs_at(op->other_logits) &&
                 packs_in(op->kept, LOSS_ITEMS) && packs_in(op->others, LOSS_ITEMS);
    unsigned grid = grid_size(op->rows);
    if (packs)
        scan_kernel<Logit, true><<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op);
    else
        scan_kernel<Logit, false><<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

void vocab_scan_cuda(struct stream *stream, const struct vocab_scan *op)
{
    BUG_UNLESS(op->kept > 0 && op->kept + op->others <= INT32_MAX - TILE);
    if (op->rows == 0)
        return;
    if (is_bf16(op->logits_type))
        scan_launch<bf16_t>(stream, op);
    else
        scan_launch<float>(stream, op);
}

// The student's row is read twice, the second time from the second-level cache.
template <typename Logit, bool PACKS>
static __global__ void __launch_bounds__(LOSS_THREADS) overlap_kernel(struct draft_overlap op)
{
    int64_t row = blockIdx.x, teacher = op.teacher_row[row];
    int32_t count = (int32_t)op.vocab;
    const Logit *student = (const Logit *)op.student + row * op.vocab;
    const Logit *of_teacher = (const Logit *)op.teacher + teacher * op.vocab;
    struct loss_softmax s = row_scan<PACKS>(student, count);
    float reference = loss_reference(s.max), inverse = loss_inverse(s), sum = 0.0f;
    float lse = op.teacher_lse[teacher];
    for (int32_t first = 0; first < count; first += TILE) {
        float z[LOSS_ITEMS], t[LOSS_ITEMS], part = 0.0f;
        tile_load<PACKS>(z, student, count, first);
        tile_load<PACKS>(t, of_teacher, count, first);
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++)
            part += fminf(loss_power(z[j], reference) * inverse, loss_exp2((t[j] - lse) * LOSS_L));
        sum += part;
    }
    sum = (float)block_sum<LOSS_THREADS>((double)sum);
    if (threadIdx.x == 0)
        op.overlap[row] = isnan(inverse) || isnan(lse) ? NAN : sum;
}

template <typename Logit>
static void overlap_launch(struct stream *stream, const struct draft_overlap *op)
{
    bool packs = packs_at(op->student) && packs_at(op->teacher) && packs_in(op->vocab, LOSS_ITEMS);
    unsigned grid = grid_size(op->rows);
    if (packs)
        overlap_kernel<Logit, true><<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op);
    else
        overlap_kernel<Logit, false><<<grid, LOSS_THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

void draft_overlap_cuda(struct stream *stream, const struct draft_overlap *op)
{
    BUG_UNLESS(op->vocab <= INT32_MAX - TILE);
    if (op->rows == 0)
        return;
    if (is_bf16(op->logits_type))
        overlap_launch<bf16_t>(stream, op);
    else
        overlap_launch<float>(stream, op);
}

static __global__ void __launch_bounds__(MASK_THREADS) mask_kernel(struct mask_rows op)
{
    int64_t row = (int64_t)blockIdx.x * MASK_THREADS + threadIdx.x;
    if (row < op.rows)
        op.scale[row] = op.argmax[op.teacher_row[row]] < op.kept ? op.weight[row] : 0.0f;
}

void mask_rows_cuda(struct stream *stream, const struct mask_rows *op)
{
    if (op->rows == 0)
        return;
    mask_kernel<<<grid_size(divide_up(op->rows, MASK_THREADS)), MASK_THREADS, 0, stream->cuda>>>(
        *op);
    launch_check();
}
