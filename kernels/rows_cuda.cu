// Owns moving rows on CUDA: gather, scatter, add, sums, clear, loading context features.
#include "kernels/rows.h"

#include <string.h>

#include "base/philox.h"
#include "kernels/cuda_vector.cuh"

enum {
    MOST_THREADS = 512, // of a row
    TOGETHER = 4,       // packs of a thread that are on their way at a time
    SUM_WARPS = 8,      // that share the rows of a sum
    MAX_LAYERS = 256
};

// Whether rows of `width` elements can be moved in packs of n.
static bool in_packs(const void *in, const void *out, int64_t in_stride, int64_t width, int n)
{
    return packs_at(in) && packs_at(out) && packs_in(in_stride, n) && packs_in(width, n);
}

// Threads of a CTA that moves one row of n-element packs.
static unsigned row_threads(int64_t width, int n)
{
    int64_t threads = round_up(divide_up(width, (int64_t)n * TOGETHER), WARP);
    return (unsigned)(threads < MOST_THREADS ? threads : MOST_THREADS);
}

// out = scale * in, one row, by the CTA.
template <int N, typename Out, typename In>
static __device__ __forceinline__ void move_row(Out *out, const In *in, float scale, int64_t width)
{
    int64_t step = (int64_t)blockDim.x * N;
    for (int64_t first = threadIdx.x * N; first < width; first += TOGETHER * step) {
        struct pack<In, N> from[TOGETHER];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            if (first + t * step < width)
                from[t] = pack_load<N>(in + first + t * step);
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            float value[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                value[i] = pack_value(from[t], i) * scale;
            if (first + t * step < width)
                store_values<N>(out + first + t * step, value);
        }
    }
}

template <int N, typename Out>
static __device__ __forceinline__ void zero_row(Out *out, int64_t width)
{
    for (int64_t i = threadIdx.x * N; i < width; i += (int64_t)blockDim.x * N)
        pack_store(out + i, pack_zero<Out, N>());
}

template <typename Out, typename In, int N>
static __global__ void __launch_bounds__(MOST_THREADS) gather_kernel(struct gather_rows op)
{
    int64_t row = blockIdx.x, from = op.index[row];
    bug_unless(from >= 0 && from < op.in_rows);
    Out *out = (Out *)op.out + row * op.width;
    float scale = op.row_scale != NULL ? op.scale * op.row_scale[row] : op.scale;
    if (op.row_scale != NULL && scale == 0.0f)
        zero_row<N>(out, op.width);
    else
        move_row<N>(out, (const In *)op.in + from * op.in_stride, scale, op.width);
}

template <typename Out, typename In>
static void gather_launch(struct stream *stream, const struct gather_rows *op)
{
    unsigned grid = grid_size(op->rows);
    enum { N = pack_of<Out, In>::N };
    if (in_packs(op->in, op->out, op->in_stride, op->width, N))
        gather_kernel<Out, In, N><<<grid, row_threads(op->width, N), 0, stream->cuda>>>(*op);
    else
        gather_kernel<Out, In, 1><<<grid, row_threads(op->width, 1), 0, stream->cuda>>>(*op);
    launch_check();
}

// One CTA a row.
void gather_rows_cuda(struct stream *stream, const struct gather_rows *op)
{
    bool in = is_bf16(op->in_type), out = is_bf16(op->out_type);
    if (op->rows == 0 || op->width == 0)
        return;
    if (out && in)
        gather_launch<bf16_t, bf16_t>(stream, op);
    else if (out)
        gather_launch<bf16_t, float>(stream, op);
    else if (in)
        gather_launch<float, bf16_t>(stream, op);
    else
        gather_launch<float, float>(stream, op);
}

// from[index[r]] = r; rows of scale 0 are left out.
static __global__ void __launch_bounds__(MOST_THREADS)
    invert_kernel(struct scatter_rows op, int32_t *from)
{
    int64_t row = (int64_t)blockIdx.x * MOST_THREADS + threadIdx.x;
    if (row >= op.rows)
        return;
    int64_t to = op.index[row];
    bug_unless(to >= 0 && to < op.out_rows);
    if (op.scale == NULL || op.scale[row] != 0.0f)
        from[to] = (int32_t)row;
}

// Row blockIdx.x of out: from its row of in, or zeros (from -1).
template <typename Out, typename In, int N>
static __global__ void __launch_bounds__(MOST_THREADS)
    scatter_kernel(struct scatter_rows op, const int32_t *from)
{
    int64_t row = from[blockIdx.x];
    Out *out = (Out *)op.out + blockIdx.x * op.width;
    if (row < 0)
        zero_row<N>(out, op.width);
    else
        move_row<N>(out, (const In *)op.in + row * op.width,
                    op.scale != NULL ? op.scale[row] : 1.0f, op.width);
}

template <typename Out, typename In>
static void scatter_launch(struct stream *stream, const struct scatter_rows *op,
                           const int32_t *from)
{
    unsigned grid = grid_size(op->out_rows);
    enum { N = pack_of<Out, In>::N };
    if (in_packs(op->in, op->out, op->width, op->width, N))
        scatter_kernel<Out, In, N><<<grid, row_threads(op->width, N), 0, stream->cuda>>>(*op, from);
    else
        scatter_kernel<Out, In, 1><<<grid, row_threads(op->width, 1), 0, stream->cuda>>>(*op, from);
    launch_check();
}

// First the row of in for each row of out, in the workspace [out_rows], so that out is written once; then
// one CTA a row of out.
void scatter_rows_cuda(struct stream *stream, const struct scatter_rows *op)
{
    bool in = is_bf16(op->in_type), out = is_bf16(op->out_type);
    int32_t *from = (int32_t *)stream->workspace;
    size_t bytes = (size_t)op->out_rows * sizeof(*from);
    if (op->out_rows == 0 || op->width == 0)
        return;
    BUG_UNLESS(bytes <= stream->workspace_bytes && op->rows <= op->out_rows);
    cuda_check(cudaMemsetAsync(from, 0xff, bytes, stream->cuda)); // -1
    if (op->rows > 0) {
        invert_kernel<<<grid_size(divide_up(op->rows, MOST_THREADS)), MOST_THREADS, 0,
                        stream->cuda>>>(*op, from);
        launch_check();
    }
    if (out && in)
        scatter_launch<bf16_t, bf16_t>(stream, op, from);
    else if (out)
        scatter_launch<bf16_t, float>(stream, op, from);
    else if (in)
        scatter_launch<float, bf16_t>(stream, op, from);
    else
        scatter_launch<float, float>(stream, op, from);
}

// out += in, one row, by the CTA.
template <typename Out, typename In, int N>
static __global__ void __launch_bounds__(MOST_THREADS) add_kernel(struct add_rows op)
{
    int64_t row = blockIdx.x, to = op.index != NULL ? op.index[row] : row;
    bug_unless(to >= 0 && to < op.out_rows);
    const In *in = (const In *)op.in + row * op.width;
    Out *out = (Out *)op.out + to * op.out_stride;
    int64_t step = (int64_t)blockDim.x * N;
    for (int64_t first = threadIdx.x * N; first < op.width; first += TOGETHER * step) {
        struct pack<In, N> from[TOGETHER];
        struct pack<Out, N> sum[TOGETHER];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            if (first + t * step < op.width) {
                from[t] = pack_load<N>(in + first + t * step);
                sum[t] = pack_load<N>(out + first + t * step);
            }
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            float value[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                value[i] = pack_value(sum[t], i) + pack_value(from[t], i);
            if (first + t * step < op.width)
                store_values<N>(out + first + t * step, value);
        }
    }
}

template <typename Out, typename In>
static void add_launch(struct stream *stream, const struct add_rows *op)
{
    unsigned grid = grid_size(op->rows);
    enum { N = pack_of<Out, In>::N };
    if (in_packs(op->in, op->out, op->width, op->width, N) && packs_in(op->out_stride, N))
        add_kernel<Out, In, N><<<grid, row_threads(op->width, N), 0, stream->cuda>>>(*op);
    else
        add_kernel<Out, In, 1><<<grid, row_threads(op->width, 1), 0, stream->cuda>>>(*op);
    launch_check();
}

// One CTA a row.
void add_rows_cuda(struct stream *stream, const struct add_rows *op)
{
    bool in = is_bf16(op->in_type), out = is_bf16(op->out_type);
    if (op->rows == 0 || op->width == 0)
        return;
    if (out && in)
        add_launch<bf16_t, bf16_t>(stream, op);
    else if (out)
        add_launch<bf16_t, float>(stream, op);
    else if (in)
        add_launch<float, bf16_t>(stream, op);
    else
        add_launch<float, float>(stream, op);
}

// Columns [WARP * N * blockIdx.y, ...) of segment blockIdx.x: warp w sums the rows begin + w, + SUM_WARPS, ...
// and the warps' sums are added in their order.
template <int N>
static __global__ void __launch_bounds__(WARP *SUM_WARPS) sum_kernel(struct sum_rows op)
{
    __shared__ float part[SUM_WARPS][WARP * N];
    int64_t segment = blockIdx.x, to = op.index[segment];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t column = ((int64_t)blockIdx.y * WARP + lane) * N;
    float sum[N] = {0.0f};
    bug_unless(to >= 0 && to < op.out_rows);
    for (int32_t i = op.begin[segment] + warp; i < op.begin[segment + 1]; i += SUM_WARPS) {
        int64_t row = op.from[i];
        bug_unless(row >= 0 && row < op.in_rows);
        float scale = op.scale[row];
        if (scale == 0.0f || column >= op.width)
            continue;
        struct pack<float, N> in = pack_load<N>(op.in + row * op.width + column);
#pragma unroll
        for (int c = 0; c < N; c++)
            sum[c] += scale * pack_value(in, c);
    }
#pragma unroll
    for (int c = 0; c < N; c++)
        part[warp][lane * N + c] = sum[c];
    __syncthreads();
    if (warp != 0 || column >= op.width)
        return;
    for (int w = 1; w < SUM_WARPS; w++)
#pragma unroll
        for (int c = 0; c < N; c++)
            sum[c] += part[w][lane * N + c];
    float *out = op.out + to * op.width + column;
#pragma unroll
    for (int c = 0; c < N; c++)
        sum[c] += out[c];
    store_values<N>(out, sum);
}

template <int N> static void sum_launch(struct stream *stream, const struct sum_rows *op)
{
    dim3 grid(grid_size(op->sums), grid_size(divide_up(op->width, WARP * N)));
    sum_kernel<N><<<grid, WARP * SUM_WARPS, 0, stream->cuda>>>(*op);
    launch_check();
}

// One CTA a segment and slice of columns.
void sum_rows_cuda(struct stream *stream, const struct sum_rows *op)
{
    enum { N = pack_of<float, float>::N };
    if (op->sums == 0 || op->width == 0)
        return;
    if (in_packs(op->in, op->out, op->width, op->width, N))
        sum_launch<N>(stream, op);
    else
        sum_launch<1>(stream, op);
}

// Whether row r has a term.
static __device__ __forceinline__ bool has_terms(const struct gather_sum &op, int64_t row)
{
    bool any = false;
    for (int j = 0; j < (int)op.terms; j++)
        any = any || op.from[j * op.from_stride + row] >= 0;
    return any;
}

// One row of out, by the CTA: a thread has TOGETHER packs, and those of all of them are on their way for a term.
template <typename Out, typename In, int N>
static __global__ void __launch_bounds__(MOST_THREADS) gather_sum_kernel(struct gather_sum op)
{
    int64_t row = blockIdx.x, step = (int64_t)blockDim.x * N;
    Out *out = (Out *)op.out + row * op.out_stride;
    if (op.add && !has_terms(op, row))
        return;
    for (int64_t first = threadIdx.x * N; first < op.width; first += TOGETHER * step) {
        float sum[TOGETHER][N];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            struct pack<Out, N> before = pack_zero<Out, N>();
            if (op.add && first + t * step < op.width)
                before = pack_load<N>((const Out *)out + first + t * step);
#pragma unroll
            for (int i = 0; i < N; i++)
                sum[t][i] = pack_value(before, i);
        }
#pragma unroll 2
        for (int j = 0; j < (int)op.terms; j++) {
            int64_t from = op.from[j * op.from_stride + row];
            bug_unless(from < op.in_rows);
            if (from < 0)
                continue;
            const In *in = (const In *)op.in + from * op.in_stride + first;
            struct pack<In, N> term[TOGETHER];
#pragma unroll
            for (int t = 0; t < TOGETHER; t++)
                term[t] =
                    first + t * step < op.width ? pack_load<N>(in + t * step) : pack_zero<In, N>();
#pragma unroll
            for (int t = 0; t < TOGETHER; t++)
#pragma unroll
                for (int i = 0; i < N; i++)
                    sum[t][i] += pack_value(term[t], i);
        }
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            if (first + t * step < op.width)
                store_values<N>(out + first + t * step, sum[t]);
    }
}

template <typename Out, typename In>
static void gather_sum_launch(struct stream *stream, const struct gather_sum *op)
{
    unsigned grid = grid_size(op->rows);
    enum { N = pack_of<Out, In>::N };
    if (in_packs(op->in, op->out, op->in_stride, op->width, N) && packs_in(op->out_stride, N))
        gather_sum_kernel<Out, In, N><<<grid, row_threads(op->width, N), 0, stream->cuda>>>(*op);
    else
        gather_sum_kernel<Out, In, 1><<<grid, row_threads(op->width, 1), 0, stream->cuda>>>(*op);
    launch_check();
}

// One CTA a row.
void gather_sum_cuda(struct stream *stream, const struct gather_sum *op)
{
    if (op->rows == 0 || op->width == 0)
        return;
    BUG_UNLESS(op->out_type == DTYPE_F32 || (op->out_type == op->in_type && !op->add));
    if (is_bf16(op->out_type))
        gather_sum_launch<bf16_t, bf16_t>(stream, op);
    else if (is_bf16(op->in_type))
        gather_sum_launch<float, bf16_t>(stream, op);
    else
        gather_sum_launch<float, float>(stream, op);
}

template <typename T>
static __global__ void __launch_bounds__(MOST_THREADS) clear_kernel(struct clear_rows op)
{
    if (op.scale[blockIdx.x] == 0.0f)
        zero_row<1>((T *)op.x + blockIdx.x * op.stride, op.width);
}

// One CTA a row; nearly all have nothing to do.
void clear_rows_cuda(struct stream *stream, const struct clear_rows *op)
{
    if (op->rows == 0 || op->width == 0)
        return;
    unsigned grid = grid_size(op->rows);
    if (is_bf16(op->type))
        clear_kernel<bf16_t><<<grid, MOST_THREADS, 0, stream->cuda>>>(*op);
    else
        clear_kernel<float><<<grid, MOST_THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

// The draws of base/rng.h on the device.
static __device__ float noise_draw(enum noise_kind kind, uint32_t k0, uint32_t k1, uint64_t counter)
{
    uint32_t words[4];
    philox_block(k0, k1, counter, words);
    float first = philox_unit(words[0]);
    if (kind == NOISE_KIND_UNIFORM)
        return 2.0f * first - 1.0f; // exact
    float radius = sqrtf(-2.0f * logf(first));
    return radius * cosf(6.28318530717958647692f * philox_unit(words[1]));
}

// op.plane is host memory, so the planes come by value.
struct planes {
    int32_t plane[MAX_LAYERS];
};

// Where a CTA's token and layer are.
template <typename In> struct plane_place {
    int64_t token, layer;
    const In *in;
    float scale;
    bool blank;
};

template <typename In>
static __device__ __forceinline__ struct plane_place<In>
plane_place_make(const struct context_load &op, const struct planes &planes) {
    struct plane_place<In> at;
    at.token = blockIdx.x / (unsigned)op.layers;
    at.layer = blockIdx.x % (unsigned)op.layers;
    int64_t plane = planes.plane[at.layer];
    at.in = (const In *)((const unsigned char *)op.in + at.token * op.in_bytes) + plane * op.hidden;
    at.scale = op.scales != NULL ? op.scales[at.token * op.scale_stride + plane] : 1.0f;
    at.blank = op.blank != NULL && op.blank[at.token] != 0;
    return at;
}

template <typename Out, typename In, int N>
static __global__ void __launch_bounds__(MOST_THREADS)
    context_kernel(struct context_load op, struct planes planes)
{
    struct plane_place<In> at = plane_place_make<In>(op, planes);
    Out *out = (Out *)op.out + blockIdx.x * op.hidden;
    if (at.blank)
        zero_row<N>(out, op.hidden);
    else
        move_row<N>(out, at.in, at.scale, op.hidden);
}

// The same with noise, whose product and sum are not fused, as on the CPU.
template <typename Out, typename In, int N>
static __global__ void __launch_bounds__(MOST_THREADS)
    noisy_context_kernel(struct context_load op, struct planes planes)
{
    struct plane_place<In> at = plane_place_make<In>(op, planes);
    Out *out = (Out *)op.out + blockIdx.x * op.hidden;
    if (at.blank) {
        zero_row<N>(out, op.hidden);
        return;
    }
    uint32_t k0 = op.noise_key[2 * at.token], k1 = op.noise_key[2 * at.token + 1];
    uint64_t slot = (uint64_t)op.positions[at.token] * (uint64_t)op.layers + (uint64_t)at.layer;
    for (int64_t first = threadIdx.x * N; first < op.hidden; first += (int64_t)blockDim.x * N) {
        struct pack<In, N> from = pack_load<N>(at.in + first);
        float value[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            uint64_t counter = slot * (uint64_t)op.hidden + (uint64_t)(first + i);
            float noise = __fmul_rn(noise_draw(op.noise, k0, k1, counter), op.noise_std);
            value[i] = __fadd_rn(__fmul_rn(pack_value(from, i), at.scale), noise);
        }
        store_values<N>(out + first, value);
    }
}

template <typename Out, typename In, int N>
static void context_start(struct stream *stream, const struct context_load *op,
                          const struct planes *planes)
{
    unsigned grid = grid_size(op->tokens * op->layers), threads = row_threads(op->hidden, N);
    if (op->noise != NOISE_KIND_NONE)
        noisy_context_kernel<Out, In, N><<<grid, threads, 0, stream->cuda>>>(*op, *planes);
    else
        context_kernel<Out, In, N><<<grid, threads, 0, stream->cuda>>>(*op, *planes);
    launch_check();
}

template <typename Out, typename In>
static void context_launch(struct stream *stream, const struct context_load *op,
                           const struct planes *planes)
{
    enum { N = sizeof(In) == 1 ? 8 : pack_of<Out, In>::N }; // of codes, accesses of 8 bytes
    if (op->in_bytes % PACK_BYTES == 0 && in_packs(op->in, op->out, op->hidden, op->hidden, N))
        context_start<Out, In, N>(stream, op, planes);
    else
        context_start<Out, In, 1>(stream, op, planes);
}

template <typename Out>
static void context_choose(struct stream *stream, const struct context_load *op,
                           const struct planes *planes)
{
    if (op->scales != NULL)
        context_launch<Out, e4m3_t>(stream, op, planes);
    else
        context_launch<Out, bf16_t>(stream, op, planes);
}

// One CTA a token and layer.
void context_load_cuda(struct stream *stream, const struct context_load *op)
{
    struct planes planes;
    BUG_UNLESS(op->layers <= MAX_LAYERS);
    if (op->tokens == 0 || op->layers == 0)
        return;
    memset(&planes, 0, sizeof(planes));
    memcpy(planes.plane, op->plane, (size_t)op->layers * sizeof(*op->plane));
    if (is_bf16(op->type))
        context_choose<bf16_t>(stream, op, &planes);
    else
        context_choose<float>(stream, op, &planes);
}
