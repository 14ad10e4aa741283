// Owns the innermost part of matrix products on the CPU: a tile of C from packed rows of A and packed
// columns of B, and the transposition that packing needs. Written with the compiler's vector types,
// one variant per width of registers.
#include "kernels/gemm_micro_cpu.h"

#include <string.h>

#include "kernels/cpu_internal.h"

typedef float vector16 __attribute__((vector_size(16), may_alias));
typedef float vector32 __attribute__((vector_size(32), may_alias));
typedef float vector64 __attribute__((vector_size(64), may_alias));

// The products are added with one rounding where the machine can; no other expression is touched.
#define FUSED optimize("fp-contract=fast")

// Each element of C is summed up alone, over k in order, so it does not depend on its place in the
// tile. `rows` x `vectors` sums stay in registers.
#define MICRO_TILE(name, vector, rows, vectors, ...)                                               \
    __attribute__((__VA_ARGS__)) static void name(int64_t k, const float *a, const float *b,       \
                                                  float *c)                                        \
    {                                                                                              \
        enum { WIDTH = sizeof(vector) / sizeof(float) };                                           \
        for (int at = 0; at < MICRO_ROWS * MICRO_COLUMNS; at += (rows)*MICRO_COLUMNS) {            \
            const float *ai = a + at / MICRO_COLUMNS * A_STRIDE;                                   \
            for (int column = 0; column < MICRO_COLUMNS; column += (vectors)*WIDTH) {              \
                vector sum[rows][vectors] = {0};                                                   \
                for (int64_t l = 0; l < k; l++) {                                                  \
                    const float *bl = b + l * MICRO_COLUMNS + column;                              \
                    _Pragma("GCC unroll 12") for (int i = 0; i < (rows); i++)                      \
                        _Pragma("GCC unroll 4") for (int j = 0; j < (vectors); j++) sum[i][j] +=   \
                        ai[i * A_STRIDE + l] * *(const vector *)(bl + j * WIDTH);                  \
                }                                                                                  \
                for (int i = 0; i < (rows); i++)                                                   \
                    memcpy(c + at + i * MICRO_COLUMNS + column, sum[i], sizeof(sum[i]));           \
            }                                                                                      \
        }                                                                                          \
    }

MICRO_TILE(micro_tile_any, vector16, 4, 2, FUSED)

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
MICRO_TILE(micro_tile_256, vector32, 6, 2, FUSED, target("avx2,fma"))
MICRO_TILE(micro_tile_512, vector64, 12, 2, FUSED, target("avx512f"))

micro_tile_fn *micro_tile_select(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return micro_tile_512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return micro_tile_256;
    return micro_tile_any;
}
#else
micro_tile_fn *micro_tile_select(void)
{
    return micro_tile_any;
}
#endif

enum { SQUARE = 8 };
typedef float vector8 __attribute__((vector_size(32), may_alias, aligned(4)));
typedef int32_t index8 __attribute__((vector_size(32)));

// One step of transposing a square: the rows of each pair exchange what lies across the diagonal.
#define EXCHANGE(row, distance, low, high)                                                         \
    _Pragma("GCC unroll 8") for (int i = 0; i < SQUARE; i++)                                       \
    {                                                                                              \
        if ((i & (distance)) != 0)                                                                 \
            continue;                                                                              \
        vector8 a = (row)[i], b = (row)[i + (distance)];                                           \
        (row)[i] = __builtin_shuffle(a, b, low);                                                   \
        (row)[i + (distance)] = __builtin_shuffle(a, b, high);                                     \
    }

static inline __attribute__((always_inline)) void
transpose_square(float *to, int64_t to_stride, const float *from, int64_t from_stride)
{
    const index8 even = {0, 8, 2, 10, 4, 12, 6, 14}, odd = {1, 9, 3, 11, 5, 13, 7, 15};
    const index8 even2 = {0, 1, 8, 9, 4, 5, 12, 13}, odd2 = {2, 3, 10, 11, 6, 7, 14, 15};
    const index8 low4 = {0, 1, 2, 3, 8, 9, 10, 11}, high4 = {4, 5, 6, 7, 12, 13, 14, 15};
    vector8 row[SQUARE];
    for (int i = 0; i < SQUARE; i++)
        row[i] = *(const vector8 *)(from + i * from_stride);
    EXCHANGE(row, 1, even, odd)
    EXCHANGE(row, 2, even2, odd2)
    EXCHANGE(row, 4, low4, high4)
    for (int i = 0; i < SQUARE; i++)
        *(vector8 *)(to + i * to_stride) = row[i];
}

KERNEL_CLONES void transpose_floats(float *to, int64_t to_stride, const float *from,
                                    int64_t from_stride, int64_t rows, int64_t columns)
{
    int64_t full_rows = rows / SQUARE * SQUARE, full_columns = columns / SQUARE * SQUARE;
    for (int64_t c = 0; c < full_columns; c += SQUARE)
        for (int64_t r = 0; r < full_rows; r += SQUARE)
            transpose_square(to + c * to_stride + r, to_stride, from + r * from_stride + c,
                             from_stride);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = r < full_rows ? full_columns : 0; c < columns; c++)
            to[c * to_stride + r] = from[r * from_stride + c];
}
