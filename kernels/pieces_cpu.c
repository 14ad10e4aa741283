// Owns arithmetic on pieces of rows: conversion, sums, exp. Plain loops that the compiler vectorises.
#include <math.h>
#include <string.h>

#include "base/bf16.h"
#include "base/log.h"
#include "kernels/cpu_internal.h"

static KERNEL_CLONES void from_bf16(float *to, const bf16 *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = bf16_to_float(from[i]);
}

static KERNEL_CLONES void to_bf16(bf16 *to, const float *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = bf16_from_float(from[i]);
}

void piece_load(float *to, const void *row, enum dtype type, int64_t first, int64_t n)
{
    if (type == DTYPE_F32)
        memcpy(to, (const float *)row + first, (size_t)n * sizeof(float));
    else
        from_bf16(to, (const bf16 *)row + first, n);
}

void piece_store(void *row, const float *from, enum dtype type, int64_t first, int64_t n)
{
    if (type == DTYPE_F32)
        memcpy((float *)row + first, from, (size_t)n * sizeof(float));
    else
        to_bf16((bf16 *)row + first, from, n);
}

KERNEL_CLONES float piece_sum(const float *x, int64_t n)
{
    float lane[PIECE_LANES] = {0};
    int64_t i = 0;
    for (; i + PIECE_LANES <= n; i += PIECE_LANES)
        for (int l = 0; l < PIECE_LANES; l++)
            lane[l] += x[i + l];
    for (int l = 0; i + l < n; l++)
        lane[l] += x[i + l];
    return lanes_sum(lane);
}

KERNEL_CLONES float piece_dot(const float *x, const float *y, int64_t n)
{
    float lane[PIECE_LANES] = {0};
    int64_t i = 0;
    for (; i + PIECE_LANES <= n; i += PIECE_LANES)
        for (int l = 0; l < PIECE_LANES; l++)
            lane[l] += x[i + l] * y[i + l];
    for (int l = 0; i + l < n; l++)
        lane[l] += x[i + l] * y[i + l];
    return lanes_sum(lane);
}

KERNEL_CLONES float piece_max(const float *x, int64_t n)
{
    float lane[PIECE_LANES], result = -INFINITY;
    for (int l = 0; l < PIECE_LANES; l++)
        lane[l] = -INFINITY;
    int64_t i = 0;
    for (; i + PIECE_LANES <= n; i += PIECE_LANES)
        for (int l = 0; l < PIECE_LANES; l++)
            lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    for (; i < n; i++)
        result = x[i] > result ? x[i] : result;
    for (int l = 0; l < PIECE_LANES; l++)
        result = lane[l] > result ? lane[l] : result;
    return result;
}

// exp(x) = 2^k exp(r), k = round(x / ln 2), |r| <= ln 2 / 2, and exp(r) = 1 + r + r^2 g(r) with g the
// least-maximum polynomial of degree 5. ln 2 is split so that k times its upper part is exact. No
// branches: selects cover what 2^k can not.
static inline __attribute__((always_inline)) float exp_one(float x)
{
    const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    float shifted = x * 1.44269504088896341f + magic;
    float k = shifted - magic;
    float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    float g = 1.99178117e-4f;
    g = g * r + 1.39460608e-3f;
    g = g * r + 8.33326578e-3f;
    g = g * r + 4.16662693e-2f;
    g = g * r + 1.66666672e-1f;
    g = g * r + 0.5f;
    float p = g * (r * r) + r + 1.0f;
    uint32_t bits, magic_bits;
    memcpy(&bits, &shifted, sizeof(bits));
    memcpy(&magic_bits, &magic, sizeof(magic_bits));
    bits = (bits - magic_bits + 126u) << 23; // 2^(k-1), so that k = 128 still has an exponent
    float scale;
    memcpy(&scale, &bits, sizeof(scale));
    float result = p * scale * 2.0f;
    result = x < -86.9f ? 0.0f : result;
    return x > 88.7228394f ? INFINITY : result;
}

KERNEL_CLONES void piece_exp(float *y, const float *x, float shift, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = exp_one(x[i] - shift) * factor;
}

KERNEL_CLONES void row_parts_add(const struct row_parts *parts, float *sum, const float *partial,
                                 int64_t width)
{
    for (int64_t i = 0; i < width; i += PIECE_LANES) {
        int64_t n = min_i64(PIECE_LANES, width - i);
        double total[PIECE_LANES] = {0};
        for (int64_t part = 0; part < parts->count; part++)
            for (int64_t l = 0; l < n; l++)
                total[l] += (double)partial[part * width + i + l];
        for (int64_t l = 0; l < n; l++)
            sum[i + l] = (float)((double)sum[i + l] + total[l]);
    }
}
