// Owns what is worth a warning: keys whose value changes nothing beside the others, and settings that
// no server runs. Contradictions are refused in config_rules.c.
#include "configs/config_faults.h"
#include "configs/config_table.h"
#include "configs/config_value.h"

#include <inttypes.h>
#include <string.h>

struct watch {
    const struct config *config;
    struct config defaults; // a key with its default value was not meant to do anything
    struct config_faults warnings;
    config_idle_fn *visit; // of keys without effect, instead of warnings
    void *context;
};

static void idle_unless(struct watch *w, bool used, const char *section, const char *name,
                        const char *why)
{
    const struct config_key *key = config_section_key(config_section_find(section), name);
    if (used || config_value_equal(w->config, &w->defaults, key))
        return;
    if (w->visit != NULL) {
        w->visit(w->context, section, name, why);
        return;
    }
    int line = *(const int *)(const void *)((const char *)w->config + key->line_at);
    config_fault(&w->warnings, w->config, line, section, name, "has no effect %s", why);
}

static bool has_windows(const struct drafter_config *d)
{
    bool any = false;
    for (size_t i = 0; i < d->layer_types.count; i++)
        any |= strcmp(d->layer_types.items[i], "sliding_attention") == 0;
    return any;
}

static void watch_drafter(struct watch *w)
{
    const struct drafter_config *d = &w->config->drafter;
    bool dflash = d->kind == DRAFTER_DFLASH;
    idle_unless(w, has_windows(d), "drafter", "sliding_window",
                "without a sliding_attention layer");
    idle_unless(w, d->rope_scaling == ROPE_SCALING_YARN, "drafter", "rope_original_positions",
                "without drafter.rope_scaling yarn");
    idle_unless(w, !d->init_from || d->init_allow.count > 0, "drafter", "init_std",
                "with drafter.init_from");
    idle_unless(w, d->init_from, "drafter", "init_allow", "without drafter.init_from");
    static const char *const eagle3[][2] = {{"drafter", "ttt_steps"},
                                            {"loss", "ttt_decay_base"},
                                            {"loss", "mask_index"},
                                            {"loss", "out_of_vocab"}};
    for (size_t i = 0; i < sizeof(eagle3) / sizeof(eagle3[0]); i++)
        idle_unless(w, !dflash, eagle3[i][0], eagle3[i][1], "with drafter.kind dflash");
    static const char *const only_dflash[][2] = {
        {"drafter", "block_size"},  {"drafter", "mask_token_id"}, {"drafter", "allow_special_mask"},
        {"anchors", "max_anchors"}, {"anchors", "per"},           {"anchors", "tail"},
        {"loss", "slot_weight"},    {"loss", "slot_mask"}};
    for (size_t i = 0; i < sizeof(only_dflash) / sizeof(only_dflash[0]); i++)
        idle_unless(w, dflash, only_dflash[i][0], only_dflash[i][1], "with drafter.kind eagle3");
}

static void watch_loss(struct watch *w)
{
    const struct loss_config *l = &w->config->loss;
    const struct drafter_config *d = &w->config->drafter;
    bool dflash = d->kind == DRAFTER_DFLASH;
    idle_unless(w, l->lk > 0.0, "loss", "lk_eta", "without loss.lk");
    idle_unless(w, dflash && l->slot_weight == SLOT_WEIGHT_EXP, "loss", "slot_decay_gamma",
                dflash ? "without loss.slot_weight exp" : "with drafter.kind eagle3");
    idle_unless(w, dflash && l->slot_weight == SLOT_WEIGHT_DPACE, "loss", "dpace_alpha",
                dflash ? "without loss.slot_weight dpace" : "with drafter.kind eagle3");
    static const char *const of_map[] = {"out_of_vocab", "full_vocab_metrics"};
    for (size_t i = 0; i < sizeof(of_map) / sizeof(of_map[0]) && !dflash; i++)
        idle_unless(w, d->draft_vocab != NULL, "loss", of_map[i], "without drafter.draft_vocab");
}

static void watch_optimizer(struct watch *w)
{
    static const char *const keys[] = {"muon_lr", "muon_momentum", "muon_ns_steps", "muon_scale",
                                       "muon_weight_decay"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        idle_unless(w, w->config->optimizer.kind == OPTIMIZER_MUON, "optimizer", keys[i],
                    "without optimizer.kind muon");
}

static void watch_run(struct watch *w)
{
    const struct config *c = w->config;
    bool val = c->data.val.count > 0;
    idle_unless(w, c->data.noise_std > 0.0, "data", "noise_kind", "with data.noise_std 0");
    idle_unless(w, c->data.on_bad_sample == BAD_SAMPLE_SKIP, "data", "max_bad_fraction",
                "without data.on_bad_sample skip");
    idle_unless(w, c->data.spool, "data", "spool_bytes", "without data.spool");
    idle_unless(w, c->data.spool, "data", "spool_wait", "without data.spool");
    idle_unless(w, val, "validation", "rows", "without data.val");
    idle_unless(w, val, "validation", "draft_tokens", "without data.val");
    idle_unless(w, c->schedule.kind == SCHEDULE_WSD, "schedule", "decay_ratio",
                "without schedule.kind wsd");
    idle_unless(w, c->schedule.kind != SCHEDULE_CONSTANT, "schedule", "min_lr_ratio",
                "with schedule.kind constant");
    bool cpu = c->run.device == DEVICE_CPU; // on which chunks do not depend on the mode
    bool chooses = c->memory.recompute == RECOMPUTE_AUTO || (!cpu && c->memory.chunk_rows == 0);
    idle_unless(w, chooses, "memory", "mode",
                cpu ? "on a CPU with memory.recompute" : "with memory.recompute and chunk_rows");
}

static void watch_idle(struct watch *w)
{
    watch_drafter(w);
    watch_loss(w);
    watch_optimizer(w);
    watch_run(w);
}

#define WARN(w, section, key, ...)                                                                 \
    config_fault(&(w)->warnings, (w)->config, (w)->config->lines.section.key, #section, #key,      \
                 __VA_ARGS__)

static void watch_serving(struct watch *w)
{
    const struct drafter_config *d = &w->config->drafter;
    bool dspark = d->kind == DRAFTER_DFLASH && d->markov_rank > 0;
    if (d->predict_from_anchor && !dspark)
        WARN(w, drafter, predict_from_anchor,
             "no server runs dflash drafters of this layout; every export of it is refused");
    if (d->markov_rank > 0 && (!dspark || has_windows(d)))
        WARN(w, drafter, markov_rank, "no layout holds it in %s; every export of it is refused",
             dspark ? "a drafter with sliding layers" : "an eagle3 drafter");
    if (d->sliding_window_non_causal)
        WARN(w, drafter, sliding_window_non_causal,
             "servers run sliding layers causally; exports are refused unless told otherwise");
    if (d->window_origin == WINDOW_FROM_ANCHOR)
        WARN(w, drafter, window_origin,
             "servers measure the window from the query; a served block sees less context");
}

// The other widths that a config gives are free, too, and whatever is asked for is computed.
static void watch_speed(struct watch *w)
{
    enum { ALIGNED = 8 }; // bf16 numbers in the 16 bytes that a GPU's products read at once
    int64_t rank = w->config->drafter.markov_rank;
    if (rank % ALIGNED != 0 && w->config->run.device != DEVICE_CPU)
        WARN(w, drafter, markov_rank,
             "%" PRId64
             " is no multiple of %d: on a GPU products with its tables may be slower, and not "
             "all of them are timed at the start; the next multiple is %" PRId64,
             rank, ALIGNED, (rank / ALIGNED + 1) * ALIGNED);
}

static void watch_parallel(struct watch *w)
{
    const struct config *c = w->config;
    idle_unless(w, c->run.device != DEVICE_CPU || c->parallel.gpus <= 1, "parallel", "gpus",
                "with run.device cpu; mpirun starts ranks on CPUs");
}

size_t config_warnings(const struct config *config, struct error *text)
{
    struct watch w = {.config = config};
    config_init(&w.defaults);
    watch_idle(&w);
    watch_serving(&w);
    watch_speed(&w);
    watch_parallel(&w);
    config_release(&w.defaults);
    config_faults_end(&w.warnings, text);
    return w.warnings.count;
}

void config_idle_keys(const struct config *config, config_idle_fn *visit, void *context)
{
    struct watch w = {.config = config, .visit = visit, .context = context};
    config_init(&w.defaults);
    watch_idle(&w);
    watch_parallel(&w);
    config_release(&w.defaults);
}
