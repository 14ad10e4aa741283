// Owns the table of CUDA ops.
#include "kernels/kernels.h"

#ifdef DTRAIN_CUDA
#define KERNEL_ENTRY(op) .op = op##_cuda,
const struct kernels kernels_cuda = {KERNEL_LIST(KERNEL_ENTRY)};
#undef KERNEL_ENTRY
#endif
