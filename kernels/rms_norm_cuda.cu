// Owns the RMS norm on CUDA, forward and backward. A row's result depends on that row alone. Rows of
// whole packs are read once and stay in registers; others (odd widths, very long rows) are read twice.
#include "kernels/rms_norm.h"

#include "kernels/cuda_vector.cuh"

enum {
    THREADS = 256, // of rows that are read twice
    BACKWARD_THREADS = 512,
    MOST_THREADS = 512,          // of a row in packs, forward
    GROUP_THREADS = 320,         // and backward, where a CTA takes several narrow rows at a time
    MOST_STAGE_BYTES = 96 << 10, // of rows that a CTA holds: what every GPU has
    HOPPER_SHARED_BYTES = 228 << 10, // of an SM
    COLUMNS = 32,                    // column sums: columns of a CTA
    SLICES = 32                      // and slices of the parts
};

// How the threads of a row share its packs: thread t has packs t, t + threads, ..., at most `each`.
struct row_plan {
    int packs, threads, each; // each 0: no packs
};

// n: elements of a pack.
static struct row_plan row_plan_make(const struct rms_norm *op, int n, int most_each,
                                     int most_threads)
{
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
    enum { N = pack_of<X, Type>::N };
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
    struct row_plan plan = row_plan_make(op, pack_of<X, Type>::N, 8, MOST_THREADS);
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
                                                          double inverse_width)
{
    return (float)((double)projection * (double)rstd * (double)rstd * inverse_width);
}

// How a CTA of backward_kernel works: `groups` rows at a time, a group of row.threads threads for each.
struct backward_plan {
    struct row_plan row;
    int groups;
    int64_t size; // rows of a part
    double inverse_width;
};

// What backward_kernel is made for: STAGES rows of a group are held, being worked on or on their way.
template <typename X_, typename Type_, int EACH_, bool ADD_, int STAGES_> struct backward_of {
    typedef X_ X;
    typedef Type_ Type;
    enum {
        EACH = EACH_,
        ADD = ADD_,
        STAGES = STAGES_,
        N = pack_of<X, Type>::N,
        X_BYTES = N * sizeof(X), // of a pack
        BYTES = N * sizeof(Type),
        STAGE_BYTES = EACH * (X_BYTES + BYTES + (ADD ? BYTES : 0)) // of a thread
    };
};

enum array { ARRAY_X, ARRAY_DY, ARRAY_DX };

// Where a thread's pack e of an array is in a stage: only the thread itself writes and reads there.
template <typename B>
static __device__ __forceinline__ char *own_place(char *shared, int stage, int e, enum array array)
{
    int threads = (int)blockDim.x, at = e * threads + (int)threadIdx.x;
    char *place = shared + stage * (B::STAGE_BYTES * threads);
    if (array == ARRAY_X)
        return place + at * B::X_BYTES;
    place += B::EACH * B::X_BYTES * threads;
    return place + (array == ARRAY_DX ? B::EACH * B::BYTES * threads : 0) + at * B::BYTES;
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

template <int N, typename Type>
static __device__ __forceinline__ struct pack<Type, N> own_load(const char *place) {
    return pack_load<N>((const Type *)place);
}

// Sends the packs of a row on their way; a row that is not there adds an empty group of copies.
template <typename B>
static __device__ __forceinline__ void row_send(const struct rms_norm &op,
                                                const struct backward_plan &plan, char *shared,
                                                int stage, int64_t row, bool there)
{
    int lane = threadIdx.x % plan.row.threads;
#pragma unroll
    for (int e = 0; e < B::EACH; e++) {
        int at = lane + e * plan.row.threads;
        int64_t element = row * op.width + at * B::N;
        if (!there || at >= plan.row.packs)
            continue;
        own_copy<B::X_BYTES>(own_place<B>(shared, stage, e, ARRAY_X),
                             (const typename B::X *)op.x + element);
        own_copy<B::BYTES>(own_place<B>(shared, stage, e, ARRAY_DY),
                           (const typename B::Type *)op.dy + element);
        if (B::ADD)
            own_copy<B::BYTES>(own_place<B>(shared, stage, e, ARRAY_DX),
                               (const typename B::Type *)op.dx + element);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// A thread's packs of a row, which have arrived.
template <typename B> struct row_packs {
    struct pack<typename B::X, B::N> x[B::EACH];
    struct pack<typename B::Type, B::N> dy[B::EACH];
};

template <typename B>
static __device__ __forceinline__ void row_take(struct row_packs<B> &r,
                                                const struct backward_plan &plan, char *shared,
                                                int stage, bool there)
{
    int lane = threadIdx.x % plan.row.threads;
    asm volatile("cp.async.wait_group %0;" ::"n"(B::STAGES - 1) : "memory");
#pragma unroll
    for (int e = 0; e < B::EACH; e++) {
        bool mine = there && lane + e * plan.row.threads < plan.row.packs;
        r.x[e] = mine ? own_load<B::N, typename B::X>(own_place<B>(shared, stage, e, ARRAY_X))
                      : pack_zero<typename B::X, B::N>();
        r.dy[e] = mine ? own_load<B::N, typename B::Type>(own_place<B>(shared, stage, e, ARRAY_DY))
                       : pack_zero<typename B::Type, B::N>();
    }
}

// A pack of the weight. Read again where it is used: the first-level cache has it, registers are few.
template <int N>
static __device__ __forceinline__ struct pack<float, N>
scale_load(const struct rms_norm &op, const struct row_plan &plan, int at) {
    return at < plan.packs ? pack_load<N>(op.weight + at * N) : pack_zero<float, N>();
}

// The thread's part of sum(dy scale x).
template <typename B>
static __device__ __forceinline__ float
row_project(struct row_packs<B> &r, const struct rms_norm &op, const struct row_plan &plan)
{
    float projection = 0.0f;
#pragma unroll
    for (int e = 0; e < B::EACH; e++) {
        int at = threadIdx.x % plan.threads + e * plan.threads;
        struct pack<float, B::N> scale = scale_load<B::N>(op, plan, at);
#pragma unroll
        for (int i = 0; i < B::N; i++)
            projection += pack_value(r.dy[e], i) * (pack_value(scale, i) + op.weight_offset) *
                          pack_value(r.x[e], i);
        pack_hold(r.x[e]);
        pack_hold(r.dy[e]);
    }
    return projection;
}

// dx of a row, and its share of dweight into sums.
template <typename B>
static __device__ __forceinline__ void
row_finish(const struct row_packs<B> &r, const struct rms_norm &op, const struct row_plan &plan,
           char *shared, int stage, int64_t row, float rstd, float c, float (&sums)[B::EACH][B::N])
{
    typename B::Type *dx = (typename B::Type *)op.dx + row * op.width;
#pragma unroll
    for (int e = 0; e < B::EACH; e++) {
        int at = threadIdx.x % plan.threads + e * plan.threads;
        if (at >= plan.packs)
            continue;
        struct pack<float, B::N> scale = scale_load<B::N>(op, plan, at);
        float value[B::N];
#pragma unroll
        for (int i = 0; i < B::N; i++) {
            float x = pack_value(r.x[e], i), dy = pack_value(r.dy[e], i);
            value[i] = rstd * ((pack_value(scale, i) + op.weight_offset) * dy - x * c);
            sums[e][i] += dy * (x * rstd);
        }
        if constexpr (B::ADD) {
            struct pack<typename B::Type, B::N> old =
                own_load<B::N, typename B::Type>(own_place<B>(shared, stage, e, ARRAY_DX));
#pragma unroll
            for (int i = 0; i < B::N; i++)
                value[i] += pack_value(old, i);
        }
        store_values<B::N>(dx + at * B::N, value);
    }
}

// The groups' sums of dweight, added in their order in shared memory, to the part's row of scratch.
template <typename B>
static __device__ __forceinline__ void store_sums(const float (&sums)[B::EACH][B::N], float *shared,
                                                  float *scratch, const struct backward_plan &plan)
{
    int group = threadIdx.x / plan.row.threads, lane = threadIdx.x % plan.row.threads;
    __syncthreads(); // what lay in shared memory has been read
    for (int g = 0; g < plan.groups; g++) {
        if (g == group)
#pragma unroll
            for (int e = 0; e < B::EACH; e++) {
                int at = lane + e * plan.row.threads;
                if (at >= plan.row.packs)
                    continue;
                float *to = (g == plan.groups - 1 ? scratch : shared) + at * B::N;
#pragma unroll
                for (int i = 0; i < B::N; i++)
                    to[i] = g == 0 ? sums[e][i] : shared[at * B::N + i] + sums[e][i];
            }
        __syncthreads();
    }
}

// A part of plan.size rows. The next rows are on their way to shared memory while these are worked on. dx
// may be dy: a thread has its own elements before it writes them.
template <typename B>
static __global__ void __launch_bounds__(GROUP_THREADS, B::EACH *B::N <= 16 ? 2 : 1)
    backward_kernel(struct rms_norm op, struct backward_plan plan)
{
    extern __shared__ uint4 shared_pieces[]; // [STAGES, STAGE_BYTES, threads]; at last [width] sums
    char *shared = (char *)shared_pieces;
    __shared__ float partial[2][GROUP_THREADS / WARP];
    int turn = 0, stage = 0;
    int64_t row = blockIdx.x * plan.size + threadIdx.x / plan.row.threads;
    int64_t last = (blockIdx.x + 1) * plan.size;
    int64_t end = last < op.rows ? last : op.rows;
    float sums[B::EACH][B::N] = {};
#pragma unroll
    for (int ahead = 0; ahead < B::STAGES - 1; ahead++)
        row_send<B>(op, plan, shared, ahead, row + ahead * plan.groups,
                    row + ahead * plan.groups < end);
    float next_rstd = row < end ? op.rstd[row] : 0.0f;
    for (int64_t base = blockIdx.x * plan.size; base < end; base += plan.groups) {
        int64_t sent = row + (B::STAGES - 1) * plan.groups, next = row + plan.groups;
        row_send<B>(op, plan, shared, stage == 0 ? B::STAGES - 1 : stage - 1, sent, sent < end);
        float rstd = next_rstd;
        next_rstd = next < end ? op.rstd[next] : 0.0f;
        struct row_packs<B> r;
        row_take(r, plan, shared, stage, row < end);
        float projection = row_project(r, op, plan.row);
        projection = row_sum(projection, partial[turn], plan.row.threads);
        float c = projection_factor(projection, rstd, plan.inverse_width);
        if (row < end)
            row_finish(r, op, plan.row, shared, stage, row, rstd, c, sums);
        turn = 1 - turn;
        stage = stage == B::STAGES - 1 ? 0 : stage + 1;
        row = next;
    }
    if (op.dweight != NULL)
        store_sums<B>(sums, (float *)shared, op.scratch + blockIdx.x * op.width, plan);
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

// Shared memory of a CTA of backward_kernel; too many bytes: the rows are too long for these stages.
template <typename B> static size_t stage_bytes(const struct backward_plan &plan)
{
    return (size_t)plan.groups * plan.row.threads * B::STAGE_BYTES * B::STAGES;
}

template <typename B>
static void backward_start(struct stream *stream, const struct rms_norm *op,
                           const struct backward_plan &plan)
{
    unsigned grid = grid_size(divide_up(op->rows, plan.size));
    size_t bytes = stage_bytes<B>(plan);
    cuda_check(cudaFuncSetAttribute(backward_kernel<B>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    MOST_STAGE_BYTES));
    // Two CTAs an SM of Hopper; the rest is first-level cache, for the weight.
    cuda_check(cudaFuncSetAttribute(backward_kernel<B>,
                                    cudaFuncAttributePreferredSharedMemoryCarveout,
                                    (int)(2 * (bytes + (2 << 10)) * 100 / HOPPER_SHARED_BYTES)));
    backward_kernel<B><<<grid, plan.groups * plan.row.threads, bytes, stream->cuda>>>(*op, plan);
    launch_check();
}

template <typename X, typename Type, int EACH, bool ADD>
static bool backward_stages(struct stream *stream, const struct rms_norm *op,
                            const struct backward_plan &plan)
{
    typedef struct backward_of<X, Type, EACH, ADD, 3> Three;
    typedef struct backward_of<X, Type, EACH, ADD, 2> Two;
    typedef struct backward_of<X, Type, EACH, ADD, 1> One;
    if (stage_bytes<Three>(plan) <= MOST_STAGE_BYTES)
        backward_start<Three>(stream, op, plan);
    else if (stage_bytes<Two>(plan) <= MOST_STAGE_BYTES)
        backward_start<Two>(stream, op, plan);
    else if (stage_bytes<One>(plan) <= MOST_STAGE_BYTES)
        backward_start<One>(stream, op, plan);
    else
        return false;
    return true;
}

template <typename X, typename Type, int EACH>
static bool backward_packs(struct stream *stream, const struct rms_norm *op,
                           const struct backward_plan &plan)
{
    return op->dx_add ? backward_stages<X, Type, EACH, true>(stream, op, plan)
                      : backward_stages<X, Type, EACH, false>(stream, op, plan);
}

// Returns the number of parts. Each is the work of one CTA.
template <typename X, typename Type>
static int64_t backward_launch(struct stream *stream, const struct rms_norm *op)
{
    enum { N = pack_of<X, Type>::N, MOST_EACH = N > 4 ? 4 : 8 };
    struct backward_plan plan = {row_plan_make(op, N, MOST_EACH, GROUP_THREADS), 1,
                                 divide_up(op->rows, RMS_NORM_PARTS), 1.0 / (double)op->width};
    bool done = false;
    if (plan.row.each > 0)
        plan.groups = GROUP_THREADS / plan.row.threads;
    plan.size = plan.size > plan.groups ? plan.size : plan.groups;
    if (plan.row.each == 1)
        done = backward_packs<X, Type, 1>(stream, op, plan);
    else if (plan.row.each == 2)
        done = backward_packs<X, Type, 2>(stream, op, plan);
    else if (plan.row.each == 4)
        done = backward_packs<X, Type, 4>(stream, op, plan);
    else if (plan.row.each == 8)
        done = backward_packs<X, Type, MOST_EACH>(stream, op, plan);
    int64_t parts = divide_up(op->rows, plan.size);
    if (!done) {
        backward_long_kernel<X, Type>
            <<<grid_size(parts), BACKWARD_THREADS, 0, stream->cuda>>>(*op, plan.size);
        launch_check();
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
