// Sizes of the CUDA backend that a plan needs without a GPU.
#ifndef KERNELS_CUDA_SIZES_H
#define KERNELS_CUDA_SIZES_H

enum {
    CUDA_WORKSPACE_BYTES = 32 << 20, // of a stream on which ops run: what cuBLAS wants on Hopper
    // Estimate of what nobody allocates: context, code of the kernels and of cuBLASLt, streams. An H200
    // with CUDA 13.0 had 527 MiB in use when a run began, and 576 MiB beside the arena at its end.
    CUDA_CONTEXT_BYTES = 640 << 20,
    // Of these, in use before a run takes anything; code is loaded when it is first needed.
    CUDA_CONTEXT_BEGUN_BYTES = 480 << 20
};

#endif
