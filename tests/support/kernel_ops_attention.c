// Owns how attention is tested.
// Shape: blocks, block size, context, heads, key heads, head_dim; CAUSAL, WINDOW, STRIDED. Of block size 0:
// rows, 0, context, and so on.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/kernel_ops.h"
#include "tests/support/kernel_ops_parts.h"
#include "tests/support/naive.h"

enum { DOCUMENTS = 3 };

static bool has_blocks(const struct kernel_case *c)
{
    return c->shape[1] > 0;
}

static int64_t rows_of(const struct kernel_case *c)
{
    return c->shape[0] * (has_blocks(c) ? c->shape[1] : 1);
}

// The context is cut into documents; block 0 sees none of it, the others from the start of a document
// up to an anchor in it. Timed cases and those of odd seeds have anchors in order, as training does. A row
// without a block stands for one; its window goes back from its anchor.
static void build_ranges(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t blocks = c->shape[0], size = has_blocks(c) ? c->shape[1] : 1, context = c->shape[2];
    struct kernel_tensor *begin = run_add(run, "begin", TENSOR_IN, DTYPE_I32, blocks * size, 1);
    struct kernel_tensor *end = run_add(run, "end", TENSOR_IN, DTYPE_I32, blocks * size, 1);
    for (int64_t block = 1; block < blocks && context > 0; block++) {
        bool sorted = (c->flags & CASE_BENCH) != 0 || c->seed % 2 == 1;
        int64_t document = sorted ? block * DOCUMENTS / blocks : run_below(run, DOCUMENTS);
        int64_t first = context * document / DOCUMENTS;
        int64_t length = context * (document + 1) / DOCUMENTS - first;
        int64_t anchor =
            first + (sorted ? context * block / blocks - first : run_below(run, length + 1));
        int64_t window = anchor - context / 5 - 2;
        for (int64_t slot = 0; slot < size; slot++) {
            int64_t later = first + (c->flags & CASE_WINDOW ? slot * 3 : 0);
            if (!has_blocks(c) && (c->flags & CASE_WINDOW) != 0)
                later = window > first ? window : first;
            begin->value[block * size + slot] = (double)(later < anchor ? later : anchor);
            end->value[block * size + slot] = (double)anchor;
        }
    }
}

static void build_inputs(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = rows_of(c), context = c->shape[2], heads = c->shape[3], kv_heads = c->shape[4],
            d = c->shape[5];
    run_add_normal(run, "q", TENSOR_IN, c->type, rows, heads * d, 1.5);
    if (has_blocks(c)) {
        run_add_normal(run, "k_block", TENSOR_IN, c->type, rows, kv_heads * d, 1.5);
        run_add_normal(run, "v_block", TENSOR_IN, c->type, rows, kv_heads * d, 1.0);
    }
    run_add_normal(run, "k_context", TENSOR_IN, c->type, context, kv_heads * d, 1.5);
    run_add_normal(run, "v_context", TENSOR_IN, c->type, context, kv_heads * d, 1.0);
    if (c->flags & CASE_STRIDED)
        run_find(run, "v_context")->stride += d;
    if ((c->flags & CASE_STRIDED) != 0 && has_blocks(c))
        run_find(run, "v_block")->stride += 3 * d;
    build_ranges(c, run);
}

struct naive_attention attention_of(const struct kernel_case *c, const struct kernel_run *run)
{
    return (struct naive_attention){.rows = rows_of(c),
                                    .block_size = c->shape[1],
                                    .context = c->shape[2],
                                    .heads = c->shape[3],
                                    .kv_heads = c->shape[4],
                                    .head_dim = c->shape[5],
                                    .causal = (c->flags & CASE_CAUSAL) != 0,
                                    .scale = (double)(1.0f / sqrtf((float)c->shape[5])),
                                    .q = run_value(run, "q"),
                                    .k_block = run_value(run, "k_block"),
                                    .v_block = run_value(run, "v_block"),
                                    .k_context = run_value(run, "k_context"),
                                    .v_context = run_value(run, "v_context"),
                                    .begin = run_integers(run, "begin"),
                                    .end = run_integers(run, "end")};
}

static void release(struct naive_attention *in)
{
    free((void *)in->begin);
    free((void *)in->end);
}

void attention_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = rows_of(c);
    build_inputs(c, run);
    run_add(run, "out", TENSOR_OUT, c->type, rows, c->shape[3] * c->shape[5]);
    run_add(run, "lse", TENSOR_OUT, DTYPE_F32, rows, c->shape[3]);
}

void attention_expect(const struct kernel_case *c, struct kernel_run *run)
{
    struct naive_attention in = attention_of(c, run);
    naive_attention(&in, run_expected(run, "out"), run_expected(run, "lse"));
    release(&in);
}

static struct attention attention_op(const struct kernel_case *c, const struct kernel_run *run)
{
    return (struct attention){.rows = rows_of(c),
                              .block_size = c->shape[1],
                              .context = c->shape[2],
                              .heads = c->shape[3],
                              .kv_heads = c->shape[4],
                              .head_dim = c->shape[5],
                              .causal = (c->flags & CASE_CAUSAL) != 0,
                              .scale = 1.0f / sqrtf((float)c->shape[5]),
                              .type = c->type,
                              .q = run_device(run, "q"),
                              .k_block = run_device(run, "k_block"),
                              .v_block = run_device(run, "v_block"),
                              .k_context = run_device(run, "k_context"),
                              .v_context = run_device(run, "v_context"),
                              .v_block_stride = has_blocks(c) ? run_stride(run, "v_block") : 0,
                              .v_context_stride = run_stride(run, "v_context"),
                              .begin = run_device(run, "begin"),
                              .end = run_device(run, "end"),
                              .out = run_device(run, "out"),
                              .lse = run_device(run, "lse"),
                              .dout = run_device(run, "dout"),
                              .delta = run_device(run, "delta"),
                              .dq = run_device(run, "dq"),
                              .dk_block = run_device(run, "dk_block"),
                              .dv_block = run_device(run, "dv_block"),
                              .dk_context = run_device(run, "dk_context"),
                              .dv_context = run_device(run, "dv_context")};
}

void attention_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct attention op = attention_op(c, run);
    run->backend->kernels->attention_forward(run->stream, &op);
}

// Pairs of query and visible key, were every block to see half of the context.
static double pairs(const struct kernel_case *c)
{
    double keys = (double)c->shape[2] / (2.0 * DOCUMENTS) + (double)c->shape[1];
    return (double)(rows_of(c) * c->shape[3]) * keys;
}

double attention_flops(const struct kernel_case *c)
{
    return 4.0 * pairs(c) * (double)c->shape[5];
}

void attention_backward_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = rows_of(c), context = c->shape[2], width = c->shape[3],
            kv_width = c->shape[4] * c->shape[5];
    build_inputs(c, run);
    struct kernel_tensor *out = run_add(run, "out", TENSOR_IN, c->type, rows, width * c->shape[5]);
    run_add(run, "lse", TENSOR_IN, DTYPE_F32, rows, width);
    struct naive_attention in = attention_of(c, run);
    naive_attention(&in, out->value, run_value(run, "lse"));
    release(&in);
    for (int64_t i = 0; i < rows * out->columns; i++)
        out->value[i] = round_to(c->type, out->value[i]);
    run_add_normal(run, "dout", TENSOR_IN, c->type, rows, out->columns, 1.0);
    run_add(run, "delta", TENSOR_SCRATCH, DTYPE_F32, rows, width);
    run_add(run, "dq", TENSOR_OUT, c->type, rows, out->columns);
    if (has_blocks(c)) {
        run_add(run, "dk_block", TENSOR_OUT, c->type, rows, kv_width);
        run_add(run, "dv_block", TENSOR_OUT, c->type, rows, kv_width)->stride =
            run_stride(run, "v_block");
    }
    run_add_normal(run, "dk_context", TENSOR_CHANGED, DTYPE_F32, context, kv_width, 1.0);
    run_add_normal(run, "dv_context", TENSOR_CHANGED, DTYPE_F32, context, kv_width, 1.0);
}

void attention_backward_expect(const struct kernel_case *c, struct kernel_run *run)
{
    struct naive_attention in = attention_of(c, run);
    struct kernel_tensor *dk = run_find(run, "dk_context"), *dv = run_find(run, "dv_context");
    naive_attention_backward(&in, run_value(run, "out"), run_value(run, "dout"),
                             run_expected(run, "dq"), run_expected(run, "dk_block"),
                             run_expected(run, "dv_block"), dk->expected, dv->expected);
    for (int64_t i = 0; i < dk->rows * dk->columns; i++) {
        dk->expected[i] += dk->value[i];
        dv->expected[i] += dv->value[i];
    }
    release(&in);
}

void attention_backward_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct attention op = attention_op(c, run);
    run->backend->kernels->attention_backward(run->stream, &op);
}

double attention_backward_flops(const struct kernel_case *c)
{
    return 2.5 * attention_flops(c);
}
