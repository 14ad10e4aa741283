// A moving average of parameters, and the exchange of both, so that a step can run on either.
// The arrays of an op here lie apart from one another.
#ifndef KERNELS_AVERAGE_H
#define KERNELS_AVERAGE_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// average += share (x - average)
struct average {
    int64_t count;
    float *average; // [count] fp32, updated in place
    const float *x; // [count]
    double share;
};

// a and b change places, bit for bit.
struct exchange {
    int64_t count;
    float *a, *b; // [count] fp32
};

typedef void average_fn(struct stream *stream, const struct average *op);
typedef void exchange_fn(struct stream *stream, const struct exchange *op);
average_fn average_cpu, average_cuda;
exchange_fn exchange_cpu, exchange_cuda;

#ifdef __cplusplus
}
#endif
#endif
