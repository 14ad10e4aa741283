// Owns moving rows on the CPU: gather, scatter, add, sum, clear, loading context features.
#include "kernels/rows.h"

#include "base/e4m3.h"
#include "base/log.h"
#include "base/rng.h"
#include "kernels/cpu_internal.h"

static void scale_row(void *to, enum dtype to_type, const void *from, enum dtype from_type,
                      float scale, int64_t width)
{
    for (int64_t first = 0; first < width; first += PIECE) {
        float piece[PIECE];
        int64_t n = min_i64(PIECE, width - first);
        piece_load(piece, from, from_type, first, n);
        for (int64_t i = 0; i < n; i++)
            piece[i] *= scale;
        piece_store(to, piece, to_type, first, n);
    }
}

void gather_rows_cpu(struct stream *stream, const struct gather_rows *op)
{
#pragma omp parallel for num_threads(team(stream, op->rows * op->width)) schedule(static)
    for (int64_t row = 0; row < op->rows; row++) {
        BUG_UNLESS(op->index[row] >= 0 && op->index[row] < op->in_rows);
        float scale = op->row_scale != NULL ? op->scale * op->row_scale[row] : op->scale;
        void *out = row_of(op->out, op->out_type, row, op->width);
        if (op->row_scale != NULL && scale == 0.0f)
            memset(out, 0, (size_t)op->width * dtype_size(op->out_type));
        else
            scale_row(out, op->out_type, row_at(op->in, op->in_type, op->index[row], op->in_stride),
                      op->in_type, scale, op->width);
    }
}

void scatter_rows_cpu(struct stream *stream, const struct scatter_rows *op)
{
    size_t row_bytes = (size_t)op->width * dtype_size(op->out_type);
#pragma omp parallel num_threads(team(stream, op->out_rows * op->width))
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < op->out_rows; row++)
            memset(row_of(op->out, op->out_type, row, op->width), 0, row_bytes);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < op->rows; row++) {
            float scale = op->scale != NULL ? op->scale[row] : 1.0f;
            BUG_UNLESS(op->index[row] >= 0 && op->index[row] < op->out_rows);
            if (scale == 0.0f)
                continue;
            scale_row(row_of(op->out, op->out_type, op->index[row], op->width), op->out_type,
                      row_at(op->in, op->in_type, row, op->width), op->in_type, scale, op->width);
        }
    }
}

static void add_row(void *to, enum dtype to_type, const void *from, enum dtype from_type,
                    int64_t width)
{
    for (int64_t first = 0; first < width; first += PIECE) {
        float sum[PIECE], piece[PIECE];
        int64_t n = min_i64(PIECE, width - first);
        piece_load(sum, to, to_type, first, n);
        piece_load(piece, from, from_type, first, n);
        for (int64_t i = 0; i < n; i++)
            sum[i] += piece[i];
        piece_store(to, sum, to_type, first, n);
    }
}

void add_rows_cpu(struct stream *stream, const struct add_rows *op)
{
#pragma omp parallel for num_threads(team(stream, op->rows * op->width)) schedule(static)
    for (int64_t row = 0; row < op->rows; row++) {
        int64_t to = op->index != NULL ? op->index[row] : row;
        BUG_UNLESS(to >= 0 && to < op->out_rows);
        add_row(row_of(op->out, op->out_type, to, op->out_stride), op->out_type,
                row_at(op->in, op->in_type, row, op->width), op->in_type, op->width);
    }
}

// One segment, a piece of its columns at a time.
static void sum_segment(const struct sum_rows *op, int64_t s)
{
    float *out = op->out + op->index[s] * op->width;
    for (int64_t first = 0; first < op->width; first += PIECE) {
        float sum[PIECE] = {0};
        int64_t n = min_i64(PIECE, op->width - first);
        for (int32_t i = op->begin[s]; i < op->begin[s + 1]; i++) {
            int64_t row = op->from[i];
            BUG_UNLESS(row >= 0 && row < op->in_rows);
            float scale = op->scale[row];
            for (int64_t c = 0; c < n && scale != 0.0f; c++)
                sum[c] += scale * op->in[row * op->width + first + c];
        }
        for (int64_t c = 0; c < n; c++)
            out[first + c] += sum[c];
    }
}

void sum_rows_cpu(struct stream *stream, const struct sum_rows *op)
{
#pragma omp parallel for num_threads(team(stream, op->sums * op->width)) schedule(static)
    for (int64_t s = 0; s < op->sums; s++) {
        BUG_UNLESS(op->index[s] >= 0 && op->index[s] < op->out_rows);
        sum_segment(op, s);
    }
}

static KERNEL_CLONES void add_piece(float *sum, const float *term, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += term[i];
}

static void gather_sum_row(const struct gather_sum *op, int64_t row)
{
    void *out = row_of(op->out, op->out_type, row, op->out_stride);
    for (int64_t first = 0; first < op->width; first += PIECE) {
        float sum[PIECE] = {0.0f}, term[PIECE];
        int64_t n = min_i64(PIECE, op->width - first);
        if (op->add)
            piece_load(sum, out, op->out_type, first, n);
        for (int64_t j = 0; j < op->terms; j++) {
            int64_t from = op->from[j * op->from_stride + row];
            BUG_UNLESS(from < op->in_rows);
            if (from < 0)
                continue;
            piece_load(term, row_at(op->in, op->in_type, from, op->in_stride), op->in_type, first,
                       n);
            add_piece(sum, term, n);
        }
        piece_store(out, sum, op->out_type, first, n);
    }
}

void gather_sum_cpu(struct stream *stream, const struct gather_sum *op)
{
    BUG_UNLESS(!op->add || op->out_type == DTYPE_F32);
#pragma omp parallel for num_threads(team(stream, op->rows * op->width)) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        gather_sum_row(op, row);
}

void clear_rows_cpu(struct stream *stream, const struct clear_rows *op)
{
    (void)stream; // few rows are cleared
    size_t size = dtype_size(op->type);
    for (int64_t row = 0; row < op->rows; row++)
        if (op->scale[row] == 0.0f)
            memset((unsigned char *)op->x + (size_t)(row * op->stride) * size, 0,
                   (size_t)op->width * size);
}

static void add_noise(float *piece, const struct context_load *op, struct rng_key key,
                      uint64_t counter, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float draw = op->noise == NOISE_KIND_NORMAL
                         ? rng_normal(key, counter + (uint64_t)i)
                         : 2.0f * rng_uniform(key, counter + (uint64_t)i) - 1.0f;
        piece[i] += draw * op->noise_std;
    }
}

static void load_codes(float *piece, const uint8_t *codes, float scale, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        piece[i] = e4m3_to_float(codes[i]) * scale;
}

static void load_plane(const struct context_load *op, int64_t token, int64_t layer)
{
    int64_t plane = op->plane[layer], at = plane * op->hidden;
    const unsigned char *in = (const unsigned char *)op->in + token * op->in_bytes;
    void *out = row_of(op->out, op->type, token * op->layers + layer, op->hidden);
    for (int64_t first = 0; first < op->hidden; first += PIECE) {
        float piece[PIECE];
        int64_t n = min_i64(PIECE, op->hidden - first);
        if (op->scales != NULL)
            load_codes(piece, in + at + first, op->scales[token * op->scale_stride + plane], n);
        else
            piece_load(piece, in, DTYPE_BF16, at + first, n);
        if (op->noise != NOISE_KIND_NONE) {
            struct rng_key key = {{op->noise_key[2 * token], op->noise_key[2 * token + 1]}};
            uint64_t slot = (uint64_t)op->positions[token] * (uint64_t)op->layers + (uint64_t)layer;
            add_noise(piece, op, key, slot * (uint64_t)op->hidden + (uint64_t)first, n);
        }
        piece_store(out, piece, op->type, first, n);
    }
}

void context_load_cpu(struct stream *stream, const struct context_load *op)
{
    size_t token_bytes = (size_t)(op->layers * op->hidden) * dtype_size(op->type);
    int threads = team(stream, op->tokens * op->layers * op->hidden);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < op->tokens; token++) {
        if (op->blank != NULL && op->blank[token] != 0) {
            memset((unsigned char *)op->out + (size_t)token * token_bytes, 0, token_bytes);
            continue;
        }
        for (int64_t layer = 0; layer < op->layers; layer++)
            load_plane(op, token, layer);
    }
}
