// What the CPU ops share: the stream, the target clones of hot loops and arithmetic on pieces of a
// row. A row of fp32 or bf16 is worked on in pieces that fit the first-level cache, in fp32.
// Every result of these functions is the same on every machine and for every thread count: sums run
// over a fixed number of lanes, whatever the width of the vectors that the compiler makes of them.
#ifndef KERNELS_CPU_INTERNAL_H
#define KERNELS_CPU_INTERNAL_H

#include <stdint.h>
#include <string.h>

#include "kernels/backend.h"

// One function, compiled for several x86 generations, the best chosen when the program is loaded.
// Not under sanitizers, whose run time is not ready yet when the choice is made.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DTRAIN_SANITIZE)
#define KERNEL_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define KERNEL_CLONES
#endif

// The CPU backend computes in the caller's thread and its OpenMP team, so a queue holds no work.
struct stream {
    int threads;
    unsigned char *workspace;
    size_t workspace_bytes;
    double times[STREAM_TIME_SLOTS]; // timer_now() of each mark
};

enum { CPU_WORKSPACE_PER_THREAD = 4 << 20 };

// The calling thread's own CPU_WORKSPACE_PER_THREAD bytes, inside a parallel region of the stream.
void *thread_workspace(struct stream *stream);

// Threads for an op that goes over so many elements: a team only where it saves more time than it
// takes to start one, which on a busy machine is long.
static inline int team(const struct stream *stream, int64_t elements)
{
    enum { LEAST_ELEMENTS = 1 << 14 };
    return elements < LEAST_ELEMENTS ? 1 : stream->threads;
}

enum { PIECE = 512 }; // elements of a row at a time

// Elements [first, first + n) of a row of fp32 or bf16 as fp32, and back with one rounding.
void piece_load(float *to, const void *row, enum dtype type, int64_t first, int64_t n);
void piece_store(void *row, const float *from, enum dtype type, int64_t first, int64_t n);

// Sums run in this many lanes, which are then added pairwise.
enum { PIECE_LANES = 32 };

static inline float lanes_sum(float *lane)
{
    for (int half = PIECE_LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

// Sums of at most a few PIECEs; longer rows add these up in fp64.
float piece_sum(const float *x, int64_t n);
float piece_dot(const float *x, const float *y, int64_t n);
// Largest element, NaN left out; -inf when there is none.
float piece_max(const float *x, int64_t n);
// y = exp(x - shift) * factor, exp within 2 ulp and 0 below -86.9. y may be x.
void piece_exp(float *y, const float *x, float shift, float factor, int64_t n);

// Pointer to row `row` of a matrix whose rows are `stride` elements apart.
static inline const void *row_at(const void *base, enum dtype type, int64_t row, int64_t stride)
{
    return (const unsigned char *)base + (size_t)row * (size_t)stride * dtype_size(type);
}

static inline void *row_of(void *base, enum dtype type, int64_t row, int64_t stride)
{
    return (unsigned char *)base + (size_t)row * (size_t)stride * dtype_size(type);
}

// A fixed division of rows into parts, for sums over rows that do not depend on the thread count.
struct row_parts {
    int64_t rows, count, size; // the last part may be shorter
};

static inline struct row_parts row_parts_make(int64_t rows, int64_t max_parts)
{
    enum { LEAST_ROWS = 16 }; // below, adding up the parts costs more than it saves
    int64_t size = (rows + max_parts - 1) / max_parts;
    size = size > LEAST_ROWS ? size : LEAST_ROWS;
    return (struct row_parts){rows, (rows + size - 1) / size, size};
}

static inline int64_t row_parts_first(const struct row_parts *parts, int64_t part)
{
    int64_t first = part * parts->size;
    return first < parts->rows ? first : parts->rows;
}

// sum[i] += partial[0][i] + partial[1][i] + ..., partial: [count, width]
void row_parts_add(const struct row_parts *parts, float *sum, const float *partial, int64_t width);

static inline int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#endif
