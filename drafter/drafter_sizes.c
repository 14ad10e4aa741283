// Owns how a drafter's sizes follow from config and target, its table of tensors and its rotary
// table. Does not own the forward pass or the files sizes are written to.
#include "drafter/drafter_sizes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"

enum { BLOCK_SIZE_MIN = 2, BLOCK_SIZE_MAX = 64 };

static int64_t given_or(int64_t value, int64_t fallback)
{
    return value != CONFIG_UNSET ? value : fallback;
}

static double given_or_real(double value, double fallback)
{
    return isnan(value) ? fallback : value;
}

static void take_widths(struct drafter_sizes *sizes, const struct drafter_config *config,
                        const struct target *target)
{
    sizes->kind = config->kind;
    sizes->head_norms = config->style == STYLE_QWEN3;
    sizes->hidden = target->hidden_size;
    sizes->vocab = target->vocab_size;
    sizes->draft_vocab = target->vocab_size;
    sizes->target_layers = target->layers;
    sizes->layers = config->layers;
    sizes->heads = given_or(config->num_attention_heads, target->num_attention_heads);
    sizes->kv_heads = given_or(config->num_key_value_heads, target->num_key_value_heads);
    sizes->head_dim = given_or(config->head_dim, target->head_dim);
    sizes->intermediate = given_or(config->intermediate_size, target->intermediate_size);
    sizes->block_size = config->block_size;
    sizes->markov_rank = config->markov_rank;
    sizes->mask_token_id = config->mask_token_id;
    sizes->predict_from_anchor = config->predict_from_anchor;
    sizes->eps = (float)given_or_real(config->rms_norm_eps, target->rms_norm_eps);
    sizes->max_position_embeddings =
        given_or(config->max_position_embeddings, target->max_position_embeddings);
}

static void take_eagle3(struct drafter_sizes *sizes, const struct drafter_config *config)
{
    if (config->kind != DRAFTER_EAGLE3)
        return;
    sizes->ttt_steps = config->ttt_steps;
    sizes->block_size = config->ttt_steps;
    sizes->predict_from_anchor = true;
    sizes->trainable_head = config->lm_head == HEAD_TRAINABLE;
    sizes->norm_before_residual = config->norm_before_residual;
    sizes->norm_before_fc = config->norm_before_fc;
    sizes->fc_norm = config->fc_norm;
    sizes->norm_output = config->norm_output;
}

// The target's theta is the only rotary fact that is inherited: partial rotation, sections and scaling
// are not, since servers rotate a drafter's full head.
static void take_rope(struct drafter_sizes *sizes, const struct drafter_config *config,
                      const struct target *target)
{
    sizes->rope_theta = given_or_real(config->rope_theta, target->rope_theta);
    sizes->rope_scaling = config->rope_scaling;
    sizes->rope_factor = config->rope_scaling == ROPE_SCALING_NONE ? 1.0 : config->rope_factor;
    sizes->rope_original_positions =
        given_or(config->rope_original_positions, target->max_position_embeddings);
}

static int check_positive(int64_t value, const char *key, struct error *err)
{
    if (value > 0)
        return 0;
    return error_add(err, "drafter.%s: not given, and the target's config.json does not say it",
                     key);
}

static int check_widths(const struct drafter_sizes *sizes, struct error *err)
{
    int faults = 0;
    faults |= check_positive(sizes->heads, "num_attention_heads", err);
    faults |= check_positive(sizes->kv_heads, "num_key_value_heads", err);
    faults |= check_positive(sizes->head_dim, "head_dim", err);
    faults |= check_positive(sizes->intermediate, "intermediate_size", err);
    faults |= check_positive(sizes->max_position_embeddings, "max_position_embeddings", err);
    if (sizes->kv_heads > 0 && sizes->heads % sizes->kv_heads != 0)
        faults |= error_add(err,
                            "drafter.num_attention_heads: %lld is not a multiple of "
                            "drafter.num_key_value_heads, %lld",
                            (long long)sizes->heads, (long long)sizes->kv_heads);
    if (sizes->head_dim % 2 != 0)
        faults |= error_add(err, "drafter.head_dim: %lld is odd; the rotary embedding turns pairs",
                            (long long)sizes->head_dim);
    if (sizes->head_dim > DRAFTER_MAX_HEAD_DIM)
        faults |= error_add(err, "drafter.head_dim: %lld is more than %d",
                            (long long)sizes->head_dim, DRAFTER_MAX_HEAD_DIM);
    bool blocks = sizes->kind == DRAFTER_DFLASH;
    if (blocks && (sizes->block_size < BLOCK_SIZE_MIN || sizes->block_size > BLOCK_SIZE_MAX))
        faults |= error_add(err, "drafter.block_size: %lld is not within %d..%d",
                            (long long)sizes->block_size, BLOCK_SIZE_MIN, BLOCK_SIZE_MAX);
    if (sizes->layers < 1 || sizes->layers > DRAFTER_MAX_LAYERS)
        faults |= error_add(err, "drafter.layers: %lld is not within 1..%d",
                            (long long)sizes->layers, DRAFTER_MAX_LAYERS);
    if (!(sizes->eps > 0.0f))
        faults |= error_add(
            err, "drafter.rms_norm_eps: not given, and the target's config.json does not say it");
    return faults;
}

static int check_rope(const struct drafter_sizes *sizes, struct error *err)
{
    int faults = 0;
    if (!(sizes->rope_theta >= 1.0))
        faults |= error_add(
            err, "drafter.rope_theta: not given, and the target's config.json does not say it");
    if (sizes->rope_scaling == ROPE_SCALING_YARN) {
        if (!(sizes->rope_theta > 1.0))
            faults |= error_add(err, "drafter.rope_theta: yarn needs more than 1");
        faults |= check_positive(sizes->rope_original_positions, "rope_original_positions", err);
    }
    return faults;
}

static int check_mask_token(const struct drafter_sizes *sizes, const struct drafter_config *config,
                            const struct target *target, struct error *err)
{
    int64_t id = sizes->mask_token_id;
    if (sizes->kind == DRAFTER_EAGLE3)
        return 0;
    if (id == CONFIG_UNSET)
        return error_add(err, "drafter.mask_token_id: required for dflash; its embedding fills the "
                              "slots that are predicted");
    if (id < 0 || id >= target->embed.rows)
        return error_add(err,
                         "drafter.mask_token_id: %lld is outside the target's embedding of "
                         "%lld rows",
                         (long long)id, (long long)target->embed.rows);
    for (size_t i = 0; i < target->special_count && !config->allow_special_mask; i++) {
        if (target->special_ids[i] == id)
            return error_add(err,
                             "drafter.mask_token_id: %lld is the target's bos, eos or pad token, "
                             "which documents contain; give an unused token, or set "
                             "drafter.allow_special_mask: true",
                             (long long)id);
    }
    return 0;
}

static int check_eagle3(const struct drafter_sizes *sizes, struct error *err)
{
    int faults = 0;
    if (sizes->norm_before_fc && sizes->fc_norm)
        faults |=
            error_add(err, "drafter.fc_norm: given together with drafter.norm_before_fc; keep "
                           "one, no server has both");
    if (sizes->kind == DRAFTER_EAGLE3 && sizes->window > 0 && sizes->window < sizes->ttt_steps)
        faults |= error_add(err,
                            "drafter.sliding_window: %lld is less than drafter.ttt_steps, %lld; a "
                            "step's own earlier keys must be inside the window",
                            (long long)sizes->window, (long long)sizes->ttt_steps);
    return faults;
}

static int take_layer_types(struct drafter_sizes *sizes, const struct drafter_config *config,
                            struct error *err)
{
    size_t count = config->layer_types.count;
    if (count != 0 && (int64_t)count != config->layers)
        return error_add(err, "drafter.layer_types: %zu given for drafter.layers: %lld", count,
                         (long long)config->layers);
    bool any = false;
    int faults = 0;
    for (size_t i = 0; i < count && i < DRAFTER_MAX_LAYERS; i++) {
        const char *type = config->layer_types.items[i];
        sizes->sliding[i] = strcmp(type, "sliding_attention") == 0;
        any |= sizes->sliding[i];
        if (!sizes->sliding[i] && strcmp(type, "full_attention") != 0)
            faults |= error_add(
                err, "drafter.layer_types: %s is neither full_attention nor sliding_attention",
                type);
    }
    if (any && config->sliding_window == CONFIG_UNSET)
        faults |= error_add(err, "drafter.sliding_window: required, since drafter.layer_types has "
                                 "sliding_attention");
    sizes->window = any ? config->sliding_window : 0;
    sizes->sliding_causal = !config->sliding_window_non_causal;
    sizes->window_origin = config->window_origin;
    return faults;
}

static int take_layer_ids(struct drafter_sizes *sizes, const int64_t *layer_ids, int64_t features,
                          struct error *err)
{
    if (features < 1 || features > DRAFTER_MAX_LAYERS)
        return error_add(err, "target.layer_ids: %lld layers; 1 to %d can be used",
                         (long long)features, DRAFTER_MAX_LAYERS);
    sizes->features = features;
    int faults = 0;
    for (int64_t i = 0; i < features; i++) {
        sizes->target_layer_ids[i] = layer_ids[i];
        if (layer_ids[i] < 0 || layer_ids[i] >= sizes->target_layers)
            faults |=
                error_add(err, "target.layer_ids: %lld is outside the target's layers 0..%lld",
                          (long long)layer_ids[i], (long long)sizes->target_layers - 1);
        if (i > 0 && layer_ids[i] <= layer_ids[i - 1])
            faults |= error_add(err, "target.layer_ids: %lld after %lld; ids must ascend",
                                (long long)layer_ids[i], (long long)layer_ids[i - 1]);
    }
    return faults;
}

int drafter_sizes_resolve(struct drafter_sizes *sizes, const struct drafter_config *config,
                          const struct target *target, const int64_t *layer_ids, int64_t features,
                          struct error *err)
{
    *sizes = (struct drafter_sizes){0};
    take_widths(sizes, config, target);
    take_eagle3(sizes, config);
    take_rope(sizes, config, target);
    int faults = check_widths(sizes, err);
    faults |= check_rope(sizes, err);
    faults |= check_mask_token(sizes, config, target, err);
    faults |= take_layer_types(sizes, config, err);
    faults |= check_eagle3(sizes, err);
    faults |= take_layer_ids(sizes, layer_ids, features, err);
    return faults != 0 ? -1 : 0;
}

static void add_matrix(struct params *params, int64_t layer, const char *name, int64_t rows,
                       int64_t columns, bool joined)
{
    char full[96];
    snprintf(full, sizeof(full), "layers.%lld.%s.weight", (long long)layer, name);
    params_add(params, full, 2, rows, columns, false, joined);
}

static void add_norm(struct params *params, int64_t layer, const char *name, int64_t width)
{
    char full[96];
    snprintf(full, sizeof(full), "layers.%lld.%s.weight", (long long)layer, name);
    params_add(params, full, 1, width, 1, true, false);
}

// q, k, v and gate, up are joined: one GEMM each in the forward pass. columns: of q, k and v.
static void add_layer(const struct drafter_sizes *sizes, int64_t layer, int64_t columns,
                      struct params *params)
{
    int64_t hidden = sizes->hidden;
    int64_t q = sizes->heads * sizes->head_dim, kv = sizes->kv_heads * sizes->head_dim;
    add_norm(params, layer, "input_layernorm", hidden);
    if (columns > hidden)
        add_norm(params, layer, "hidden_norm", hidden);
    add_matrix(params, layer, "self_attn.q_proj", q, columns, false);
    add_matrix(params, layer, "self_attn.k_proj", kv, columns, true);
    add_matrix(params, layer, "self_attn.v_proj", kv, columns, true);
    if (sizes->head_norms || sizes->kind == DRAFTER_DFLASH) {
        add_norm(params, layer, "self_attn.q_norm", sizes->head_dim);
        add_norm(params, layer, "self_attn.k_norm", sizes->head_dim);
    }
    add_matrix(params, layer, "self_attn.o_proj", hidden, q, false);
    add_norm(params, layer, "post_attention_layernorm", hidden);
    add_matrix(params, layer, "mlp.gate_proj", sizes->intermediate, hidden, false);
    add_matrix(params, layer, "mlp.up_proj", sizes->intermediate, hidden, true);
    add_matrix(params, layer, "mlp.down_proj", hidden, sizes->intermediate, false);
}

bool drafter_is_markov(const struct param *param)
{
    return strcmp(param->name, MARKOV_W1) == 0 || strcmp(param->name, MARKOV_W2) == 0;
}

static void add_markov(const struct drafter_sizes *sizes, struct params *params)
{
    if (sizes->markov_rank == 0)
        return;
    params_add(params, MARKOV_W1, 2, sizes->vocab, sizes->markov_rank, false, false);
    params_add(params, MARKOV_W2, 2, sizes->draft_vocab, sizes->markov_rank, false, false);
}

int dflash_context_part(int64_t layer)
{
    return 1 + (int)layer;
}

int dflash_layer_part(int64_t layers, int64_t layer)
{
    return 1 + (int)layers + (int)layer;
}

static int part_of(const struct drafter_sizes *sizes, const struct param *param)
{
    static const char *const of_context[] = {"k_proj", "v_proj", "k_norm"};
    const char *name = param->name;
    int layers = (int)sizes->layers, layer;
    if (sscanf(name, "layers.%d.", &layer) != 1)
        return strcmp(name, "norm.weight") == 0 || drafter_is_markov(param) ? 1 + 2 * layers : 0;
    for (size_t i = 0; i < sizeof(of_context) / sizeof(*of_context); i++)
        if (strstr(name, of_context[i]) != NULL)
            return dflash_context_part(layer);
    return dflash_layer_part(layers, layer);
}

void dflash_params(const struct drafter_sizes *sizes, struct params *params)
{
    int64_t hidden = sizes->hidden;
    params_add(params, "fc.weight", 2, hidden, sizes->features * hidden, false, false);
    params_add(params, "hidden_norm.weight", 1, hidden, 1, true, false);
    for (int64_t i = 0; i < sizes->layers; i++)
        add_layer(sizes, i, hidden, params);
    params_add(params, "norm.weight", 1, hidden, 1, true, false);
    add_markov(sizes, params);
    for (size_t i = 0; i < params->count; i++)
        params->items[i].part = part_of(sizes, &params->items[i]);
    params->parts = 2 + 2 * (int)sizes->layers;
}

int eagle3_keys_part(int64_t layer)
{
    return 1 + 2 * (int)layer;
}

int eagle3_rest_part(int64_t layer)
{
    return 2 + 2 * (int)layer;
}

static int eagle3_part_of(const struct drafter_sizes *sizes, const char *name)
{
    static const char *const rest[] = {"o_proj", "post_attention_layernorm", "mlp."};
    int layer;
    if (sscanf(name, "layers.%d.", &layer) != 1)
        return strncmp(name, "fc", 2) == 0 || strcmp(name, "input_norm.weight") == 0
                   ? 0
                   : 1 + 2 * (int)sizes->layers;
    for (size_t i = 0; i < sizeof(rest) / sizeof(*rest); i++)
        if (strstr(name, rest[i]) != NULL)
            return eagle3_rest_part(layer);
    return eagle3_keys_part(layer);
}

void eagle3_params(const struct drafter_sizes *sizes, struct params *params)
{
    int64_t hidden = sizes->hidden, wide = sizes->features * hidden;
    params_add(params, "fc.weight", 2, hidden, wide, false, false);
    if (sizes->norm_before_fc)
        params_add(params, "input_norm.weight", 1, wide, 1, true, false);
    for (int64_t f = 0; sizes->fc_norm && f < sizes->features; f++) {
        char name[48];
        snprintf(name, sizeof(name), "fc_norm.%lld.weight", (long long)f);
        params_add(params, name, 1, hidden, 1, true, false);
    }
    for (int64_t i = 0; i < sizes->layers; i++)
        add_layer(sizes, i, i == 0 ? 2 * hidden : hidden, params);
    params_add(params, "norm.weight", 1, hidden, 1, true, false);
    if (sizes->trainable_head)
        params_add(params, "lm_head.weight", 2, sizes->draft_vocab, hidden, false, false);
    add_markov(sizes, params);
    for (size_t i = 0; i < params->count; i++)
        params->items[i].part = eagle3_part_of(sizes, params->items[i].name);
    params->parts = 2 + 2 * (int)sizes->layers;
}

// Pair (fractional) that turns `turns` times over the original positions.
static double yarn_pair(const struct drafter_sizes *sizes, double turns)
{
    double pi = acos(-1.0);
    return (double)sizes->head_dim *
           log((double)sizes->rope_original_positions / (turns * 2.0 * pi)) /
           (2.0 * log(sizes->rope_theta));
}

// Share of the slowed frequency in pair i: 0 for pairs that turn more than 32 times over the original
// positions, 1 for those that turn less than once, linear between (bounds rounded outwards).
static double yarn_share(const struct drafter_sizes *sizes, int64_t i)
{
    double low = fmax(floor(yarn_pair(sizes, 32.0)), 0.0);
    double high = fmin(ceil(yarn_pair(sizes, 1.0)), (double)(sizes->head_dim - 1));
    double width = high == low ? 0.001 : high - low;
    return fmin(fmax(((double)i - low) / width, 0.0), 1.0);
}

static double inverse_frequency(const struct drafter_sizes *sizes, int64_t i)
{
    double plain = pow(sizes->rope_theta, -2.0 * (double)i / (double)sizes->head_dim);
    double slowed = plain / sizes->rope_factor;
    if (sizes->rope_scaling == ROPE_SCALING_NONE)
        return plain;
    if (sizes->rope_scaling == ROPE_SCALING_LINEAR)
        return slowed;
    double share = yarn_share(sizes, i);
    return slowed * share + plain * (1.0 - share);
}

void drafter_rope_table(const struct drafter_sizes *sizes, int64_t positions, float *cos_table,
                        float *sin_table)
{
    int64_t half = sizes->head_dim / 2;
    bool stretched = sizes->rope_scaling == ROPE_SCALING_YARN && sizes->rope_factor > 1.0;
    double scale = stretched ? 0.1 * log(sizes->rope_factor) + 1.0 : 1.0;
    for (int64_t i = 0; i < half; i++) {
        double frequency = inverse_frequency(sizes, i);
        for (int64_t p = 0; p < positions; p++) {
            double angle = (double)p * frequency;
            cos_table[p * half + i] = (float)(cos(angle) * scale);
            sin_table[p * half + i] = (float)(sin(angle) * scale);
        }
    }
}
