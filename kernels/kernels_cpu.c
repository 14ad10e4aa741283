// Owns the table of CPU ops.
#include "kernels/kernels.h"

#define KERNEL_ENTRY(op) .op = op##_cpu,
const struct kernels kernels_cpu = {KERNEL_LIST(KERNEL_ENTRY)};
#undef KERNEL_ENTRY
