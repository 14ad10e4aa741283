// Stands in for the CUDA backend where CUDA is not built in.
#include "kernels/backend.h"

#ifndef DTRAIN_CUDA
const struct backend *backend_cuda(struct error *why)
{
    error_set(why,
              "this build has no CUDA backend; it is not proven on a GPU yet and left out unless "
              "CMake is given -DCUDA_BACKEND=ON where nvcc is found");
    return NULL;
}
#endif
