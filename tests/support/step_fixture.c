// Owns the made-up target, weights, rows and backend of step tests.
#include "tests/support/step_fixture.h"

#include <stdarg.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/log.h"
#include "base/rng.h"
#include "tests/support/rows.h"

// ---- the backend

// Ops get no context from whoever calls them, so what the wrapped ones need is here.
static struct {
    const struct step *step; // whose head, vocabulary and loss buffers are meant
    struct head_rows rows;
    const float *noise;
    struct test_backend on; // the backend below; CPU unless chosen
} wrapped;

void step_fixture_use(const struct test_backend *on)
{
    wrapped.on = *on;
}

static const struct backend *below(void)
{
    return wrapped.on.backend != NULL ? wrapped.on.backend : backend_cpu();
}

static void counted_gemm(struct stream *stream, const struct gemm *gemm)
{
    const struct step *step = wrapped.step;
    if (gemm->b == step->head) {
        if (gemm->a == step->loss.student)
            wrapped.rows.student += gemm->m;
        else if (gemm->a == step->loss.teacher)
            wrapped.rows.teacher += gemm->m;
        else if (gemm->k == step->setup.sizes->draft_vocab)
            wrapped.rows.gradient += gemm->m;
        else
            BUG("the head is multiplied with something unknown");
    }
    below()->kernels->gemm(stream, gemm);
}

static void forced_context_load(struct stream *stream, const struct context_load *op)
{
    if (wrapped.noise == NULL) {
        below()->kernels->context_load(stream, op);
        return;
    }
    struct context_load plain = *op;
    BUG_UNLESS(op->noise != NOISE_KIND_NONE && op->type == DTYPE_F32);
    plain.noise = NOISE_KIND_NONE;
    below()->kernels->context_load(stream, &plain);
    size_t count = (size_t)(op->tokens * op->layers * op->hidden), bytes = count * sizeof(float);
    float *values = memory_alloc(count, sizeof(*values));
    below()->copy_out(stream, values, op->out, bytes);
    below()->sync(stream);
    for (size_t i = 0; i < count; i++)
        values[i] += wrapped.noise[i];
    below()->copy_in(stream, op->out, values, bytes);
    below()->sync(stream);
    free(values);
}

// Rows are added to at once: of two that are added to the same, one may be lost.
static void distinct_add_rows(struct stream *stream, const struct add_rows *op)
{
    if (op->index != NULL) {
        int32_t *index = memory_alloc((size_t)op->rows, sizeof(*index));
        bool *taken = memory_alloc((size_t)op->out_rows, sizeof(*taken));
        below()->copy_out(stream, index, op->index, (size_t)op->rows * sizeof(*index));
        below()->sync(stream);
        for (int64_t i = 0; i < op->rows; i++) {
            if (index[i] < 0 || index[i] >= op->out_rows || taken[index[i]])
                fail_msg("row %lld is added to row %d, which another one is added to or which does "
                         "not exist",
                         (long long)i, index[i]);
            taken[index[i]] = true;
        }
        free(index);
        free(taken);
    }
    below()->kernels->add_rows(stream, op);
}

// All ones is NaN in fp32, bf16 and fp64: what is read before it is written shows.
static void *poisoned_alloc(size_t bytes)
{
    enum { PIECE = 1 << 20 };
    struct stream *stream = below()->stream_open(&(struct stream_options){.threads = 1});
    unsigned char *memory = below()->alloc(bytes), *ones = memory_alloc(PIECE, 1);
    memset(ones, 0xff, PIECE);
    for (size_t at = 0; at < bytes; at += PIECE)
        below()->copy_in(stream, memory + at, ones, bytes - at < PIECE ? bytes - at : PIECE);
    below()->sync(stream);
    below()->stream_close(stream);
    free(ones);
    return memory;
}

const struct backend *step_fixture_backend(void)
{
    static struct kernels kernels;
    static struct backend backend;
    kernels = *below()->kernels;
    kernels.gemm = counted_gemm;
    kernels.context_load = forced_context_load;
    kernels.add_rows = distinct_add_rows;
    backend = *below();
    backend.kernels = &kernels;
    backend.alloc = poisoned_alloc;
    return &backend;
}

struct head_rows step_fixture_head_rows(void)
{
    return wrapped.rows;
}

void step_fixture_force_noise(const float *noise)
{
    wrapped.noise = noise;
}

// ---- target, weights, rows

// Three planes of features and the last hidden state.
enum { FEATURES = 3, TARGET_LAYERS = 8 };

static void fill_normal(float *out, int64_t count, double mean, double std, uint64_t seed,
                        uint64_t stream)
{
    struct rng_key key = rng_key_make(seed, 0, stream, RNG_TEST);
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)(mean + std * (double)rng_normal(key, (uint64_t)i));
}

static float *made_tensor(struct target_tensor *tensor, int64_t rows, int64_t columns)
{
    float *data = memory_alloc((size_t)(rows * columns), sizeof(*data));
    *tensor =
        (struct target_tensor){.data = data, .dtype = DTYPE_F32, .rows = rows, .columns = columns};
    return data;
}

static void make_target(struct step_fixture *f, const struct step_fixture_options *o)
{
    int64_t v = o->vocab > 0 ? o->vocab : 64, h = o->hidden > 0 ? o->hidden : 8;
    f->target = (struct target){.hidden_size = h,
                                .vocab_size = v,
                                .layers = TARGET_LAYERS,
                                .max_position_embeddings = 1024,
                                .rms_norm_eps = 1e-6,
                                .rope_theta = 10000.0,
                                .tied = o->tied,
                                .embed_scale = 1.0f,
                                .logit_scale = 1.0f};
    f->embed = made_tensor(&f->target.embed, v, h);
    fill_normal(f->embed, v * h, 0.0, 0.7, o->seed, 1);
    f->target.head = f->target.embed;
    if (!o->tied) {
        f->head = made_tensor(&f->target.head, v, h);
        fill_normal(f->head, v * h, 0.0, 0.7, o->seed, 2);
    }
    f->norm = made_tensor(&f->target.norm, h, 1);
    fill_normal(f->norm, h, 1.0, 0.2, o->seed, 3);
}

// Tokens spread over the whole vocabulary.
static void make_map(struct step_fixture *f, const struct step_fixture_options *o)
{
    int64_t vocab = f->target.vocab_size;
    struct error err = {0};
    if (o->draft_vocab == 0)
        return;
    int64_t *counts = memory_alloc((size_t)vocab, sizeof(*counts));
    for (int64_t i = 0; i < vocab; i++)
        counts[i] = 1 + i * 37 % vocab;
    if (vocab_map_make(&f->map, counts, vocab, o->draft_vocab, &err) != 0)
        die("%s", err.text);
    free(counts);
}

// Larger than at the start of training and norms off 1, so that every path matters.
static void make_weights(struct step_fixture *f, const struct step_fixture_options *o)
{
    double scale = o->weight_scale > 0.0 ? o->weight_scale : 1.0;
    for (size_t i = 0; i < f->params.count; i++) {
        const struct param *param = &f->params.items[i];
        double std = param->norm ? 0.3 : scale / sqrt((double)param->shape[1]);
        fill_normal(f->state.master + param->offset, param->count, param->norm ? 1.0 : 0.0, std,
                    o->seed, 100 + i);
    }
}

static void make_config(struct config *config, const struct step_fixture_options *o)
{
    static const char *const tiny[] = {
        "run.dir=unused",
        "run.compute=fp32",
        "run.device=cpu",
        "target.path=unused",
        "data.seq_len=64",
        "drafter.layers=2",
        "drafter.block_size=8",
        "drafter.mask_token_id=60",
        "drafter.head_dim=4",
        "drafter.num_attention_heads=2",
        "drafter.num_key_value_heads=2",
        "loss.kl=1.0",
        "drafter.intermediate_size=12",
    };
    enum { TINY = sizeof(tiny) / sizeof(*tiny), MOST = 32 };
    const char *sets[TINY + MOST];
    struct error err = {0};
    BUG_UNLESS(o->set_count <= MOST);
    memcpy(sets, tiny, sizeof(tiny));
    for (size_t i = 0; i < o->set_count; i++)
        sets[TINY + i] = o->sets[i];
    config_init(config);
    if (config_load(config, NULL, sets, TINY + o->set_count, &err) != 0)
        die("%s", err.text);
}

void step_fixture_resolve(struct step_fixture *f, const int64_t *layer_ids, int64_t features)
{
    struct error err = {0};
    if (drafter_sizes_resolve(&f->sizes, &f->config.drafter, &f->target, layer_ids, features,
                              &err) != 0)
        die("%s", err.text);
    if (f->map.draft_size > 0)
        f->sizes.draft_vocab = f->map.draft_size;
    drafter_params(&f->sizes, &f->params);
    f->planes = features + 1;
    for (int32_t l = 0; l < features; l++)
        f->plane[l] = l;
    f->last_plane = (int32_t)features;
    if (execution_choose(&f->execution, &f->config, &f->sizes, step_fixture_backend(), &err) != 0)
        die("%s", err.text);
    f->execution.threads = 1; // more is slower for tensors this small
    if (wrapped.on.generic)
        snprintf(f->execution.kernels, sizeof(f->execution.kernels), "generic");
    const struct state_layout layout = {&f->params, NULL, &f->config.optimizer};
    model_state_open_as(&f->state, &layout, false);
}

void step_fixture_init(struct step_fixture *f, const struct step_fixture_options *options)
{
    static const int64_t ids[FEATURES] = {1, 3, 6};
    *f = (struct step_fixture){.last_hidden = options->last_hidden, .float8 = options->float8};
    make_config(&f->config, options);
    make_target(f, options);
    make_map(f, options);
    step_fixture_resolve(f, ids, FEATURES);
    make_weights(f, options);
}

// Codes whose values are about as large as a standard normal's, scales that differ by a factor of 4.
static void make_codes(struct row *row, struct rng_key key)
{
    const struct feature_layout *features = &row->features;
    for (int64_t t = 0; t < row->tokens; t++) {
        bf16 *token = row->hidden + t * features->stride;
        float *scales = memory_alloc((size_t)features->layers, sizeof(*scales));
        uint8_t *codes = (uint8_t *)(token + features->codes);
        uint64_t first = (uint64_t)t * (uint64_t)((features->planes + 1) * features->hidden_size);
        for (int64_t l = 0; l < features->layers; l++)
            scales[l] = 0.1f * exp2f((float)(rng_u64(key, first + (uint64_t)l) % 5) * 0.5f);
        memcpy(token, scales, (size_t)features->layers * sizeof(*scales));
        for (int64_t i = 0; i < features->layers * features->hidden_size; i++) {
            uint64_t draw = rng_u64(key, first + (uint64_t)(i + 64));
            codes[i] = (uint8_t)((draw % 88) | (draw >> 32 & 1) << 7); // up to 15
        }
        for (int64_t i = 0; i < features->hidden_size; i++)
            token[features->last + i] = bf16_from_float(rng_normal(key, first + (uint64_t)i));
        free(scales);
    }
}

void step_fixture_row(const struct step_fixture *f, struct row *row, const int32_t *lengths,
                      int64_t documents, uint64_t seed)
{
    struct feature_layout features =
        feature_layout_make(f->planes, true, f->target.hidden_size, f->float8);
    test_row_open_features(row, lengths, documents, &features);
    struct rng_key key = rng_key_make(seed, 0, 7, RNG_TEST);
    for (int64_t t = 0; t < row->tokens; t++)
        row->input_ids[t] = (int32_t)(rng_u64(key, (uint64_t)t) % (uint64_t)f->target.vocab_size);
    int64_t values = row->tokens * row->planes * row->hidden_size;
    key = rng_key_make(seed, 0, 8, RNG_TEST);
    if (f->float8) {
        make_codes(row, key);
        return;
    }
    for (int64_t i = 0; i < values; i++)
        row->hidden[i] = bf16_from_float(rng_normal(key, (uint64_t)i));
}

// ---- the step

static void see_row(void *context, const struct row *row, const int32_t *anchors, int64_t count)
{
    struct step_fixture *f = context;
    (void)row, (void)anchors, (void)count;
    f->seen_rows++;
}

static void see_group(void *context, int64_t first_block, const struct slot *slots, int64_t count,
                      const struct slot_results *results)
{
    struct step_fixture *f = context;
    if (f->seen_count + count > f->seen_capacity) {
        f->seen_capacity = 2 * (f->seen_count + count);
        f->seen = memory_resize(f->seen, (size_t)f->seen_capacity, sizeof(*f->seen));
    }
    for (int64_t i = 0; i < count; i++)
        f->seen[f->seen_count++] =
            (struct seen_slot){.row = f->seen_rows - 1,
                               .block = (int32_t)first_block + slots[i].block,
                               .slot = slots[i].slot,
                               .label = slots[i].label,
                               .teacher_row = slots[i].teacher_row,
                               .student_argmax = results->student_argmax[i],
                               .teacher_argmax = results->teacher_argmax[i],
                               .weight = results->weight[i],
                               .loss = results->loss[i],
                               .student_lse = results->student_lse[i],
                               .teacher_lse = results->teacher_lse[i],
                               .overlap = results->overlap[i]};
}

struct step_setup step_fixture_setup(const struct step_fixture *f)
{
    return (struct step_setup){.config = &f->config,
                               .execution = &f->execution,
                               .backend = step_fixture_backend(),
                               .target = &f->target,
                               .sizes = &f->sizes,
                               .params = &f->params,
                               .map = f->map.draft_size > 0 ? &f->map : NULL,
                               .planes = f->planes,
                               .plane = f->plane,
                               .last_plane = f->last_plane,
                               .last_hidden = f->last_hidden,
                               .float8 = f->float8,
                               .training = true};
}

void step_fixture_open(struct step_fixture *f)
{
    struct step_setup setup = step_fixture_setup(f);
    struct error err = {0};
    step_close(&f->step);
    wrapped.step = &f->step;
    wrapped.noise = NULL;
    if (step_open(&f->step, &setup, &err) != 0)
        die("%s", err.text);
    step_load(&f->step, &f->state);
    f->observer = (struct step_observer){.context = f, .row = see_row, .group = see_group};
    f->step.observer = &f->observer;
    step_fixture_begin(f);
}

void step_fixture_release(struct step_fixture *f)
{
    step_close(&f->step);
    model_state_close(&f->state);
    params_release(&f->params);
    vocab_map_release(&f->map);
    config_release(&f->config);
    if (f->embed == NULL)
        target_close(&f->target);
    free(f->embed);
    free(f->head);
    free(f->norm);
    free(f->seen);
    *f = (struct step_fixture){0};
}

void step_fixture_begin(struct step_fixture *f)
{
    f->seen_count = 0;
    f->seen_rows = 0;
    wrapped.rows = (struct head_rows){0};
    step_begin(&f->step);
}

void step_fixture_run(struct step_fixture *f, const struct row *row, const int32_t *anchors,
                      int64_t count)
{
    step_fixture_begin(f);
    assert_int_equal(step_row_anchors(&f->step, row, anchors, count), 0);
}

const float *step_fixture_hidden(struct step_fixture *f, const struct row *row,
                                 const int32_t *anchors, int64_t count)
{
    struct step *step = &f->step;
    BUG_UNLESS(step->drafter.options.compute == DTYPE_F32);
    dflash_context_forward(&step->drafter.dflash, step->setup.backend, step->stream, row,
                           row->hidden, false, 0);
    return dflash_group_forward(&step->drafter.dflash, step->setup.backend, step->stream, anchors,
                                count, NULL, 0);
}

float *step_fixture_fetch(const struct step_fixture *f, const float *flat)
{
    size_t count = (size_t)f->params.elements;
    float *values = memory_alloc(count, sizeof(*values));
    below()->copy_out(f->step.stream, values, flat, count * sizeof(*values));
    below()->sync(f->step.stream);
    return values;
}

// ---- comparing

double relative_error(const float *got, const float *want, int64_t count)
{
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < count; i++) {
        double d = (double)got[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
}

void step_fixture_compare(const struct step_fixture *f, const float *got, const float *want,
                          double tol, const char *what)
{
    for (size_t i = 0; i < f->params.count; i++) {
        const struct param *param = &f->params.items[i];
        double error = relative_error(got + param->offset, want + param->offset, param->count);
        if (!(error <= tol))
            fail_msg("%s: %s off by %g, allowed %g", what, param->name, error, tol);
    }
}
