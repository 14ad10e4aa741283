// Stands in for NCCL where CUDA or NCCL's header is not there.
#include "trainer/ranks_internal.h"

#ifndef DTRAIN_NCCL
const struct ranks_engine *ranks_nccl_engine(struct ranks *ranks, void **state, struct error *err)
{
    (void)ranks;
    *state = NULL;
    error_set(
        err,
        "this build has no NCCL: CMake found no nccl.h beside the CUDA toolkit; one GPU can be "
        "used, several can not");
    return NULL;
}
#endif
