// Owns the RMS norm on CUDA, forward and backward. A row's result depends on that row alone. Rows of
// whole packs are read once and stay in registers; others (odd widths, very long rows) are read twice.
#include "kernels/rms_norm.h"

#include "kernels/cuda_vector.cuh"

enum {
    THREADS = 256, // of rows that are read twice
    BACKWARD_THREADS = 512,
    MOST_THREADS = 512,  // of a row in packs, forward
    GROUP_THREADS = 320, // and backward, where a CTA takes several narrow rows at a time
    COLUMNS = 32,        // column sums: columns of a CTA
    SLICES = 32          // and slices of the parts
};

template <typename Type> struct of_type {
    enum { N = PACK_BYTES / sizeof(Type) }; // elements of a pack
};

// How the threads of a row share its packs: thread t has packs t, t + threads, ..., at most `each`.
struct row_plan {
    int packs, threads, each; // each 0: no packs
};

static struct row_plan row_plan_make(const struct rms_norm *op, int most_each, int most_threads)
{
    int n = PACK_BYTES / (int)dtype_size(op->type);
    bool aligned = packs_at(op->x) && packs_at(op->weight) && packs_at(op->y) && packs_at(op->dy) &&
                   packs_at(op->dx) && packs_in(op->width, n);
    struct row_plan plan = {0, 0, 0};
    if (!aligned || op->width / n > (int64_t)most_each * most_threads)
        return plan;
    plan.packs = (int)(op->width / n);
    plan.each = plan.packs <= GROUP_THREADS / 2 ? 1 : 2;
    while (plan.packs > plan.each * most_threads)
        plan.each *= 2;
    plan.threads = (int)round_up(divide_up(plan.packs, plan.each), WARP);
    return plan;
}

// Sum over the `threads` threads of a row, for all of them, warps added in order. The whole CTA calls
// it; two calls in a row must use different buffers [threads of the CTA / WARP].
static __device__ __forceinline__ float row_sum(float x, float *partial, int threads)
{
    int warp = threadIdx.x / WARP, first = threadIdx.x / threads * (threads / WARP);
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0)
        partial[warp] = x;
    __syncthreads();
    float sum = partial[first];
    for (int w = 1; w < threads / WARP; w++)
        sum += partial[first + w];
    return sum;
}

template <typename X, typename Type, int EACH>
static __global__ void __launch_bounds__(MOST_THREADS)
    forward_kernel(struct rms_norm op, struct row_plan plan)
{
    enum { N = of_type<Type>::N };
    __shared__ float partial[MOST_THREADS / WARP];
    const X *x = (const X *)op.x + blockIdx.x * op.width;
    Type *y = (Type *)op.y + blockIdx.x * op.width;
    struct pack<X, N> xs[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int at = threadIdx.x + e * plan.threads;
        xs[e] = at < plan.packs ? pack_load_once<N>(x + at * N) : pack_zero<X, N>();
    }
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int i = 0; i < N; i++)
            squares += pack_value(xs[e], i) * pack_value(xs[e], i);
    squares = row_sum(squares, partial, plan.threads);
    float rstd = 1.0f / sqrtf(squares / (float)op.width + op.eps);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int at = threadIdx.x + e * plan.threads;
        if (at >= plan.packs)
            continue;
        struct pack<float, N> scale = pack_load<N>(op.weight + at * N); // now: registers are few
        float value[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            value[i] = pack_value(xs[e], i) * rstd * (pack_value(scale, i) + op.weight_offset);
        store_values<N>(y + at * N, value);
    }
    if (threadIdx.x == 0 && op.rstd != NULL)
        op.rstd[blockIdx.x] = rstd;
}

template <typename X, typename Type>
static __global__ void __launch_bounds__(THREADS) forward_long_kernel(struct rms_norm op)
{
    int64_t row = blockIdx.x;
    const X *x = (const X *)op.x + row * op.width;
    const float *weight = op.weight;
    Type *y = (Type *)op.y + row * op.width;
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS)
        squares += load(x, i) * load(x, i);
    squares = block_sum<THREADS>(squares);
    float rstd = 1.0f / sqrtf(squares / (float)op.width + op.eps);
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS) // y may be x: each reads its own
        store(y, i, load(x, i) * rstd * (weight[i] + op.weight_offset));
    if (threadIdx.x == 0 && op.rstd != NULL)
        op.rstd[row] = rstd;
}

template <typename X, typename Type>
static void forward_launch(struct stream *stream, const struct rms_norm *op)
{
    struct row_plan plan = row_plan_make(op, 8, MOST_THREADS);
    unsigned grid = grid_size(op->rows);
    if (plan.each == 0)
        forward_long_kernel<X, Type><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (plan.each == 1)
        forward_kernel<X, Type, 1><<<grid, plan.threads, 0, stream->cuda>>>(*op, plan);
    else if (plan.each == 2)
        forward_kernel<X, Type, 2><<<grid, plan.threads, 0, stream->cuda>>>(*op, plan);
    else if (plan.each == 4)
        forward_kernel<X, Type, 4><<<grid, plan.threads, 0, stream->cuda>>>(*op, plan);
    else
        forward_kernel<X, Type, 8><<<grid, plan.threads, 0, stream->cuda>>>(*op, plan);
    launch_check();
}

// One CTA a row.
void rms_norm_forward_cuda(struct stream *stream, const struct rms_norm *norm)
{
    if (norm->rows == 0)
        return;
    BUG_UNLESS(norm->x_type == norm->type || norm->x_type == DTYPE_F32);
    if (is_bf16(norm->x_type))
        forward_launch<bf16_t, bf16_t>(stream, norm);
    else if (is_bf16(norm->type))
        forward_launch<float, bf16_t>(stream, norm);
    else
        forward_launch<float, float>(stream, norm);
}

// c of dx = rstd (scale dy - x c): rstd^2 mean(dy scale x)
static __device__ __forceinline__ float projection_factor(float projection, float rstd,
                                                          int64_t width)
{
    return (float)((double)projection * (double)rstd * (double)rstd / (double)width);
}

// What a thread holds of a row.
template <typename X, typename Type, int EACH> struct row_packs {
    struct pack<X, of_type<Type>::N> x[EACH];
    struct pack<Type, of_type<Type>::N> dy[EACH];
    float rstd;
};

template <typename X, typename Type, int EACH>
static __device__ __forceinline__ void
row_load(struct row_packs<X, Type, EACH> &r, const struct rms_norm &op, const struct row_plan &plan,
         int lane, int64_t row, bool there)
{
    enum { N = of_type<Type>::N };
    const X *x = (const X *)op.x + row * op.width;
    const Type *dy = (const Type *)op.dy + row * op.width;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int at = lane + e * plan.threads;
        bool mine = there && at < plan.packs;
        r.x[e] = mine ? pack_load_once<N>(x + at * N) : pack_zero<X, N>();
        r.dy[e] = mine ? pack_load_once<N>(dy + at * N) : pack_zero<Type, N>();
    }
    r.rstd = there ? op.rstd[row] : 0.0f;
}

// A pack of the weight. Read again where it is used: the first-level cache has it, registers are few.
template <int N>
static __device__ __forceinline__ struct pack<float, N>
scale_load(const struct rms_norm &op, const struct row_plan &plan, int at) {
    return at < plan.packs ? pack_load<N>(op.weight + at * N) : pack_zero<float, N>();
}

// dx of a row, and its share of dweight into sums.
template <typename X, typename Type, int EACH, bool ADD>
static __device__ __forceinline__ void
row_finish(const struct row_packs<X, Type, EACH> &r,
           const struct pack<Type, of_type<Type>::N> (&old)[EACH], const struct rms_norm &op,
           const struct row_plan &plan, int lane, Type *dx, float c,
           float (&sums)[EACH][of_type<Type>::N])
{
    enum { N = of_type<Type>::N };
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int at = lane + e * plan.threads;
        struct pack<float, N> scale = scale_load<N>(op, plan, at);
        float value[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            float x = pack_value(r.x[e], i), dy = pack_value(r.dy[e], i);
            value[i] = r.rstd * ((pack_value(scale, i) + op.weight_offset) * dy - x * c);
            if (ADD)
                value[i] += pack_value(old[e], i);
            sums[e][i] += dy * (x * r.rstd);
        }
        if (dx != NULL && at < plan.packs)
            store_values<N>(dx + at * N, value);
    }
}

// The groups' sums of dweight, added in their order in shared memory, to the part's row of scratch.
template <int EACH, int N>
static __device__ __forceinline__ void store_sums(const float (&sums)[EACH][N], float *shared,
                                                  float *scratch, const struct row_plan &plan,
                                                  int lane, int group)
{
    int groups = blockDim.x / plan.threads;
    for (int g = 0; g < groups; g++) {
        if (g == group)
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                int at = (lane + e * plan.threads) * N;
                if (at >= plan.packs * N)
                    continue;
                float *to = g == groups - 1 ? scratch + at : shared + at;
#pragma unroll
                for (int i = 0; i < N; i++)
                    to[i] = g == 0 ? sums[e][i] : shared[at + i] + sums[e][i];
            }
        __syncthreads();
    }
}

// A part of `size` rows, a group of plan.threads threads for each row, as many rows at a time as there
// are groups. The next rows are on their way while these are summed. dx may be dy: each thread reads its
// own elements before it writes them. Two CTAs fit an SM while their registers do.
template <typename X, typename Type, int EACH, bool ADD>
static __global__ void __launch_bounds__(GROUP_THREADS, EACH <= 2 ? 2 : 1)
    backward_kernel(struct rms_norm op, struct row_plan plan, int64_t size)
{
    enum { N = of_type<Type>::N };
    extern __shared__ float shared[]; // [width] with several groups
    __shared__ float partial[2][GROUP_THREADS / WARP];
    int group = threadIdx.x / plan.threads, lane = threadIdx.x % plan.threads;
    int groups = blockDim.x / plan.threads, turn = 0;
    int64_t first = blockIdx.x * size;
    int64_t end = first + size < op.rows ? first + size : op.rows;
    struct pack<Type, N> old[EACH];
    float sums[EACH][N] = {};
    struct row_packs<X, Type, EACH> now, next;
    row_load(now, op, plan, lane, first + group, first + group < end);
    for (int64_t base = first; base < end; base += groups) {
        int64_t row = base + group;
        Type *dx = row < end ? (Type *)op.dx + row * op.width : NULL;
        row_load(next, op, plan, lane, row + groups, row + groups < end);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int at = lane + e * plan.threads;
            old[e] = ADD && dx != NULL && at < plan.packs ? pack_load_once<N>(dx + at * N)
                                                          : pack_zero<Type, N>();
        }
        float projection = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            struct pack<float, N> scale = scale_load<N>(op, plan, lane + e * plan.threads);
#pragma unroll
            for (int i = 0; i < N; i++)
                projection += pack_value(now.dy[e], i) * (pack_value(scale, i) + op.weight_offset) *
                              pack_value(now.x[e], i);
            pack_hold(now.x[e]);
            pack_hold(now.dy[e]);
        }
        projection = row_sum(projection, partial[turn], plan.threads);
        turn = 1 - turn;
        float c = projection_factor(projection, now.rstd, op.width);
        row_finish<X, Type, EACH, ADD>(now, old, op, plan, lane, dx, c, sums);
        now = next;
    }
    if (op.dweight != NULL)
        store_sums(sums, shared, op.scratch + blockIdx.x * op.width, plan, lane, group);
}

// The same with rows read twice; sums [width] of dweight in global memory, NULL: frozen.
template <typename X, typename Type>
static __device__ void backward_row(const struct rms_norm &op, int64_t row, float *sums, bool first)
{
    const X *x = (const X *)op.x + row * op.width;
    const float *weight = op.weight;
    const Type *dy = (const Type *)op.dy + row * op.width;
    Type *dx = (Type *)op.dx + row * op.width;
    float rstd = op.rstd[row], projection = 0.0f;
    for (int64_t i = threadIdx.x; i < op.width; i += BACKWARD_THREADS)
        projection += load(dy, i) * (weight[i] + op.weight_offset) * load(x, i);
    projection = block_sum<BACKWARD_THREADS>(projection);
    float c = projection_factor(projection, rstd, op.width);
    for (int64_t i = threadIdx.x; i < op.width; i += BACKWARD_THREADS) {
        float xi = load(x, i), dyi = load(dy, i), scale = weight[i] + op.weight_offset;
        float value = rstd * (scale * dyi - xi * c);
        store(dx, i, op.dx_add ? load(dx, i) + value : value);
        if (sums != NULL)
            sums[i] = (first ? 0.0f : sums[i]) + dyi * (xi * rstd);
    }
}

template <typename X, typename Type>
static __global__ void __launch_bounds__(BACKWARD_THREADS)
    backward_long_kernel(struct rms_norm op, int64_t size)
{
    int64_t first = blockIdx.x * size;
    int64_t end = first + size < op.rows ? first + size : op.rows;
    float *sums = op.dweight != NULL ? op.scratch + blockIdx.x * op.width : NULL;
    for (int64_t row = first; row < end; row++)
        backward_row<X, Type>(op, row, sums, row == first);
}

template <typename X, typename Type, int EACH>
static void backward_packs(struct stream *stream, const struct rms_norm *op,
                           const struct row_plan &plan, int groups, int64_t size)
{
    unsigned grid = grid_size(divide_up(op->rows, size));
    int threads = groups * plan.threads;
    size_t shared = groups > 1 ? (size_t)op->width * sizeof(float) : 0;
    if (op->dx_add)
        backward_kernel<X, Type, EACH, true>
            <<<grid, threads, shared, stream->cuda>>>(*op, plan, size);
    else
        backward_kernel<X, Type, EACH, false>
            <<<grid, threads, shared, stream->cuda>>>(*op, plan, size);
    launch_check();
}

// Returns the number of parts. Each is the work of one CTA.
template <typename X, typename Type>
static int64_t backward_launch(struct stream *stream, const struct rms_norm *op)
{
    struct row_plan plan = row_plan_make(op, 4, GROUP_THREADS);
    int64_t size = divide_up(op->rows, RMS_NORM_PARTS);
    int groups = plan.each > 0 && plan.threads < GROUP_THREADS ? GROUP_THREADS / plan.threads : 1;
    size = size > groups ? size : groups;
    int64_t parts = divide_up(op->rows, size);
    if (plan.each == 0) {
        backward_long_kernel<X, Type>
            <<<grid_size(parts), BACKWARD_THREADS, 0, stream->cuda>>>(*op, size);
        launch_check();
    } else if (plan.each == 1) {
        backward_packs<X, Type, 1>(stream, op, plan, groups, size);
    } else if (plan.each == 2) {
        backward_packs<X, Type, 2>(stream, op, plan, groups, size);
    } else {
        backward_packs<X, Type, 4>(stream, op, plan, groups, size);
    }
    return parts;
}

// Thread (c, s) adds the parts s, s + SLICES, ... of column c; then the slices are added in order.
static __global__ void __launch_bounds__(COLUMNS *SLICES)
    add_parts_kernel(float *sum, const float *partial, int parts, int64_t width)
{
    __shared__ double slices[SLICES][COLUMNS];
    int column = threadIdx.x % COLUMNS, slice = threadIdx.x / COLUMNS;
    int64_t i = (int64_t)blockIdx.x * COLUMNS + column;
    double total = 0.0;
    if (i < width)
#pragma unroll 8
        for (int part = slice; part < parts; part += SLICES)
            total += (double)partial[part * width + i];
    slices[slice][column] = total;
    __syncthreads();
    if (slice > 0 || i >= width)
        return;
    for (int s = 1; s < SLICES; s++)
        total += slices[s][column];
    sum[i] = (float)((double)sum[i] + total);
}

void column_parts_add(struct stream *stream, float *sum, const float *partial, int parts,
                      int64_t width)
{
    add_parts_kernel<<<grid_size(divide_up(width, COLUMNS)), COLUMNS * SLICES, 0, stream->cuda>>>(
        sum, partial, parts, width);
    launch_check();
}

// A CTA for each of at most RMS_NORM_PARTS parts of the rows, two of them on each SM of an H200; then
// the parts' sums of dweight are added.
void rms_norm_backward_cuda(struct stream *stream, const struct rms_norm *norm)
{
    BUG_UNLESS(!norm->dx_add || norm->dx != norm->dy);
    if (norm->rows == 0)
        return;
    BUG_UNLESS(norm->x_type == norm->type || norm->x_type == DTYPE_F32);
    int64_t parts = is_bf16(norm->x_type) ? backward_launch<bf16_t, bf16_t>(stream, norm)
                    : is_bf16(norm->type) ? backward_launch<float, bf16_t>(stream, norm)
                                          : backward_launch<float, float>(stream, norm);
    if (norm->dweight != NULL)
        column_parts_add(stream, norm->dweight, norm->scratch, (int)parts, norm->width);
}
