// Stands in for the CUDA backend where CUDA is not built in.
#include "kernels/backend.h"

#ifndef DTRAIN_CUDA
const struct backend *backend_cuda(struct error *why)
{
    error_set(why, "this build has no CUDA backend: CMake found no CUDA toolkit, or was given "
                   "-DWITH_CUDA=OFF");
    return NULL;
}

int backend_cuda_count(void)
{
    return 0;
}
#endif
