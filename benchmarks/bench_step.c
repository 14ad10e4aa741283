// Times whole training steps at real sizes, at several numbers of anchors in one process: a made-up
// target and row in memory, weights as a run begins with, one row a step in four documents, every token
// supervised. Prints one line per number of anchors: milliseconds of a step (mean of steps queued one
// after another, as in training), block rows per second, parts, device memory, loss; then the same numbers
// of anchors in changing order, as the largest slow-down of a block row against the line before.
// Usage: bench_step cpu|cuda|cuda-generic MODEL ANCHORS[,ANCHORS...]|all [draft_vocab=N] [section.key=value...]
// MODEL: v4, qwen3-8b, small; EAGLE-3: eagle3-qwen3-8b, eagle3-small, where every position counts (all).
// A run's own settings of memory.* and kernels.* are given as key=value, and data.rows_per_step for steps of
// several such rows. draft_vocab: EAGLE-3 with a draft vocabulary of N tokens.
// With optimizer.kind=muon it also prints the update of Muon's matrices, and of AdamW's tensors, by themselves.
// Started by torchrun or mpirun it is as many ranks, which share the rows of a step; rank 0 prints, also how
// long what they exchange takes alone, and how much of it a step waits for.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/log.h"
#include "base/rng.h"
#include "base/timer.h"
#include "tests/support/backends.h"
#include "tests/support/rows.h"
#include "trainer/muon.h"
#include "trainer/step.h"
#include "trainer/tune.h"
#include "trainer/update_rule.h"

enum { MOST_FEATURES = 5, DOCUMENTS = 4, WARM_UP = 1, LEAST_STEPS = 3, MOST_COUNTS = 16 };
static const int64_t ALL_ANCHORS = INT32_MAX;
static const double enough_seconds = 2.0; // of steps at one number of anchors
static const double head_spread = 3.5;    // of logits against unit hidden states

struct model {
    const char *name, *target; // target: a model of known sizes; NULL: the small one
    int64_t features;
    const char *sets[12]; // config, NULL at the end
};

static const struct model models[] = {
    {"v4",
     "qwen3.6-27b",
     5,
     {"data.seq_len=8192", "drafter.block_size=16", "drafter.mask_token_id=248070",
      "drafter.num_attention_heads=32", "drafter.num_key_value_heads=8", "drafter.head_dim=128",
      "drafter.intermediate_size=17408", NULL}},
    {"qwen3-8b",
     "qwen3-8b",
     5,
     {"data.seq_len=8192", "drafter.block_size=16", "drafter.mask_token_id=151669",
      "drafter.num_attention_heads=32", "drafter.num_key_value_heads=8", "drafter.head_dim=128",
      "drafter.intermediate_size=12288", NULL}},
    {"small",
     NULL,
     5,
     {"data.seq_len=512", "drafter.block_size=8", "drafter.mask_token_id=900",
      "drafter.num_attention_heads=4", "drafter.num_key_value_heads=2", "drafter.head_dim=64",
      "drafter.intermediate_size=256", NULL}},
    {"eagle3-qwen3-8b",
     "qwen3-8b",
     3,
     {"data.seq_len=8192", "drafter.kind=eagle3", "drafter.style=llama", "drafter.layers=1",
      "drafter.num_attention_heads=32", "drafter.num_key_value_heads=8", "drafter.head_dim=128",
      "drafter.intermediate_size=12288", NULL}},
    {"eagle3-small",
     NULL,
     3,
     {"data.seq_len=512", "drafter.kind=eagle3", "drafter.style=llama", "drafter.layers=1",
      "drafter.num_attention_heads=4", "drafter.num_key_value_heads=2", "drafter.head_dim=64",
      "drafter.intermediate_size=256", "drafter.ttt_steps=3", NULL}},
};

struct bench {
    struct test_backend on;
    struct config config;
    int64_t features;
    int64_t draft_vocab; // 0: none
    struct vocab_map map;
    struct target target;
    bf16 *embed, *head;
    float *norm;
    struct drafter_sizes sizes;
    struct params params;
    struct execution execution;
    int32_t plane[MOST_FEATURES];
    struct ranks *ranks;
    struct ownership ownership;
    struct step step;
    struct row row,
        twin;           // twin: the same arrays, so that one is copied while the other is computed
    size_t used_before; // device memory in use
    int64_t steps;      // so far
    int64_t rows;       // so far, of this rank
    double loss;        // of the newest step
};

static void fail(const struct error *err)
{
    die("%s", err->text);
}

// Of what rank 0 prints alone.
static bool is_first(const struct bench *b)
{
    return ranks_rank(b->ranks) == 0;
}

// The GPU is chosen before the backend looks for one.
static int join(struct bench *b, const char *backend)
{
    struct error err = {0};
    b->config.run.device = strcmp(backend, "cpu") == 0 ? DEVICE_CPU : DEVICE_CUDA;
    if (ranks_open(&b->ranks, &b->config, &err) != 0)
        fail(&err);
    int status = test_backend_named(&b->on, backend);
    if (status == 0 && ranks_connect(b->ranks, b->on.backend, &err) != 0)
        fail(&err);
    if (status == 0 && b->on.generic)
        b->config.kernels.path = KERNELS_GENERIC;
    return status;
}

// Evenly distributed values of the given deviation, four from each draw.
static bf16 *random_values(void *(*alloc)(size_t), int64_t count, double deviation, uint64_t seed)
{
    bf16 *values = alloc((size_t)count * sizeof(*values));
    float scale = (float)(deviation * sqrt(3.0) / 32768.0);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count / 4; i++) {
        uint64_t draw = rng_mix(seed, (uint64_t)i);
        for (int64_t j = 0; j < 4; j++)
            values[4 * i + j] =
                bf16_from_float(scale * (float)(int16_t)(uint16_t)(draw >> (16 * j)));
    }
    return values;
}

static void *zeroed(size_t bytes)
{
    return memory_alloc(bytes, 1);
}

static struct target small_target(void)
{
    return (struct target){.hidden_size = 128,
                           .vocab_size = 1024,
                           .layers = 8,
                           .max_position_embeddings = 1024,
                           .rms_norm_eps = 1e-6,
                           .rope_theta = 10000.0,
                           .embed_scale = 1.0f,
                           .logit_scale = 1.0f};
}

static void make_target(struct bench *b, const struct model *model)
{
    if (model->target == NULL)
        b->target = small_target();
    else if (!target_open_known(&b->target, model->target))
        BUG("no sizes of %s", model->target);
    int64_t v = b->target.vocab_size, h = b->target.hidden_size;
    b->embed = random_values(zeroed, v * h, 0.02, 1);
    b->head = random_values(zeroed, v * h, head_spread / sqrt((double)h), 2);
    b->norm = memory_alloc((size_t)h, sizeof(*b->norm));
    for (int64_t i = 0; i < h; i++)
        b->norm[i] = 1.0f;
    b->target.tied = false;
    b->target.embed = (struct target_tensor){b->embed, DTYPE_BF16, v, h};
    b->target.head = (struct target_tensor){b->head, DTYPE_BF16, v, h};
    b->target.norm = (struct target_tensor){b->norm, DTYPE_F32, h, 1};
}

static void make_config(struct bench *b, const struct model *model, const char *const *own,
                        int own_count)
{
    static const char *const common[] = {"run.dir=unused",     "run.compute=bf16",
                                         "target.path=unused", "drafter.layers=5",
                                         "loss.kl=1.0",        "loss.slot_decay_gamma=7.0",
                                         "optimizer.lr=1e-5",  "data.rows_per_step=1"};
    enum { COMMON = sizeof(common) / sizeof(*common), MOST = 32 };
    const char *sets[MOST];
    size_t count = 0;
    struct error err = {0};
    for (size_t i = 0; i < COMMON; i++)
        sets[count++] = common[i];
    for (size_t i = 0; model->sets[i] != NULL; i++)
        sets[count++] = model->sets[i];
    for (int i = 0; i < own_count && count < MOST; i++) {
        if (strncmp(own[i], "draft_vocab=", 12) == 0)
            b->draft_vocab = strtoll(own[i] + 12, NULL, 10);
        else
            sets[count++] = own[i];
    }
    b->features = model->features;
    config_init(&b->config);
    if (config_load(&b->config, NULL, sets, count, &err) != 0)
        fail(&err);
}

// Tokens spread over the whole vocabulary.
static void make_map(struct bench *b)
{
    int64_t vocab = b->target.vocab_size;
    struct error err = {0};
    if (b->draft_vocab == 0)
        return;
    int64_t *counts = memory_alloc((size_t)vocab, sizeof(*counts));
    for (int64_t i = 0; i < vocab; i++)
        counts[i] = 1 + (int64_t)(rng_mix(5, (uint64_t)i) % 1000000);
    if (vocab_map_make(&b->map, counts, vocab, b->draft_vocab, &err) != 0)
        fail(&err);
    b->sizes.draft_vocab = b->draft_vocab;
    free(counts);
}

static void open_step(struct bench *b)
{
    double begin = timer_now();
    struct error err = {0};
    int64_t ids[MOST_FEATURES];
    for (int32_t i = 0; i < b->features; i++) {
        ids[i] = i + 1;
        b->plane[i] = i;
    }
    if (drafter_sizes_resolve(&b->sizes, &b->config.drafter, &b->target, ids, b->features, &err) !=
        0)
        fail(&err);
    make_map(b);
    drafter_params(&b->sizes, &b->params);
    ownership_open(&b->ownership, &b->params, ranks_size(b->ranks), ranks_rank(b->ranks));
    if (execution_choose(&b->execution, &b->config, &b->sizes, b->on.backend, &err) != 0)
        fail(&err);
    struct step_setup setup = {.config = &b->config,
                               .execution = &b->execution,
                               .backend = b->on.backend,
                               .target = &b->target,
                               .sizes = &b->sizes,
                               .params = &b->params,
                               .map = b->draft_vocab > 0 ? &b->map : NULL,
                               .planes = b->features + 1,
                               .plane = b->plane,
                               .last_plane = (int32_t)b->features,
                               .last_hidden = LAST_HIDDEN_POST_NORM,
                               .training = true,
                               .ownership = &b->ownership,
                               .ranks = b->ranks};
    if (step_open(&b->step, &setup, &err) != 0)
        fail(&err);
    double opened = timer_now();
    step_initialize(&b->step, NULL);
    double initialized = timer_now();
    if (step_tune(&b->step, &b->execution, &err) != 0)
        fail(&err);
    if (is_first(b))
        printf(
            "start: memory and target %.1f s, weights %.1f s, %lld algorithms of products %.1f s\n",
            opened - begin, initialized - opened, (long long)b->execution.gemm.count,
            timer_now() - initialized);
}

static void make_row(struct bench *b)
{
    int32_t lengths[DOCUMENTS];
    for (int d = 0; d < DOCUMENTS; d++)
        lengths[d] = (int32_t)(b->config.data.seq_len / DOCUMENTS);
    test_row_open(&b->row, lengths, DOCUMENTS, b->features + 1, b->target.hidden_size);
    for (int64_t t = 0; t < b->row.tokens; t++)
        b->row.input_ids[t] = (int32_t)(rng_mix(3, (uint64_t)t) % (uint64_t)b->target.vocab_size);
    free(b->row.hidden);
    b->row.hidden = random_values(b->on.backend->host_alloc,
                                  b->row.tokens * b->row.planes * b->row.hidden_size, 1.0, 4);
    b->twin = b->row;
}

static size_t memory_used(const struct bench *b)
{
    size_t left = 0, total = 0;
    b->on.backend->memory(&left, &total);
    return total - left;
}

// Rows of a step that are this rank's: they are all alike.
static int64_t own_rows(const struct bench *b)
{
    int64_t rows = b->config.data.rows_per_step, ranks = ranks_size(b->ranks);
    return rows / ranks + (ranks_rank(b->ranks) < rows % ranks);
}

// One step of `anchors` newly drawn anchors a row; the update may still be queued when it returns.
static void run_step(struct bench *b, int64_t anchors)
{
    struct step_outcome outcome;
    int64_t rows = own_rows(b);
    b->config.anchors.max_anchors = anchors; // EAGLE-3 does not read it
    step_begin(&b->step);
    for (int64_t r = 0; r < rows; r++, b->rows++) {
        struct row *row = b->rows % 2 == 0 ? &b->row : &b->twin;
        row->epoch = (uint64_t)(b->rows * ranks_size(b->ranks) + ranks_rank(b->ranks));
        if (r + 1 == rows)
            step_last_row(&b->step);
        step_stage_row(&b->step, row == &b->row ? &b->twin : &b->row); // the next one
        step_row(&b->step, row);
    }
    step_apply(&b->step, 1e-5, ++b->steps, &outcome);
    if (!outcome.applied)
        die("step %lld: no update, gradient of %s", (long long)b->steps, outcome.tensor);
    b->loss = b->step.metrics.loss / b->step.metrics.weight;
}

// How many steps are timed: enough of them by rank 0's clock, which is asked once, so that steps are queued one
// after another.
static int64_t choose_steps(struct bench *b, int64_t anchors)
{
    for (int i = 0; i < WARM_UP; i++)
        run_step(b, anchors);
    b->on.backend->sync(b->step.stream);
    double begin = timer_now();
    run_step(b, anchors);
    b->on.backend->sync(b->step.stream);
    int64_t steps = 1 + (int64_t)(enough_seconds / (timer_now() - begin));
    ranks_share(b->ranks, &steps, sizeof(steps), 0);
    return steps > LEAST_STEPS ? steps : LEAST_STEPS;
}

// Seconds a step, and of the parts; *block_rows of a step.
static double measure(struct bench *b, int64_t anchors, double *part, double *block_rows)
{
    int64_t steps = choose_steps(b, anchors);
    double begin = timer_now();
    memset(part, 0, STEP_PARTS * sizeof(*part));
    for (int64_t s = 0; s < steps; s++) {
        run_step(b, anchors);
        for (int i = 0; i < STEP_PARTS; i++)
            part[i] += b->step.clock.seconds[i];
    }
    b->on.backend->sync(b->step.stream);
    double seconds = timer_now() - begin;
    for (int i = 0; i < STEP_PARTS; i++)
        part[i] /= (double)steps;
    *block_rows = b->step.metrics.anchors * (double)b->sizes.block_size;
    return seconds / (double)steps;
}

static void print_steps(struct bench *b, const char *model, int64_t anchors, double *per_row)
{
    double part[STEP_PARTS], rows = 0.0;
    double seconds = measure(b, anchors, part, &rows);
    *per_row = seconds / rows;
    if (!is_first(b))
        return;
    double step_rows = (double)b->config.data.rows_per_step;
    if (anchors == ALL_ANCHORS)
        anchors = (int64_t)(rows / (double)b->sizes.block_size);
    printf(
        "%-9s %5lld anchors: %8.1f ms, %7.0f block rows/s; forward %.0f, loss %.0f, backward %.0f, "
        "optimizer %.0f ms; planned %.2f GiB, in use %.2f more than before; loss %.4f; %.3f rows/s "
        "of %d ranks, exchange waited for %.2f ms\n",
        model, (long long)anchors, 1e3 * seconds, rows / seconds, 1e3 * part[STEP_FORWARD],
        1e3 * part[STEP_LOSS], 1e3 * part[STEP_BACKWARD], 1e3 * part[STEP_OPTIMIZER],
        (double)b->step.arena.bytes / 0x1p30,
        ((double)memory_used(b) - (double)b->used_before) / 0x1p30, b->loss, step_rows / seconds,
        ranks_size(b->ranks), 1e3 * part[STEP_EXCHANGE]);
    fflush(stdout);
}

static void reduce_all(struct bench *b)
{
    ranks_group_begin(b->ranks);
    for (size_t i = 0; i < b->params.count; i++)
        ranks_reduce(b->ranks, b->step.grads + b->params.items[i].offset, b->params.items[i].count,
                     b->ownership.owner[i]);
    ranks_group_end(b->ranks);
    ranks_mark(b->ranks, 0);
    ranks_wait(b->ranks, 0);
}

static void broadcast_all(struct bench *b)
{
    for (int part = 0; part < b->params.parts; part++)
        step_exchange_weights(&b->step, part);
    step_exchange_settle(&b->step);
}

// Milliseconds, with nothing beside it.
static double time_alone(struct bench *b, void (*work)(struct bench *b))
{
    enum { TIMES = 5 };
    double begin = 0.0;
    for (int i = 0; i <= TIMES; i++) { // the first warms up
        work(b);
        b->on.backend->sync(b->step.stream);
        if (i == 0)
            begin = timer_now();
    }
    return 1e3 * (timer_now() - begin) / TIMES;
}

static bool updates_by_muon(const struct bench *b, size_t param)
{
    return update_is_muon(&b->config.optimizer, &b->params.items[param]);
}

// The tensors that this rank owns and Muon takes, or AdamW.
static void update(struct bench *b, bool muon)
{
    const struct step_update update = {.lr = 1e-5, .grad_scale = 1.0, .applied_step = b->steps + 1};
    for (size_t i = 0; i < b->params.count; i++)
        if (updates_by_muon(b, i) == muon && ownership_mine(&b->ownership, i))
            step_update_tensor(&b->step, &update, i);
}

static void update_muon(struct bench *b)
{
    update(b, true);
}

static void update_adamw(struct bench *b)
{
    update(b, false);
}

// Rank 0's.
static void print_update(struct bench *b)
{
    const struct optimizer_config *o = &b->config.optimizer;
    int64_t matrices = 0;
    double flops = 0.0;
    if (o->kind != OPTIMIZER_MUON)
        return;
    for (size_t i = 0; i < b->params.count; i++)
        if (updates_by_muon(b, i) && ownership_mine(&b->ownership, i)) {
            const struct param *p = &b->params.items[i];
            matrices++;
            flops += muon_flops(o, p->shape[0], p->shape[1]);
        }
    double muon = time_alone(b, update_muon), adamw = time_alone(b, update_adamw);
    if (is_first(b))
        printf("update alone: Muon %.1f ms of %lld matrices (%.0f TFLOP/s of products), AdamW %.1f "
               "ms of the other tensors\n",
               muon, (long long)matrices, 1e-9 * flops / muon, adamw);
}

static void print_exchange(struct bench *b)
{
    double elements = (double)b->params.trainable;
    double bytes = (double)dtype_size(b->step.drafter.options.compute);
    if (ranks_size(b->ranks) == 1)
        return;
    double reduce = time_alone(b, reduce_all), broadcast = time_alone(b, broadcast_all);
    if (is_first(b))
        printf("exchange alone: gradients %.2f ms (%.0f GB/s), weights %.2f ms (%.0f GB/s)\n",
               reduce, 4e-6 * elements / reduce, broadcast, 1e-6 * bytes * elements / broadcast);
}

// Numbers of anchors from both ends of the list in turn, each step alone.
static void print_changing(struct bench *b, const int64_t *anchors, const double *per_row,
                           int count)
{
    double worst = 0.0;
    int64_t at = 0;
    size_t used = memory_used(b);
    for (int i = 0; i < count; i++) {
        int k = i % 2 == 0 ? i / 2 : count - 1 - i / 2;
        b->on.backend->sync(b->step.stream);
        double begin = timer_now();
        run_step(b, anchors[k]);
        b->on.backend->sync(b->step.stream);
        double rows = b->step.metrics.anchors * (double)b->sizes.block_size;
        double slower = (timer_now() - begin) / rows / per_row[k];
        if (slower > worst) {
            worst = slower;
            at = anchors[k];
        }
    }
    if (is_first(b))
        printf("in changing order: a block row at most %.2f times its time above (%lld anchors); "
               "memory %+.2f GiB\n",
               worst, (long long)at, ((double)memory_used(b) - (double)used) / 0x1p30);
}

static int parse_anchors(const char *text, int64_t *anchors)
{
    int count = 0;
    if (strcmp(text, "all") == 0) {
        anchors[0] = ALL_ANCHORS;
        return 1;
    }
    for (const char *at = text; count < MOST_COUNTS && at != NULL; count++) {
        anchors[count] = strtoll(at, NULL, 10);
        if (anchors[count] < 1)
            die("%s: numbers of anchors like 512,1024, or all", text);
        at = strchr(at, ',');
        at = at != NULL ? at + 1 : NULL;
    }
    return count;
}

static const struct model *find_model(const char *name)
{
    for (size_t i = 0; i < sizeof(models) / sizeof(*models); i++)
        if (strcmp(models[i].name, name) == 0)
            return &models[i];
    die("model %s: v4, qwen3-8b, small, eagle3-qwen3-8b or eagle3-small", name);
}

static void bench_close(struct bench *b)
{
    ranks_close(b->ranks);
    ownership_close(&b->ownership);
    step_close(&b->step);
    b->on.backend->host_free(b->row.hidden);
    b->row.hidden = NULL;
    row_close(&b->row, NULL);
    params_release(&b->params);
    vocab_map_release(&b->map);
    config_release(&b->config);
    b->target.embed.data = b->target.head.data = b->target.norm.data = NULL;
    target_close(&b->target);
    free(b->embed);
    free(b->head);
    free(b->norm);
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    int64_t anchors[MOST_COUNTS];
    double per_row[MOST_COUNTS];
    if (argc < 4) {
        fprintf(stderr, "usage: bench_step cpu|cuda|cuda-generic MODEL ANCHORS[,ANCHORS...]|all "
                        "[draft_vocab=N] [section.key=value...]\n");
        return 2;
    }
    const struct model *model = find_model(argv[2]);
    int count = parse_anchors(argv[3], anchors);
    make_config(&b, model, (const char *const *)argv + 4, argc - 4);
    int status = join(&b, argv[1]);
    if (status != 0)
        return status;
    double begin = timer_now();
    b.used_before = memory_used(&b);
    make_target(&b, model);
    open_step(&b);
    make_row(&b);
    if (is_first(&b))
        printf("%s: ready after %.1f s; groups of %lld rows, chunks of %lld, recompute %s, logits "
               "%s\n",
               b.execution.hardware, timer_now() - begin, (long long)b.execution.group_rows,
               (long long)b.execution.chunk_rows, b.execution.recompute, b.execution.logits);
    for (int i = 0; i < count; i++)
        print_steps(&b, model->name, anchors[i], &per_row[i]);
    print_changing(&b, anchors, per_row, count);
    print_update(&b);
    print_exchange(&b);
    bench_close(&b);
    return 0;
}
