// Owns matrix products on the CPU. First version: tiles through CBLAS.
#include "kernels/gemm.h"

#include <cblas.h>

#include "base/log.h"
#include "kernels/cpu_internal.h"

enum { TILE_M = 256, TILE_N = 512, TILE_K = 256 };

static void load_tile(float *to, const void *from, enum dtype type, int64_t stride, int64_t row,
                      int64_t rows, int64_t column, int64_t columns)
{
    for (int64_t r = 0; r < rows; r++)
        piece_load(to + r * columns, row_at(from, type, row + r, stride), type, column, columns);
}

static void tile(const struct gemm *g, float *work, int64_t m0, int64_t n0)
{
    int64_t m = min_i64(TILE_M, g->m - m0), n = min_i64(TILE_N, g->n - n0);
    float *c = work, *a = c + TILE_M * TILE_N, *b = a + TILE_M * TILE_K;
    for (int64_t k0 = 0; k0 < g->k; k0 += TILE_K) {
        int64_t k = min_i64(TILE_K, g->k - k0);
        if (g->transpose_a)
            load_tile(a, g->a, g->a_type, g->lda, k0, k, m0, m);
        else
            load_tile(a, g->a, g->a_type, g->lda, m0, m, k0, k);
        if (g->transpose_b)
            load_tile(b, g->b, g->b_type, g->ldb, n0, n, k0, k);
        else
            load_tile(b, g->b, g->b_type, g->ldb, k0, k, n0, n);
        cblas_sgemm(CblasRowMajor, g->transpose_a ? CblasTrans : CblasNoTrans,
                    g->transpose_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, g->alpha, a,
                    (int)(g->transpose_a ? m : k), b, (int)(g->transpose_b ? k : n),
                    k0 > 0 ? 1.0f : 0.0f, c, (int)n);
    }
    for (int64_t r = 0; r < m; r++) {
        float row[TILE_N];
        if (g->beta != 0.0f) {
            const void *d = g->d != NULL ? g->d : g->c;
            piece_load(row, row_at(d, g->c_type, m0 + r, g->ldc), g->c_type, n0, n);
            for (int64_t i = 0; i < n; i++)
                c[r * n + i] += g->beta * row[i];
        }
        piece_store(row_of(g->c, g->c_type, m0 + r, g->ldc), c + r * n, g->c_type, n0, n);
    }
}

void gemm_cpu(struct stream *stream, const struct gemm *gemm)
{
    struct gemm g = *gemm;
    BUG_UNLESS(g.a_type == g.b_type && g.k > 0);
    if (g.lda == 0)
        g.lda = g.transpose_a ? g.m : g.k;
    if (g.ldb == 0)
        g.ldb = g.transpose_b ? g.k : g.n;
    if (g.ldc == 0)
        g.ldc = g.n;
#pragma omp parallel num_threads(stream->threads)
    {
        float *work = thread_workspace(stream);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t m0 = 0; m0 < g.m; m0 += TILE_M)
            for (int64_t n0 = 0; n0 < g.n; n0 += TILE_N)
                tile(&g, work, m0, n0);
    }
}
