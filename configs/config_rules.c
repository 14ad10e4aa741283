// Owns the rules between keys: what is missing and what contradicts. Ranges of single keys are in the
// table; what needs the target or the shards is checked where those are read.
#include "configs/config_rules.h"

#include <inttypes.h>
#include <string.h>

#include "base/byte_size.h"
#include "base/log.h"
#include "configs/config_table.h"
#include "configs/config_value.h"

struct check {
    const struct config *config;
    struct config_faults *faults;
};

// A fault of config->section.key; the key is spelled once and checked by the compiler.
#define FAULT(check, section, key, ...)                                                            \
    config_fault((check)->faults, (check)->config, (check)->config->lines.section.key, #section,   \
                 #key, __VA_ARGS__)

// Where the first loss term was written, whatever its value; CONFIG_LINE_DEFAULT when none was.
static int loss_line(const struct config *config)
{
    const struct loss_lines *l = &config->lines.loss;
    const int lines[] = {l->kl,      l->reverse_kl, l->js,  l->ce_teacher,
                         l->ce_data, l->tv,         l->nla, l->lk};
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
        if (lines[i] != CONFIG_LINE_DEFAULT)
            return lines[i];
    return CONFIG_LINE_DEFAULT;
}

static void check_loss(const struct check *c)
{
    const struct loss_config *l = &c->config->loss;
    double sum =
        l->kl + l->reverse_kl + l->js + l->ce_teacher + l->ce_data + l->tv + l->nla + l->lk;
    if (!(sum > 0.0))
        config_fault(c->faults, c->config, loss_line(c->config), "loss", NULL,
                     "no term is positive; give at least one of kl, reverse_kl, js, ce_teacher, "
                     "ce_data, tv, nla, lk");
}

static void check_ascending(const struct check *c, int line, const char *section, const char *key,
                            const struct config_ints *ints)
{
    for (size_t i = 1; i < ints->count; i++)
        if (ints->items[i] <= ints->items[i - 1])
            config_fault(c->faults, c->config, line, section, key,
                         "must ascend without repeats, but %" PRId64 " follows %" PRId64,
                         ints->items[i], ints->items[i - 1]);
}

static void check_data(const struct check *c)
{
    const struct config *config = c->config;
    check_ascending(c, config->lines.target.layer_ids, "target", "layer_ids",
                    &config->target.layer_ids);
    const struct data_config *d = &config->data;
    uint64_t bytes = 0;
    if (d->manifest && d->train.count > 0)
        FAULT(c, data, manifest, "given together with data.train; keep one, both say what to read");
    if (d->manifest && !d->spool)
        FAULT(c, data, manifest,
              "needs data.spool, the folder through which the features of its documents come");
    if (d->spool && !d->manifest)
        FAULT(c, data, spool, "needs data.manifest, which says what documents there will be");
    if (byte_size_parse_memory(d->spool_bytes, &bytes) != 0)
        FAULT(c, data, spool_bytes, "%s is no number of bytes with a unit; say 64GiB or 512MiB",
              d->spool_bytes);
}

// Drafts of one block, or ttt_steps.
static int64_t draft_count(const struct drafter_config *d)
{
    if (d->kind == DRAFTER_EAGLE3)
        return d->ttt_steps;
    return d->predict_from_anchor ? d->block_size : d->block_size - 1;
}

static void check_validation(const struct check *c)
{
    const struct validation_config *v = &c->config->validation;
    bool shards = c->config->data.val.count > 0;
    if (v->every > 0 && !shards)
        FAULT(c, validation, every, "needs shards to validate on; give data.val or set it to 0");
    if (v->patience > 0 && v->every == 0)
        FAULT(c, validation, patience,
              "counts validations during training, but validation.every is 0");
    check_ascending(c, c->config->lines.validation.draft_tokens, "validation", "draft_tokens",
                    &v->draft_tokens);
    int64_t drafts = draft_count(&c->config->drafter);
    for (size_t i = 0; i < v->draft_tokens.count; i++)
        if (v->draft_tokens.items[i] > drafts)
            FAULT(c, validation, draft_tokens,
                  "%" PRId64 " is more than the %" PRId64 " drafts that %s gives",
                  v->draft_tokens.items[i], drafts,
                  c->config->drafter.kind == DRAFTER_EAGLE3 ? "drafter.ttt_steps"
                                                            : "a block of drafter.block_size");
}

static bool has_layer_type(const struct drafter_config *d, const char *type)
{
    for (size_t i = 0; i < d->layer_types.count; i++)
        if (strcmp(d->layer_types.items[i], type) == 0)
            return true;
    return false;
}

static void check_layers(const struct check *c)
{
    static const char *const types[] = {"full_attention", "sliding_attention"};
    const struct drafter_config *d = &c->config->drafter;
    for (size_t i = 0; i < d->layer_types.count; i++) {
        const char *type = d->layer_types.items[i];
        if (strcmp(type, types[0]) == 0 || strcmp(type, types[1]) == 0)
            continue;
        const char *near = error_nearest(type, types, 2);
        FAULT(c, drafter, layer_types, "%s is not a choice; allowed: %s, %s%s%s%s", type, types[0],
              types[1], near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    }
    if (d->layer_types.count > 0 && (int64_t)d->layer_types.count != d->layers)
        FAULT(c, drafter, layer_types, "has %zu entries for drafter.layers %" PRId64,
              d->layer_types.count, d->layers);
    bool sliding = has_layer_type(d, types[1]);
    if (sliding && d->sliding_window == CONFIG_UNSET)
        FAULT(c, drafter, sliding_window, "required, because drafter.layer_types has %s", types[1]);
    if (!sliding && d->sliding_window_non_causal)
        FAULT(c, drafter, sliding_window_non_causal, "no layer of drafter.layer_types is %s",
              types[1]);
    if (!sliding && d->window_origin != WINDOW_FROM_QUERY)
        FAULT(c, drafter, window_origin, "no layer of drafter.layer_types is %s", types[1]);
}

static void check_heads(const struct check *c)
{
    const struct drafter_config *d = &c->config->drafter;
    int64_t q = d->num_attention_heads, kv = d->num_key_value_heads;
    if (q != CONFIG_UNSET && kv != CONFIG_UNSET && q % kv != 0)
        FAULT(c, drafter, num_key_value_heads,
              "%" PRId64 " does not divide drafter.num_attention_heads %" PRId64, kv, q);
    if (d->head_dim != CONFIG_UNSET && d->head_dim % 2 != 0)
        FAULT(c, drafter, head_dim,
              "%" PRId64 " is odd; the rotary embedding turns pairs, so it must be even",
              d->head_dim);
}

static void check_rope(const struct check *c)
{
    const struct drafter_config *d = &c->config->drafter;
    if (d->rope_scaling != ROPE_SCALING_NONE && !(d->rope_factor > 1.0))
        FAULT(c, drafter, rope_factor, "must be above 1 with drafter.rope_scaling %s",
              config_choice_name("drafter", "rope_scaling", d->rope_scaling));
    if (d->rope_scaling == ROPE_SCALING_NONE && d->rope_factor > 1.0)
        FAULT(c, drafter, rope_factor, "needs drafter.rope_scaling linear or yarn");
}

static void check_dflash(const struct check *c)
{
    const struct config *config = c->config;
    const struct drafter_config *d = &config->drafter;
    static const char only[] = "only eagle3 has it; drafter.kind is dflash";
    if (d->mask_token_id == CONFIG_UNSET)
        FAULT(c, drafter, mask_token_id,
              "required for dflash: the token whose embedding fills the slots to predict");
    if (d->style != STYLE_QWEN3)
        FAULT(c, drafter, style, "dflash is qwen3; llama is a style of eagle3");
    if (d->draft_vocab)
        FAULT(c, drafter, draft_vocab, "%s", only);
    if (d->lm_head != HEAD_FROZEN)
        FAULT(c, drafter, lm_head, "only eagle3 trains its head; drafter.kind is dflash");
    if (d->norm_before_residual)
        FAULT(c, drafter, norm_before_residual, "%s", only);
    if (d->norm_before_fc)
        FAULT(c, drafter, norm_before_fc, "%s", only);
    if (d->fc_norm)
        FAULT(c, drafter, fc_norm, "%s", only);
    if (d->norm_output)
        FAULT(c, drafter, norm_output, "%s", only);
    // The last position that a whole block predicts counted from its anchor, which is at 0 or later.
    int64_t reach = d->predict_from_anchor ? d->block_size : d->block_size - 1;
    if (config->anchors.tail == TAIL_WHOLE && reach >= config->data.seq_len)
        FAULT(c, anchors, tail, "whole: no block of %" PRId64 " slots fits data.seq_len %" PRId64,
              d->block_size, config->data.seq_len);
}

static void check_eagle3(const struct check *c)
{
    const struct drafter_config *d = &c->config->drafter;
    static const char only[] = "only dflash has it; drafter.kind is eagle3";
    if (d->predict_from_anchor)
        FAULT(c, drafter, predict_from_anchor, "%s", only);
    if (d->sliding_window_non_causal)
        FAULT(c, drafter, sliding_window_non_causal, "%s", only);
    if (d->window_origin != WINDOW_FROM_QUERY)
        FAULT(c, drafter, window_origin, "%s", only);
    if (c->config->loss.slot_weight == SLOT_WEIGHT_DPACE)
        FAULT(c, loss, slot_weight,
              "dpace weighs the slots of dflash blocks; eagle3 has loss.ttt_decay_base");
}

static void check_markov(const struct check *c)
{
    const struct config *config = c->config;
    if (config->drafter.markov_rank > 0 && config->loss.slot_weight == SLOT_WEIGHT_DPACE)
        FAULT(c, drafter, markov_rank,
              "can not be trained with loss.slot_weight dpace: the head's gradient needs a slot's "
              "weight while its logits are there, and dpace's follows from the whole block; take "
              "exp or uniform, or a rank of 0");
}

static void check_full_vocab(const struct check *c)
{
    const struct config *config = c->config;
    if (!config->loss.full_vocab_metrics && config->drafter.draft_vocab != NULL &&
        config->loss.out_of_vocab == OUT_OF_VOCAB_MASKED)
        FAULT(
            c, loss, full_vocab_metrics,
            "is what loss.out_of_vocab masked goes by: which token the teacher wants of the whole "
            "vocabulary; take true, or loss.out_of_vocab kept");
}

static void check_memory(const struct check *c)
{
    const char *limit = c->config->memory.limit;
    uint64_t bytes = 0;
    if (limit && byte_size_parse_memory(limit, &bytes) != 0)
        FAULT(c, memory, limit, "%s is no amount of memory with a unit; say 80GiB or 512MiB",
              limit);
}

static void check_kernels(const struct check *c)
{
    const char *algorithms = c->config->kernels.algorithms;
    if (algorithms && algorithms[0] != '/' && strcmp(algorithms, "none") != 0)
        FAULT(c, kernels, algorithms, "%s is neither none nor an absolute path", algorithms);
}

static void check_optimizer(const struct check *c)
{
    const struct optimizer_config *o = &c->config->optimizer;
    if (o->betas.count != 2)
        FAULT(c, optimizer, betas, "needs 2 values, has %zu", o->betas.count);
    if (o->muon_lr > 0.0 && o->lr == 0.0)
        FAULT(c, optimizer, muon_lr,
              "follows the schedule of optimizer.lr in proportion, and that is 0");
}

static void check_schedule(const struct check *c)
{
    const struct schedule_config *s = &c->config->schedule;
    int64_t max_steps = c->config->run.max_steps;
    bool counted = s->warmup_steps != CONFIG_UNSET;
    if (counted && s->warmup_ratio > 0.0)
        FAULT(c, schedule, warmup_steps, "given together with schedule.warmup_ratio; keep one");
    if (counted && max_steps > 0 && s->warmup_steps > max_steps)
        FAULT(c, schedule, warmup_steps, "%" PRId64 " is more than run.max_steps %" PRId64,
              s->warmup_steps, max_steps);
    if (s->kind != SCHEDULE_WSD)
        return;
    double warmup = s->warmup_ratio;
    if (counted)
        warmup = max_steps > 0 ? (double)s->warmup_steps / (double)max_steps : 0.0;
    if (!(warmup + s->decay_ratio <= 1.0))
        FAULT(c, schedule, decay_ratio,
              "warm-up (%g of all steps) and fall (%g) together are more than the run", warmup,
              s->decay_ratio);
    if (s->decay_ratio == 0.0)
        FAULT(c, schedule, decay_ratio, "wsd without a fall is schedule.kind constant");
}

void config_check_missing(const struct config *config, struct config_faults *faults)
{
    struct check c = {config, faults};
    static const char missing[] = "required key is missing";
    if (!config->run.dir && config->lines.run.dir == CONFIG_LINE_DEFAULT)
        FAULT(&c, run, dir, "%s", missing);
    if (!config->target.path && config->lines.target.path == CONFIG_LINE_DEFAULT)
        FAULT(&c, target, path, "%s", missing);
    if (loss_line(config) == CONFIG_LINE_DEFAULT)
        check_loss(&c);
}

void config_check_rules(const struct config *config, struct config_faults *faults)
{
    struct check c = {config, faults};
    if (loss_line(config) != CONFIG_LINE_DEFAULT)
        check_loss(&c);
    check_data(&c);
    check_validation(&c);
    check_layers(&c);
    check_heads(&c);
    check_rope(&c);
    if (config->drafter.kind == DRAFTER_DFLASH)
        check_dflash(&c);
    else
        check_eagle3(&c);
    check_markov(&c);
    check_full_vocab(&c);
    check_optimizer(&c);
    check_memory(&c);
    check_kernels(&c);
    check_schedule(&c);
}

int config_validate(const struct config *config, struct error *err)
{
    struct config_faults faults = {0};
    config_check_missing(config, &faults);
    config_check_rules(config, &faults);
    return config_faults_end(&faults, err);
}

uint64_t config_spool_bytes(const struct config *config)
{
    uint64_t bytes = 0;
    if (byte_size_parse_memory(config->data.spool_bytes, &bytes) != 0)
        BUG("data.spool_bytes was not checked: %s", config->data.spool_bytes);
    return bytes;
}

uint64_t config_memory_limit(const struct config *config)
{
    uint64_t bytes = 0;
    if (config->memory.limit != NULL && byte_size_parse_memory(config->memory.limit, &bytes) != 0)
        BUG("memory.limit was not checked: %s", config->memory.limit);
    return bytes;
}
