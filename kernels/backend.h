// A backend: where tensors live and who computes on them. Chosen once at start, passed down, never
// mixed. The CPU backend is the reference that CUDA is held against.
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/memory.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kernels;
struct stream; // an ordered queue of work with its workspace and library handles; per backend

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
    // threads: CPU threads of this stream's work (CUDA ignores it). Used by one thread at a time, on
    // the CPU the one that opened it.
    struct stream *(*stream_open)(int threads, size_t workspace_bytes);
    void (*stream_close)(struct stream *stream);
};

// The CPU backend. Always there.
const struct backend *backend_cpu(void);
// The CUDA backend, or NULL when it is not built in or no device is visible (then why says which).
const struct backend *backend_cuda(struct error *why);

#ifdef __cplusplus
}
#endif
#endif
