// Sizes of the CUDA backend that a plan needs without a GPU.
#ifndef KERNELS_CUDA_SIZES_H
#define KERNELS_CUDA_SIZES_H

enum {
    CUDA_WORKSPACE_BYTES = 32 << 20, // of a stream on which ops run: what cuBLAS wants on Hopper
    // Estimate: context, code of the kernels and of cuBLASLt, streams. Nobody allocates it.
    CUDA_CONTEXT_BYTES = 640 << 20
};

#endif
