// Owns how attention to the keys of a row's own steps is tested.
// Shape: rows, steps, heads, key heads, head_dim; STRIDED: the steps of a row lie beside each other, with
// gaps; otherwise the rows of a step do. Backward FRESH, too.
#include <math.h>
#include <string.h>

#include "tests/support/kernel_ops.h"
#include "tests/support/kernel_ops_parts.h"
#include "tests/support/naive.h"

static bool is_strided(const struct kernel_case *c)
{
    return (c->flags & CASE_STRIDED) != 0;
}

static void build_inputs(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], steps = c->shape[1], kv_heads = c->shape[3], d = c->shape[4];
    run_add_normal(run, "q", TENSOR_IN, c->type, rows, c->shape[2] * d, 1.5);
    run_add_normal(run, "k", TENSOR_IN, c->type, steps * rows, kv_heads * d, 1.5)->stride +=
        is_strided(c) ? 2 * d : 0;
    run_add_normal(run, "v", TENSOR_IN, c->type, steps * rows, kv_heads * d, 1.0)->stride +=
        is_strided(c) ? d : 0;
}

// What attention over the context would give; row 0 sees none.
static void build_context(const struct kernel_case *c, struct kernel_run *run, const char *out,
                          const char *lse, enum tensor_role role)
{
    int64_t rows = c->shape[0], heads = c->shape[2], d = c->shape[4];
    struct kernel_tensor *of_out = run_add_normal(run, out, role, c->type, rows, heads * d, 0.5);
    struct kernel_tensor *of_lse = run_add_normal(run, lse, role, DTYPE_F32, rows, heads, 2.0);
    for (int64_t i = 0; i < heads * d; i++)
        of_out->value[i] = 0.0;
    for (int64_t i = 0; i < heads; i++)
        of_lse->value[i] = (double)-INFINITY;
}

struct naive_diagonal diagonal_of(const struct kernel_case *c, const struct kernel_run *run)
{
    return (struct naive_diagonal){.rows = c->shape[0],
                                   .steps = c->shape[1],
                                   .heads = c->shape[2],
                                   .kv_heads = c->shape[3],
                                   .head_dim = c->shape[4],
                                   .step_rows = is_strided(c) ? 1 : c->shape[0],
                                   .row_rows = is_strided(c) ? c->shape[1] : 1,
                                   .scale = (double)(1.0f / sqrtf((float)c->shape[4])),
                                   .q = run_value(run, "q"),
                                   .k = run_value(run, "k"),
                                   .v = run_value(run, "v")};
}

void diagonal_build(const struct kernel_case *c, struct kernel_run *run)
{
    build_inputs(c, run);
    build_context(c, run, "out", "lse", TENSOR_CHANGED);
}

void diagonal_expect(const struct kernel_case *c, struct kernel_run *run)
{
    struct naive_diagonal in = diagonal_of(c, run);
    naive_diagonal(&in, run_value(run, "out"), run_value(run, "lse"), run_expected(run, "out"),
                   run_expected(run, "lse"));
}

static struct diagonal diagonal_op(const struct kernel_case *c, const struct kernel_run *run)
{
    int64_t k = run_stride(run, "k"), v = run_stride(run, "v");
    return (struct diagonal){.rows = c->shape[0],
                             .steps = c->shape[1],
                             .heads = c->shape[2],
                             .kv_heads = c->shape[3],
                             .head_dim = c->shape[4],
                             .scale = 1.0f / sqrtf((float)c->shape[4]),
                             .type = c->type,
                             .q = run_device(run, "q"),
                             .k = run_device(run, "k"),
                             .v = run_device(run, "v"),
                             .k_step = is_strided(c) ? k : k * c->shape[0],
                             .k_stride = is_strided(c) ? k * c->shape[1] : k,
                             .v_step = is_strided(c) ? v : v * c->shape[0],
                             .v_stride = is_strided(c) ? v * c->shape[1] : v,
                             .out = run_device(run, "out"),
                             .lse = run_device(run, "lse"),
                             .dout = run_device(run, "dout"),
                             .dq = run_device(run, "dq"),
                             .dk = run_device(run, "dk"),
                             .dv = run_device(run, "dv"),
                             .fresh = (c->flags & CASE_FRESH) != 0};
}

void diagonal_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct diagonal op = diagonal_op(c, run);
    run->backend->kernels->diagonal_forward(run->stream, &op);
}

void diagonal_backward_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[2] * c->shape[4];
    build_inputs(c, run);
    build_context(c, run, "context_out", "context_lse", TENSOR_IN);
    struct kernel_tensor *out = run_add(run, "out", TENSOR_IN, c->type, rows, width);
    run_add(run, "lse", TENSOR_IN, DTYPE_F32, rows, c->shape[2]);
    struct naive_diagonal in = diagonal_of(c, run);
    naive_diagonal(&in, run_value(run, "context_out"), run_value(run, "context_lse"), out->value,
                   run_value(run, "lse"));
    for (int64_t i = 0; i < rows * width; i++)
        out->value[i] = round_to(c->type, out->value[i]);
    for (int64_t i = 0; i < rows * c->shape[2]; i++)
        run_value(run, "lse")[i] = round_to(DTYPE_F32, run_value(run, "lse")[i]);
    run_add_normal(run, "dout", TENSOR_IN, c->type, rows, width, 1.0);
    run_add_normal(run, "dq", TENSOR_CHANGED, c->type, rows, width, 1.0);
    int64_t keys = c->shape[1] * rows, key = c->shape[3] * c->shape[4];
    enum tensor_role role = c->flags & CASE_FRESH ? TENSOR_OUT : TENSOR_CHANGED;
    run_add_normal(run, "dk", role, DTYPE_F32, keys, key, 1.0);
    run_add_normal(run, "dv", role, DTYPE_F32, keys, key, 1.0);
}

// What the gradients are added to.
static void expect_added(struct kernel_tensor *tensor)
{
    size_t bytes = (size_t)(tensor->rows * tensor->columns) * sizeof(double);
    if (tensor->role == TENSOR_OUT)
        memset(tensor->expected, 0, bytes);
    else
        memcpy(tensor->expected, tensor->value, bytes);
}

void diagonal_backward_expect(const struct kernel_case *c, struct kernel_run *run)
{
    struct naive_diagonal in = diagonal_of(c, run);
    struct kernel_tensor *dq = run_find(run, "dq");
    expect_added(dq);
    expect_added(run_find(run, "dk"));
    expect_added(run_find(run, "dv"));
    naive_diagonal_backward(&in, run_value(run, "out"), run_value(run, "lse"),
                            run_value(run, "dout"), dq->expected, run_expected(run, "dk"),
                            run_expected(run, "dv"));
}

void diagonal_backward_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct diagonal op = diagonal_op(c, run);
    run->backend->kernels->diagonal_backward(run->stream, &op);
}
