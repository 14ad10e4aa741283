// The frozen target as the trainer needs it: config facts, embedding, head and final norm.
// Opens a target directory (config.json + head.safetensors) or a full Hugging Face model directory
// (single or sharded safetensors; names are found under model., language_model. and the like; nested
// text_config; tied heads). What is not understood is refused by the config key's name.
#ifndef DATA_TARGET_H
#define DATA_TARGET_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/memory.h"

// A weight matrix or vector in the file's own dtype, memory-mapped.
struct target_tensor {
    const void *data;
    enum dtype dtype; // fp32 or bf16 (fp16 is converted to fp32 on opening; then owned)
    int64_t rows, columns;
};

struct target {
    char *path;
    char *model_type;    // of the text model
    char *architecture;  // architectures[0], or ""
    int64_t hidden_size; // H
    int64_t vocab_size;  // V: rows of the head
    int64_t layers;
    // these are 0 where config.json does not give them
    int64_t num_attention_heads, num_key_value_heads, head_dim, intermediate_size;
    int64_t max_position_embeddings;
    double rms_norm_eps;
    double rope_theta;        // 10000, the convention, where config.json does not give it
    bool tied;                // the head is the embedding
    float norm_weight_offset; // 1 where the family stores w - 1 (told by model_type), else 0
    float embed_scale;        // embeddings are multiplied by this (Gemma, Granite); 1 else
    float logit_scale;        // logits are multiplied by this (Granite: 1/logits_scaling); 1 else
    int64_t *special_ids;     // bos, eos (may be several), pad; those that are given
    size_t special_count;
    struct target_tensor embed; // [rows >= V, H]
    struct target_tensor head;  // [V, H]
    struct target_tensor norm;  // [H]
    // private
    struct target_files *files;
};

// final_logit_softcapping, head bias and the like, unknown norm families etc. are refused here.
int target_open(struct target *target, const char *path, struct error *err);
// Facts and sizes alone, for plans: of a config.json (PATH is the file or its folder). Keys that no size
// follows from may be missing. Tensors have shapes (embedding and head of vocab_size rows) and no data.
int target_open_sizes(struct target *target, const char *path, struct error *err);
// The same of a model whose published sizes this program knows by the last part of `path`, whatever
// its case: "models/qwen3-8b". False: it is none of them.
bool target_open_known(struct target *target, const char *path);
// Tells one set of frozen weights from another: of the norm, and of rows of embedding and head that are
// spread evenly (a thousand of each at most).
uint64_t target_fingerprint(const struct target *target);
// Whether every number of norm, embedding and head is finite: all of them are read. The error names the row.
int target_check_finite(const struct target *target, struct error *err);
void target_close(struct target *target);

#endif
