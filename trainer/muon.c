// Owns the Newton-Schulz iteration. Does not own its elementwise parts (kernels/muon.h).
#include "trainer/muon.h"

#include <math.h>

#include "base/log.h"
#include "kernels/kernels.h"
#include "trainer/update_rule.h"

// x' = a x + b (x x^T) x + c (x x^T)^2 x maps the singular values of x. These values have the steepest slope
// at 0 for which singular values stay near 1 once they are there (Jordan et al. 2024).
static const float ns_a = 3.4445f, ns_b = -4.7750f, ns_c = 2.0315f;

static int64_t shorter(int64_t rows, int64_t columns)
{
    return rows < columns ? rows : columns;
}

void muon_plan(struct muon *muon, const struct optimizer_config *optimizer,
               const struct params *params, enum dtype type, struct arena *arena)
{
    int64_t elements = 1, side = 1;
    for (size_t i = 0; i < params->count; i++) {
        const struct param *p = &params->items[i];
        if (!update_is_muon(optimizer, p))
            continue;
        int64_t s = shorter(p->shape[0], p->shape[1]);
        elements = p->count > elements ? p->count : elements;
        side = s > side ? s : side;
    }
    muon->type = type;
    muon->elements = elements;
    muon->x[0] = arena_take(arena, "update", "muon_x", type, elements, 1, 1);
    muon->x[1] = arena_take(arena, "update", "muon_x_next", type, elements, 1, 1);
    muon->gram = arena_take(arena, "update", "muon_gram", type, side, side, 1);
    muon->poly = arena_take(arena, "update", "muon_poly", type, side, side, 1);
    muon->squares = arena_take(arena, "update", "muon_squares", DTYPE_F64, 1, 1, 1);
    muon->squares_scratch =
        arena_take(arena, "update", "muon_squares_scratch", DTYPE_F64, SUM_SQUARES_PARTS, 1, 1);
}

// The products of one iteration on [r, c] matrices, always with the smaller of x x^T and x^T x.
static void iterate(const struct muon *muon, const struct backend *backend, struct stream *stream,
                    int64_t r, int64_t c, const void *x, void *next)
{
    enum dtype type = muon->type;
    bool wide = r <= c;
    int64_t s = shorter(r, c);
    const struct gemm gram = {.m = s,
                              .n = s,
                              .k = wide ? c : r,
                              .transpose_a = !wide,
                              .transpose_b = wide,
                              .alpha = 1.0f,
                              .a = x,
                              .b = x,
                              .c = muon->gram,
                              .a_type = type,
                              .b_type = type,
                              .c_type = type,
                              .fixed = true};
    const struct gemm poly = {.m = s,
                              .n = s,
                              .k = s,
                              .alpha = ns_c,
                              .beta = ns_b,
                              .a = muon->gram,
                              .b = muon->gram,
                              .d = muon->gram,
                              .c = muon->poly,
                              .a_type = type,
                              .b_type = type,
                              .c_type = type,
                              .fixed = true};
    const struct gemm step = {.m = r,
                              .n = c,
                              .k = s,
                              .alpha = 1.0f,
                              .beta = ns_a,
                              .a = wide ? muon->poly : x,
                              .b = wide ? x : muon->poly,
                              .d = x,
                              .c = next,
                              .a_type = type,
                              .b_type = type,
                              .c_type = type,
                              .fixed = true};
    backend->kernels->gemm(stream, &gram);
    backend->kernels->gemm(stream, &poly);
    backend->kernels->gemm(stream, &step);
}

void muon_show_products(const struct muon *muon, const struct optimizer_config *optimizer,
                        const struct params *params, const struct backend *backend,
                        struct stream *stream)
{
    backend->zero(stream, muon->x[0], (size_t)muon->elements * dtype_size(muon->type));
    for (size_t i = 0; i < params->count; i++) {
        const struct param *p = &params->items[i];
        if (update_is_muon(optimizer, p))
            iterate(muon, backend, stream, p->shape[0], p->shape[1], muon->x[0], muon->x[1]);
    }
}

double muon_factor(const struct optimizer_config *optimizer, int64_t rows, int64_t columns)
{
    double r = (double)rows, c = (double)columns;
    if (optimizer->muon_scale == MUON_SCALE_ORIGINAL)
        return sqrt(fmax(1.0, r / c));
    return 0.2 * sqrt(fmax(r, c));
}

double muon_flops(const struct optimizer_config *optimizer, int64_t rows, int64_t columns)
{
    double s = (double)shorter(rows, columns), long_side = (double)(rows + columns) - s;
    return (double)optimizer->muon_ns_steps * (4.0 * s * s * long_side + 2.0 * s * s * s);
}

void muon_apply(const struct muon *muon, const struct optimizer_config *optimizer,
                const struct backend *backend, struct stream *stream, const struct muon_tensor *t)
{
    const struct kernels *kernels = backend->kernels;
    int64_t count = t->rows * t->columns;
    void *x = muon->x[0], *next = muon->x[1];
    BUG_UNLESS(x != NULL);
    kernels->muon_momentum(stream, &(struct muon_momentum){.count = count,
                                                           .grad = t->grad,
                                                           .m = t->m,
                                                           .momentum = optimizer->muon_momentum,
                                                           .grad_scale = t->grad_scale});
    kernels->sum_squares(stream, &(struct sum_squares){.count = count,
                                                       .x = t->grad,
                                                       .result = muon->squares,
                                                       .scratch = muon->squares_scratch});
    kernels->muon_normalise(stream, &(struct muon_normalise){.count = count,
                                                             .from = t->grad,
                                                             .squares = muon->squares,
                                                             .to = x,
                                                             .to_type = muon->type});
    for (int64_t i = 0; i < optimizer->muon_ns_steps; i++) {
        void *last = x;
        iterate(muon, backend, stream, t->rows, t->columns, x, next);
        x = next;
        next = last;
    }
    kernels->muon_update(
        stream, &(struct muon_update){.count = count,
                                      .param = t->param,
                                      .x = x,
                                      .x_type = muon->type,
                                      .copy = t->copy,
                                      .copy_type = t->copy_type,
                                      .keep = 1.0 - t->lr * t->weight_decay,
                                      .step = t->lr * muon_factor(optimizer, t->rows, t->columns)});
}
