// Owns the norm and rotary embedding of heads on CUDA. A head belongs to neighbouring threads of a warp,
// its lanes, a power of two; lane l has the pairs (i, i + head_dim / 2) of packs l, l + lanes, ... of the
// lower half, so that rotating a head and summing over it needs no shared memory. The usual sizes of
// heads are known when the kernels are compiled; others, in packs or element by element, are not.
#include "kernels/norm_rope.h"

#include "kernels/cuda_vector.cuh"
#include "kernels/rms_norm.h"

enum {
    MAX_HEAD_DIM = 512,
    PACK = 8, // elements: 16 bytes of bf16, twice as many of fp32
    THREADS = 128,
    TOGETHER = 8, // heads of a row that a thread takes at a time, forward (half of it in fp32)
    BACKWARD_THREADS = 256
};

static constexpr int power_of_two_from(int n)
{
    int power = 1;
    while (power < n)
        power *= 2;
    return power;
}

// Packs of N elements, heads of 2 * HALF elements (0: as the call says).
template <int N, int HALF> struct layout {
    enum {
        LANES = HALF > 0 ? power_of_two_from(HALF / N) : WARP,
        EACH = HALF > 0 ? 1 : MAX_HEAD_DIM / 2 / WARP / N // packs of a lane
    };
};

template <int HALF> static __device__ __forceinline__ int half_of(const struct norm_rope &op)
{
    return HALF > 0 ? HALF : (int)op.head_dim / 2;
}

// Place in the half of pack `e` of a lane; past the half: none.
template <int N, int HALF> static __device__ __forceinline__ int pair_at(int lane, int e)
{
    return (lane + e * layout<N, HALF>::LANES) * N;
}

// Sum over the lanes of a head, the same bits in each.
template <int LANES> static __device__ __forceinline__ float head_sum(float x)
{
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// A lane's share of a head, both halves.
template <typename Type, int N, int HALF> struct head_packs {
    struct pack<Type, N> low[layout<N, HALF>::EACH], high[layout<N, HALF>::EACH];
};

template <int N, int HALF> struct head_values {
    float low[layout<N, HALF>::EACH][N], high[layout<N, HALF>::EACH][N];
};

template <typename Type, int N, int HALF>
static __device__ __forceinline__ void head_load(struct head_packs<Type, N, HALF> &h,
                                                 const Type *from, int half, int lane, bool there)
{
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++) {
        int at = pair_at<N, HALF>(lane, e);
        bool mine = there && at < half;
        h.low[e] = mine ? pack_load_once<N>(from + at) : pack_zero<Type, N>();
        h.high[e] = mine ? pack_load_once<N>(from + at + half) : pack_zero<Type, N>();
    }
}

template <typename Type, int N, int HALF>
static __device__ __forceinline__ void head_store(Type *to, const struct head_values<N, HALF> &h,
                                                  int half, int lane)
{
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++) {
        int at = pair_at<N, HALF>(lane, e);
        if (at >= half)
            continue;
        store_values<N>(to + at, h.low[e]);
        store_values<N>(to + at + half, h.high[e]);
    }
}

template <typename Type, int N, int HALF>
static __device__ __forceinline__ float head_squares(const struct head_packs<Type, N, HALF> &h)
{
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            squares += pack_value(h.low[e], i) * pack_value(h.low[e], i);
            squares += pack_value(h.high[e], i) * pack_value(h.high[e], i);
        }
    return squares;
}

// Keeps the packs packed; see pack_hold.
template <typename Type, int N, int HALF>
static __device__ __forceinline__ void head_hold(struct head_packs<Type, N, HALF> &h)
{
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++) {
        pack_hold(h.low[e]);
        pack_hold(h.high[e]);
    }
}

// N elements of a table in fp32; 1 where there is none.
template <int N>
static __device__ __forceinline__ void table_load(float (&values)[N], const float *table, int at)
{
    if (table == NULL) {
#pragma unroll
        for (int i = 0; i < N; i++)
            values[i] = 1.0f;
        return;
    }
    struct pack<float, N> p = pack_load<N>(table + at);
#pragma unroll
    for (int i = 0; i < N; i++)
        values[i] = pack_value(p, i);
}

// Cosines and sines of a row's position.
struct angles {
    const float *cos, *sin; // [head_dim / 2]
};

static __device__ __forceinline__ struct angles angles_at(const struct norm_rope &op,
                                                          int64_t position, int half)
{
    bug_unless(position >= 0 && position < op.table_rows);
    struct angles a = {op.cos + position * half, op.sin + position * half};
    return a;
}

static __device__ __forceinline__ float head_rstd(const struct norm_rope &op, float squares,
                                                  float inverse_dim)
{
    return op.weight != NULL ? rsqrtf(squares * inverse_dim + op.eps) : 1.0f;
}

// A lane's share of the weight: 1 where there is none.
template <int N, int HALF>
static __device__ __forceinline__ void weight_load(struct head_values<N, HALF> &weight,
                                                   const float *from, int half, int lane)
{
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++) {
        int at = pair_at<N, HALF>(lane, e);
        const float *low = at < half ? from : NULL;
        table_load(weight.low[e], low, at);
        table_load(weight.high[e], low != NULL ? low + half : NULL, at);
    }
}

// And of a row's angles.
template <int N, int HALF> struct angle_packs {
    struct pack<float, N> cos[layout<N, HALF>::EACH], sin[layout<N, HALF>::EACH];
};

template <int N, int HALF>
static __device__ __forceinline__ void angles_load(struct angle_packs<N, HALF> &packs,
                                                   const struct angles &angles, int half, int lane)
{
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++) {
        int at = pair_at<N, HALF>(lane, e);
        bool mine = at < half;
        packs.cos[e] = mine ? pack_load<N>(angles.cos + at) : pack_zero<float, N>();
        packs.sin[e] = mine ? pack_load<N>(angles.sin + at) : pack_zero<float, N>();
    }
}

template <typename Type, int N, int HALF>
static __device__ __forceinline__ void rotate(struct head_values<N, HALF> &y,
                                              const struct head_packs<Type, N, HALF> &x,
                                              const struct angle_packs<N, HALF> &angles,
                                              const struct head_values<N, HALF> &weight, float rstd)
{
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float a = pack_value(x.low[e], i) * rstd * weight.low[e][i];
            float b = pack_value(x.high[e], i) * rstd * weight.high[e][i];
            float cos = pack_value(angles.cos[e], i), sin = pack_value(angles.sin[e], i);
            y.low[e][i] = a * cos - b * sin;
            y.high[e][i] = b * cos + a * sin;
        }
}

// An item is a slot of a row, with the heads slot, slot + slots, ...: up to HEADS heads, which share
// their angles. y may be x: a head is in registers before it is written.
template <typename Type, int N, int HALF, int HEADS>
static __global__ void __launch_bounds__(THREADS, HALF > 0 ? 4 : 1)
    forward_kernel(struct norm_rope op, unsigned slots, float inverse_dim)
{
    enum { LANES = layout<N, HALF>::LANES };
    unsigned item = (blockIdx.x * THREADS + threadIdx.x) / LANES;
    int lane = (int)(threadIdx.x % LANES), half = half_of<HALF>(op);
    unsigned slot = item % slots, index = item / slots;
    unsigned heads = index < op.rows ? (unsigned)op.heads : 0;
    int64_t row = index < op.rows ? index : 0, apart = (int64_t)slots * (2 * half);
    const Type *x = (const Type *)op.x + row * op.x_stride + slot * (2 * half);
    Type *y = (Type *)op.y + (row * op.heads + slot) * (2 * half);
    struct head_packs<Type, N, HALF> packs[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        head_load(packs[h], x + h * apart, half, lane, slot + h * slots < heads);
    struct angle_packs<N, HALF> angles;
    struct head_values<N, HALF> values, weight;
    angles_load(angles, angles_at(op, op.positions[row], half), half, lane);
    weight_load(weight, op.weight, half, lane);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float squares = head_sum<LANES>(head_squares(packs[h]));
        rotate(values, packs[h], angles, weight, head_rstd(op, squares, inverse_dim));
        if (slot + h * slots < heads)
            head_store(y + h * apart, values, half, lane);
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

template <typename Type, int N, int HALF>
static void forward_launch(struct stream *stream, const struct norm_rope *op)
{
    enum { HEADS = N == 1 ? 1 : sizeof(Type) == 2 ? TOGETHER : TOGETHER / 2 };
    int64_t slots = divide_up(op->heads, HEADS);
    unsigned grid = grid_size(divide_up(op->rows * slots * layout<N, HALF>::LANES, THREADS));
    forward_kernel<Type, N, HALF, HEADS>
        <<<grid, THREADS, 0, stream->cuda>>>(*op, (unsigned)slots, 1.0f / (float)op->head_dim);
    launch_check();
}

template <typename Type> static void forward(struct stream *stream, const struct norm_rope *op)
{
    if (!in_packs(op, 0))
        forward_launch<Type, 1, 0>(stream, op);
    else if (op->head_dim == 64)
        forward_launch<Type, PACK, 32>(stream, op);
    else if (op->head_dim == 96)
        forward_launch<Type, PACK, 48>(stream, op);
    else if (op->head_dim == 128)
        forward_launch<Type, PACK, 64>(stream, op);
    else if (op->head_dim == 256)
        forward_launch<Type, PACK, 128>(stream, op);
    else
        forward_launch<Type, PACK, 0>(stream, op);
}

// The lanes of a head for up to TOGETHER heads of a row.
void norm_rope_forward_cuda(struct stream *stream, const struct norm_rope *op)
{
    check(op);
    if (op->rows == 0)
        return;
    if (is_bf16(op->type))
        forward<bf16_t>(stream, op);
    else
        forward<float>(stream, op);
}

// The gradient of the normed head, dy rotated back. Returns the lane's sum of it times weight and x.
template <typename Type, typename Gradient, int N, int HALF>
static __device__ __forceinline__ float
rotate_back(struct head_values<N, HALF> &dn, const struct head_packs<Gradient, N, HALF> &dy,
            const struct head_packs<Type, N, HALF> &x, const struct angle_packs<N, HALF> &angles,
            const struct head_values<N, HALF> &weight)
{
    float projection = 0.0f;
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float a = pack_value(dy.low[e], i), b = pack_value(dy.high[e], i);
            float cos = pack_value(angles.cos[e], i), sin = pack_value(angles.sin[e], i);
            dn.low[e][i] = a * cos + b * sin;
            dn.high[e][i] = b * cos - a * sin;
            projection += dn.low[e][i] * weight.low[e][i] * pack_value(x.low[e], i);
            projection += dn.high[e][i] * weight.high[e][i] * pack_value(x.high[e], i);
        }
    return projection;
}

// sums += dn x rstd, the head's share of dweight; dn becomes the gradient of x: rstd (weight dn - x c).
template <typename Type, int N, int HALF>
static __device__ __forceinline__ void
finish(struct head_values<N, HALF> &dn, struct head_values<N, HALF> &sums,
       const struct head_packs<Type, N, HALF> &x, const struct head_values<N, HALF> &weight,
       float rstd, float c)
{
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float a = pack_value(x.low[e], i), b = pack_value(x.high[e], i);
            sums.low[e][i] += dn.low[e][i] * a * rstd;
            sums.high[e][i] += dn.high[e][i] * b * rstd;
            dn.low[e][i] = rstd * (dn.low[e][i] * weight.low[e][i] - a * c);
            dn.high[e][i] = rstd * (dn.high[e][i] * weight.high[e][i] - b * c);
        }
}

// The sums of the CTA's lanes that have the same place in a head, added in a fixed order: within a warp
// pairwise, then warp after warp; to the CTA's row of scratch.
template <int N, int HALF>
static __device__ __forceinline__ void store_sums(const struct norm_rope &op, int half, int lane,
                                                  const struct head_values<N, HALF> &sums)
{
    enum { LANES = layout<N, HALF>::LANES };
    __shared__ float partial[BACKWARD_THREADS / WARP][MAX_HEAD_DIM];
    int warp = threadIdx.x / WARP;
#pragma unroll
    for (int e = 0; e < layout<N, HALF>::EACH; e++) {
        int at = pair_at<N, HALF>(lane, e);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float low = sums.low[e][i], high = sums.high[e][i];
#pragma unroll
            for (int distance = LANES; distance < WARP; distance *= 2) {
                low += __shfl_xor_sync(0xffffffffu, low, distance);
                high += __shfl_xor_sync(0xffffffffu, high, distance);
            }
            if (threadIdx.x % WARP < LANES && at < half) {
                partial[warp][at + i] = low;
                partial[warp][at + half + i] = high;
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * half; i += BACKWARD_THREADS) {
        float sum = partial[0][i];
        for (int w = 1; w < BACKWARD_THREADS / WARP; w++)
            sum += partial[w][i];
        op.scratch[blockIdx.x * op.head_dim + i] = sum;
    }
}

// What backward_kernel is made for. Packs are single accesses of at most 16 bytes also where fp32 meets
// bf16; a thread takes PACK elements of each half at a time, of one head or two.
template <typename Type_, typename Gradient_, bool PACKS, int HALF_> struct backward_of {
    typedef Type_ Type;
    typedef Gradient_ Gradient;
    enum {
        N = PACKS ? pack_of<Type, Gradient>::N : 1,
        HALF = HALF_,
        HEADS = PACKS ? PACK / N : 1,
        LANES = layout<N, HALF>::LANES,
        CTAS = PACKS && HALF > 0 ? 2 : 1 // of an SM: registers
    };
};

// Where a slot (see forward_kernel) is, past the last row: none.
struct place {
    unsigned row, slot;
    int32_t position;
};

static __device__ __forceinline__ int64_t row_or_first(const struct norm_rope &op, unsigned row)
{
    return row < op.rows ? row : 0;
}

static __device__ __forceinline__ struct place place_at(const struct norm_rope &op, unsigned row,
                                                        unsigned slot)
{
    struct place place = {row, slot, op.positions[row_or_first(op, row)]};
    return place;
}

// All slots are dealt out in turn; from one of a thread to its next there are so many rows and slots.
struct stride {
    unsigned rows, slots;
};

static __device__ __forceinline__ struct place place_after(const struct norm_rope &op,
                                                           const struct place &place,
                                                           struct stride stride, unsigned slots)
{
    unsigned slot = place.slot + stride.slots, over = slot >= slots ? 1 : 0;
    return place_at(op, place.row + stride.rows + over, slot - over * slots);
}

// What a thread reads of a slot.
template <typename B> struct slot_input {
    struct head_packs<typename B::Gradient, B::N, B::HALF> dy[B::HEADS];
    struct head_packs<typename B::Type, B::N, B::HALF> x[B::HEADS];
};

template <typename B>
static __device__ __forceinline__ void input_load(struct slot_input<B> &in,
                                                  const struct norm_rope &op,
                                                  const struct place &place, unsigned slots)
{
    int lane = (int)(threadIdx.x % B::LANES), half = half_of<B::HALF>(op);
    int64_t row = row_or_first(op, place.row);
    const typename B::Gradient *dy =
        (const typename B::Gradient *)op.dy + row * op.heads * (2 * half);
    const typename B::Type *x = (const typename B::Type *)op.x + row * op.x_stride;
#pragma unroll
    for (int h = 0; h < B::HEADS; h++) {
        unsigned head = place.slot + h * slots;
        bool there = place.row < op.rows && head < op.heads;
        head_load(in.dy[h], dy + head * (2 * half), half, lane, there);
        head_load(in.x[h], x + head * (2 * half), half, lane, there && op.weight != NULL);
    }
}

// Sends the angles of a place on their way to the second-level cache: registers are few.
template <typename B>
static __device__ __forceinline__ void angles_send(const struct norm_rope &op,
                                                   const struct place &place)
{
    int lane = (int)(threadIdx.x % B::LANES), half = half_of<B::HALF>(op);
    int at = pair_at<B::N, B::HALF>(lane, 0);
    struct angles angles = angles_at(op, place.position, half);
    if (at >= half)
        return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(angles.cos + at));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(angles.sin + at));
}

// The gradients of a slot's heads, and their shares of dweight into sums.
template <typename B>
static __device__ __forceinline__ void
slot_gradient(struct slot_input<B> &in, const struct place &place,
              struct head_values<B::N, B::HALF> &sums,
              const struct head_values<B::N, B::HALF> &weight, const struct norm_rope &op,
              unsigned slots, float inverse_dim)
{
    int lane = (int)(threadIdx.x % B::LANES), half = half_of<B::HALF>(op);
    typename B::Type *dx = (typename B::Type *)op.dx + place.row * op.dx_stride;
    struct angle_packs<B::N, B::HALF> angles;
    angles_load(angles, angles_at(op, place.position, half), half, lane);
#pragma unroll
    for (int h = 0; h < B::HEADS; h++) {
        unsigned head = place.slot + h * slots;
        struct head_values<B::N, B::HALF> dn;
        float projection = rotate_back(dn, in.dy[h], in.x[h], angles, weight);
        projection = head_sum<B::LANES>(projection);
        float rstd = head_rstd(op, head_sum<B::LANES>(head_squares(in.x[h])), inverse_dim);
        head_hold(in.x[h]);
        finish(dn, sums, in.x[h], weight, rstd, projection * inverse_dim * rstd * rstd);
        if (place.row < op.rows && head < op.heads)
            head_store(dx + head * (2 * half), dn, half, lane);
    }
}

// Slots in turn over all CTAs, the next on its way, and the position after it. dx may be x: each lane has read what it writes.
// `rounds` is the same for all, as head_sum needs whole warps.
template <typename B>
static __global__ void __launch_bounds__(BACKWARD_THREADS, B::CTAS)
    backward_kernel(struct norm_rope op, unsigned slots, struct stride stride, unsigned rounds,
                    float inverse_dim)
{
    unsigned index = (blockIdx.x * BACKWARD_THREADS + threadIdx.x) / B::LANES;
    int lane = (int)(threadIdx.x % B::LANES), half = half_of<B::HALF>(op);
    typedef struct head_values<B::N, B::HALF> Values;
    Values weight, sums = {};
    struct slot_input<B> now, next;
    struct place place = place_at(op, index / slots, index % slots);
    weight_load(weight, op.weight, half, lane);
    input_load(now, op, place, slots);
    struct place coming = place_after(op, place, stride, slots);
    parts_add_may_start();
    for (unsigned round = 0; round < rounds; round++) {
        struct place later = place_after(op, coming, stride, slots);
        input_load(next, op, coming, slots);
        angles_send<B>(op, coming);
        slot_gradient(now, place, sums, weight, op, slots, inverse_dim);
        now = next;
        place = coming;
        coming = later;
    }
    if (op.weight != NULL)
        store_sums<B::N, B::HALF>(op, half, lane, sums);
}

// Returns the number of parts of scratch, each written by one CTA.
template <typename B> static int backward_launch(struct stream *stream, const struct norm_rope *op)
{
    enum { SLOTS = BACKWARD_THREADS / B::LANES }; // of a CTA at a time
    int64_t slots = divide_up(op->heads, B::HEADS), all = op->rows * slots;
    int64_t needed = divide_up(all, SLOTS);
    unsigned grid = grid_size(needed < RMS_NORM_PARTS ? needed : RMS_NORM_PARTS);
    int64_t step = (int64_t)grid * SLOTS;
    struct stride stride = {(unsigned)(step / slots), (unsigned)(step % slots)};
    backward_kernel<B><<<grid, BACKWARD_THREADS, 0, stream->cuda>>>(
        *op, (unsigned)slots, stride, (unsigned)divide_up(all, step), 1.0f / (float)op->head_dim);
    launch_check();
    return (int)grid;
}

template <typename Type, typename Gradient>
static int backward(struct stream *stream, const struct norm_rope *op)
{
    if (!in_packs(op, op->dx_stride))
        return backward_launch<struct backward_of<Type, Gradient, false, 0>>(stream, op);
    if (op->head_dim == 64)
        return backward_launch<struct backward_of<Type, Gradient, true, 32>>(stream, op);
    if (op->head_dim == 96)
        return backward_launch<struct backward_of<Type, Gradient, true, 48>>(stream, op);
    if (op->head_dim == 128)
        return backward_launch<struct backward_of<Type, Gradient, true, 64>>(stream, op);
    if (op->head_dim == 256)
        return backward_launch<struct backward_of<Type, Gradient, true, 128>>(stream, op);
    return backward_launch<struct backward_of<Type, Gradient, true, 0>>(stream, op);
}

// At most RMS_NORM_PARTS CTAs, two on each SM of an H200, 16 KiB of shared memory; then their sums of
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
        parts = backward<bf16_t, bf16_t>(stream, op);
    else if (type)
        parts = backward<bf16_t, float>(stream, op);
    else if (gradient)
        parts = backward<float, bf16_t>(stream, op);
    else
        parts = backward<float, float>(stream, op);
    if (op->weight != NULL)
        column_parts_add(stream, op->dweight, op->scratch, parts, op->head_dim);
}
