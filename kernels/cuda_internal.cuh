// What the CUDA ops share: the stream, checks of API calls, fp32 and bf16 elements as fp32, and sums
// over a warp or a CTA in a fixed order. No op adds with atomics, so results repeat bit for bit.
#ifndef KERNELS_CUDA_INTERNAL_CUH
#define KERNELS_CUDA_INTERNAL_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "base/log.h"
#include "kernels/backend.h"
#include "kernels/gemm.h"

#define cuda_check(call) cuda_check_status((call), #call, __FILE__, __LINE__)

static inline void cuda_check_status(cudaError_t status, const char *call, const char *file,
                                     int line)
{
    if (status != cudaSuccess)
        log_die(file, line, "CUDA: %s: %s", call, cudaGetErrorString(status));
}

// After every launch; names the function, which is called as the op is. Faults inside the kernel show
// at the next sync.
#define launch_check() launch_check_status(cudaGetLastError(), __func__, __FILE__, __LINE__)

static inline void launch_check_status(cudaError_t status, const char *function, const char *file,
                                       int line)
{
    if (status != cudaSuccess)
        log_die(file, line, "CUDA: a launch in %s: %s", function, cudaGetErrorString(status));
}

// Before a launch with this much dynamic shared memory: more than 48 KiB has to be asked for.
template <typename Kernel> static inline void allow_shared(Kernel *kernel, size_t bytes)
{
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

struct gemm_state; // the library's handle and which algorithm each product takes

struct stream {
    cudaStream_t cuda;
    bool generic;     // no path that only some GPUs have: the option, or a GPU that is not sm_90
    cudaEvent_t done; // of the work queued before the last stream_wait for this stream
    cudaEvent_t times[STREAM_TIME_SLOTS];
    struct gemm_state *gemm; // NULL until the first product
    void *workspace;
    size_t workspace_bytes;
};

// Element types of kernels: float, and bf16 for DTYPE_BF16.
typedef __nv_bfloat16 bf16_t;

static __device__ __forceinline__ float load(const float *x, int64_t i)
{
    return x[i];
}

static __device__ __forceinline__ float load(const bf16_t *x, int64_t i)
{
    return __bfloat162float(x[i]);
}

static __device__ __forceinline__ void store(float *x, int64_t i, float value)
{
    x[i] = value;
}

static __device__ __forceinline__ void store(bf16_t *x, int64_t i, float value)
{
    x[i] = __float2bfloat16_rn(value);
}

// A broken invariant inside a kernel: the launch fails and the next sync ends the program.
static __device__ __forceinline__ void bug_unless(bool condition)
{
    if (!condition)
        __trap();
}

enum { WARP = 32 };

// Sum over the 32 lanes, the same bits in each: halves are added pairwise.
template <typename Number> static __device__ __forceinline__ Number warp_sum(Number x)
{
    for (int half = WARP / 2; half > 0; half /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, half);
    return x;
}

// Sum over the CTA of THREADS threads, for all of them. Warps are added in order. All threads call it.
template <int THREADS, typename Number> static __device__ __forceinline__ Number block_sum(Number x)
{
    __shared__ Number partial[THREADS / WARP];
    x = warp_sum(x);
    __syncthreads(); // the last call's readers are done
    if (threadIdx.x % WARP == 0)
        partial[threadIdx.x / WARP] = x;
    __syncthreads();
    Number sum = partial[0];
    for (int warp = 1; warp < THREADS / WARP; warp++)
        sum += partial[warp];
    return sum;
}

static inline int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

// First dimension of a grid.
static inline unsigned grid_size(int64_t blocks)
{
    BUG_UNLESS(blocks > 0 && blocks <= INT32_MAX);
    return (unsigned)blocks;
}

void gemm_state_close(struct gemm_state *state);

// sum[i] += partial[0][i] + partial[1][i] + ..., in fp64; partial: [parts, width], parts at most
// RMS_NORM_PARTS, written by the launch right before, which may not touch sum: it is waited for in the
// kernel and not at its start (Hopper).
void column_parts_add(struct stream *stream, float *sum, const float *partial, int parts,
                      int64_t width);

// In the kernel before column_parts_add: its CTAs may come to the SMs as soon as all of these have, and
// wait there.
static __device__ __forceinline__ void parts_add_may_start(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static inline bool is_bf16(enum dtype type)
{
    BUG_UNLESS(type == DTYPE_F32 || type == DTYPE_BF16);
    return type == DTYPE_BF16;
}

#endif
