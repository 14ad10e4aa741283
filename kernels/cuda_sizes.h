// Sizes of the CUDA backend that a plan needs without a GPU.
#ifndef KERNELS_CUDA_SIZES_H
#define KERNELS_CUDA_SIZES_H

enum {
    CUDA_WORKSPACE_BYTES = 32 << 20 // of a stream on which ops run: what cuBLAS wants on Hopper
};

#endif
