// The innermost part of matrix products on the CPU.
#ifndef KERNELS_GEMM_MICRO_CPU_H
#define KERNELS_GEMM_MICRO_CPU_H

#include <stdint.h>

enum {
    MICRO_ROWS = 12,        // rows of C in a micro tile
    MICRO_COLUMNS = 32,     // columns of C in a micro tile
    BLOCK_K = 256,          // most of the inner dimension that is packed at a time
    A_STRIDE = BLOCK_K + 16 // floats between packed rows of A; no power of two, or all rows would
                            // meet in the same sets of the first-level cache
};

// c [MICRO_ROWS, MICRO_COLUMNS] = a b, with a [MICRO_ROWS, k] rows A_STRIDE apart and b
// [k, MICRO_COLUMNS] packed and aligned to 64 bytes. c is aligned to 64 bytes and overwritten.
typedef void micro_tile_fn(int64_t k, const float *a, const float *b, float *c);

// The variant for the registers of this machine.
micro_tile_fn *micro_tile_select(void);

// to[c, r] = from[r, c] for r < rows, c < columns.
void transpose_floats(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                      int64_t rows, int64_t columns);

#endif
