// Muon by itself: what the iteration makes of singular values, which tensors it takes, and what it leaves of
// the state. One step against float64 is test_golden's.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "kernels/kernels.h"
#include "tests/support/step_fixture.h"
#include "trainer/muon.h"
#include "trainer/update_rule.h"

enum { THREADS = 2, MOST = 64 };

struct matrix {
    struct optimizer_config optimizer;
    struct params params;
    struct arena arena;
    struct muon muon;
    struct stream *stream;
    int64_t rows, columns;
    float *param, *m, *grad;
    void *memory;
};

static void matrix_open(struct matrix *t, int64_t rows, int64_t columns, enum dtype type)
{
    const struct backend *backend = backend_cpu();
    struct config config;
    *t = (struct matrix){.rows = rows, .columns = columns};
    config_init(&config);
    t->optimizer = config.optimizer; // numbers alone are used after the release
    config_release(&config);
    t->optimizer.kind = OPTIMIZER_MUON;
    params_add(&t->params, "layers.0.mlp.up_proj.weight", 2, rows, columns, false, false);
    arena_init(&t->arena);
    muon_plan(&t->muon, &t->optimizer, &t->params, type, &t->arena);
    t->memory = backend->alloc(t->arena.bytes);
    arena_place(&t->arena, t->memory, t->arena.bytes);
    muon_plan(&t->muon, &t->optimizer, &t->params, type, &t->arena);
    t->stream = backend->stream_open(&(struct stream_options){
        .threads = THREADS, .workspace_bytes = backend->stream_workspace_bytes(THREADS)});
    size_t count = (size_t)(rows * columns);
    t->param = memory_alloc(count, sizeof(float));
    t->m = memory_alloc(count, sizeof(float));
    t->grad = memory_alloc(count, sizeof(float));
}

static void matrix_close(struct matrix *t)
{
    backend_cpu()->stream_close(t->stream);
    backend_cpu()->free(t->memory);
    arena_release(&t->arena);
    params_release(&t->params);
    free(t->param);
    free(t->m);
    free(t->grad);
}

// Normal draws; column j is `fall` to the power j times as large, so that singular values fall, too.
static void fill(struct matrix *t, double fall, uint64_t seed)
{
    struct rng_key key = rng_key_make(seed, 0, 0, RNG_TEST);
    for (int64_t i = 0; i < t->rows * t->columns; i++)
        t->grad[i] = rng_normal(key, (uint64_t)i) * (float)pow(fall, (double)(i % t->columns));
}

// From a parameter of zeros with rate -1: what the gradient becomes, times muon_factor.
static void apply(struct matrix *t, double grad_scale)
{
    size_t bytes = (size_t)(t->rows * t->columns) * sizeof(float);
    memset(t->param, 0, bytes);
    memset(t->m, 0, bytes);
    muon_apply(&t->muon, &t->optimizer, backend_cpu(), t->stream,
               &(struct muon_tensor){.rows = t->rows,
                                     .columns = t->columns,
                                     .param = t->param,
                                     .m = t->m,
                                     .grad = t->grad,
                                     .lr = -1.0,
                                     .grad_scale = grad_scale});
}

// Eigenvalues of a symmetric matrix [n, n] onto its diagonal, by Jacobi's rotations.
static void diagonalise(double *a, int n)
{
    for (int sweep = 0; sweep < 30; sweep++)
        for (int p = 0; p < n; p++)
            for (int q = p + 1; q < n; q++) {
                if (fabs(a[p * n + q]) < 1e-14)
                    continue;
                double angle = 0.5 * atan2(2.0 * a[p * n + q], a[q * n + q] - a[p * n + p]);
                double c = cos(angle), s = sin(angle);
                for (int k = 0; k < n; k++) {
                    double x = a[k * n + p], y = a[k * n + q];
                    a[k * n + p] = c * x - s * y;
                    a[k * n + q] = s * x + c * y;
                }
                for (int k = 0; k < n; k++) {
                    double x = a[p * n + k], y = a[q * n + k];
                    a[p * n + k] = c * x - s * y;
                    a[q * n + k] = s * x + c * y;
                }
            }
}

// Smallest and largest singular value of what `apply` has made.
static void singular_values(const struct matrix *t, double *least, double *most)
{
    bool wide = t->rows <= t->columns;
    int n = (int)(wide ? t->rows : t->columns), k = (int)(wide ? t->columns : t->rows);
    double gram[MOST * MOST] = {0}, factor = muon_factor(&t->optimizer, t->rows, t->columns);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            for (int l = 0; l < k; l++) {
                double x = (double)t->param[wide ? i * k + l : l * n + i];
                double y = (double)t->param[wide ? j * k + l : l * n + j];
                gram[i * n + j] += x * y / (factor * factor);
            }
    diagonalise(gram, n);
    *least = INFINITY;
    *most = 0.0;
    for (int i = 0; i < n; i++) {
        double value = sqrt(fmax(gram[i * n + i], 0.0));
        *least = fmin(*least, value);
        *most = fmax(*most, value);
    }
}

// The iteration keeps singular values from about 0.7 to 1.2 once they are there; five steps bring up those that
// are not below a hundredth of the norm.
static void singular_values_become_one(void **state)
{
    static const int64_t shapes[][2] = {{24, 60}, {60, 24}, {16, 16}, {3, 64}, {64, 2}};
    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++)
        for (int bf16_too = 0; bf16_too < 2; bf16_too++) {
            struct matrix t;
            double least, most;
            matrix_open(&t, shapes[i][0], shapes[i][1], bf16_too ? DTYPE_BF16 : DTYPE_F32);
            fill(&t, shapes[i][0] == shapes[i][1] ? 0.9 : 0.99, i);
            apply(&t, 1.0);
            singular_values(&t, &least, &most);
            print_message("%lld x %lld: %.3f to %.3f\n", (long long)t.rows, (long long)t.columns,
                          least, most);
            assert_true(most <= 1.25);
            if (t.rows != t.columns)
                assert_true(least >= 0.65);
            matrix_close(&t);
        }
}

// x x^T or x^T x, whichever is smaller: the update of a transposed gradient is the transposed update.
static void transposed_alike(void **state)
{
    (void)state;
    struct matrix a, b;
    matrix_open(&a, 12, 31, DTYPE_F32);
    matrix_open(&b, 31, 12, DTYPE_F32);
    fill(&a, 0.95, 3);
    for (int64_t r = 0; r < 12; r++)
        for (int64_t c = 0; c < 31; c++)
            b.grad[c * 12 + r] = a.grad[r * 31 + c];
    apply(&a, 1.0);
    apply(&b, 1.0);
    for (int64_t r = 0; r < 12; r++)
        for (int64_t c = 0; c < 31; c++)
            assert_float_equal(a.param[r * 31 + c], b.param[c * 12 + r], 1e-5);
    matrix_close(&a);
    matrix_close(&b);
}

static void gradients_of_any_size_move_alike(void **state)
{
    (void)state;
    struct matrix a, b;
    matrix_open(&a, 10, 20, DTYPE_F32);
    matrix_open(&b, 10, 20, DTYPE_F32);
    fill(&a, 1.0, 4);
    fill(&b, 1.0, 4);
    apply(&a, 1.0);
    apply(&b, 0x1p-12);
    for (int64_t i = 0; i < 200; i++)
        assert_float_equal(a.param[i], b.param[i], 1e-6);
    memset(a.grad, 0, 200 * sizeof(float));
    apply(&a, 1.0);
    for (int64_t i = 0; i < 200; i++)
        assert_true(a.param[i] == 0.0f);
    matrix_close(&a);
    matrix_close(&b);
}

// ---- which tensors

static void takes_hidden_matrices(void **state)
{
    static const struct {
        const char *name;
        int dims;
        int64_t rows, columns;
        bool norm, muon;
    } tensors[] = {{"fc.weight", 2, 8, 24, false, true},
                   {"layers.0.self_attn.q_proj.weight", 2, 8, 8, false, true},
                   {"layers.3.mlp.down_proj.weight", 2, 8, 12, false, true},
                   {"norm.weight", 1, 8, 1, true, false},
                   {"lm_head.weight", 2, 64, 8, false, false},
                   {"embed_tokens.weight", 2, 64, 8, false, false},
                   {"confidence_head.proj.weight", 2, 1, 8, false, false}};
    (void)state;
    struct config config;
    struct params params = {0};
    config_init(&config);
    for (size_t i = 0; i < sizeof(tensors) / sizeof(*tensors); i++) {
        const struct param *p =
            params_add(&params, tensors[i].name, tensors[i].dims, tensors[i].rows,
                       tensors[i].columns, tensors[i].norm, false);
        config.optimizer.kind = OPTIMIZER_ADAMW;
        assert_false(update_is_muon(&config.optimizer, p));
        config.optimizer.kind = OPTIMIZER_MUON;
        assert_int_equal(update_is_muon(&config.optimizer, p), tensors[i].muon);
        config.optimizer.lr = 1e-4;
        config.optimizer.muon_lr = 1e-3;
        config.optimizer.weight_decay = 0.01;
        config.optimizer.muon_weight_decay = 0.1;
        double share = update_lr_share(&config.optimizer, p);
        assert_true(fabs(share - (tensors[i].muon ? 10.0 : 1.0)) <= 1e-12);
        double decay = tensors[i].muon ? 0.1 : 0.01;
        assert_true(update_weight_decay(&config.optimizer, p) == (tensors[i].norm ? 0.0 : decay));
    }
    config.optimizer.muon_lr = config.optimizer.muon_weight_decay = NAN;
    assert_true(update_lr_share(&config.optimizer, &params.items[0]) == 1.0);
    assert_true(update_weight_decay(&config.optimizer, &params.items[0]) == 0.01);
    params_release(&params);
    config_release(&config);
}

// Second moments are of AdamW's tensors alone, one behind the other, on any rank.
static void second_moments_are_few(void **state)
{
    static const char *const sets[] = {"optimizer.kind=muon"};
    (void)state;
    struct step_fixture f;
    step_fixture_init(&f, &(struct step_fixture_options){.seed = 1, .sets = sets, .set_count = 1});
    for (int ranks = 1; ranks <= 3; ranks++) {
        int64_t found = 0;
        for (int rank = 0; rank < ranks; rank++) {
            struct ownership ownership;
            ownership_open(&ownership, &f.params, ranks, rank);
            const struct state_layout layout = {&f.params, &ownership, &f.config.optimizer};
            int64_t end = 0;
            for (size_t i = 0; i < f.params.count; i++) {
                if (!state_has(&layout, STATE_V, i))
                    continue;
                assert_true(f.params.items[i].norm);
                assert_int_equal(state_offset(&layout, STATE_V, i), end);
                end += (f.params.items[i].count + PARAM_ALIGNMENT - 1) / PARAM_ALIGNMENT *
                       PARAM_ALIGNMENT;
                found++;
            }
            assert_int_equal(state_elements(&layout, STATE_V), end > 0 ? end : 1);
            int64_t own = ownership.elements[ownership.rank];
            assert_int_equal(state_elements(&layout, STATE_M), own > 0 ? own : 1);
            ownership_close(&ownership);
        }
        int64_t norms = 0;
        for (size_t i = 0; i < f.params.count; i++)
            norms += f.params.items[i].norm;
        assert_int_equal(found, norms);
    }
    step_fixture_release(&f);
}

// Scratch lies where nothing lives between passes: a large step takes no more memory with Muon than its
// second moments were.
static void scratch_costs_nothing_beside_large_groups(void **state)
{
    static const char *const sets[] = {"memory.group_rows=800", "memory.chunk_rows=1600",
                                       "data.seq_len=400", "optimizer.kind=muon"};
    (void)state;
    size_t bytes[2];
    for (size_t muon = 0; muon < 2; muon++) {
        struct step_fixture f;
        struct arena arena;
        step_fixture_init(
            &f, &(struct step_fixture_options){.seed = 1, .sets = sets, .set_count = 3 + muon});
        struct step_setup setup = step_fixture_setup(&f);
        arena_init(&arena);
        step_plan(&arena, &setup);
        bytes[muon] = arena.bytes;
        assert_int_equal(arena_group_bytes(&arena, "update"), 0);
        arena_release(&arena);
        step_fixture_release(&f);
    }
    assert_true(bytes[1] < bytes[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(singular_values_become_one),
        cmocka_unit_test(transposed_alike),
        cmocka_unit_test(gradients_of_any_size_move_alike),
        cmocka_unit_test(takes_hidden_matrices),
        cmocka_unit_test(second_moments_are_few),
        cmocka_unit_test(scratch_costs_nothing_beside_large_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
