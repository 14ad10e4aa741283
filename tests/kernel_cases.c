// Owns the table of kernel cases. Shapes: 1, primes, a unit of the implementation -1/0/+1 (micro tiles
// of 12 x 32, pieces of 512, blocks of 256), and one shape of a real training step for each op.
#include "tests/kernel_cases.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "tests/support/kernel_ops.h"

// Bounds {atol, rtol, nmse} and why.
#define EXACT      {0.0, 0.0, 0.0}, "values are only moved"
#define ROUND_BF16 {0.0, 0x1.01p-8, 1e-5}, "one rounding to bf16"
#define ROW_F32    {2e-6, 3e-6, 1e-12}, "a dozen fp32 operations on values near 1, a sum in lanes"
#define ROW_BF16   {1e-5, 0x1.04p-8, 1e-5}, "one rounding to bf16 after fp32"
// Sums of k standard normal products: partial sums near sqrt(k) are rounded in blocks of at most 256;
// five standard deviations of that.
#define SUM_F32(k_root) {2e-6 * (k_root), 2e-6, 1e-12}, "fp32 sums of k products, sqrt(k) in atol"
// Tensor cores multiply bf16 exactly and add 16 products at a time to an fp32 sum that they cut off instead
// of rounding: k / 16 cuts of at most 2^-23 of a partial sum near sqrt(k), all in one direction, so
// that they add up: 2^-27 k sqrt(k). The mean square is of the same against sums near sqrt(k).
#define CUTS(k_root) (0x1p-27 * (k_root) * (k_root) * (k_root))
#define SUM_CUT(k_root)                                                                            \
    {2e-6 * (k_root) + CUTS(k_root), 2e-6,                                                         \
     1e-12 + 0x1p-54 * (k_root) * (k_root) * (k_root) * (k_root)},                                 \
        "sums of k exact products on tensor cores, cut off in fp32"
#define SUM_BF16(k_root)                                                                           \
    {2e-6 * (k_root) + CUTS(k_root), 0x1.04p-8, 1e-5}, "as above, rounded to bf16"
#define ATTENTION_F32  {1e-5, 1e-5, 1e-11}, "two products and a softmax of scores up to 10 in fp32"
#define ATTENTION_BF16 {2e-5, 0x1.04p-8, 1e-5}, "as in fp32, one rounding to bf16"
// Probabilities and their gradients are rounded to bf16 before their products: 2^-9 of terms up to 8.
#define ATTENTION_ROUNDED {2e-2, 0x1p-7, 1e-5}, "as in bf16, with factors of sums rounded to bf16"
#define LOSS_F32          {1e-7, 1e-5, 1e-10}, "loss and gradient within 1e-5 relative of fp64"
#define LOSS_BF16         {1e-7, 0x1.01p-8, 1e-5}, "fp32 arithmetic, gradient rounded once to bf16"
#define NOISE             {1e-6, 0x1.01p-8, 1e-5}, "the same draws; logf and cosf may differ in the last bit"
#define ADAM              {1e-7, 1e-6, 1e-12}, "a dozen fp32 operations"
#define SQUARES           {0.0, 1e-6, 1e-12}, "fp32 sums of 512 squares, the rest in fp64"

#define TA CASE_TRANSPOSE_A
#define TB CASE_TRANSPOSE_B

const struct kernel_case kernel_cases[] = {
    {"gemm", {1, 1, 1}, DTYPE_F32, 0, 1, SUM_F32(1)},
    {"gemm", {7, 13, 5}, DTYPE_F32, TB, 2, SUM_F32(3)},
    {"gemm", {11, 31, 255}, DTYPE_F32, 0, 3, SUM_F32(16)},
    {"gemm", {12, 32, 256}, DTYPE_F32, TB, 4, SUM_F32(16)},
    {"gemm", {13, 33, 257}, DTYPE_F32, TB, 5, SUM_F32(16)},
    {"gemm", {13, 33, 257}, DTYPE_F32, TA, 6, SUM_F32(16)},
    {"gemm", {13, 33, 257}, DTYPE_F32, TA | TB, 7, SUM_F32(16)},
    {"gemm", {67, 101, 43}, DTYPE_F32, CASE_BETA_ONE | CASE_STRIDED, 8, SUM_F32(8)},
    {"gemm", {67, 101, 43}, DTYPE_F32, CASE_BETA_D | CASE_STRIDED | TB, 9, SUM_F32(8)},
    {"gemm", {529, 97, 11}, DTYPE_F32, TA | CASE_STRIDED, 10, SUM_F32(4)},
    {"gemm", {5, 1025, 19}, DTYPE_F32, TB, 11, SUM_F32(5)},
    {"gemm", {3, 7, 5003}, DTYPE_F32, 0, 12, SUM_F32(71)},
    {"gemm", {512, 192, 576}, DTYPE_F32, TB, 13, SUM_F32(24)},
    {"gemm", {1, 1, 1}, DTYPE_BF16, 0, 14, SUM_BF16(1)},
    {"gemm", {13, 33, 257}, DTYPE_BF16, TB, 15, SUM_BF16(16)},
    {"gemm", {13, 33, 600}, DTYPE_BF16, TA | CASE_BETA_ONE, 16, SUM_BF16(25)},
    {"gemm", {67, 101, 43}, DTYPE_BF16, CASE_BETA_D | CASE_STRIDED, 17, SUM_BF16(8)},
    {"gemm", {67, 101, 600}, DTYPE_BF16, CASE_TO_F32 | CASE_BETA_ONE | TA, 18, SUM_CUT(25)},
    {"gemm", {530, 70, 40}, DTYPE_BF16, CASE_TO_F32 | TA | TB, 19, SUM_CUT(7)},
    {"gemm", {448, 192, 576}, DTYPE_BF16, TB, 20, SUM_BF16(24)},
    // Rows of A beside the multiples that tiles have, other sizes as aligned as a model's are.
    {"gemm", {257, 320, 512}, DTYPE_BF16, TB, 26, SUM_BF16(23)},
    {"gemm", {320, 512, 509}, DTYPE_BF16, TA | CASE_BETA_ONE | CASE_TO_F32, 27, SUM_CUT(23)},
    {"gemm", {129, 257, 1003}, DTYPE_BF16, CASE_STRIDED | CASE_TO_F32, 28, SUM_CUT(32)},
    {"gemm", {131, 192, 257}, DTYPE_BF16, TB | CASE_TO_F32 | CASE_UNALIGNED, 29, SUM_CUT(16)},
    {"gemm", {64, 65, 256}, DTYPE_BF16, TB | CASE_BETA_D | CASE_UNALIGNED, 901, SUM_BF16(16)},
    // The residual stream: fp32 added to a product of bf16, into other memory.
    {"gemm", {257, 320, 512}, DTYPE_BF16, TB | CASE_BETA_D | CASE_TO_F32, 903, SUM_CUT(23)},
    {"gemm",
     {67, 33, 43},
     DTYPE_BF16,
     TB | CASE_BETA_D | CASE_TO_F32 | CASE_STRIDED,
     904,
     SUM_CUT(7)},
    {"gemm", {67, 101, 43}, DTYPE_F32, CASE_BETA_ONE | CASE_UNALIGNED, 902, SUM_F32(8)},
    // Parts of k, aligned as a model's are, and not.
    {"gemm", {131, 264, 2048, 4}, DTYPE_BF16, CASE_TO_F32, 925, SUM_CUT(46)},
    {"gemm", {129, 255, 1250, 5}, DTYPE_BF16, CASE_TO_F32 | CASE_STRIDED, 926, SUM_CUT(36)},
    {"gemm", {67, 72, 1024, 8}, DTYPE_BF16, TB | CASE_TO_F32 | CASE_UNALIGNED, 927, SUM_CUT(32)},
    {"gemm", {7, 13, 999, 3}, DTYPE_F32, TB | CASE_STRIDED, 928, SUM_F32(32)},
    {"gemm", {300, 576, 65536, 2}, DTYPE_BF16, CASE_TO_F32 | CASE_BENCH, 929, SUM_CUT(256)},
    {"gemm", {448, 49152, 576}, DTYPE_F32, TB | CASE_BENCH, 21, SUM_F32(24)},
    {"gemm", {448, 576, 49152}, DTYPE_F32, CASE_BENCH, 22, SUM_F32(222)},
    {"gemm", {512, 3072, 576}, DTYPE_F32, TB | CASE_BENCH, 23, SUM_F32(24)},
    {"gemm", {3072, 576, 512}, DTYPE_F32, TA | CASE_BETA_ONE | CASE_BENCH, 24, SUM_F32(23)},
    {"gemm", {448, 49152, 576}, DTYPE_BF16, TB | CASE_TO_F32 | CASE_BENCH, 25, SUM_CUT(24)},

    {"rms_norm_forward", {1, 1}, DTYPE_F32, 0, 30, ROW_F32},
    {"rms_norm_forward", {3, 257}, DTYPE_F32, 0, 31, ROW_F32},
    {"rms_norm_forward", {5, 511}, DTYPE_F32, CASE_OFFSET, 32, ROW_F32},
    {"rms_norm_forward", {5, 512}, DTYPE_F32, CASE_IN_PLACE, 33, ROW_F32},
    {"rms_norm_forward", {5, 513}, DTYPE_F32, CASE_FROZEN, 34, ROW_F32},
    {"rms_norm_forward", {512, 576}, DTYPE_F32, 0, 35, ROW_F32},
    {"rms_norm_forward", {1, 1}, DTYPE_BF16, 0, 36, ROW_BF16},
    {"rms_norm_forward", {3, 257}, DTYPE_BF16, CASE_OFFSET, 37, ROW_BF16},
    {"rms_norm_forward", {17, 1031}, DTYPE_BF16, CASE_IN_PLACE | CASE_FROZEN, 38, ROW_BF16},
    {"rms_norm_forward", {512, 576}, DTYPE_BF16, 0, 39, ROW_BF16},
    {"rms_norm_forward", {7, 257}, DTYPE_BF16, CASE_TO_F32, 600, ROW_BF16},
    {"rms_norm_forward", {7, 520}, DTYPE_BF16, CASE_TO_F32 | CASE_FROZEN, 601, ROW_BF16},
    {"rms_norm_forward", {19, 5120}, DTYPE_BF16, CASE_TO_F32, 602, ROW_BF16},
    {"rms_norm_forward", {3, 4096}, DTYPE_BF16, CASE_OFFSET | CASE_IN_PLACE, 300, ROW_BF16},
    {"rms_norm_forward", {5, 5120}, DTYPE_BF16, 0, 301, ROW_BF16},
    {"rms_norm_forward", {5, 5120}, DTYPE_F32, CASE_IN_PLACE, 302, ROW_F32},
    {"rms_norm_forward", {5, 5120}, DTYPE_BF16, CASE_UNALIGNED, 303, ROW_BF16},
    {"rms_norm_forward", {2, 8200}, DTYPE_BF16, 0, 304, ROW_BF16},
    {"rms_norm_forward", {2, 17408}, DTYPE_BF16, CASE_IN_PLACE, 305, ROW_BF16},
    {"rms_norm_forward", {2, 40000}, DTYPE_BF16, CASE_IN_PLACE, 306, ROW_BF16},

    {"rms_norm_backward", {1, 3}, DTYPE_F32, 0, 40, ROW_F32},
    {"rms_norm_backward", {3, 257}, DTYPE_F32, CASE_ADD, 41, ROW_F32},
    {"rms_norm_backward", {15, 511}, DTYPE_F32, CASE_OFFSET, 42, ROW_F32},
    {"rms_norm_backward", {16, 512}, DTYPE_F32, CASE_IN_PLACE, 43, ROW_F32},
    {"rms_norm_backward", {17, 513}, DTYPE_F32, CASE_FROZEN | CASE_ADD, 44, ROW_F32},
    {"rms_norm_backward", {4099, 7}, DTYPE_F32, 0, 45, ROW_F32},
    {"rms_norm_backward", {512, 576}, DTYPE_F32, CASE_ADD, 46, ROW_F32},
    {"rms_norm_backward", {3, 257}, DTYPE_BF16, CASE_ADD, 47, ROW_BF16},
    {"rms_norm_backward", {19, 1031}, DTYPE_BF16, CASE_IN_PLACE | CASE_OFFSET, 48, ROW_BF16},
    {"rms_norm_backward", {512, 576}, DTYPE_BF16, CASE_ADD, 49, ROW_BF16},
    {"rms_norm_backward", {7, 257}, DTYPE_BF16, CASE_TO_F32 | CASE_ADD, 603, ROW_BF16},
    {"rms_norm_backward", {7, 520}, DTYPE_BF16, CASE_TO_F32, 604, ROW_BF16},
    {"rms_norm_backward", {519, 5120}, DTYPE_BF16, CASE_TO_F32 | CASE_ADD, 605, ROW_BF16},
    {"rms_norm_backward", {19, 20480}, DTYPE_BF16, CASE_TO_F32 | CASE_ADD, 606, ROW_BF16},
    {"rms_norm_backward", {7, 4096}, DTYPE_BF16, CASE_IN_PLACE, 310, ROW_BF16},
    {"rms_norm_backward", {259, 4096}, DTYPE_BF16, CASE_TO_F32 | CASE_ADD, 318, ROW_BF16},
    {"rms_norm_backward", {3, 8192}, DTYPE_BF16, CASE_TO_F32 | CASE_ADD, 319, ROW_BF16},
    {"rms_norm_backward", {261, 5120}, DTYPE_BF16, CASE_ADD, 311, ROW_BF16},
    {"rms_norm_backward", {7, 5120}, DTYPE_F32, CASE_ADD, 312, ROW_F32},
    {"rms_norm_backward", {7, 5120}, DTYPE_BF16, CASE_ADD | CASE_UNALIGNED, 313, ROW_BF16},
    {"rms_norm_backward", {3, 10240}, DTYPE_BF16, CASE_FROZEN, 314, ROW_BF16},
    {"rms_norm_backward", {3, 10248}, DTYPE_BF16, CASE_ADD, 315, ROW_BF16},
    {"rms_norm_backward", {2111, 40}, DTYPE_F32, CASE_IN_PLACE, 316, ROW_F32},
    {"rms_norm_backward", {2111, 72}, DTYPE_BF16, CASE_ADD, 317, ROW_BF16},

    {"norm_rope_forward", {1, 1, 2}, DTYPE_F32, 0, 50, ROW_F32},
    {"norm_rope_forward", {7, 3, 6}, DTYPE_F32, CASE_STRIDED, 51, ROW_F32},
    {"norm_rope_forward", {5, 2, 510}, DTYPE_F32, 0, 52, ROW_F32},
    {"norm_rope_forward", {5, 2, 512}, DTYPE_F32, CASE_NO_NORM, 53, ROW_F32},
    {"norm_rope_forward", {512, 9, 64}, DTYPE_F32, CASE_STRIDED, 54, ROW_F32},
    {"norm_rope_forward", {7, 3, 6}, DTYPE_BF16, CASE_STRIDED, 55, ROW_BF16},
    {"norm_rope_forward", {7, 3, 34}, DTYPE_BF16, CASE_NO_NORM, 56, ROW_BF16},
    {"norm_rope_forward", {512, 9, 64}, DTYPE_BF16, 0, 57, ROW_BF16},
    {"norm_rope_forward", {5, 32, 128}, DTYPE_BF16, CASE_STRIDED, 320, ROW_BF16},
    {"norm_rope_forward", {7, 8, 128}, DTYPE_BF16, CASE_IN_PLACE, 321, ROW_BF16},
    {"norm_rope_forward", {7, 5, 128}, DTYPE_BF16, CASE_STRIDED | CASE_UNALIGNED, 322, ROW_BF16},
    {"norm_rope_forward", {3, 5, 128}, DTYPE_F32, CASE_STRIDED | CASE_NO_NORM, 323, ROW_F32},
    {"norm_rope_forward", {4, 5, 64}, DTYPE_BF16, CASE_STRIDED | CASE_ODD, 329, ROW_BF16},
    {"norm_rope_forward", {5, 3, 96}, DTYPE_BF16, CASE_STRIDED, 324, ROW_BF16},
    {"norm_rope_forward", {5, 3, 96}, DTYPE_F32, CASE_IN_PLACE, 325, ROW_F32},
    {"norm_rope_forward", {5, 7, 256}, DTYPE_BF16, CASE_STRIDED, 326, ROW_BF16},
    {"norm_rope_forward", {3, 2, 512}, DTYPE_BF16, CASE_STRIDED, 327, ROW_BF16},
    {"norm_rope_forward", {3, 3, 10}, DTYPE_F32, CASE_IN_PLACE | CASE_NO_NORM, 328, ROW_F32},

    {"norm_rope_backward", {1, 1, 2}, DTYPE_F32, 0, 60, ROW_F32},
    {"norm_rope_backward", {7, 3, 6}, DTYPE_F32, CASE_STRIDED, 61, ROW_F32},
    {"norm_rope_backward", {15, 2, 130}, DTYPE_F32, CASE_NO_NORM, 62, ROW_F32},
    {"norm_rope_backward", {4097, 1, 4}, DTYPE_F32, 0, 63, ROW_F32},
    {"norm_rope_backward", {512, 3, 64}, DTYPE_F32, CASE_STRIDED, 64, ROW_F32},
    {"norm_rope_backward", {7, 3, 6}, DTYPE_BF16, CASE_STRIDED, 65, ROW_BF16},
    {"norm_rope_backward", {17, 3, 34}, DTYPE_BF16, CASE_TO_F32, 66, ROW_BF16},
    {"norm_rope_backward", {512, 9, 64}, DTYPE_BF16, CASE_TO_F32 | CASE_STRIDED, 67, ROW_BF16},
    {"norm_rope_backward", {9, 32, 128}, DTYPE_BF16, CASE_STRIDED, 330, ROW_BF16},
    {"norm_rope_backward", {9, 8, 128}, DTYPE_BF16, CASE_IN_PLACE | CASE_STRIDED, 331, ROW_BF16},
    {"norm_rope_backward", {1031, 8, 128}, DTYPE_BF16, CASE_TO_F32, 332, ROW_BF16},
    {"norm_rope_backward", {7, 5, 128}, DTYPE_BF16, CASE_STRIDED | CASE_UNALIGNED, 333, ROW_BF16},
    {"norm_rope_backward", {7, 5, 128}, DTYPE_F32, CASE_IN_PLACE, 334, ROW_F32},
    {"norm_rope_backward", {5, 3, 96}, DTYPE_BF16, CASE_STRIDED, 335, ROW_BF16},
    {"norm_rope_backward", {4, 5, 64}, DTYPE_BF16, CASE_STRIDED | CASE_ODD, 342, ROW_BF16},
    {"norm_rope_backward", {5, 3, 96}, DTYPE_F32, CASE_NO_NORM | CASE_IN_PLACE, 336, ROW_F32},
    {"norm_rope_backward", {5, 7, 256}, DTYPE_BF16, CASE_STRIDED, 337, ROW_BF16},
    {"norm_rope_backward", {3, 2, 512}, DTYPE_BF16, CASE_IN_PLACE, 338, ROW_BF16},
    {"norm_rope_backward", {3, 3, 10}, DTYPE_F32, CASE_IN_PLACE | CASE_STRIDED, 339, ROW_F32},

    {"swiglu_forward", {1, 1}, DTYPE_F32, 0, 70, ROW_F32},
    {"swiglu_forward", {3, 511}, DTYPE_F32, 0, 71, ROW_F32},
    {"swiglu_forward", {3, 512}, DTYPE_F32, 0, 72, ROW_F32},
    {"swiglu_forward", {3, 513}, DTYPE_F32, 0, 73, ROW_F32},
    {"swiglu_forward", {512, 1536}, DTYPE_F32, 0, 74, ROW_F32},
    {"swiglu_forward", {3, 257}, DTYPE_BF16, 0, 75, ROW_BF16},
    {"swiglu_forward", {512, 1536}, DTYPE_BF16, 0, 76, ROW_BF16},
    {"swiglu_forward", {3, 17408}, DTYPE_BF16, 0, 340, ROW_BF16},
    {"swiglu_forward", {5, 256}, DTYPE_BF16, CASE_UNALIGNED, 341, ROW_BF16},

    {"swiglu_backward", {1, 1}, DTYPE_F32, 0, 80, ROW_F32},
    {"swiglu_backward", {3, 511}, DTYPE_F32, CASE_IN_PLACE, 81, ROW_F32},
    {"swiglu_backward", {3, 512}, DTYPE_F32, 0, 82, ROW_F32},
    {"swiglu_backward", {3, 513}, DTYPE_F32, 0, 83, ROW_F32},
    {"swiglu_backward", {512, 1536}, DTYPE_F32, CASE_IN_PLACE, 84, ROW_F32},
    {"swiglu_backward", {3, 257}, DTYPE_BF16, CASE_IN_PLACE, 85, ROW_BF16},
    {"swiglu_backward", {512, 1536}, DTYPE_BF16, 0, 86, ROW_BF16},
    {"swiglu_backward", {3, 17408}, DTYPE_BF16, CASE_IN_PLACE, 345, ROW_BF16},
    {"swiglu_backward", {5, 256}, DTYPE_BF16, CASE_IN_PLACE | CASE_UNALIGNED, 346, ROW_BF16},
    {"swiglu_backward", {3, 264}, DTYPE_F32, CASE_IN_PLACE, 347, ROW_F32},

    {"gather_rows", {1, 1, 1}, DTYPE_F32, 0, 90, EXACT},
    {"gather_rows", {7, 513, 5}, DTYPE_F32, CASE_STRIDED, 91, EXACT},
    {"gather_rows", {7, 511, 11}, DTYPE_F32, CASE_SCALED, 92, ROW_F32},
    {"gather_rows", {7, 29, 5}, DTYPE_BF16, CASE_TO_F32 | CASE_STRIDED, 93, EXACT},
    {"gather_rows", {512, 576, 1009}, DTYPE_BF16, CASE_SCALED, 94, ROUND_BF16},
    {"gather_rows", {9, 5120, 31}, DTYPE_BF16, 0, 350, EXACT},
    {"gather_rows", {9, 5120, 31}, DTYPE_BF16, CASE_STRIDED | CASE_TO_F32, 351, EXACT},
    {"gather_rows", {9, 264, 31}, DTYPE_F32, CASE_UNALIGNED, 352, EXACT},
    {"gather_rows", {3, 8264, 5}, DTYPE_F32, CASE_SCALED, 353, ROW_F32},

    {"scatter_rows", {1, 1, 1}, DTYPE_F32, 0, 100, EXACT},
    {"scatter_rows", {7, 513, 15}, DTYPE_F32, 0, 101, EXACT},
    {"scatter_rows", {7, 29, 15}, DTYPE_F32, CASE_SCALED, 102, ROW_F32},
    {"scatter_rows", {7, 29, 7}, DTYPE_BF16, CASE_TO_F32, 103, EXACT},
    {"scatter_rows", {448, 576, 512}, DTYPE_BF16, CASE_SCALED, 104, ROUND_BF16},
    {"scatter_rows", {9, 5120, 17}, DTYPE_BF16, CASE_SCALED, 360, ROUND_BF16},
    {"scatter_rows", {9, 264, 9}, DTYPE_BF16, CASE_UNALIGNED, 361, EXACT},
    {"scatter_rows", {1, 8264, 3}, DTYPE_F32, 0, 362, EXACT},

    {"context_load", {1, 1, 1, 1}, DTYPE_F32, 0, 110, EXACT},
    {"context_load", {23, 4, 3, 513}, DTYPE_F32, 0, 111, EXACT},
    {"context_load", {23, 4, 3, 17}, DTYPE_F32, CASE_NORMAL | CASE_BLANK, 112, NOISE},
    {"context_load", {23, 4, 3, 17}, DTYPE_F32, CASE_UNIFORM, 113, NOISE},
    {"context_load", {23, 4, 3, 513}, DTYPE_BF16, CASE_UNIFORM | CASE_BLANK, 114, NOISE},
    {"context_load", {1009, 6, 5, 576}, DTYPE_BF16, 0, 115, EXACT},
    {"context_load", {7, 5, 5, 5120}, DTYPE_BF16, CASE_BLANK, 370, EXACT},
    {"context_load", {11, 3, 2, 1032}, DTYPE_BF16, CASE_NORMAL, 371, NOISE},
    {"context_load", {11, 3, 2, 1032}, DTYPE_F32, CASE_BLANK | CASE_UNALIGNED, 372, EXACT},
    {"context_load", {1, 1, 1, 1}, DTYPE_F32, CASE_FLOAT8, 373, EXACT},
    {"context_load", {23, 4, 3, 513}, DTYPE_F32, CASE_FLOAT8, 374, EXACT},
    {"context_load", {23, 4, 3, 1032}, DTYPE_F32, CASE_FLOAT8 | CASE_BLANK, 375, EXACT},
    {"context_load", {1009, 6, 5, 576}, DTYPE_BF16, CASE_FLOAT8, 376, EXACT},
    {"context_load", {7, 5, 5, 5120}, DTYPE_BF16, CASE_FLOAT8 | CASE_BLANK, 377, EXACT},
    {"context_load", {11, 3, 2, 1032}, DTYPE_BF16, CASE_FLOAT8 | CASE_UNALIGNED, 378, EXACT},
    {"context_load", {11, 3, 2, 1032}, DTYPE_F32, CASE_FLOAT8 | CASE_NORMAL, 379, NOISE},
    {"context_load", {11, 3, 2, 1032}, DTYPE_BF16, CASE_FLOAT8 | CASE_UNIFORM, 930, NOISE},

    {"attention_forward", {1, 1, 1, 1, 1, 2}, DTYPE_F32, 0, 120, ATTENTION_F32},
    {"attention_forward", {3, 5, 0, 2, 1, 6}, DTYPE_F32, CASE_CAUSAL, 121, ATTENTION_F32},
    {"attention_forward", {7, 5, 37, 3, 3, 7}, DTYPE_F32, CASE_STRIDED, 122, ATTENTION_F32},
    {"attention_forward",
     {9, 8, 131, 6, 2, 16},
     DTYPE_F32,
     CASE_CAUSAL | CASE_WINDOW,
     123,
     ATTENTION_F32},
    {"attention_forward", {5, 4, 3083, 4, 2, 8}, DTYPE_F32, 0, 124, ATTENTION_F32},
    {"attention_forward", {2, 64, 90, 5, 1, 8}, DTYPE_F32, CASE_STRIDED, 125, ATTENTION_F32},
    {"attention_forward", {8, 8, 1024, 9, 3, 64}, DTYPE_F32, 0, 126, ATTENTION_F32},
    {"attention_forward", {3, 4, 700, 2, 1, 512}, DTYPE_F32, 0, 204, ATTENTION_F32},
    {"attention_forward", {2, 5, 37, 4, 2, 300}, DTYPE_BF16, CASE_CAUSAL, 415, ATTENTION_BF16},
    {"attention_forward", {7, 5, 37, 3, 3, 7}, DTYPE_BF16, CASE_STRIDED, 127, ATTENTION_BF16},
    {"attention_forward", {8, 8, 600, 9, 3, 64}, DTYPE_BF16, CASE_WINDOW, 128, ATTENTION_ROUNDED},
    {"attention_forward", {9, 16, 301, 8, 2, 128}, DTYPE_BF16, 0, 400, ATTENTION_ROUNDED},
    {"attention_forward",
     {24, 16, 700, 8, 2, 128},
     DTYPE_BF16,
     CASE_WINDOW,
     401,
     ATTENTION_ROUNDED},
    {"attention_forward",
     {11, 7, 333, 9, 3, 96},
     DTYPE_BF16,
     CASE_CAUSAL | CASE_WINDOW,
     402,
     ATTENTION_ROUNDED},
    {"attention_forward", {5, 32, 260, 6, 6, 64}, DTYPE_BF16, CASE_STRIDED, 403, ATTENTION_ROUNDED},
    {"attention_forward", {70, 2, 500, 3, 1, 64}, DTYPE_BF16, 0, 404, ATTENTION_ROUNDED},
    {"attention_forward", {3, 64, 190, 16, 1, 64}, DTYPE_BF16, CASE_CAUSAL, 405, ATTENTION_ROUNDED},
    {"attention_forward",
     {41, 3, 129, 5, 1, 128},
     DTYPE_BF16,
     CASE_STRIDED | CASE_WINDOW,
     406,
     ATTENTION_ROUNDED},
    {"attention_forward", {6, 16, 270, 4, 2, 256}, DTYPE_BF16, 0, 407, ATTENTION_ROUNDED},
    {"attention_forward",
     {5, 7, 100, 8, 1, 256},
     DTYPE_BF16,
     CASE_CAUSAL | CASE_STRIDED,
     408,
     ATTENTION_ROUNDED},
    {"attention_forward", {13, 16, 1100, 4, 4, 128}, DTYPE_BF16, 0, 409, ATTENTION_ROUNDED},
    {"attention_forward", {3, 16, 0, 4, 2, 128}, DTYPE_BF16, 0, 410, ATTENTION_ROUNDED},
    {"attention_forward", {1, 2, 1, 1, 1, 96}, DTYPE_BF16, 0, 411, ATTENTION_ROUNDED},
    {"attention_forward", {136, 16, 100, 16, 16, 64}, DTYPE_BF16, 0, 440, ATTENTION_ROUNDED},
    {"attention_forward", {9, 8, 200, 10, 2, 128}, DTYPE_BF16, CASE_WINDOW, 441, ATTENTION_ROUNDED},
    {"attention_forward", {13, 5, 90, 7, 1, 64}, DTYPE_BF16, CASE_STRIDED, 442, ATTENTION_ROUNDED},
    {"attention_forward", {5, 16, 70, 20, 1, 64}, DTYPE_BF16, CASE_CAUSAL, 443, ATTENTION_ROUNDED},
    {"attention_forward", {3, 8, 50, 32, 1, 128}, DTYPE_BF16, 0, 444, ATTENTION_ROUNDED},
    // Several tiles for each CTA of a large GPU, and groups of heads that do not divide a tile.
    {"attention_forward", {520, 8, 1500, 9, 3, 64}, DTYPE_BF16, 0, 445, ATTENTION_ROUNDED},
    {"attention_forward", {3, 6, 37, 4, 2, 250}, DTYPE_F32, CASE_WINDOW, 130, ATTENTION_F32},
    {"attention_forward", {64, 8, 4096, 9, 3, 64}, DTYPE_F32, CASE_BENCH, 129, ATTENTION_F32},

    {"attention_backward", {1, 1, 1, 1, 1, 2}, DTYPE_F32, 0, 140, ATTENTION_F32},
    {"attention_backward", {3, 5, 0, 2, 1, 6}, DTYPE_F32, CASE_CAUSAL, 141, ATTENTION_F32},
    {"attention_backward", {7, 5, 37, 3, 3, 7}, DTYPE_F32, CASE_STRIDED, 142, ATTENTION_F32},
    {"attention_backward",
     {9, 8, 131, 6, 2, 16},
     DTYPE_F32,
     CASE_CAUSAL | CASE_WINDOW,
     143,
     ATTENTION_F32},
    {"attention_backward", {5, 4, 3083, 4, 2, 8}, DTYPE_F32, 0, 144, ATTENTION_F32},
    {"attention_backward", {2, 64, 90, 5, 1, 8}, DTYPE_F32, CASE_STRIDED, 145, ATTENTION_F32},
    {"attention_backward", {8, 8, 1024, 9, 3, 64}, DTYPE_F32, 0, 146, ATTENTION_F32},
    {"attention_backward", {3, 4, 700, 2, 1, 512}, DTYPE_F32, 0, 205, ATTENTION_F32},
    {"attention_backward", {2, 5, 37, 4, 2, 300}, DTYPE_BF16, CASE_CAUSAL, 435, ATTENTION_BF16},
    {"attention_backward", {7, 5, 37, 3, 3, 7}, DTYPE_BF16, CASE_STRIDED, 147, ATTENTION_BF16},
    {"attention_backward", {8, 8, 600, 9, 3, 64}, DTYPE_BF16, CASE_WINDOW, 148, ATTENTION_ROUNDED},
    {"attention_backward", {9, 16, 301, 8, 2, 128}, DTYPE_BF16, 0, 420, ATTENTION_ROUNDED},
    {"attention_backward",
     {24, 16, 700, 8, 2, 128},
     DTYPE_BF16,
     CASE_WINDOW,
     421,
     ATTENTION_ROUNDED},
    {"attention_backward",
     {11, 7, 333, 9, 3, 96},
     DTYPE_BF16,
     CASE_CAUSAL | CASE_WINDOW,
     422,
     ATTENTION_ROUNDED},
    {"attention_backward",
     {5, 32, 260, 6, 6, 64},
     DTYPE_BF16,
     CASE_STRIDED,
     423,
     ATTENTION_ROUNDED},
    {"attention_backward", {70, 2, 500, 3, 1, 64}, DTYPE_BF16, 0, 424, ATTENTION_ROUNDED},
    {"attention_backward",
     {3, 64, 190, 16, 1, 64},
     DTYPE_BF16,
     CASE_CAUSAL,
     425,
     ATTENTION_ROUNDED},
    {"attention_backward",
     {41, 3, 129, 5, 1, 128},
     DTYPE_BF16,
     CASE_STRIDED | CASE_WINDOW,
     426,
     ATTENTION_ROUNDED},
    {"attention_backward", {6, 16, 270, 4, 2, 256}, DTYPE_BF16, 0, 427, ATTENTION_ROUNDED},
    {"attention_backward",
     {5, 7, 100, 8, 1, 256},
     DTYPE_BF16,
     CASE_CAUSAL | CASE_STRIDED,
     428,
     ATTENTION_ROUNDED},
    {"attention_backward", {13, 16, 1100, 4, 4, 128}, DTYPE_BF16, 0, 429, ATTENTION_ROUNDED},
    {"attention_backward", {3, 16, 0, 4, 2, 128}, DTYPE_BF16, 0, 430, ATTENTION_ROUNDED},
    {"attention_backward", {1, 2, 1, 1, 1, 96}, DTYPE_BF16, 0, 431, ATTENTION_ROUNDED},
    {"attention_backward", {136, 16, 100, 16, 16, 64}, DTYPE_BF16, 0, 450, ATTENTION_ROUNDED},
    {"attention_backward",
     {9, 8, 200, 10, 2, 128},
     DTYPE_BF16,
     CASE_WINDOW,
     451,
     ATTENTION_ROUNDED},
    {"attention_backward", {13, 5, 90, 7, 1, 64}, DTYPE_BF16, CASE_STRIDED, 452, ATTENTION_ROUNDED},
    {"attention_backward", {5, 16, 70, 20, 1, 64}, DTYPE_BF16, CASE_CAUSAL, 453, ATTENTION_ROUNDED},
    {"attention_backward", {3, 8, 50, 32, 1, 128}, DTYPE_BF16, 0, 454, ATTENTION_ROUNDED},
    {"attention_backward", {520, 8, 1500, 9, 3, 64}, DTYPE_BF16, 0, 455, ATTENTION_ROUNDED},
    {"attention_backward", {3, 6, 37, 4, 2, 250}, DTYPE_F32, CASE_WINDOW, 150, ATTENTION_F32},
    {"attention_backward", {64, 8, 4096, 9, 3, 64}, DTYPE_F32, CASE_BENCH, 149, ATTENTION_F32},

    {"softmax_loss", {1, 1, 1, 0}, DTYPE_F32, CASE_TO_F32, 160, LOSS_F32},
    {"softmax_loss", {5, 511, 7, 0}, DTYPE_F32, CASE_TO_F32, 161, LOSS_F32},
    {"softmax_loss", {5, 512, 3, 1}, DTYPE_F32, CASE_TO_F32, 162, LOSS_F32},
    {"softmax_loss", {5, 513, 5, 2}, DTYPE_F32, CASE_TO_F32, 163, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 3}, DTYPE_F32, CASE_TO_F32, 164, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 4}, DTYPE_F32, CASE_TO_F32, 165, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 5}, DTYPE_F32, CASE_TO_F32, 166, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 6}, DTYPE_F32, CASE_TO_F32, 167, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 7}, DTYPE_F32, CASE_TO_F32, 168, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 8}, DTYPE_F32, CASE_TO_F32, 169, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 9}, DTYPE_F32, CASE_TO_F32 | CASE_IN_PLACE, 170, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 10}, DTYPE_F32, CASE_TO_F32 | CASE_IN_PLACE, 171, LOSS_F32},
    {"softmax_loss", {1000, 1003, 600, 11}, DTYPE_F32, CASE_TO_F32 | CASE_IN_PLACE, 172, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 11}, DTYPE_F32, CASE_IN_PLACE, 173, LOSS_BF16},
    {"softmax_loss", {7, 1003, 5, 11}, DTYPE_F32, CASE_EXCLUDED | CASE_TO_F32, 174, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 4}, DTYPE_F32, CASE_NO_TEACHER | CASE_TO_F32, 175, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 4}, DTYPE_F32, CASE_NO_TEACHER | CASE_NO_GRADIENT, 176, LOSS_F32},
    {"softmax_loss", {7, 1003, 5, 11}, DTYPE_F32, CASE_NO_GRADIENT, 177, LOSS_F32},
    {"softmax_loss", {2, 300007, 2, 11}, DTYPE_F32, CASE_TO_F32, 178, LOSS_F32},
    {"softmax_loss", {16, 49152, 12, 0}, DTYPE_F32, CASE_IN_PLACE, 179, LOSS_BF16},
    {"softmax_loss", {7, 1003, 5, 11}, DTYPE_BF16, CASE_IN_PLACE, 180, LOSS_BF16},
    {"softmax_loss", {7, 1003, 5, 11}, DTYPE_BF16, CASE_TO_F32, 181, LOSS_F32},
    {"softmax_loss", {16, 49152, 12, 0}, DTYPE_BF16, CASE_IN_PLACE, 182, LOSS_BF16},
    {"softmax_loss", {6, 4100, 5, 0}, DTYPE_F32, CASE_TO_F32, 1600, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 1}, DTYPE_F32, CASE_TO_F32, 1601, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 2}, DTYPE_F32, CASE_TO_F32, 1602, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 3}, DTYPE_F32, CASE_TO_F32, 1603, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 4}, DTYPE_F32, CASE_TO_F32, 1604, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 5}, DTYPE_F32, CASE_TO_F32, 1605, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 6}, DTYPE_F32, CASE_TO_F32, 1606, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 7}, DTYPE_F32, CASE_TO_F32, 1607, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 8}, DTYPE_F32, CASE_TO_F32, 1608, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 9}, DTYPE_F32, CASE_TO_F32, 1609, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 10}, DTYPE_F32, CASE_TO_F32, 1610, LOSS_F32},
    {"softmax_loss", {6, 4100, 5, 11}, DTYPE_F32, CASE_TO_F32, 1611, LOSS_F32},
    {"softmax_loss",
     {9, 4096, 3, 0},
     DTYPE_F32,
     CASE_TO_F32 | CASE_IN_PLACE | CASE_SORTED,
     1612,
     LOSS_F32},
    {"softmax_loss",
     {9, 8204, 3, 11},
     DTYPE_F32,
     CASE_TO_F32 | CASE_IN_PLACE | CASE_SORTED,
     1613,
     LOSS_F32},
    {"softmax_loss", {9, 12300, 4, 0}, DTYPE_F32, CASE_IN_PLACE | CASE_SORTED, 1614, LOSS_BF16},
    {"softmax_loss", {9, 12300, 4, 11}, DTYPE_F32, CASE_IN_PLACE | CASE_SORTED, 1615, LOSS_BF16},
    {"softmax_loss", {9, 12304, 4, 11}, DTYPE_BF16, CASE_IN_PLACE | CASE_SORTED, 1616, LOSS_BF16},
    {"softmax_loss", {9, 12304, 4, 0}, DTYPE_BF16, CASE_STRIDED, 1617, LOSS_BF16},
    {"softmax_loss", {9, 12300, 4, 0}, DTYPE_F32, CASE_STRIDED, 1618, LOSS_BF16},
    {"softmax_loss", {7, 4100, 5, 11}, DTYPE_F32, CASE_UNALIGNED | CASE_TO_F32, 1619, LOSS_F32},
    {"softmax_loss", {7, 4104, 5, 0}, DTYPE_BF16, CASE_UNALIGNED | CASE_IN_PLACE, 1620, LOSS_BF16},
    {"softmax_loss", {7, 4100, 5, 11}, DTYPE_F32, CASE_EXCLUDED | CASE_TO_F32, 1621, LOSS_F32},
    {"softmax_loss", {7, 4100, 5, 0}, DTYPE_F32, CASE_EXCLUDED | CASE_TO_F32, 1622, LOSS_F32},
    {"softmax_loss", {11, 1003, 7, 11}, DTYPE_F32, CASE_NOT_FINITE | CASE_TO_F32, 1623, LOSS_F32},
    {"softmax_loss",
     {11, 4100, 7, 11},
     DTYPE_F32,
     CASE_NOT_FINITE | CASE_TO_F32 | CASE_IN_PLACE,
     1624,
     LOSS_F32},
    {"softmax_loss", {11, 4100, 7, 0}, DTYPE_F32, CASE_NOT_FINITE | CASE_IN_PLACE, 1625, LOSS_BF16},
    {"softmax_loss",
     {11, 4104, 7, 8},
     DTYPE_BF16,
     CASE_NOT_FINITE | CASE_IN_PLACE,
     1626,
     LOSS_BF16},
    {"softmax_loss",
     {7, 4100, 5, 4},
     DTYPE_F32,
     CASE_NO_TEACHER | CASE_TO_F32 | CASE_IN_PLACE,
     1627,
     LOSS_F32},
    {"softmax_loss",
     {7, 4104, 5, 4},
     DTYPE_BF16,
     CASE_NO_TEACHER | CASE_NO_GRADIENT,
     1628,
     LOSS_F32},
    {"softmax_loss", {7, 4100, 5, 11}, DTYPE_F32, CASE_NO_GRADIENT, 1629, LOSS_F32},
    {"softmax_loss", {7, 4100, 5, 0}, DTYPE_F32, CASE_NO_GRADIENT, 1630, LOSS_F32},
    {"softmax_loss", {150, 41000, 70, 0}, DTYPE_F32, CASE_IN_PLACE | CASE_SORTED, 1631, LOSS_BF16},
    {"softmax_loss", {3, 81924, 2, 9}, DTYPE_F32, CASE_IN_PLACE | CASE_SORTED, 1632, LOSS_BF16},
    {"softmax_loss",
     {3, 151936, 2, 0},
     DTYPE_F32,
     CASE_TO_F32 | CASE_IN_PLACE | CASE_SORTED,
     1633,
     LOSS_F32},
    {"softmax_loss", {2, 151936, 2, 8}, DTYPE_BF16, CASE_IN_PLACE, 1634, LOSS_BF16},
    {"softmax_loss", {5, 248320, 2, 0}, DTYPE_F32, CASE_IN_PLACE | CASE_SORTED, 1635, LOSS_BF16},
    {"softmax_loss", {2, 248320, 2, 11}, DTYPE_F32, CASE_TO_F32 | CASE_IN_PLACE, 1636, LOSS_F32},
    {"softmax_loss", {3, 248320, 2, 0}, DTYPE_BF16, CASE_IN_PLACE | CASE_SORTED, 1637, LOSS_BF16},
    {"softmax_loss", {2, 300000, 1, 0}, DTYPE_F32, CASE_IN_PLACE | CASE_SORTED, 1638, LOSS_BF16},
    {"softmax_loss", {2, 300000, 2, 11}, DTYPE_BF16, CASE_IN_PLACE, 1639, LOSS_BF16},
    {"softmax_loss",
     {448, 49152, 400, 0},
     DTYPE_F32,
     CASE_TO_F32 | CASE_IN_PLACE | CASE_BENCH,
     183,
     LOSS_F32},
    {"softmax_loss",
     {64, 49152, 64, 11},
     DTYPE_F32,
     CASE_TO_F32 | CASE_IN_PLACE | CASE_BENCH,
     184,
     LOSS_F32},

    {"adamw", {1, 1}, DTYPE_F32, 0, 190, ADAM},
    {"adamw", {511, 1}, DTYPE_F32, CASE_FROZEN, 191, ADAM},
    {"adamw", {513, 2}, DTYPE_BF16, 0, 192, ADAM},
    {"adamw", {1031, 100000}, DTYPE_BF16, 0, 193, ADAM},
    {"adamw", {331776, 10}, DTYPE_BF16, 0, 194, ADAM},
    {"adamw", {4103, 3}, DTYPE_BF16, CASE_UNALIGNED, 380, ADAM},
    {"adamw", {4103, 3}, DTYPE_F32, 0, 381, ADAM},
    {"adamw", {4095, 3}, DTYPE_F32, CASE_FROZEN, 382, ADAM},

    {"sum_squares", {1}, DTYPE_F32, 0, 200, SQUARES},
    {"sum_squares", {1031}, DTYPE_F32, 0, 201, SQUARES},
    {"sum_squares", {524289}, DTYPE_F32, 0, 202, SQUARES},
    {"sum_squares", {1000003}, DTYPE_F32, 0, 203, SQUARES},
    {"sum_squares", {300001}, DTYPE_F32, CASE_UNALIGNED, 385, SQUARES},

    {"convert", {1}, DTYPE_F32, 0, 210, ROUND_BF16},
    {"convert", {513}, DTYPE_BF16, CASE_TO_F32, 211, EXACT},
    {"convert", {331777}, DTYPE_F32, 0, 212, ROUND_BF16},
    {"convert", {4103}, DTYPE_BF16, CASE_TO_F32 | CASE_UNALIGNED, 390, EXACT},
    {"convert", {4103}, DTYPE_BF16, 0, 391, EXACT},
    {"convert", {4103}, DTYPE_F32, CASE_TO_F32, 392, EXACT},
    {"convert", {5 * 264, 264}, DTYPE_F32, 0, 393, ROUND_BF16},
    {"convert", {5 * 67, 67}, DTYPE_BF16, CASE_TO_F32, 394, EXACT},
    {"convert", {3 * 1030, 1030}, DTYPE_F32, 0, 395, ROUND_BF16},
};
const int kernel_case_count = sizeof(kernel_cases) / sizeof(kernel_cases[0]);

void kernel_case_name(const struct kernel_case *c, char name[CASE_NAME])
{
    static const char *const flags[] = {
        "transpose_a", "transpose_b", "beta_one", "beta_d",    "to_fp32", "strided",
        "in_place",    "add",         "frozen",   "offset",    "no_norm", "causal",
        "window",      "normal",      "uniform",  "blank",     "scaled",  "no_teacher",
        "no_gradient", "excluded",    "bench",    "unaligned", "sorted",  "not_finite",
        "odd",         "float8",
    };
    int dimensions = 6, at;
    while (dimensions > 1 && c->shape[dimensions - 1] == 0)
        dimensions--;
    at = snprintf(name, CASE_NAME, "%s/%lld", c->op, (long long)c->shape[0]);
    for (int i = 1; i < dimensions; i++)
        at += snprintf(name + at, (size_t)(CASE_NAME - at), "x%lld", (long long)c->shape[i]);
    at += snprintf(name + at, (size_t)(CASE_NAME - at), "/%s", dtype_name(c->type));
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++)
        if (c->flags & 1u << i)
            at += snprintf(name + at, (size_t)(CASE_NAME - at), "/%s", flags[i]);
}

static const struct kernel_op *op_of(const struct kernel_case *c)
{
    const struct kernel_op *op = kernel_op_find(c->op);
    BUG_UNLESS(op != NULL);
    return op;
}

void kernel_case_build(const struct kernel_case *c, struct kernel_run *run)
{
    kernel_run_init(run, c->seed);
    op_of(c)->build(c, run);
    for (int i = 0; i < run->count && (c->flags & CASE_UNALIGNED) != 0; i++)
        if (run->tensors[i].alias == NULL)
            run->tensors[i].shift = dtype_size(run->tensors[i].type);
}

void kernel_case_expect(const struct kernel_case *c, struct kernel_run *run)
{
    op_of(c)->expect(c, run);
}

void kernel_case_call(const struct kernel_case *c, struct kernel_run *run)
{
    op_of(c)->call(c, run);
}

double kernel_case_flops(const struct kernel_case *c)
{
    return op_of(c)->flops(c);
}
