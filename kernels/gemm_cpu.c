// Owns matrix products on the CPU: C is cut into tiles, one thread each; for a tile, blocks of the
// inner dimension of A and B are packed as fp32 into the thread's workspace and multiplied by micro
// tiles (gemm_micro_cpu.h).
//
// Not CBLAS: there a row of C is computed in an order that depends on where the row lies in the call
// and on how many rows follow (seen in OpenBLAS 0.3.21), so that a block's result would change with
// the other blocks of its group. Here every element of C is the sum over k, in blocks that depend on k
// alone, whatever m, n, the tiles and the number of threads.
#include "kernels/gemm.h"

#include "base/log.h"
#include "kernels/cpu_internal.h"
#include "kernels/gemm_micro_cpu.h"

enum {
    TILE_M = 44 * MICRO_ROWS,    // most rows of C in a tile
    TILE_N = 16 * MICRO_COLUMNS, // most columns
    LEAST_TILE = 96,             // below, packing costs more than another thread saves
    PACK_M = 22 * MICRO_ROWS     // rows of A packed at a time: half of a second-level cache
};

struct workspace {
    float b[BLOCK_K * TILE_N];    // [n / MICRO_COLUMNS, k, MICRO_COLUMNS]
    float a[PACK_M * A_STRIDE];   // [m, k] rows A_STRIDE apart
    float c[TILE_M * TILE_N];     // [m, n] rows TILE_N apart; where C is not fp32
    float rows[TILE_M * BLOCK_K]; // rows to be transposed, as fp32
    float micro[MICRO_ROWS * MICRO_COLUMNS];
};
_Static_assert(sizeof(struct workspace) <= CPU_WORKSPACE_PER_THREAD, "workspace of one thread");

// One tile of C and the block of k at hand.
struct tile {
    const struct gemm *g; // with strides filled in
    struct workspace *work;
    int64_t row, rows, column, columns; // of C
    int64_t first_k, k;
    float *c; // [rows, columns] fp32 sums
    int64_t c_stride;
    bool overwrite; // the block of k is the first and there is nothing to add to
};

// rows [first, first + count) and `k` columns from first_k of a stored matrix, as fp32
static const float *load_rows(const struct tile *tile, const void *base, enum dtype type,
                              int64_t stride, int64_t first, int64_t count, int64_t column,
                              int64_t columns, int64_t *loaded_stride)
{
    if (type == DTYPE_F32) {
        *loaded_stride = stride;
        return (const float *)base + first * stride + column;
    }
    *loaded_stride = columns;
    for (int64_t i = 0; i < count; i++)
        piece_load(tile->work->rows + i * columns, row_at(base, type, first + i, stride), type,
                   column, columns);
    return tile->work->rows;
}

// Packs columns of op(B); a last panel that is not full is filled with zeros.
static void pack_b(const struct tile *tile)
{
    const struct gemm *g = tile->g;
    for (int64_t j = 0; j < tile->columns; j += MICRO_COLUMNS) {
        int64_t n = min_i64(MICRO_COLUMNS, tile->columns - j), stride;
        float *to = tile->work->b + j * tile->k;
        if (n < MICRO_COLUMNS)
            memset(to, 0, (size_t)(tile->k * MICRO_COLUMNS) * sizeof(float));
        if (g->transpose_b) {
            const float *from = load_rows(tile, g->b, g->b_type, g->ldb, tile->column + j, n,
                                          tile->first_k, tile->k, &stride);
            transpose_floats(to, MICRO_COLUMNS, from, stride, n, tile->k);
            continue;
        }
        for (int64_t l = 0; l < tile->k; l++)
            piece_load(to + l * MICRO_COLUMNS, row_at(g->b, g->b_type, tile->first_k + l, g->ldb),
                       g->b_type, tile->column + j, n);
    }
}

// Packs rows [first, first + count) of the tile's op(A), with rows of zeros up to a full micro tile.
static void pack_a(const struct tile *tile, int64_t first, int64_t count)
{
    const struct gemm *g = tile->g;
    float *to = tile->work->a;
    if (g->transpose_a) {
        int64_t stride;
        const float *from = load_rows(tile, g->a, g->a_type, g->lda, tile->first_k, tile->k,
                                      tile->row + first, count, &stride);
        transpose_floats(to, A_STRIDE, from, stride, tile->k, count);
    } else {
        for (int64_t i = 0; i < count; i++)
            piece_load(to + i * A_STRIDE, row_at(g->a, g->a_type, tile->row + first + i, g->lda),
                       g->a_type, tile->first_k, tile->k);
    }
    for (int64_t i = count; i % MICRO_ROWS != 0; i++)
        memset(to + i * A_STRIDE, 0, (size_t)tile->k * sizeof(float));
}

static KERNEL_CLONES void add_micro(float *c, int64_t stride, const float *micro, int64_t rows,
                                    int64_t columns, float alpha, bool overwrite)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            float product = alpha * micro[i * MICRO_COLUMNS + j];
            c[i * stride + j] = overwrite ? product : c[i * stride + j] + product;
        }
}

static void multiply_block(const struct tile *tile, micro_tile_fn *micro_tile)
{
    struct workspace *work = tile->work;
    pack_b(tile);
    for (int64_t first = 0; first < tile->rows; first += PACK_M) {
        int64_t count = min_i64(PACK_M, tile->rows - first);
        pack_a(tile, first, count);
        for (int64_t j = 0; j < tile->columns; j += MICRO_COLUMNS)
            for (int64_t i = 0; i < count; i += MICRO_ROWS) {
                micro_tile(tile->k, work->a + i * A_STRIDE, work->b + j * tile->k, work->micro);
                add_micro(tile->c + (first + i) * tile->c_stride + j, tile->c_stride, work->micro,
                          min_i64(MICRO_ROWS, count - i), min_i64(MICRO_COLUMNS, tile->columns - j),
                          tile->g->alpha, tile->overwrite);
            }
    }
}

// Puts beta D where the products are added; returns false when there is nothing to add to.
static bool start_sums(const struct tile *tile)
{
    const struct gemm *g = tile->g;
    if (g->beta == 0.0f)
        return false;
    const void *d = g->d != NULL ? g->d : g->c;
    if (d == g->c && g->beta == 1.0f && g->c_type == DTYPE_F32)
        return true;
    for (int64_t i = 0; i < tile->rows; i++) {
        float *c = tile->c + i * tile->c_stride;
        piece_load(c, row_at(d, g->c_type, tile->row + i, g->ldc), g->c_type, tile->column,
                   tile->columns);
        for (int64_t j = 0; j < tile->columns; j++)
            c[j] *= g->beta;
    }
    return true;
}

static void multiply_tile(struct tile *tile, micro_tile_fn *micro_tile)
{
    const struct gemm *g = tile->g;
    bool in_place = g->c_type == DTYPE_F32;
    tile->c_stride = in_place ? g->ldc : TILE_N;
    tile->c = in_place ? (float *)g->c + tile->row * g->ldc + tile->column : tile->work->c;
    tile->overwrite = !start_sums(tile);
    // Blocks of equal size, made from k alone.
    int64_t blocks = (g->k + BLOCK_K - 1) / BLOCK_K, size = (g->k + blocks - 1) / blocks;
    for (tile->first_k = 0; tile->first_k < g->k; tile->first_k += size) {
        tile->k = min_i64(size, g->k - tile->first_k);
        multiply_block(tile, micro_tile);
        tile->overwrite = false;
    }
    if (!in_place)
        for (int64_t i = 0; i < tile->rows; i++)
            piece_store(row_of(g->c, g->c_type, tile->row + i, g->ldc), tile->c + i * TILE_N,
                        g->c_type, tile->column, tile->columns);
}

// `size` cut into parts of at most `most`, all but the last of the same size, a multiple of `unit`.
static int64_t part_size(int64_t size, int64_t most, int64_t unit)
{
    int64_t parts = (size + most - 1) / most;
    int64_t part = (size + parts - 1) / parts;
    return (part + unit - 1) / unit * unit;
}

// Halves tiles until there are some for every thread.
static void choose_tiles(const struct gemm *g, int threads, int64_t *tile_m, int64_t *tile_n)
{
    int64_t most_m = TILE_M, most_n = TILE_N;
    for (;;) {
        *tile_m = part_size(g->m, most_m, MICRO_ROWS);
        *tile_n = part_size(g->n, most_n, MICRO_COLUMNS);
        int64_t tiles = ((g->m + *tile_m - 1) / *tile_m) * ((g->n + *tile_n - 1) / *tile_n);
        if (threads == 1 || tiles >= 2 * threads ||
            (*tile_m <= LEAST_TILE && *tile_n <= LEAST_TILE))
            return;
        if (*tile_m > *tile_n)
            most_m = *tile_m / 2;
        else
            most_n = *tile_n / 2;
    }
}

static struct gemm with_strides(const struct gemm *gemm)
{
    struct gemm g = *gemm;
    BUG_UNLESS(g.a_type == g.b_type && g.k > 0);
    if (g.lda == 0)
        g.lda = g.transpose_a ? g.m : g.k;
    if (g.ldb == 0)
        g.ldb = g.transpose_b ? g.k : g.n;
    if (g.ldc == 0)
        g.ldc = g.n;
    return g;
}

void gemm_cpu(struct stream *stream, const struct gemm *gemm)
{
    struct gemm g = with_strides(gemm);
    if (g.m == 0 || g.n == 0)
        return;
    micro_tile_fn *micro_tile = micro_tile_select();
    int64_t tile_m, tile_n;
    choose_tiles(&g, stream->threads, &tile_m, &tile_n);
#pragma omp parallel for collapse(2) num_threads(stream->threads) schedule(dynamic)
    for (int64_t row = 0; row < g.m; row += tile_m)
        for (int64_t column = 0; column < g.n; column += tile_n) {
            struct tile tile = {.g = &g,
                                .work = thread_workspace(stream),
                                .row = row,
                                .rows = min_i64(tile_m, g.m - row),
                                .column = column,
                                .columns = min_i64(tile_n, g.n - column)};
            multiply_tile(&tile, micro_tile);
        }
}
