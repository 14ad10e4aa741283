// Owns the RMS norm on CUDA, forward and backward. A row's result depends on that row alone. Rows of
// whole packs are read once and stay in registers; others (odd widths, very long rows) are read twice.
#include "kernels/rms_norm.h"

#include "kernels/cuda_vector.cuh"

enum {
    THREADS = 256, // of rows that are read twice
    BACKWARD_THREADS = 512,
    MOST_THREADS = 512,          // of a row in packs, forward
    FEW_THREADS = 160,           // of a row of bf16, as long as they suffice for 4 packs each
    GROUP_THREADS = 320,         // and backward, where a CTA takes several narrow rows at a time
    MOST_STAGE_BYTES = 96 << 10, // of rows that a CTA holds: what every GPU has
    HOPPER_SHARED_BYTES = 228 << 10, // of an SM
    GROUP_WARPS = 12,                // at most GROUP_THREADS / WARP, in whole float4
    MOST_STAGES = 4,
    ADD_THREADS = 1024, // that add parts
    FEW_COLUMNS = 1024
};

// How the threads of a row share its packs: see pack_at.
struct row_plan {
    int packs, threads, each; // each 0: no packs
};

// n: elements of a pack. Each thread takes 4 packs before there are more than few_threads of them,
// but more only where most_threads do not suffice.
static struct row_plan row_plan_make(const struct rms_norm *op, int n, int most_each,
                                     int few_threads, int most_threads)
{
    bool aligned = packs_at(op->x) && packs_at(op->weight) && packs_at(op->y) && packs_at(op->dy) &&
                   packs_at(op->dx) && packs_at(op->dx_from) && packs_at(op->scratch) &&
                   packs_in(op->width, n);
    struct row_plan plan = {0, 0, 0};
    if (!aligned || op->width / n > (int64_t)most_each * most_threads)
        return plan;
    plan.packs = (int)(op->width / n);
    plan.each = plan.packs <= GROUP_THREADS / 2 ? 1 : 2;
    while (plan.packs > plan.each * (plan.each < 4 ? few_threads : most_threads))
        plan.each *= 2;
    plan.threads = (int)round_up(divide_up(plan.packs, plan.each), WARP);
    return plan;
}

// Pack e of a row's thread: a warp has EACH * WARP neighbours, so that those of a thread are a
// constant apart. At the end of the row there may be none.
template <int EACH> static __device__ __forceinline__ int pack_at(int thread, int e)
{
    return (thread / WARP * EACH + e) * WARP + thread % WARP;
}

// Sums of the warps of a row; what is missing to WARPS is 0.
template <int WARPS> struct row_partial {
    float4 four[WARPS / 4];
};

template <int WARPS>
static __device__ __forceinline__ void row_partial_clear(struct row_partial<WARPS> &partial,
                                                         int thread, int threads)
{
    if (thread < WARPS && thread >= threads / WARP)
        ((float *)partial.four)[thread] = 0.0f;
}

// Sum over the threads of a row, for all of them, warps added in a fixed order. The whole CTA
// calls it; two calls in a row must use different partial sums.
template <int WARPS>
static __device__ __forceinline__ float row_sum(float x, struct row_partial<WARPS> &partial,
                                                int thread)
{
    float sum = 0.0f;
    x = warp_sum(x);
    if (thread % WARP == 0)
        ((float *)partial.four)[thread / WARP] = x;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS / 4; w++) {
        float4 four = partial.four[w];
        sum += (four.x + four.y) + (four.z + four.w);
    }
    return sum;
}

template <typename X, typename Type, int EACH>
static __global__ void __launch_bounds__(MOST_THREADS)
    forward_kernel(struct rms_norm op, struct row_plan plan)
{
    enum { N = pack_of<X, Type>::N, AHEAD = sizeof(X) == 2 && EACH <= 4 };
    __shared__ struct row_partial<MOST_THREADS / WARP> partial;
    const X *x = (const X *)op.x + blockIdx.x * op.width;
    Type *y = (Type *)op.y + blockIdx.x * op.width;
    struct pack<X, N> xs[EACH];
    struct pack<float, N> scales[AHEAD ? EACH : 1];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int at = pack_at<EACH>(threadIdx.x, e);
        xs[e] = at < plan.packs ? pack_load_once<N>(x + at * N) : pack_zero<X, N>();
    }
    if constexpr (AHEAD)
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int at = pack_at<EACH>(threadIdx.x, e);
            scales[e] = at < plan.packs ? pack_load<N>(op.weight + at * N) : pack_zero<float, N>();
        }
    row_partial_clear(partial, threadIdx.x, plan.threads);
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int i = 0; i < N; i++)
            squares += pack_value(xs[e], i) * pack_value(xs[e], i);
#pragma unroll
    for (int e = 0; e < EACH; e++)
        pack_hold(xs[e]);
    squares = row_sum(squares, partial, threadIdx.x);
    float rstd = 1.0f / sqrtf(squares / (float)op.width + op.eps);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int at = pack_at<EACH>(threadIdx.x, e);
        if (at >= plan.packs)
            continue;
        struct pack<float, N> scale =
            AHEAD ? scales[AHEAD ? e : 0] : pack_load<N>(op.weight + at * N);
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
    enum { N = pack_of<X, Type>::N, FEW = sizeof(X) == 2 ? FEW_THREADS : MOST_THREADS };
    struct row_plan plan = row_plan_make(op, N, 8, FEW, MOST_THREADS);
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

// How a CTA of backward_kernel works: `groups` rows at a time, a group of row.threads threads for
// each. `stages` rows of a group are held, being worked on or on their way.
struct backward_plan {
    struct row_plan row;
    int groups, stages;
    float inverse_width;
};

// What the gradient is added to.
enum { ADD_NONE, ADD_DX, ADD_FROM };

// What backward_kernel is made for.
template <typename X_, typename Type_, int EACH_, int ADD_> struct backward_of {
    typedef X_ X;
    typedef Type_ Type;
    enum {
        EACH = EACH_,
        ADD = ADD_,
        N = pack_of<X, Type>::N,
        X_BYTES = N * sizeof(X), // of a pack
        BYTES = N * sizeof(Type),
        STAGE_BYTES = EACH * (X_BYTES + BYTES + (ADD != ADD_NONE ? (int)BYTES : 0)) // of a thread
    };
};

enum array { ARRAY_X, ARRAY_DY, ARRAY_DX };

// Where a thread's pack e of an array is in a stage: only the thread itself writes and reads there.
template <typename B>
static __device__ __forceinline__ char *own_place(char *stage, int e, enum array array)
{
    int at = e * WARP + threadIdx.x % WARP;
    char *place = stage + threadIdx.x / WARP * (WARP * B::STAGE_BYTES);
    if (array == ARRAY_X)
        return place + at * B::X_BYTES;
    place += B::EACH * WARP * (B::X_BYTES + (array == ARRAY_DX ? B::BYTES : 0));
    return place + at * B::BYTES;
}

// Sends BYTES, 8 or 16, on their way to shared memory.
template <int BYTES> static __device__ __forceinline__ void own_copy(char *place, const void *from)
{
    unsigned to = (unsigned)__cvta_generic_to_shared(place);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// Waits until at most `rows` rows, less than MOST_STAGES, are still on their way.
static __device__ __forceinline__ void own_wait(int rows)
{
    if (rows == 3)
        asm volatile("cp.async.wait_group 3;" ::: "memory");
    else if (rows == 2)
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (rows == 1)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
}

template <int N, typename Type>
static __device__ __forceinline__ struct pack<Type, N> own_load(const char *place, bool there) {
    return there ? pack_load<N>((const Type *)place) : pack_zero<Type, N>();
}

// Sends the packs of a row on their way; a row that is not there adds an empty group of copies.
template <typename B>
static __device__ __forceinline__ void row_send(const struct rms_norm &op,
                                                const struct row_plan &plan, char *stage, int row)
{
    int64_t first =
        (int64_t)row * op.width + pack_at<B::EACH>(threadIdx.x % plan.threads, 0) * B::N;
#pragma unroll
    for (int e = 0; e < B::EACH; e++) {
        int64_t element = first + e * (WARP * B::N);
        if (row >= op.rows || pack_at<B::EACH>(threadIdx.x % plan.threads, e) >= plan.packs)
            continue;
        own_copy<B::X_BYTES>(own_place<B>(stage, e, ARRAY_X),
                             (const typename B::X *)op.x + element);
        own_copy<B::BYTES>(own_place<B>(stage, e, ARRAY_DY),
                           (const typename B::Type *)op.dy + element);
        if (B::ADD != ADD_NONE)
            own_copy<B::BYTES>(own_place<B>(stage, e, ARRAY_DX),
                               (const typename B::Type *)(B::ADD == ADD_FROM ? op.dx_from : op.dx) +
                                   element);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// A thread's share of the columns.
template <typename B> struct columns {
    float value[B::EACH][B::N];
};

template <typename B>
static __device__ __forceinline__ void
scale_load(struct columns<B> &scale, const struct rms_norm &op, const struct row_plan &plan)
{
#pragma unroll
    for (int e = 0; e < B::EACH; e++) {
        int at = pack_at<B::EACH>(threadIdx.x % plan.threads, e);
        struct pack<float, B::N> weight =
            at < plan.packs ? pack_load<B::N>(op.weight + at * B::N) : pack_zero<float, B::N>();
#pragma unroll
        for (int i = 0; i < B::N; i++)
            scale.value[e][i] = pack_value(weight, i) + op.weight_offset;
    }
}

// Takes a row that has arrived: x rstd and dy scale; dy x rstd, its share of dweight, into sums.
// Returns the thread's part of sum(dy scale x rstd).
template <typename B>
static __device__ __forceinline__ float
row_take(struct columns<B> &x, struct columns<B> &dy, struct columns<B> &sums,
         const struct columns<B> &scale, const struct row_plan &plan, char *stage, float rstd,
         bool there)
{
    float projection = 0.0f;
#pragma unroll
    for (int e = 0; e < B::EACH; e++) {
        bool mine = there && pack_at<B::EACH>(threadIdx.x % plan.threads, e) < plan.packs;
        struct pack<typename B::X, B::N> xs =
            own_load<B::N, typename B::X>(own_place<B>(stage, e, ARRAY_X), mine);
        struct pack<typename B::Type, B::N> dys =
            own_load<B::N, typename B::Type>(own_place<B>(stage, e, ARRAY_DY), mine);
#pragma unroll
        for (int i = 0; i < B::N; i++) {
            x.value[e][i] = pack_value(xs, i) * rstd;
            sums.value[e][i] += pack_value(dys, i) * x.value[e][i];
            dy.value[e][i] = pack_value(dys, i) * scale.value[e][i];
            projection += dy.value[e][i] * x.value[e][i];
        }
    }
    return projection;
}

// dx of a row, rstd (dy scale - x rstd c), c the mean of dy scale x rstd.
template <typename B>
static __device__ __forceinline__ void
row_finish(const struct columns<B> &x, const struct columns<B> &dy, const struct rms_norm &op,
           const struct row_plan &plan, char *stage, int row, float rstd, float c)
{
    typename B::Type *dx = (typename B::Type *)op.dx + (int64_t)row * op.width +
                           pack_at<B::EACH>(threadIdx.x % plan.threads, 0) * B::N;
#pragma unroll
    for (int e = 0; e < B::EACH; e++) {
        if (pack_at<B::EACH>(threadIdx.x % plan.threads, e) >= plan.packs)
            continue;
        float value[B::N];
#pragma unroll
        for (int i = 0; i < B::N; i++)
            value[i] = rstd * (dy.value[e][i] - x.value[e][i] * c);
        if constexpr (B::ADD != ADD_NONE) {
            struct pack<typename B::Type, B::N> old =
                pack_load<B::N>((const typename B::Type *)own_place<B>(stage, e, ARRAY_DX));
#pragma unroll
            for (int i = 0; i < B::N; i++)
                value[i] += pack_value(old, i);
        }
        store_values<B::N>(dx + e * (WARP * B::N), value);
    }
}

// The groups' sums of dweight, added in their order in shared memory, to the part's row of scratch.
template <typename B>
static __device__ __forceinline__ void store_sums(struct columns<B> &sums, float *shared,
                                                  float *scratch, const struct backward_plan &plan)
{
    int group = threadIdx.x / plan.row.threads;
    __syncthreads(); // what lay in shared memory has been read
    for (int g = 0; g < plan.groups; g++) {
        if (g == group)
#pragma unroll
            for (int e = 0; e < B::EACH; e++) {
                int at = pack_at<B::EACH>(threadIdx.x % plan.row.threads, e);
                if (at >= plan.row.packs)
                    continue;
                struct pack<float, B::N> before =
                    g > 0 ? pack_load<B::N>(shared + at * B::N) : pack_zero<float, B::N>();
#pragma unroll
                for (int i = 0; i < B::N; i++)
                    sums.value[e][i] += pack_value(before, i);
                if (g == plan.groups - 1)
                    store_values<B::N>(scratch + at * B::N, sums.value[e]);
                else
#pragma unroll
                    for (int i = 0; i < B::N; i++) // store_values is for global memory alone
                        shared[at * B::N + i] = sums.value[e][i];
            }
        __syncthreads();
    }
}

// Rows in turn over all groups of all CTAs. The next rows are on their way to shared memory while
// these are worked on. dx may be dy: a thread has its own elements before it writes them.
template <typename B>
static __global__ void __launch_bounds__(GROUP_THREADS, B::EACH *B::N <= 16 ? 2 : 1)
    backward_kernel(struct rms_norm op, struct backward_plan plan)
{
    extern __shared__ uint4 shared_pieces[]; // [stages, threads, STAGE_BYTES]; at last [width] sums
    __shared__ struct row_partial<GROUP_WARPS> partial[2][GROUP_THREADS / WARP];
    char *shared = (char *)shared_pieces;
    int turn = 0, stage = 0, stage_bytes = (int)blockDim.x * B::STAGE_BYTES;
    int step = (int)gridDim.x * plan.groups, base = (int)blockIdx.x * plan.groups;
    int group = (int)threadIdx.x / plan.row.threads, thread = (int)threadIdx.x % plan.row.threads;
    int row = base + group, rows = (int)op.rows;
    struct columns<B> sums = {}, scale;
    scale_load<B>(scale, op, plan.row);
    row_partial_clear(partial[0][group], thread, plan.row.threads);
    row_partial_clear(partial[1][group], thread, plan.row.threads);
    for (int ahead = 0; ahead < plan.stages - 1; ahead++)
        row_send<B>(op, plan.row, shared + ahead * stage_bytes, row + ahead * step);
    float next_rstd = row < rows ? op.rstd[row] : 0.0f;
    parts_add_may_start();
    for (; base < rows; base += step) {
        int free_stage = (stage == 0 ? plan.stages : stage) - 1;
        row_send<B>(op, plan.row, shared + free_stage * stage_bytes,
                    row + (plan.stages - 1) * step);
        float rstd = next_rstd;
        next_rstd = row + step < rows ? op.rstd[row + step] : 0.0f;
        own_wait(plan.stages - 1);
        struct columns<B> x, dy;
        char *arrived = shared + stage * stage_bytes;
        float sum = row_take<B>(x, dy, sums, scale, plan.row, arrived, rstd, row < rows);
        sum = row_sum(sum, partial[turn][group], thread);
        if (row < rows)
            row_finish<B>(x, dy, op, plan.row, arrived, row, rstd, sum * plan.inverse_width);
        turn = 1 - turn;
        stage = stage == plan.stages - 1 ? 0 : stage + 1;
        row += step;
    }
    if (op.dweight != NULL)
        store_sums<B>(sums, (float *)shared, op.scratch + blockIdx.x * op.width, plan);
}

// c of dx = rstd (scale dy - x c): rstd^2 mean(dy scale x)
static __device__ __forceinline__ float projection_factor(float projection, float rstd,
                                                          double inverse_width)
{
    return (float)((double)projection * (double)rstd * (double)rstd * inverse_width);
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
    float c = projection_factor(projection, rstd, 1.0 / (double)op.width);
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

// Returns the number of parts, each the work of one CTA; 0: the rows are too long for a stage.
template <typename X, typename Type, int EACH, int ADD>
static int64_t backward_start(struct stream *stream, const struct rms_norm *op,
                              const struct row_plan &row)
{
    typedef struct backward_of<X, Type, EACH, ADD> B;
    struct backward_plan plan = {row, GROUP_THREADS / row.threads, MOST_STAGES,
                                 1.0f / (float)op->width};
    int threads = plan.groups * row.threads, most = MOST_STAGE_BYTES / (threads * B::STAGE_BYTES);
    int64_t needed = divide_up(op->rows, plan.groups);
    int64_t parts = needed < RMS_NORM_PARTS ? needed : RMS_NORM_PARTS;
    plan.stages = most < MOST_STAGES ? most : MOST_STAGES;
    if (plan.stages == 0)
        return 0;
    size_t bytes = (size_t)plan.stages * threads * B::STAGE_BYTES;
    cuda_check(cudaFuncSetAttribute(backward_kernel<B>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    MOST_STAGE_BYTES));
    // Two CTAs an SM of Hopper.
    cuda_check(cudaFuncSetAttribute(backward_kernel<B>,
                                    cudaFuncAttributePreferredSharedMemoryCarveout,
                                    (int)(2 * (bytes + (2 << 10)) * 100 / HOPPER_SHARED_BYTES)));
    backward_kernel<B><<<grid_size(parts), threads, bytes, stream->cuda>>>(*op, plan);
    launch_check();
    return parts;
}

template <typename X, typename Type, int EACH>
static int64_t backward_packs(struct stream *stream, const struct rms_norm *op,
                              const struct row_plan &row)
{
    if (!op->dx_add)
        return backward_start<X, Type, EACH, ADD_NONE>(stream, op, row);
    return op->dx_from == NULL ? backward_start<X, Type, EACH, ADD_DX>(stream, op, row)
                               : backward_start<X, Type, EACH, ADD_FROM>(stream, op, row);
}

// Returns the number of parts. Each is the work of one CTA.
template <typename X, typename Type>
static int64_t backward_launch(struct stream *stream, const struct rms_norm *op)
{
    enum { N = pack_of<X, Type>::N, MOST_EACH = N > 4 ? 4 : 8 };
    struct row_plan row = row_plan_make(op, N, MOST_EACH, GROUP_THREADS, GROUP_THREADS);
    int64_t parts = 0, size = divide_up(op->rows, RMS_NORM_PARTS);
    if (row.each == 1)
        parts = backward_packs<X, Type, 1>(stream, op, row);
    else if (row.each == 2)
        parts = backward_packs<X, Type, 2>(stream, op, row);
    else if (row.each == 4)
        parts = backward_packs<X, Type, 4>(stream, op, row);
    else if (row.each == 8)
        parts = backward_packs<X, Type, MOST_EACH>(stream, op, row);
    if (parts > 0)
        return parts;
    if (op->dx_add && op->dx_from != NULL)
        cuda_check(cudaMemcpyAsync(op->dx, op->dx_from,
                                   (size_t)(op->rows * op->width) * sizeof(Type),
                                   cudaMemcpyDeviceToDevice, stream->cuda));
    parts = divide_up(op->rows, size);
    backward_long_kernel<X, Type>
        <<<grid_size(parts), BACKWARD_THREADS, 0, stream->cuda>>>(*op, size);
    launch_check();
    return parts;
}

// Thread (c, s) adds the parts s, s + SLICES, ... of column c; then slices are added pairwise, those of
// a warp first and the warps' sums after them.
template <int COLUMNS>
static __global__ void __launch_bounds__(ADD_THREADS)
    add_parts_kernel(float *sum, const float *partial, int parts, int64_t width)
{
    enum { SLICES = ADD_THREADS / COLUMNS, EACH = RMS_NORM_PARTS / SLICES };
    __shared__ double totals[ADD_THREADS / WARP][COLUMNS + 1]; // one more: no two in a bank
    int column = threadIdx.x % COLUMNS, slice = threadIdx.x / COLUMNS;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int64_t first = (int64_t)blockIdx.x * COLUMNS;
    bool ends = warp < COLUMNS && first + warp < width; // a column
    float before = ends ? sum[first + warp] : 0.0f;     // which the kernel before it leaves alone
    float values[EACH];
    double total = 0.0;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory"); // the kernel before it is done
#endif
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int part = slice + e * SLICES;
        bool there = part < parts && first + column < width;
        values[e] = there ? partial[part * width + first + column] : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
        total += (double)values[e];
    for (int distance = COLUMNS; distance < WARP; distance *= 2)
        total += __shfl_xor_sync(0xffffffffu, total, distance);
    if (lane < COLUMNS)
        totals[warp][lane] = total;
    __syncthreads();
    if (!ends)
        return;
    total = warp_sum(totals[lane][warp]);
    if (lane == 0)
        sum[first + warp] = (float)((double)before + total);
}

template <int COLUMNS>
static void add_parts(struct stream *stream, float *sum, const float *partial, int parts,
                      int64_t width)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(grid_size(divide_up(width, COLUMNS)));
    launch.blockDim = dim3(ADD_THREADS);
    launch.stream = stream->cuda;
    launch.attrs = &early;
    launch.numAttrs = stream->generic ? 0 : 1;
    cuda_check(cudaLaunchKernelEx(&launch, add_parts_kernel<COLUMNS>, sum, partial, parts, width));
    launch_check();
}

// Launched while the kernel before it, which writes the parts, is still at work: see
// add_parts_kernel. Few columns are spread over more CTAs.
void column_parts_add(struct stream *stream, float *sum, const float *partial, int parts,
                      int64_t width)
{
    BUG_UNLESS(parts <= RMS_NORM_PARTS);
    if (width <= FEW_COLUMNS)
        add_parts<8>(stream, sum, partial, parts, width);
    else
        add_parts<WARP>(stream, sum, partial, parts, width);
}

// A CTA for each of at most RMS_NORM_PARTS parts of the rows, two of them on each SM of an H200; then
// the parts' sums of dweight are added.
void rms_norm_backward_cuda(struct stream *stream, const struct rms_norm *norm)
{
    BUG_UNLESS(!norm->dx_add || norm->dx != norm->dy);
    BUG_UNLESS(norm->rows <= INT32_MAX / 2); // rows on their way may be past the last
    if (norm->rows == 0)
        return;
    BUG_UNLESS(norm->x_type == norm->type || norm->x_type == DTYPE_F32);
    int64_t parts = is_bf16(norm->x_type) ? backward_launch<bf16_t, bf16_t>(stream, norm)
                    : is_bf16(norm->type) ? backward_launch<float, bf16_t>(stream, norm)
                                          : backward_launch<float, float>(stream, norm);
    if (norm->dweight != NULL)
        column_parts_add(stream, norm->dweight, norm->scratch, (int)parts, norm->width);
}
