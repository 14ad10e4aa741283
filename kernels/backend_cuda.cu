// Owns the CUDA backend: device memory, pinned host memory, streams with their workspace and
// cuBLASLt handle. Work runs on the current device of the process (the first that is visible).
#include "kernels/backend.h"

#include <algorithm>
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define HAS_NVTX 1
#else // a toolkit of which this part is not installed: profilers see no ranges
#define HAS_NVTX 0
#endif

#include "base/error.h"
#include "base/log.h"
#include "kernels/cuda_internal.cuh"
#include "kernels/cuda_sizes.h"
#include "kernels/gemm_algorithms.h"
#include "kernels/kernels.h"

enum {
    LEAST_MAJOR = 8,       // compute capability
    LEAST_ALLOCATION = 256 // so that an allocation of nothing has an address, too
};

static void cuda_describe(char *hardware, size_t hardware_size, char *library, size_t library_size)
{
    cudaDeviceProp properties;
    int device = 0, runtime = 0, driver = 0;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&properties, device));
    cuda_check(cudaRuntimeGetVersion(&runtime));
    cuda_check(cudaDriverGetVersion(&driver));
    size_t blas = cublasLtGetVersion();
    snprintf(hardware, hardware_size, "%s", properties.name);
    snprintf(library, library_size, "CUDA %d.%d, driver for %d.%d, cuBLASLt %zu", runtime / 1000,
             runtime % 1000 / 10, driver / 1000, driver % 1000 / 10, blas);
}

static void *cuda_alloc(size_t bytes)
{
    void *pointer = NULL;
    size_t wanted = bytes > 0 ? bytes : (size_t)LEAST_ALLOCATION, left = 0, total = 0;
    cudaError_t status = cudaMalloc(&pointer, wanted);
    if (status == cudaErrorMemoryAllocation) {
        cuda_check(cudaMemGetInfo(&left, &total));
        die("out of GPU memory: %.2f GiB wanted, %.2f of %.2f GiB free", (double)wanted / 0x1p30,
            (double)left / 0x1p30, (double)total / 0x1p30);
    }
    cuda_check(status);
    return pointer;
}

static void cuda_free(void *pointer)
{
    cuda_check(cudaFree(pointer));
}

static void *cuda_host_alloc(size_t bytes)
{
    void *pointer = NULL;
    size_t wanted = bytes > 0 ? bytes : (size_t)LEAST_ALLOCATION;
    cudaError_t status = cudaHostAlloc(&pointer, wanted, cudaHostAllocDefault);
    if (status == cudaErrorMemoryAllocation)
        die("out of pinned host memory: %.2f GiB wanted; fewer data.prefetch_rows or a smaller "
            "data.seq_len need less",
            (double)wanted / 0x1p30);
    cuda_check(status);
    return pointer;
}

static void cuda_host_free(void *pointer)
{
    cuda_check(cudaFreeHost(pointer));
}

static void move(struct stream *stream, void *to, const void *from, size_t bytes,
                 enum cudaMemcpyKind kind)
{
    if (bytes > 0)
        cuda_check(cudaMemcpyAsync(to, from, bytes, kind, stream->cuda));
}

// A GPU copies what comes from the host in the order of the calls, whatever their streams: a few numbers
// that the step needs at once would wait for all of a row's features. So few bytes are read by a kernel
// instead, over the bus, and many are copied in pieces.
enum { FEW_BYTES = 256 << 10, PIECE_BYTES = 16 << 20, COPY_THREADS = 256, COPY_CTAS = 32 };

static __global__ void read_kernel(unsigned char *to, const unsigned char *host, size_t bytes)
{
    size_t first = (size_t)blockIdx.x * COPY_THREADS + threadIdx.x,
           step = (size_t)gridDim.x * COPY_THREADS, done = 0;
    if ((((uintptr_t)to | (uintptr_t)host) & 15) == 0) {
        done = bytes / 16 * 16;
        for (size_t i = first; i < bytes / 16; i += step)
            ((uint4 *)to)[i] = ((const uint4 *)host)[i];
    }
    for (size_t i = done + first; i < bytes; i += step)
        to[i] = host[i];
}

// Whether a kernel may read it: memory of cuda_host_alloc.
static bool is_pinned(const void *host)
{
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, host) == cudaSuccess)
        return attributes.type == cudaMemoryTypeHost && attributes.devicePointer == host;
    (void)cudaGetLastError();
    return false;
}

static void cuda_copy_in(struct stream *stream, void *device, const void *host, size_t bytes)
{
    unsigned char *to = (unsigned char *)device;
    const unsigned char *from = (const unsigned char *)host;
    if (bytes > 0 && bytes <= FEW_BYTES && is_pinned(host)) {
        size_t ctas =
            std::min((bytes + 16 * COPY_THREADS - 1) / (16 * COPY_THREADS), (size_t)COPY_CTAS);
        read_kernel<<<(unsigned)ctas, COPY_THREADS, 0, stream->cuda>>>(to, from, bytes);
        launch_check();
        return;
    }
    for (size_t at = 0; at < bytes; at += PIECE_BYTES)
        move(stream, to + at, from + at, std::min(bytes - at, (size_t)PIECE_BYTES),
             cudaMemcpyHostToDevice);
}

static void cuda_copy_out(struct stream *stream, void *host, const void *device, size_t bytes)
{
    move(stream, host, device, bytes, cudaMemcpyDeviceToHost);
}

static void cuda_copy(struct stream *stream, void *to, const void *from, size_t bytes)
{
    move(stream, to, from, bytes, cudaMemcpyDeviceToDevice);
}

static void cuda_zero(struct stream *stream, void *device, size_t bytes)
{
    if (bytes > 0)
        cuda_check(cudaMemsetAsync(device, 0, bytes, stream->cuda));
}

static void cuda_sync(struct stream *stream)
{
    cudaError_t status = cudaStreamSynchronize(stream->cuda);
    if (status != cudaSuccess)
        die("CUDA: work that was queued failed: %s; CUDA_LAUNCH_BLOCKING=1 in the environment "
            "makes "
            "the message name the op",
            cudaGetErrorString(status));
}

static size_t cuda_workspace_bytes(int threads)
{
    (void)threads;
    return CUDA_WORKSPACE_BYTES;
}

// Whether this GPU runs code that is built for sm_90a only.
static bool is_hopper(void)
{
    int device = 0, major = 0, minor = 0;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    return major == 9 && minor == 0;
}

static struct stream *cuda_stream_open(const struct stream_options *options)
{
    struct stream *stream = (struct stream *)memory_alloc(1, sizeof(*stream));
    cuda_check(cudaStreamCreateWithFlags(&stream->cuda, cudaStreamNonBlocking));
    cuda_check(cudaEventCreateWithFlags(&stream->done, cudaEventDisableTiming));
    for (int slot = 0; slot < STREAM_TIME_SLOTS; slot++)
        cuda_check(cudaEventCreate(&stream->times[slot]));
    stream->generic = options->generic || !is_hopper();
    if (options->workspace_bytes == 0)
        return stream;
    BUG_UNLESS(options->workspace_bytes >= cuda_workspace_bytes(options->threads));
    stream->workspace = cuda_alloc(options->workspace_bytes);
    // What products may use is fixed: more would change which algorithms they choose.
    stream->workspace_bytes = CUDA_WORKSPACE_BYTES;
    return stream;
}

static void cuda_stream_close(struct stream *stream)
{
    if (stream == NULL)
        return;
    cuda_check(cudaStreamSynchronize(stream->cuda));
    gemm_state_close(stream->gemm);
    if (stream->workspace != NULL)
        cuda_free(stream->workspace);
    for (int slot = 0; slot < STREAM_TIME_SLOTS; slot++)
        cuda_check(cudaEventDestroy(stream->times[slot]));
    cuda_check(cudaEventDestroy(stream->done));
    cuda_check(cudaStreamDestroy(stream->cuda));
    free(stream);
}

// The wait takes the event as it is now, so that the next record does not disturb it.
static void cuda_stream_wait(struct stream *waiter, struct stream *other)
{
    cuda_check(cudaEventRecord(other->done, other->cuda));
    cuda_check(cudaStreamWaitEvent(waiter->cuda, other->done, 0));
}

static void cuda_time_mark(struct stream *stream, int slot)
{
    BUG_UNLESS(slot >= 0 && slot < STREAM_TIME_SLOTS);
    cuda_check(cudaEventRecord(stream->times[slot], stream->cuda));
}

static double cuda_time_between(struct stream *stream, int from, int to)
{
    float milliseconds = 0.0f;
    cuda_check(cudaEventElapsedTime(&milliseconds, stream->times[from], stream->times[to]));
    return (double)milliseconds * 1e-3;
}

static void cuda_memory(size_t *free_bytes, size_t *total_bytes)
{
    cuda_check(cudaMemGetInfo(free_bytes, total_bytes));
}

// NVTX finds out at its first call whether a profiler is attached; without one a call is a test of a pointer.
static void cuda_range_push(const char *name)
{
#if HAS_NVTX
    nvtxRangePushA(name);
#else
    (void)name;
#endif
}

static void cuda_range_pop(void)
{
#if HAS_NVTX
    nvtxRangePop();
#endif
}

static __global__ void probe_kernel(void) {}

// Whether this build's kernels run on the device.
static int check_device(struct error *why)
{
    cudaDeviceProp properties;
    cudaFuncAttributes attributes;
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaGetDeviceProperties(&properties, device);
    if (status != cudaSuccess)
        return error_set(why, "the GPU can not be used: %s", cudaGetErrorString(status));
    if (properties.major < LEAST_MAJOR)
        return error_set(why, "%s has compute capability %d.%d, 8.0 or newer is needed",
                         properties.name, properties.major, properties.minor);
    status = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (status != cudaSuccess)
        return error_set(why,
                         "%s has compute capability %d.%d, for which this build has no code (%s): "
                         "build with CMAKE_CUDA_ARCHITECTURES set to it",
                         properties.name, properties.major, properties.minor,
                         cudaGetErrorString(status));
    return 0;
}

int backend_cuda_count(void)
{
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

const struct backend *backend_cuda(struct error *why)
{
    static const struct backend backend = {
        "cuda",           &kernels_cuda,  cuda_describe,        cuda_alloc,       cuda_free,
        cuda_host_alloc,  cuda_host_free, cuda_copy_in,         cuda_copy_out,    cuda_copy,
        cuda_zero,        cuda_sync,      cuda_workspace_bytes, cuda_stream_open, cuda_stream_close,
        cuda_stream_wait, cuda_time_mark, cuda_time_between,    cuda_memory,      gemm_record_cuda,
        gemm_tune_cuda,   gemm_obey_cuda, cuda_range_push,      cuda_range_pop,
    };
    int devices = 0;
    cudaError_t status = cudaGetDeviceCount(&devices);
    if (status != cudaSuccess || devices == 0) {
        error_set(why, "no GPU is visible: %s",
                  status != cudaSuccess ? cudaGetErrorString(status) : "no device");
        return NULL;
    }
    return check_device(why) == 0 ? &backend : NULL;
}
