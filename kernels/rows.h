// Moving rows: embedding look-up, picking hidden states by position, putting gradients back, summing them
// by token, and picking planes of features. Outputs lie apart from all inputs.
#ifndef KERNELS_ROWS_H
#define KERNELS_ROWS_H

#include <stdbool.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// out[i, :] = scale * row_scale[i] * in[index[i], :]
struct gather_rows {
    int64_t rows, width;
    const void *in; // [in_rows, width], rows in_stride elements apart
    int64_t in_rows, in_stride;
    enum dtype in_type, out_type;
    const int32_t *index; // [rows], each in [0, in_rows)
    float scale;
    const float
        *row_scale; // [rows]; NULL: 1. A scale of 0 writes zeros even where in is not finite
    void *out;      // [rows, width], packed
};

// out[index[i], :] = scale[i] * in[i, :]; every other row of out becomes 0. No index comes twice.
struct scatter_rows {
    int64_t rows, width;
    const void *in; // [rows, width], packed
    enum dtype in_type, out_type;
    const int32_t *index; // [rows], each in [0, out_rows)
    const float *scale;   // [rows]; NULL: 1. A scale of 0 writes zeros even where in is not finite
    void *out;            // [out_rows, width], packed
    int64_t out_rows;
};

// out[index[i], :] += in[i, :]. No index comes twice; other rows of out stay.
struct add_rows {
    int64_t rows, width;
    const void *in;       // [rows, width], packed
    const int32_t *index; // [rows], each in [0, out_rows); NULL: 0, 1, 2, ...
    void *out;            // [out_rows, width], rows out_stride elements apart
    int64_t out_rows, out_stride;
    enum dtype in_type, out_type;
};

// out[index[s], :] += the sum of scale[r] * in[r, :] over the rows r = from[i] with begin[s] <= i <
// begin[s + 1], in an order that follows from the segment alone. No index comes twice; other rows of out stay.
struct sum_rows {
    int64_t sums, width;  // segments; each has a row at least
    const float *in;      // [in_rows, width], packed
    const int32_t *from;  // [begin[sums]], each in [0, in_rows)
    const int32_t *begin; // [sums + 1], begin[0] = 0, ascending
    const int32_t *index; // [sums], each in [0, out_rows)
    const float *scale;   // [in_rows]; a scale of 0 leaves a row out even where it is not finite
    float *out;           // [out_rows, width], packed
    int64_t in_rows, out_rows;
};

// out[r, :] = or (add) += in[from[0, r], :] + in[from[1, r], :] + ..., in fp32, in this order; a negative
// number stands for no row. Without any, rows of out become 0 or (add) stay. It is rounded to out's type once.
struct gather_sum {
    int64_t rows, width, terms;
    const void *in; // [in_rows, width], rows in_stride elements apart
    int64_t in_rows, in_stride;
    enum dtype in_type;
    const int32_t *from; // [terms, rows], terms from_stride numbers apart, each below in_rows
    int64_t from_stride;
    bool add;  // only in fp32
    void *out; // [rows, width], rows out_stride elements apart
    int64_t out_stride;
    enum dtype out_type; // fp32, or in_type
};

// x[r, :] = 0 where scale[r] is 0, whatever it was; other rows stay.
struct clear_rows {
    int64_t rows, width;
    const float *scale; // [rows]
    void *x;            // [rows, width], rows stride elements apart
    int64_t stride;
    enum dtype type;
};

enum noise_kind { NOISE_KIND_NONE, NOISE_KIND_NORMAL, NOISE_KIND_UNIFORM };

// Context features of a row: out[t, l, :] = in[t, plane[l], :] + noise, where in is bf16, or e4m3 codes
// (base/e4m3.h) times the scale of their token and plane, multiplied in fp32. The noise of (document,
// position, plane slot l, element h) is a pure function of its key: base/rng.h with counter
// ((position * layers) + l) * hidden + h, rng_normal times std or (2 rng_uniform - 1) times std.
struct context_load {
    int64_t tokens, layers, hidden; // T, L, H
    const void *in;                 // [T, P, H]: bf16, or with scales e4m3
    const float *scales;            // [T, P]; NULL: in is bf16
    int64_t in_bytes;               // from a token of in to the next
    int64_t scale_stride;           // floats from a token's scales to the next's
    const int32_t *plane;           // [L] in [0, P), host memory
    enum dtype type;                // of out
    void *out;                      // [T, L * H]
    enum noise_kind noise;
    float noise_std;
    const uint32_t *noise_key; // [T, 2] key of each token's document; unread without noise
    const int32_t *positions;  // [T] position in the document
    const uint8_t *blank;      // [T]; 1: the token's features become 0 (bad document). NULL: none
};

typedef void gather_rows_fn(struct stream *stream, const struct gather_rows *op);
typedef void scatter_rows_fn(struct stream *stream, const struct scatter_rows *op);
typedef void add_rows_fn(struct stream *stream, const struct add_rows *op);
typedef void sum_rows_fn(struct stream *stream, const struct sum_rows *op);
typedef void gather_sum_fn(struct stream *stream, const struct gather_sum *op);
typedef void clear_rows_fn(struct stream *stream, const struct clear_rows *op);
typedef void context_load_fn(struct stream *stream, const struct context_load *op);
gather_rows_fn gather_rows_cpu, gather_rows_cuda;
scatter_rows_fn scatter_rows_cpu, scatter_rows_cuda;
add_rows_fn add_rows_cpu, add_rows_cuda;
sum_rows_fn sum_rows_cpu, sum_rows_cuda;
gather_sum_fn gather_sum_cpu, gather_sum_cuda;
clear_rows_fn clear_rows_cpu, clear_rows_cuda;
context_load_fn context_load_cpu, context_load_cuda;

#ifdef __cplusplus
}
#endif
#endif
