// All documents of a data set, known before the first step: identity, length, supervision. Their
// features are read later through a source. What plain shards hold is read from the shards.
#ifndef DATA_DOCUMENTS_H
#define DATA_DOCUMENTS_H

#include "configs/config.h"
#include "data/shard.h"

struct document {
    uint64_t id;         // stable identity, keys the random numbers
    int64_t first;       // token in the shard
    int32_t shard;       // index in documents.shards
    int32_t index;       // document in the shard
    int32_t length;      // tokens after the cut to seq_len
    int32_t full_length; // tokens in the shard
    int32_t supervised;  // supervised tokens within length
};

struct documents {
    struct shard *shards;
    size_t shard_count;
    struct document *items; // those that can be trained on
    size_t count;
    // of all shards together; every shard must agree
    int64_t hidden_size, vocab_size;
    int64_t planes; // P as stored
    struct feature_layout features;
    int64_t *layer_ids; // [shard_layers] as stored
    int64_t shard_layers;
    enum last_hidden last_hidden;
    char *target_model;
    // what was left out, and sums
    int64_t dropped_unsupervised, dropped_bad, cut;
    int64_t tokens, supervised;
    uint64_t fingerprint;      // of ids, lengths, tokens and masks of all documents, in order
    uint64_t kept_fingerprint; // of ids and lengths of items, in order: what a run trains on
};

// Opens every shard, checks structure, token ids and masks (only headers, offsets, ids and masks are
// read), leaves out documents without supervised tokens after the cut, and those that a verdict file
// calls bad (on_bad_sample skip; with fail they are an error). Faults: all of them, a line each.
// A data set without any supervised token is an error that says so.
int documents_open(struct documents *documents, const struct config_texts *paths, int64_t seq_len,
                   int on_bad_sample, struct error *err);
// The same of a manifest (docs/file-formats.md), which holds all documents and no features.
int documents_open_manifest(struct documents *documents, const char *path, int64_t seq_len,
                            int on_bad_sample, struct error *err);
void documents_close(struct documents *documents);

// Maps target.layer_ids of a config (empty: all) to planes of the shards: plane[l] for each captured
// layer, and the plane of the last hidden state or -1. Errors name the ids: not ascending, repeated,
// beyond the target's layers, not in the shards, another order.
int documents_select_planes(const struct documents *documents, const struct config_ints *layer_ids,
                            int64_t target_layers, int32_t *plane, int64_t capacity,
                            int64_t *layers, int32_t *last_plane, struct error *err);

#endif
