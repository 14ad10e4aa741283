// Owns the CPU backend: host memory, and streams that compute in the caller's thread. What is queued
// is done when the call returns, so sync has nothing to do.
#include "kernels/backend.h"

#include <cblas.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/host_memory.h"
#include "base/log.h"
#include "base/timer.h"
#include "kernels/cpu_internal.h"
#include "kernels/kernels.h"

enum { ALLOC_ALIGNMENT = 256 };

#if defined(DTRAIN_SANITIZE) || defined(DTRAIN_DEBUG)
static const bool poison = true;
#else
static const bool poison = false;
#endif

// Hardware: "model name" of /proc/cpuinfo, or "cpu". Library: OpenBLAS, its version and its kernels.
static void cpu_describe(char *hardware, size_t hardware_size, char *library, size_t library_size)
{
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "re");
    snprintf(hardware, hardware_size, "cpu");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL)
            continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(hardware, hardware_size, "%s", colon + 2);
        break;
    }
    if (file != NULL)
        fclose(file);
    snprintf(library, library_size, "%s, %s kernels", openblas_get_config(),
             openblas_get_corename());
}

static void *cpu_alloc(size_t bytes)
{
    size_t padded = (bytes + ALLOC_ALIGNMENT - 1) / ALLOC_ALIGNMENT * ALLOC_ALIGNMENT;
    void *pointer = aligned_alloc(ALLOC_ALIGNMENT, padded > 0 ? padded : ALLOC_ALIGNMENT);
    if (pointer == NULL)
        die("out of host memory: %zu bytes wanted", bytes);
    if (poison)
        memset(pointer, 0xff, padded); // a NaN in fp32, fp64 and bf16, -1 in integers
    return pointer;
}

static void cpu_copy(struct stream *stream, void *to, const void *from, size_t bytes)
{
    (void)stream;
    memcpy(to, from, bytes);
}

static void cpu_zero(struct stream *stream, void *device, size_t bytes)
{
    (void)stream;
    memset(device, 0, bytes);
}

static void cpu_sync(struct stream *stream)
{
    (void)stream;
}

static size_t cpu_workspace_bytes(int threads)
{
    return (size_t)threads * CPU_WORKSPACE_PER_THREAD;
}

void *thread_workspace(struct stream *stream)
{
    return stream->workspace + (size_t)omp_get_thread_num() * CPU_WORKSPACE_PER_THREAD;
}

// OpenBLAS computes in the calling thread only: the ops split their work over one OpenMP team, and a
// second pool of threads that waits busily would take that team's cores.
static struct stream *cpu_stream_open(const struct stream_options *options)
{
    struct stream *stream = memory_alloc(1, sizeof(*stream));
    if (options->workspace_bytes == 0)
        return stream;
    BUG_UNLESS(options->threads > 0 &&
               options->workspace_bytes >= cpu_workspace_bytes(options->threads));
    stream->threads = options->threads;
    stream->workspace = cpu_alloc(options->workspace_bytes);
    stream->workspace_bytes = options->workspace_bytes;
    omp_set_num_threads(options->threads);
    openblas_set_num_threads(1);
    return stream;
}

static void cpu_stream_close(struct stream *stream)
{
    if (stream == NULL)
        return;
    free(stream->workspace);
    free(stream);
}

static void cpu_stream_wait(struct stream *waiter, struct stream *other)
{
    (void)waiter;
    (void)other;
}

static void cpu_time_mark(struct stream *stream, int slot)
{
    BUG_UNLESS(slot >= 0 && slot < STREAM_TIME_SLOTS);
    stream->times[slot] = timer_now();
}

static double cpu_time_between(struct stream *stream, int from, int to)
{
    return stream->times[to] - stream->times[from];
}

static void cpu_memory(size_t *free_bytes, size_t *total_bytes)
{
    struct host_memory memory = host_memory_read();
    *free_bytes = memory.available;
    *total_bytes = memory.total;
}

// CPU profilers name functions by themselves.
static void cpu_range_push(const char *name)
{
    (void)name;
}

static void cpu_range_pop(void) {}

const struct backend *backend_cpu(void)
{
    static const struct backend backend = {
        .name = "cpu",
        .kernels = &kernels_cpu,
        .describe = cpu_describe,
        .alloc = cpu_alloc,
        .free = free,
        .host_alloc = cpu_alloc,
        .host_free = free,
        .copy_in = cpu_copy,
        .copy_out = cpu_copy,
        .copy = cpu_copy,
        .zero = cpu_zero,
        .sync = cpu_sync,
        .stream_workspace_bytes = cpu_workspace_bytes,
        .stream_open = cpu_stream_open,
        .stream_close = cpu_stream_close,
        .stream_wait = cpu_stream_wait,
        .time_mark = cpu_time_mark,
        .time_between = cpu_time_between,
        .memory = cpu_memory,
        .range_push = cpu_range_push,
        .range_pop = cpu_range_pop,
    };
    return &backend;
}
