// Owns the norm and rotary embedding of heads on CUDA. A head belongs to `lanes` neighbouring threads of
// a warp, a power of two; lane l has the pairs (i, i + head_dim / 2) of packs l, l + lanes, ... of the
// lower half, so that rotating a head and summing over it needs no shared memory.
#include "kernels/norm_rope.h"

#include "kernels/cuda_vector.cuh"
#include "kernels/rms_norm.h"

enum {
    MAX_HEAD_DIM = 512,
    PACK = 8,                             // elements: 16 bytes of bf16, twice as many of fp32
    MAX_SINGLE = MAX_HEAD_DIM / 2 / WARP, // packs of a lane when a pack is one element
    THREADS = 128,
    TOGETHER = 4, // heads of a row that a thread takes at a time, forward
    BACKWARD_THREADS = 320
};

// How the heads of a call are divided.
struct head_plan {
    unsigned lanes; // of a head
    unsigned slots; // of a row: slot s has the heads s, s + slots, ...; forward
    unsigned items; // rows * slots, or heads in all backward
};

// Positions inside a head of the pack p of a lane; past the half: none.
template <int N> static __device__ __forceinline__ int pair_at(int lane, int lanes, int p)
{
    return (lane + p * lanes) * N;
}

// Sum over the lanes of a head, the same bits in each.
static __device__ __forceinline__ float head_sum(float x, unsigned lanes)
{
    for (unsigned distance = lanes / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// Cosines and sines of a lane's pairs, PER packs of N.
template <int N, int PER> struct angles {
    float cos[PER][N], sin[PER][N];
};

template <int N, int PER>
static __device__ __forceinline__ void
angles_load(struct angles<N, PER> &a, const struct norm_rope &op, int64_t row, int lane, int lanes)
{
    int half = (int)op.head_dim / 2;
    int64_t position = op.positions[row];
    bug_unless(position >= 0 && position < op.table_rows);
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int at = pair_at<N>(lane, lanes, p);
        struct pack<float, N> c = pack_zero<float, N>(), s = c;
        if (at < half) {
            c = pack_load<N>(op.cos + position * half + at);
            s = pack_load<N>(op.sin + position * half + at);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            a.cos[p][i] = pack_value(c, i);
            a.sin[p][i] = pack_value(s, i);
        }
    }
}

// A lane's share of a head, or of the weight: both halves.
template <typename Type, int N, int PER> struct head_packs {
    struct pack<Type, N> low[PER], high[PER];
};

template <typename Type, int N, int PER>
static __device__ __forceinline__ void head_load(struct head_packs<Type, N, PER> &h,
                                                 const Type *from, int half, int lane, int lanes,
                                                 bool there)
{
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int at = pair_at<N>(lane, lanes, p);
        bool mine = there && at < half;
        h.low[p] = mine ? pack_load<N>(from + at) : pack_zero<Type, N>();
        h.high[p] = mine ? pack_load<N>(from + at + half) : pack_zero<Type, N>();
    }
}

template <typename Type, int N, int PER>
static __device__ __forceinline__ void head_hold(struct head_packs<Type, N, PER> &h)
{
#pragma unroll
    for (int p = 0; p < PER; p++) {
        pack_hold(h.low[p]);
        pack_hold(h.high[p]);
    }
}

template <typename Type, int N, int PER>
static __device__ __forceinline__ float head_squares(const struct head_packs<Type, N, PER> &h)
{
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PER; p++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            squares += pack_value(h.low[p], i) * pack_value(h.low[p], i);
            squares += pack_value(h.high[p], i) * pack_value(h.high[p], i);
        }
    return squares;
}

// One head: y from x. y may be x, which is in registers by now.
template <typename Type, int N, int PER>
static __device__ __forceinline__ void
rotate_head(const struct norm_rope &op, const struct head_packs<Type, N, PER> &x,
            const struct head_packs<float, N, PER> &weight, const struct angles<N, PER> &angles,
            float rstd, Type *y, int lane, int lanes)
{
    int half = (int)op.head_dim / 2;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int at = pair_at<N>(lane, lanes, p);
        float low[N], high[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            float a = pack_value(x.low[p], i), b = pack_value(x.high[p], i);
            if (op.weight != NULL) {
                a = a * rstd * pack_value(weight.low[p], i);
                b = b * rstd * pack_value(weight.high[p], i);
            }
            low[i] = a * angles.cos[p][i] - b * angles.sin[p][i];
            high[i] = b * angles.cos[p][i] + a * angles.sin[p][i];
        }
        if (at < half) {
            store_values<N>(y + at, low);
            store_values<N>(y + at + half, high);
        }
    }
}

// An item is a slot of a row: up to HEADS heads, which share their angles.
template <typename Type, int N, int PER, int HEADS>
static __global__ void __launch_bounds__(THREADS)
    forward_kernel(struct norm_rope op, struct head_plan plan)
{
    unsigned thread = blockIdx.x * THREADS + threadIdx.x, item = thread / plan.lanes;
    int lanes = (int)plan.lanes, lane = (int)(thread % plan.lanes), half = (int)op.head_dim / 2;
    bool there = item < plan.items;
    int64_t row = there ? item / plan.slots : 0;
    unsigned slot = item % plan.slots;
    struct head_packs<Type, N, PER> x[HEADS];
    struct head_packs<float, N, PER> weight;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        unsigned head = slot + h * plan.slots;
        head_load(x[h], (const Type *)op.x + row * op.x_stride + head * op.head_dim, half, lane,
                  lanes, there && head < op.heads);
    }
    head_load(weight, op.weight, half, lane, lanes, op.weight != NULL);
    struct angles<N, PER> angles;
    angles_load(angles, op, row, lane, lanes);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        unsigned head = slot + h * plan.slots;
        float rstd = 1.0f;
        if (op.weight != NULL)
            rstd = 1.0f /
                   sqrtf(head_sum(head_squares(x[h]), plan.lanes) / (float)op.head_dim + op.eps);
        if (there && head < op.heads)
            rotate_head(op, x[h], weight, angles, rstd,
                        (Type *)op.y + (row * op.heads + head) * op.head_dim, lane, lanes);
    }
}

static void check(const struct norm_rope *op)
{
    BUG_UNLESS(op->head_dim % 2 == 0 && op->head_dim <= MAX_HEAD_DIM);
    BUG_UNLESS(op->rows * op->heads <= INT32_MAX / WARP);
}

// Whether all that a call touches can be moved in packs.
static bool in_packs(const struct norm_rope *op, int64_t stride)
{
    return packs_at(op->x) && packs_at(op->weight) && packs_at(op->cos) && packs_at(op->sin) &&
           packs_at(op->y) && packs_at(op->dy) && packs_at(op->dx) &&
           packs_in(op->head_dim, 2 * PACK) && packs_in(op->x_stride, PACK) &&
           packs_in(stride, PACK);
}

static struct head_plan head_plan_make(const struct norm_rope *op, int n, int together)
{
    struct head_plan plan;
    plan.lanes = 1;
    while (plan.lanes < WARP && (int64_t)plan.lanes * n < op->head_dim / 2)
        plan.lanes *= 2;
    plan.slots = (unsigned)divide_up(op->heads, together);
    plan.items = (unsigned)op->rows * plan.slots;
    return plan;
}

template <typename Type>
static void forward_launch(struct stream *stream, const struct norm_rope *op)
{
    bool packs = in_packs(op, 0);
    struct head_plan plan = head_plan_make(op, packs ? PACK : 1, packs ? TOGETHER : 1);
    unsigned grid = grid_size(divide_up((int64_t)plan.items * plan.lanes, THREADS));
    if (packs)
        forward_kernel<Type, PACK, 1, TOGETHER><<<grid, THREADS, 0, stream->cuda>>>(*op, plan);
    else
        forward_kernel<Type, 1, MAX_SINGLE, 1><<<grid, THREADS, 0, stream->cuda>>>(*op, plan);
    launch_check();
}

// `lanes` threads for TOGETHER heads of a row.
void norm_rope_forward_cuda(struct stream *stream, const struct norm_rope *op)
{
    check(op);
    if (op->rows == 0)
        return;
    if (is_bf16(op->type))
        forward_launch<bf16_t>(stream, op);
    else
        forward_launch<float>(stream, op);
}

// A lane's sums of dweight over the heads that it has seen.
template <int N, int PER> struct head_sums {
    float low[PER][N], high[PER][N];
};

// The gradient of the normed head: dy rotated back.
template <typename Gradient, int N, int PER>
static __device__ __forceinline__ void rotate_back(const struct head_packs<Gradient, N, PER> &dy,
                                                   const struct angles<N, PER> &angles,
                                                   struct head_sums<N, PER> &dn)
{
#pragma unroll
    for (int p = 0; p < PER; p++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float a = pack_value(dy.low[p], i), b = pack_value(dy.high[p], i);
            dn.low[p][i] = a * angles.cos[p][i] + b * angles.sin[p][i];
            dn.high[p][i] = b * angles.cos[p][i] - a * angles.sin[p][i];
        }
}

// dn becomes the gradient of x, and sums get the head's share of dweight; see rms_norm_cuda.cu.
template <typename Type, int N, int PER>
static __device__ __forceinline__ void
norm_backward(const struct norm_rope &op, struct head_packs<Type, N, PER> &x, int lane,
              unsigned lanes, struct head_sums<N, PER> &dn, struct head_sums<N, PER> &sums)
{
    int half = (int)op.head_dim / 2;
    float projection = 0.0f;
    // Read again where it is used: the first-level cache has it, registers are few.
    struct head_packs<float, N, PER> weight;
    head_load(weight, op.weight, half, lane, (int)lanes, true);
#pragma unroll
    for (int p = 0; p < PER; p++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            projection += dn.low[p][i] * pack_value(weight.low[p], i) * pack_value(x.low[p], i);
            projection += dn.high[p][i] * pack_value(weight.high[p], i) * pack_value(x.high[p], i);
        }
    float squares = head_sum(head_squares(x), lanes);
    projection = head_sum(projection, lanes);
    head_hold(x);
    head_load(weight, op.weight, half, lane, (int)lanes, true);
    float rstd = 1.0f / sqrtf(squares / (float)op.head_dim + op.eps);
    float c =
        (float)((double)projection * (double)rstd * (double)rstd * (1.0 / (double)op.head_dim));
#pragma unroll
    for (int p = 0; p < PER; p++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float a = pack_value(x.low[p], i), b = pack_value(x.high[p], i);
            sums.low[p][i] += dn.low[p][i] * (a * rstd);
            sums.high[p][i] += dn.high[p][i] * (b * rstd);
            dn.low[p][i] = rstd * (dn.low[p][i] * pack_value(weight.low[p], i) - a * c);
            dn.high[p][i] = rstd * (dn.high[p][i] * pack_value(weight.high[p], i) - b * c);
        }
}

// The sums of the CTA's lanes that have the same place in a head, added in a fixed order: within a warp
// pairwise, then warp after warp; to the CTA's row of scratch.
template <int N, int PER>
static __device__ __forceinline__ void store_sums(const struct norm_rope &op,
                                                  const struct head_plan &plan, int lane,
                                                  const struct head_sums<N, PER> &sums)
{
    __shared__ float partial[BACKWARD_THREADS / WARP][MAX_HEAD_DIM];
    int warp = threadIdx.x / WARP, half = (int)op.head_dim / 2;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int at = pair_at<N>(lane, (int)plan.lanes, p);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float low = sums.low[p][i], high = sums.high[p][i];
            for (unsigned distance = plan.lanes; distance < WARP; distance *= 2) {
                low += __shfl_xor_sync(0xffffffffu, low, distance);
                high += __shfl_xor_sync(0xffffffffu, high, distance);
            }
            if (threadIdx.x % WARP < plan.lanes && at < half) {
                partial[warp][at + i] = low;
                partial[warp][at + half + i] = high;
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < op.head_dim; i += BACKWARD_THREADS) {
        float sum = partial[0][i];
        for (int w = 1; w < BACKWARD_THREADS / WARP; w++)
            sum += partial[w][i];
        op.scratch[blockIdx.x * op.head_dim + i] = sum;
    }
}

// What a lane reads of a head for its gradient.
template <typename Type, typename Gradient, int N, int PER> struct head_input {
    struct head_packs<Gradient, N, PER> dy;
    struct head_packs<Type, N, PER> x;
};

// Row and head of an index over all heads; past the last: those of the last row.
static __device__ __forceinline__ int64_t row_of(const struct norm_rope &op, unsigned index)
{
    unsigned row = index / (unsigned)op.heads;
    return row < op.rows ? row : (unsigned)op.rows - 1;
}

static __device__ __forceinline__ int64_t head_of(const struct norm_rope &op, unsigned index)
{
    return index % (unsigned)op.heads;
}

template <typename Type, typename Gradient, int N, int PER>
static __device__ __forceinline__ void
input_load(struct head_input<Type, Gradient, N, PER> &in, const struct norm_rope &op,
           const struct head_plan &plan, unsigned index, int lane)
{
    int half = (int)op.head_dim / 2, lanes = (int)plan.lanes;
    bool there = index < plan.items;
    head_load(in.dy, (const Gradient *)op.dy + (int64_t)index * op.head_dim, half, lane, lanes,
              there);
    head_load(in.x,
              (const Type *)op.x + row_of(op, index) * op.x_stride +
                  head_of(op, index) * op.head_dim,
              half, lane, lanes, there && op.weight != NULL);
}

// Heads in turn over all CTAs, the next on its way where registers suffice. dx may be x: each lane has
// read what it writes.
template <typename Type, typename Gradient, int N, int PER>
static __global__ void __launch_bounds__(BACKWARD_THREADS, N > 1 && sizeof(Type) == 2 ? 2 : 1)
    backward_kernel(struct norm_rope op, struct head_plan plan)
{
    enum { AHEAD = N > 1 && sizeof(Type) == 2 && sizeof(Gradient) == 2 };
    unsigned step = gridDim.x * (BACKWARD_THREADS / plan.lanes);
    unsigned index = (blockIdx.x * BACKWARD_THREADS + threadIdx.x) / plan.lanes;
    int lanes = (int)plan.lanes, lane = (int)(threadIdx.x % plan.lanes);
    int half = (int)op.head_dim / 2;
    struct head_sums<N, PER> sums = {
    };
    struct head_input<Type, Gradient, N, PER> now, next;
    if (AHEAD)
        input_load(now, op, plan, index, lane);
    // Whole warps go on together: head_sum needs them.
    for (; index / (WARP / plan.lanes) * (WARP / plan.lanes) < plan.items; index += step) {
        if (AHEAD)
            input_load(next, op, plan, index + step, lane);
        else
            input_load(now, op, plan, index, lane);
        struct angles<N, PER> angles;
        struct head_sums<N, PER> dn;
        angles_load(angles, op, row_of(op, index), lane, lanes);
        rotate_back(now.dy, angles, dn);
        if (op.weight != NULL)
            norm_backward(op, now.x, lane, plan.lanes, dn, sums);
        Type *dx =
            (Type *)op.dx + row_of(op, index) * op.dx_stride + head_of(op, index) * op.head_dim;
#pragma unroll
        for (int p = 0; p < PER; p++) {
            int at = pair_at<N>(lane, lanes, p);
            if (index < plan.items && at < half) {
                store_values<N>(dx + at, dn.low[p]);
                store_values<N>(dx + at + half, dn.high[p]);
            }
        }
        if (AHEAD)
            now = next;
    }
    if (op.weight != NULL)
        store_sums(op, plan, lane, sums);
}

// Returns the number of parts of scratch, each written by one CTA.
template <typename Type, typename Gradient>
static int backward_launch(struct stream *stream, const struct norm_rope *op)
{
    bool packs = in_packs(op, op->dx_stride);
    struct head_plan plan = head_plan_make(op, packs ? PACK : 1, 1);
    int64_t needed = divide_up((int64_t)plan.items * plan.lanes, BACKWARD_THREADS);
    unsigned grid = grid_size(needed < RMS_NORM_PARTS ? needed : RMS_NORM_PARTS);
    if (packs)
        backward_kernel<Type, Gradient, PACK, 1>
            <<<grid, BACKWARD_THREADS, 0, stream->cuda>>>(*op, plan);
    else
        backward_kernel<Type, Gradient, 1, MAX_SINGLE>
            <<<grid, BACKWARD_THREADS, 0, stream->cuda>>>(*op, plan);
    launch_check();
    return (int)grid;
}

// At most RMS_NORM_PARTS CTAs, two on each SM of an H200, 24 KiB of shared memory; then their sums of
// dweight are added.
void norm_rope_backward_cuda(struct stream *stream, const struct norm_rope *op)
{
    int parts;
    check(op);
    BUG_UNLESS((op->weight == NULL) == (op->dweight == NULL));
    if (op->rows == 0)
        return;
    bool type = is_bf16(op->type), gradient = is_bf16(op->dy_type);
    if (type && gradient)
        parts = backward_launch<bf16_t, bf16_t>(stream, op);
    else if (type)
        parts = backward_launch<bf16_t, float>(stream, op);
    else if (gradient)
        parts = backward_launch<float, bf16_t>(stream, op);
    else
        parts = backward_launch<float, float>(stream, op);
    if (op->weight != NULL)
        column_parts_add(stream, op->dweight, op->scratch, parts, op->head_dim);
}
