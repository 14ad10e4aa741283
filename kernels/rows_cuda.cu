// Owns moving rows on CUDA: gather, scatter, loading context features.
#include "kernels/rows.h"

#include <string.h>

#include "base/philox.h"
#include "kernels/cuda_internal.cuh"

enum { THREADS = 256, MAX_LAYERS = 256 };

template <typename Out, typename In> static __global__ void gather_kernel(struct gather_rows op)
{
    int64_t row = blockIdx.x, from = op.index[row];
    bug_unless(from >= 0 && from < op.in_rows);
    const In *in = (const In *)op.in + from * op.in_stride;
    Out *out = (Out *)op.out + row * op.width;
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS)
        store(out, i, load(in, i) * op.scale);
}

template <typename Out, typename In> static __global__ void scatter_kernel(struct scatter_rows op)
{
    int64_t row = blockIdx.x, to = op.index[row];
    float scale = op.scale != NULL ? op.scale[row] : 1.0f;
    bug_unless(to >= 0 && to < op.out_rows);
    if (scale == 0.0f)
        return; // the zeros are there already
    const In *in = (const In *)op.in + row * op.width;
    Out *out = (Out *)op.out + to * op.width;
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS)
        store(out, i, load(in, i) * scale);
}

// One CTA a row.
void gather_rows_cuda(struct stream *stream, const struct gather_rows *op)
{
    bool in = is_bf16(op->in_type), out = is_bf16(op->out_type);
    if (op->rows == 0)
        return;
    unsigned grid = grid_size(op->rows);
    if (out && in)
        gather_kernel<bf16_t, bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (out)
        gather_kernel<bf16_t, float><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (in)
        gather_kernel<float, bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else
        gather_kernel<float, float><<<grid, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

// Zeros everywhere, then one CTA a row.
void scatter_rows_cuda(struct stream *stream, const struct scatter_rows *op)
{
    bool in = is_bf16(op->in_type), out = is_bf16(op->out_type);
    size_t bytes = (size_t)(op->out_rows * op->width) * dtype_size(op->out_type);
    if (bytes > 0)
        cuda_check(cudaMemsetAsync(op->out, 0, bytes, stream->cuda));
    if (op->rows == 0)
        return;
    unsigned grid = grid_size(op->rows);
    if (out && in)
        scatter_kernel<bf16_t, bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (out)
        scatter_kernel<bf16_t, float><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (in)
        scatter_kernel<float, bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else
        scatter_kernel<float, float><<<grid, THREADS, 0, stream->cuda>>>(*op);
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

template <typename Out>
static __global__ void context_kernel(struct context_load op, struct planes planes)
{
    int64_t token = blockIdx.x / op.layers, layer = blockIdx.x % op.layers;
    Out *out = (Out *)op.out + (token * op.layers + layer) * op.hidden;
    const bf16_t *in =
        (const bf16_t *)op.in + (token * op.planes + planes.plane[layer]) * op.hidden;
    bool blank = op.blank != NULL && op.blank[token] != 0;
    bool noisy = op.noise != NOISE_KIND_NONE && !blank;
    uint32_t k0 = noisy ? op.noise_key[2 * token] : 0;
    uint32_t k1 = noisy ? op.noise_key[2 * token + 1] : 0;
    uint64_t slot =
        noisy ? (uint64_t)op.positions[token] * (uint64_t)op.layers + (uint64_t)layer : 0;
    for (int64_t i = threadIdx.x; i < op.hidden; i += THREADS) {
        float value = blank ? 0.0f : load(in, i);
        if (noisy) {
            uint64_t counter = slot * (uint64_t)op.hidden + (uint64_t)i;
            float noise = __fmul_rn(noise_draw(op.noise, k0, k1, counter), op.noise_std);
            value = __fadd_rn(value, noise); // not fused, as on the CPU
        }
        store(out, i, value);
    }
}

// One CTA a token and layer.
void context_load_cuda(struct stream *stream, const struct context_load *op)
{
    struct planes planes;
    BUG_UNLESS(op->layers <= MAX_LAYERS);
    if (op->tokens == 0)
        return;
    memset(&planes, 0, sizeof(planes));
    memcpy(planes.plane, op->plane, (size_t)op->layers * sizeof(*op->plane));
    unsigned grid = grid_size(op->tokens * op->layers);
    if (is_bf16(op->type))
        context_kernel<bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op, planes);
    else
        context_kernel<float><<<grid, THREADS, 0, stream->cuda>>>(*op, planes);
    launch_check();
}
