// Owns matrix products on the CPU, through CBLAS. C is cut into a grid of tiles, one cblas_sgemm a tile,
// and the stream's OpenMP team takes the tiles: OpenBLAS itself computes in the calling thread only
// (see backend_cpu.c). fp32 operands are multiplied where they lie; bf16 operands are brought into the
// thread's workspace as fp32, block by block of the inner dimension.
//
// In OpenBLAS the last bits of a row depend on how many rows share the call. Products of few rows are
// therefore padded with zero rows to a multiple of PAD_M, so that a block of a small group has the same
// bits whether it is alone or not; in larger products that holds up to rounding.
#include "kernels/gemm.h"

#include <cblas.h>

#include "base/log.h"
#include "kernels/arguments.h"
#include "kernels/cpu_internal.h"

enum {
    BLOCK_M = 256, // bf16: rows, columns and inner dimension of what is converted at a time
    BLOCK_N = 256,
    BLOCK_K = 512,
    PAD_M = 16, // products of less than FEW_M rows are padded to a multiple of this
    FEW_M = 64,
    FEW_N = 1024, // their columns and inner dimension at a time
    FEW_K = 2048,
    LEAST_TILE = 64,   // rows or columns below which another tile costs more than a thread saves
    MULTIPLY_ADDS = 16 // in the time of one element of other ops
};

struct workspace {
    float a[BLOCK_M * BLOCK_K], b[BLOCK_N * BLOCK_K]; // as stored, packed
    float c[BLOCK_M * BLOCK_N];
};
_Static_assert(sizeof(struct workspace) <= CPU_WORKSPACE_PER_THREAD, "workspace of one thread");
_Static_assert(FEW_M *FEW_K <= BLOCK_M * BLOCK_K && FEW_M * FEW_N <= BLOCK_M * BLOCK_N, "few rows");

// Rows and columns of C.
struct tile {
    int64_t row, rows, column, columns;
};

static void multiply(const struct gemm *g, int64_t m, int64_t n, int64_t k, const float *a,
                     int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    cblas_sgemm(CblasRowMajor, g->transpose_a ? CblasTrans : CblasNoTrans,
                g->transpose_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, g->alpha, a,
                (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

// Puts beta D into rows of fp32 sums, so that products can be added.
static void start_sums(const struct gemm *g, const struct tile *tile, float *c, int64_t ldc)
{
    const void *d = g->d != NULL ? g->d : g->c;
    for (int64_t i = 0; i < tile->rows; i++) {
        piece_load(c + i * ldc, row_at(d, g->c_type, tile->row + i, g->ldc), g->c_type,
                   tile->column, tile->columns);
        for (int64_t j = 0; j < tile->columns; j++)
            c[i * ldc + j] *= g->beta;
    }
}

static void multiply_f32(const struct gemm *g, const struct tile *tile)
{
    const float *a = (const float *)g->a + (g->transpose_a ? tile->row : tile->row * g->lda);
    const float *b = (const float *)g->b + (g->transpose_b ? tile->column * g->ldb : tile->column);
    float *c = (float *)g->c + tile->row * g->ldc + tile->column;
    float beta = g->beta;
    if (beta != 0.0f && g->d != NULL && g->d != g->c) {
        start_sums(g, tile, c, g->ldc);
        beta = 1.0f;
    }
    multiply(g, tile->rows, tile->columns, g->k, a, g->lda, b, g->ldb, beta, c, g->ldc);
}

// A tile of few rows, padded with rows of zeros.
static void multiply_few(const struct gemm *g, struct workspace *work, const struct tile *tile)
{
    int64_t padded = (tile->rows + PAD_M - 1) / PAD_M * PAD_M;
    for (int64_t column = 0; column < tile->columns; column += FEW_N) {
        struct tile part = {tile->row, tile->rows, tile->column + column,
                            min_i64(FEW_N, tile->columns - column)};
        int64_t n = part.columns;
        memset(work->c, 0, (size_t)(padded * n) * sizeof(float));
        if (g->beta != 0.0f)
            start_sums(g, &part, work->c, n);
        for (int64_t first = 0; first < g->k; first += FEW_K) {
            int64_t k = min_i64(FEW_K, g->k - first);
            memset(work->a, 0, (size_t)(padded * k) * sizeof(float));
            for (int64_t i = 0; i < part.rows; i++)
                piece_load(work->a + i * k, row_at(g->a, DTYPE_F32, part.row + i, g->lda),
                           DTYPE_F32, first, k);
            const float *b = (const float *)g->b + (g->transpose_b ? part.column * g->ldb + first
                                                                   : first * g->ldb + part.column);
            multiply(g, padded, n, k, work->a, k, b, g->ldb, 1.0f, work->c, n);
        }
        for (int64_t i = 0; i < part.rows; i++)
            piece_store(row_of(g->c, DTYPE_F32, part.row + i, g->ldc), work->c + i * n, DTYPE_F32,
                        part.column, n);
    }
}

// A block of a stored matrix as packed fp32.
static void load_block(float *to, const void *base, enum dtype type, int64_t stride, int64_t row,
                       int64_t rows, int64_t column, int64_t columns)
{
    for (int64_t i = 0; i < rows; i++)
        piece_load(to + i * columns, row_at(base, type, row + i, stride), type, column, columns);
}

// A tile of at most BLOCK_M x BLOCK_N whose operands or result are not fp32.
static void multiply_block(const struct gemm *g, struct workspace *work, const struct tile *tile)
{
    int64_t m = tile->rows, n = tile->columns;
    if (g->beta != 0.0f)
        start_sums(g, tile, work->c, n);
    for (int64_t first = 0; first < g->k; first += BLOCK_K) {
        int64_t k = min_i64(BLOCK_K, g->k - first);
        if (g->transpose_a)
            load_block(work->a, g->a, g->a_type, g->lda, first, k, tile->row, m);
        else
            load_block(work->a, g->a, g->a_type, g->lda, tile->row, m, first, k);
        if (g->transpose_b)
            load_block(work->b, g->b, g->b_type, g->ldb, tile->column, n, first, k);
        else
            load_block(work->b, g->b, g->b_type, g->ldb, first, k, tile->column, n);
        float beta = first > 0 || g->beta != 0.0f ? 1.0f : 0.0f;
        multiply(g, m, n, k, work->a, g->transpose_a ? m : k, work->b, g->transpose_b ? k : n, beta,
                 work->c, n);
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j += PIECE)
            piece_store(row_of(g->c, g->c_type, tile->row + i, g->ldc), work->c + i * n + j,
                        g->c_type, tile->column + j, min_i64(PIECE, n - j));
}

// Size of the tiles that `size` is cut into: `parts` equal ones, a multiple of 16.
static int64_t part_size(int64_t size, int64_t parts)
{
    int64_t part = (size + parts - 1) / parts;
    return (part + 15) / 16 * 16;
}

// One tile a thread, as square as the threads divide: the fewest operand elements are read.
static void choose_tiles(const struct gemm *g, int64_t threads, int64_t *tile_m, int64_t *tile_n)
{
    int64_t best = INT64_MAX;
    for (int64_t parts_m = 1; parts_m <= threads; parts_m++) {
        if (threads % parts_m != 0)
            continue;
        int64_t m = part_size(g->m, parts_m), n = part_size(g->n, threads / parts_m);
        if ((m < LEAST_TILE && parts_m > 1) || (n < LEAST_TILE && parts_m < threads))
            continue;
        if (m + n < best) {
            best = m + n;
            *tile_m = m;
            *tile_n = n;
        }
    }
    if (best == INT64_MAX) {
        *tile_m = g->m > LEAST_TILE ? g->m : LEAST_TILE;
        *tile_n = g->n > LEAST_TILE ? g->n : LEAST_TILE;
    }
}

static void add_parts(struct stream *stream, const struct gemm *g)
{
#pragma omp parallel for num_threads(team(stream, g->m * g->n * g->parts)) schedule(static)
    for (int64_t row = 0; row < g->m; row++) {
        const float *sums = g->part_sums + row * g->part_stride;
        float *c = (float *)g->c + row * g->ldc;
        for (int64_t j = 0; j < g->n; j++) {
            float sum = sums[j];
            for (int64_t part = 1; part < g->parts; part++)
                sum += sums[part * g->n + j];
            c[j] = sum;
        }
    }
}

static void multiply_parts(struct stream *stream, const struct gemm *g)
{
    struct gemm one = *g;
    int64_t step_b = g->k / g->parts * (g->transpose_b ? 1 : g->ldb);
    one.parts = 1;
    one.k = g->k / g->parts;
    one.ldc = g->part_stride;
    for (int64_t part = 0; part < g->parts; part++) {
        one.a = row_at(g->a, g->a_type, part, one.k);
        one.b = row_at(g->b, g->b_type, part, step_b);
        one.c = g->part_sums + part * g->n;
        gemm_cpu(stream, &one);
    }
    add_parts(stream, g);
}

void gemm_cpu(struct stream *stream, const struct gemm *gemm)
{
    struct gemm g = gemm_with_strides(gemm);
    if (g.m == 0 || g.n == 0)
        return;
    if (g.parts > 1) {
        multiply_parts(stream, &g);
        return;
    }
    bool f32 = g.a_type == DTYPE_F32 && g.c_type == DTYPE_F32;
    int64_t tile_m = BLOCK_M, tile_n = BLOCK_N;
    if (f32)
        choose_tiles(&g, stream->threads, &tile_m, &tile_n);
    int threads = team(stream, g.m * g.n * g.k / MULTIPLY_ADDS);
#pragma omp parallel for collapse(2) num_threads(threads) schedule(dynamic)
    for (int64_t row = 0; row < g.m; row += tile_m)
        for (int64_t column = 0; column < g.n; column += tile_n) {
            struct tile tile = {row, min_i64(tile_m, g.m - row), column,
                                min_i64(tile_n, g.n - column)};
            if (f32 && g.m < FEW_M && !g.transpose_a)
                multiply_few(&g, thread_workspace(stream), &tile);
            else if (f32)
                multiply_f32(&g, &tile);
            else
                multiply_block(&g, thread_workspace(stream), &tile);
        }
}
