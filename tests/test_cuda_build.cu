// Shows that CUDA sources join this build: the headers of kernels/ and the parts of base/ that they
// include compile as CUDA C++, and the toolkit's libraries link. With a GPU it also runs a kernel of
// the architectures that were compiled for. Exit status 77 (skipped) without a GPU, unless
// REQUIRE_CUDA=1 is set, then it fails.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>
#include <cuda_runtime.h>
#ifdef DTRAIN_CUDNN
#include <cudnn.h>
#endif
#ifdef DTRAIN_NCCL
#include <nccl.h>
#endif

#include "base/bf16.h"
#include "kernels/kernels.h"

static __global__ void add_one_kernel(float *x) // [32]
{
    x[threadIdx.x] += 1.0f;
}

static void print_versions(void)
{
    printf("cuBLASLt %zu", cublasLtGetVersion());
#ifdef DTRAIN_CUDNN
    printf(", cuDNN %zu", cudnnGetVersion());
#endif
#ifdef DTRAIN_NCCL
    int nccl = 0;
    if (ncclGetVersion(&nccl) == ncclSuccess)
        printf(", NCCL %d", nccl);
#endif
    printf("\n");
}

static int run_kernel(void)
{
    float h_x[32];
    float *x = NULL;
    int wrong = 0;
    for (int i = 0; i < 32; i++)
        h_x[i] = (float)i;
    if (cudaMalloc(&x, sizeof h_x) != cudaSuccess)
        return 1;
    cudaMemcpy(x, h_x, sizeof h_x, cudaMemcpyHostToDevice);
    add_one_kernel<<<1, 32>>>(x);
    cudaMemcpy(h_x, x, sizeof h_x, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 32; i++)
        wrong += !(h_x[i] == (float)(i + 1));
    cudaError_t status = cudaGetLastError();
    cudaFree(x);
    printf("kernel: %d wrong values, %s\n", wrong, cudaGetErrorString(status));
    return wrong > 0 || status != cudaSuccess;
}

int main(void)
{
    int devices = 0;
    const char *required = getenv("REQUIRE_CUDA");
    print_versions();
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no GPU here\n");
        return required && strcmp(required, "1") == 0 ? 1 : 77;
    }
    return run_kernel();
}
