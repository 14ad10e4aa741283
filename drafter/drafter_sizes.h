// A drafter's sizes and switches with every default resolved from the target: what the forward
// pass computes and what an export states.
#ifndef DRAFTER_DRAFTER_SIZES_H
#define DRAFTER_DRAFTER_SIZES_H

#include "configs/config.h"
#include "data/target.h"
#include "drafter/params.h"

enum { DRAFTER_MAX_LAYERS = 256, DRAFTER_MAX_HEAD_DIM = 512 };

struct drafter_sizes {
    int kind;                                     // DRAFTER_*
    int64_t hidden;                               // H
    int64_t vocab;                                // V
    int64_t features;                             // L captured layers
    int64_t target_layer_ids[DRAFTER_MAX_LAYERS]; // [features] output of decoder layer i, 0-based
    int64_t target_layers;
    int64_t layers;
    int64_t heads, kv_heads, head_dim, intermediate;
    bool head_norms;    // RMS norms of every head of queries and keys
    int64_t block_size; // B; of eagle3 ttt_steps, predicted from the anchor
    int64_t mask_token_id;
    bool predict_from_anchor;
    float eps;
    double rope_theta;
    int rope_scaling; // ROPE_SCALING_*
    double rope_factor;
    int64_t rope_original_positions;
    int64_t max_position_embeddings;
    bool sliding[DRAFTER_MAX_LAYERS]; // [layers]
    int64_t window;                   // of sliding layers
    bool sliding_causal;              // own block of sliding layers
    int window_origin;                // WINDOW_FROM_*
    int64_t markov_rank;              // r; 0: no Markov head
    // eagle3
    int64_t ttt_steps;
    int64_t draft_vocab; // Vd; V without a map, and of dflash
    bool trainable_head; // lm_head [Vd, H] is a parameter
    bool norm_before_residual, norm_before_fc, fc_norm, norm_output;
};

// layer_ids: the planes in use, in order. Errors name the key: sizes that do not divide, a mask token
// outside the embedding or equal to a special token, layer ids beyond the target. draft_vocab is V: whoever has
// read a vocabulary map sets it.
int drafter_sizes_resolve(struct drafter_sizes *sizes, const struct drafter_config *config,
                          const struct target *target, const int64_t *layer_ids, int64_t features,
                          struct error *err);
// The trainable tensors, by the names of the layout that servers read, and their parts (struct param). A Markov
// head's two tables come last, under speculators' names: w1 [V, r] by target id, w2 [Vd, r].
void drafter_params(const struct drafter_sizes *sizes, struct params *params);
#define MARKOV_W1 "markov_head.markov_w1.weight"
#define MARKOV_W2 "markov_head.markov_w2.weight"
bool drafter_is_markov(const struct param *param);
// Of DFlash, z-lab names: fc, hidden_norm, layers.*, norm. Their parts are numbered in the
// order in which a row's forward pass reads them first: fc and hidden_norm; of each layer what makes the
// context's keys and values; the rest of each layer; norm and the Markov head.
void dflash_params(const struct drafter_sizes *sizes, struct params *params);
int dflash_context_part(int64_t layer);
int dflash_layer_part(int64_t layers, int64_t layer);
// Of EAGLE-3, names of the speculators layout: fc and its norms, layers.*, norm, lm_head where it is trained.
// The first layer has 2 H columns in q, k and v, the embedding's first. Their parts: fc and its norms; of each
// layer what makes queries, keys and values, then the rest; the final norm and the heads.
void eagle3_params(const struct drafter_sizes *sizes, struct params *params);
int eagle3_keys_part(int64_t layer);
int eagle3_rest_part(int64_t layer);
// Rotary table of `positions` rows: cos and sin [positions, head_dim / 2], scaling included
// (linear: position / factor; yarn: Peng et al. 2023 as transformers computes it).
void drafter_rope_table(const struct drafter_sizes *sizes, int64_t positions, float *cos,
                        float *sin);

#endif
