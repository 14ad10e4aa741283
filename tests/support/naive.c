// Owns the reference of every op but the loss, in double.
#include "tests/support/naive.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

void naive_gemm(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b, double alpha,
                const double *a, const double *b, double beta, const double *d, double *c)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.0;
            for (int64_t l = 0; l < k; l++)
                sum += (transpose_a ? a[l * m + i] : a[i * k + l]) *
                       (transpose_b ? b[j * k + l] : b[l * n + j]);
            c[i * n + j] = alpha * sum + (beta != 0.0 ? beta * d[i * n + j] : 0.0);
        }
}

static double naive_rstd(const double *x, int64_t width, double eps)
{
    double squares = 0.0;
    for (int64_t i = 0; i < width; i++)
        squares += x[i] * x[i];
    return 1.0 / sqrt(squares / (double)width + eps);
}

void naive_rms_norm(int64_t rows, int64_t width, double eps, double offset, const double *x,
                    const double *weight, double *y, double *rstd)
{
    for (int64_t r = 0; r < rows; r++) {
        double factor = naive_rstd(x + r * width, width, eps);
        for (int64_t i = 0; i < width; i++)
            y[r * width + i] = x[r * width + i] * factor * (weight[i] + offset);
        if (rstd != NULL)
            rstd[r] = factor;
    }
}

// By the chain rule: y_i = x_i f w_i, d f / d x_j = -f^3 x_j / width.
void naive_rms_norm_backward(int64_t rows, int64_t width, double eps, double offset,
                             const double *x, const double *weight, const double *dy, double *dx,
                             double *dweight)
{
    for (int64_t r = 0; r < rows; r++) {
        const double *xr = x + r * width, *dyr = dy + r * width;
        double f = naive_rstd(xr, width, eps), through_f = 0.0;
        for (int64_t i = 0; i < width; i++)
            through_f += dyr[i] * xr[i] * (weight[i] + offset);
        for (int64_t j = 0; j < width; j++) {
            dx[r * width + j] =
                dyr[j] * f * (weight[j] + offset) - through_f * f * f * f * xr[j] / (double)width;
            if (dweight != NULL)
                dweight[j] += dyr[j] * xr[j] * f;
        }
    }
}

// The rotation as a matrix: y = R n with R made of cosines and sines; sign -1 gives its transpose.
static void naive_rotate(const struct naive_rope *rope, int64_t row, double sign, const double *n,
                         double *y)
{
    int64_t half = rope->head_dim / 2, at = rope->positions[row] * half;
    for (int64_t i = 0; i < half; i++) {
        double c = rope->cos[at + i], s = sign * rope->sin[at + i];
        y[i] = n[i] * c - n[i + half] * s;
        y[i + half] = n[i + half] * c + n[i] * s;
    }
}

void naive_norm_rope(const struct naive_rope *rope, const double *x, double *y)
{
    int64_t d = rope->head_dim;
    double *normed = memory_alloc((size_t)d, sizeof(double));
    for (int64_t i = 0; i < rope->rows * rope->heads; i++) {
        if (rope->weight != NULL)
            naive_rms_norm(1, d, rope->eps, 0.0, x + i * d, rope->weight, normed, NULL);
        else
            memcpy(normed, x + i * d, (size_t)d * sizeof(double));
        naive_rotate(rope, i / rope->heads, 1.0, normed, y + i * d);
    }
    free(normed);
}

void naive_norm_rope_backward(const struct naive_rope *rope, const double *x, const double *dy,
                              double *dx, double *dweight)
{
    int64_t d = rope->head_dim;
    double *dn = memory_alloc((size_t)d, sizeof(double));
    for (int64_t i = 0; i < rope->rows * rope->heads; i++) {
        naive_rotate(rope, i / rope->heads, -1.0, dy + i * d, dn);
        if (rope->weight != NULL)
            naive_rms_norm_backward(1, d, rope->eps, 0.0, x + i * d, rope->weight, dn, dx + i * d,
                                    dweight);
        else
            memcpy(dx + i * d, dn, (size_t)d * sizeof(double));
    }
    free(dn);
}

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

void naive_swiglu(int64_t rows, int64_t width, const double *gate_up, double *y)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i++) {
            double gate = gate_up[r * 2 * width + i], up = gate_up[r * 2 * width + width + i];
            y[r * width + i] = gate * sigmoid(gate) * up;
        }
}

void naive_swiglu_backward(int64_t rows, int64_t width, const double *gate_up, const double *dy,
                           double *dgate_up)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i++) {
            int64_t g = r * 2 * width + i, u = g + width;
            double s = sigmoid(gate_up[g]), d = dy[r * width + i];
            dgate_up[g] = d * gate_up[u] * (s + gate_up[g] * s * (1.0 - s));
            dgate_up[u] = d * gate_up[g] * s;
        }
}

// Keys of a query, context first: index i < context is context key i, the rest are slots.
static bool sees(const struct naive_attention *in, int64_t row, int64_t key)
{
    if (key < in->context)
        return in->begin[row] <= key && key < in->end[row];
    return !in->causal || key - in->context <= row % in->block_size;
}

static const double *key_of(const struct naive_attention *in, const double *context,
                            const double *block, int64_t row, int64_t head, int64_t key)
{
    int64_t kv = head / (in->heads / in->kv_heads);
    if (key < in->context)
        return context + (key * in->kv_heads + kv) * in->head_dim;
    int64_t other = row / in->block_size * in->block_size + key - in->context;
    return block + (other * in->kv_heads + kv) * in->head_dim;
}

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

// Probabilities of all keys for one query; returns the log-sum-exp.
static double probabilities(const struct naive_attention *in, int64_t row, int64_t head, double *p)
{
    int64_t keys = in->context + in->block_size;
    const double *q = in->q + (row * in->heads + head) * in->head_dim;
    double max = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < keys; i++) {
        p[i] = -INFINITY;
        if (sees(in, row, i))
            p[i] = in->scale *
                   dot(q, key_of(in, in->k_context, in->k_block, row, head, i), in->head_dim);
        max = p[i] > max ? p[i] : max;
    }
    for (int64_t i = 0; i < keys; i++)
        sum += exp(p[i] - max);
    for (int64_t i = 0; i < keys; i++)
        p[i] = max == (double)-INFINITY ? 0.0 : exp(p[i] - max) / sum;
    return max == (double)-INFINITY ? max : max + log(sum); // a row that sees nothing
}

void naive_attention(const struct naive_attention *in, double *out, double *lse)
{
    int64_t keys = in->context + in->block_size, d = in->head_dim;
    double *p = memory_alloc((size_t)keys, sizeof(double));
    for (int64_t row = 0; row < in->rows; row++)
        for (int64_t head = 0; head < in->heads; head++) {
            int64_t at = row * in->heads + head;
            lse[at] = probabilities(in, row, head, p);
            for (int64_t j = 0; j < d; j++)
                out[at * d + j] = 0.0;
            for (int64_t i = 0; i < keys; i++) {
                const double *v = key_of(in, in->v_context, in->v_block, row, head, i);
                for (int64_t j = 0; j < d && p[i] != 0.0; j++)
                    out[at * d + j] += p[i] * v[j];
            }
        }
    free(p);
}

static void add_scaled(double *to, const double *from, double factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] += factor * from[i];
}

void naive_attention_backward(const struct naive_attention *in, const double *out,
                              const double *dout, double *dq, double *dk_block, double *dv_block,
                              double *dk_context, double *dv_context)
{
    int64_t keys = in->context + in->block_size, d = in->head_dim;
    size_t block_bytes =
        in->block_size > 0 ? (size_t)(in->rows * in->kv_heads * d) * sizeof(double) : 0;
    size_t context_bytes = (size_t)(in->context * in->kv_heads * d) * sizeof(double);
    if (block_bytes > 0) {
        memset(dk_block, 0, block_bytes);
        memset(dv_block, 0, block_bytes);
    }
    memset(dk_context, 0, context_bytes);
    memset(dv_context, 0, context_bytes);
    double *p = memory_alloc((size_t)keys, sizeof(double));
    double *dp = memory_alloc((size_t)keys, sizeof(double));
    for (int64_t at = 0; at < in->rows * in->heads; at++) {
        int64_t row = at / in->heads, head = at % in->heads;
        probabilities(in, row, head, p);
        for (int64_t i = 0; i < keys; i++)
            dp[i] = dot(dout + at * d, key_of(in, in->v_context, in->v_block, row, head, i), d);
        double mean = dot(out + at * d, dout + at * d, d); // of dp under p
        memset(dq + at * d, 0, (size_t)d * sizeof(double));
        for (int64_t i = 0; i < keys; i++) {
            double ds = p[i] * (dp[i] - mean) * in->scale;
            // The gradients lie as the keys do.
            double *dk = (double *)key_of(in, dk_context, dk_block, row, head, i);
            double *dv = (double *)key_of(in, dv_context, dv_block, row, head, i);
            add_scaled(dq + at * d, key_of(in, in->k_context, in->k_block, row, head, i), ds, d);
            add_scaled(dk, in->q + at * d, ds, d);
            add_scaled(dv, dout + at * d, p[i], d);
        }
    }
    free(p);
    free(dp);
}

static const double *own_key(const struct naive_diagonal *in, const double *keys, int64_t row,
                             int64_t head, int64_t step)
{
    int64_t kv = head / (in->heads / in->kv_heads);
    return keys + ((step * in->step_rows + row * in->row_rows) * in->kv_heads + kv) * in->head_dim;
}

void naive_diagonal(const struct naive_diagonal *in, const double *context_out,
                    const double *context_lse, double *out, double *lse)
{
    int64_t d = in->head_dim;
    for (int64_t at = 0; at < in->rows * in->heads; at++) {
        int64_t row = at / in->heads, head = at % in->heads;
        double context = exp(context_lse[at]), sum = context;
        for (int64_t i = 0; i < d; i++)
            out[at * d + i] = context * context_out[at * d + i];
        for (int64_t j = 0; j < in->steps; j++) {
            double weight =
                exp(in->scale * dot(in->q + at * d, own_key(in, in->k, row, head, j), d));
            sum += weight;
            add_scaled(out + at * d, own_key(in, in->v, row, head, j), weight, d);
        }
        for (int64_t i = 0; i < d; i++)
            out[at * d + i] /= sum;
        lse[at] = log(sum);
    }
}

void naive_diagonal_backward(const struct naive_diagonal *in, const double *out, const double *lse,
                             const double *dout, double *dq, double *dk, double *dv)
{
    int64_t d = in->head_dim, group = in->heads / in->kv_heads;
    for (int64_t at = 0; at < in->rows * in->heads; at++) {
        int64_t row = at / in->heads, head = at % in->heads;
        double mean = dot(out + at * d, dout + at * d, d);
        for (int64_t j = 0; j < in->steps; j++) {
            const double *k = own_key(in, in->k, row, head, j);
            double p = exp(in->scale * dot(in->q + at * d, k, d) - lse[at]);
            double ds =
                p * (dot(dout + at * d, own_key(in, in->v, row, head, j), d) - mean) * in->scale;
            int64_t to = ((j * in->rows + row) * in->kv_heads + head / group) * d;
            add_scaled(dq + at * d, k, ds, d);
            add_scaled(dk + to, in->q + at * d, ds, d);
            add_scaled(dv + to, dout + at * d, p, d);
        }
    }
}
