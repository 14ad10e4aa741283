// Owns a GPU that is not there: what a plan asks a backend, answered without one.
#include <stdio.h>

#include "kernels/backend.h"
#include "kernels/cuda_sizes.h"

static void planned_describe(char *hardware, size_t hardware_size, char *library,
                             size_t library_size)
{
    snprintf(hardware, hardware_size, "a GPU");
    snprintf(library, library_size, "CUDA");
}

static size_t planned_workspace_bytes(int threads)
{
    (void)threads;
    return CUDA_WORKSPACE_BYTES;
}

const struct backend *backend_planned(void)
{
    static const struct backend backend = {.name = "cuda",
                                           .describe = planned_describe,
                                           .stream_workspace_bytes = planned_workspace_bytes};
    return &backend;
}
