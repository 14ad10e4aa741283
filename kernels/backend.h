// A backend: where tensors live and who computes on them. Chosen once at start, passed down, never
// mixed. The CPU backend is the reference that CUDA is held against.
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/memory.h"

#ifdef __cplusplus
extern "C" {
#endif

struct gemm_algorithms;
struct kernels;
struct stream; // an ordered queue of work with its workspace and library handles; per backend

struct stream_options {
    int threads; // CPU threads of this stream's work (CUDA ignores it)
    // 0: a stream for copies, fills, waits and times only, on which no op runs
    size_t workspace_bytes;
    bool generic; // CUDA: no path that only some GPUs have, as if this were any other GPU
};

// Times of one stream that are remembered together.
enum { STREAM_TIME_SLOTS = 64 };

struct backend {
    const char *name; // "cpu", "cuda"
    const struct kernels *kernels;
    // Which hardware and which numeric library, with version: what execution.json freezes.
    void (*describe)(char *hardware, size_t hardware_size, char *library, size_t library_size);
    // Memory of this backend; die() when there is none. Contents are undefined (CPU: poisoned in
    // sanitizer builds).
    void *(*alloc)(size_t bytes);
    void (*free)(void *pointer);
    // Host memory that copies to and from this backend are fast with (pinned on CUDA).
    void *(*host_alloc)(size_t bytes);
    void (*host_free)(void *pointer);
    // Copies and fills are queued on the stream; host memory must stay valid until the next sync.
    void (*copy_in)(struct stream *stream, void *device, const void *host, size_t bytes);
    void (*copy_out)(struct stream *stream, void *host, const void *device, size_t bytes);
    void (*copy)(struct stream *stream, void *to, const void *from, size_t bytes);
    void (*zero)(struct stream *stream, void *device, size_t bytes);
    void (*sync)(struct stream *stream);
    // The least workspace that every op works with. More does not change results.
    size_t (*stream_workspace_bytes)(int threads);
    // Used by one thread at a time, on the CPU the one that opened it.
    struct stream *(*stream_open)(const struct stream_options *options);
    void (*stream_close)(struct stream *stream);
    // What is queued on `waiter` from now on starts after all that is queued on `other` so far. The
    // caller does not wait.
    void (*stream_wait)(struct stream *waiter, struct stream *other);
    // Notes when the work queued so far is done, without waiting for it; slot < STREAM_TIME_SLOTS.
    void (*time_mark)(struct stream *stream, int slot);
    // Seconds between two marks, to be asked after a sync.
    double (*time_between)(struct stream *stream, int from, int to);
    // Memory of the device (CPU: of the machine, as its system counts) that can be had now, and all of it.
    void (*memory)(size_t *free_bytes, size_t *total_bytes);
    // Which algorithm products are computed with; all NULL on backends that have one only.
    // Between gemm_record and gemm_tune the stream remembers its products. Then gemm_tune times them,
    // for about so many seconds at most, takes what is fastest (what the library proposes first, where
    // there was no time), and lists it. Operands must still be where they were, and lose their
    // contents: A and C of all, B of those whose A is transposed and of fixed ones.
    void (*gemm_record)(struct stream *stream);
    void (*gemm_tune)(struct stream *stream, double seconds, struct gemm_algorithms *algorithms);
    // Takes what was listed before. -1 when the library does not know an algorithm.
    int (*gemm_obey)(struct stream *stream, const struct gemm_algorithms *algorithms,
                     struct error *err);
    // Names what the calling thread queues until the matching pop, for a profiler. Nests. Next to nothing
    // where none listens.
    void (*range_push)(const char *name);
    void (*range_pop)(void);
};

// The CPU backend. Always there.
const struct backend *backend_cpu(void);
// The CUDA backend, or NULL when it is not built in or no device is visible (then why says which).
const struct backend *backend_cuda(struct error *why);
// How many GPUs this process sees; 0 without CUDA.
int backend_cuda_count(void);
// Stands for a CUDA backend in plans, on machines without a GPU too: name, describe and
// stream_workspace_bytes; there is nothing else in it.
const struct backend *backend_planned(void);

#ifdef __cplusplus
}
#endif
#endif
