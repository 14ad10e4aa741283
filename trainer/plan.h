// What a run will take, before it takes anything: memory by group on the device and on the host, for any
// number of ranks, and how the step is cut so that it fits. Made from the arena table that training
// itself takes; nothing is allocated, no GPU is needed.
#ifndef TRAINER_PLAN_H
#define TRAINER_PLAN_H

#include "trainer/session.h"

// What stays the same while a config's numbers are varied.
struct plan_subject {
    const struct target *target;           // sizes are enough
    const struct backend *backend;         // live, or backend_planned()
    int64_t layer_ids[DRAFTER_MAX_LAYERS]; // [features] in use
    int32_t plane[DRAFTER_MAX_LAYERS];     // [features]
    int64_t features, planes;              // L in use, P
    bool float8;                           // of the shards' planes
    int32_t last_plane;                    // -1: no last hidden state
    enum last_hidden last_hidden;
    bool training;       // false: scoring only
    bool validates;      // there are validation shards
    int64_t documents;   // 0: not known
    int64_t draft_vocab; // 0: no vocabulary map
    int64_t ranks;       // that the limit is held against
    size_t limit; // bytes of a device that may be taken in all, context included; 0: any number
};

struct plan_part {
    char name[24];
    size_t bytes;
};

enum { PLAN_PARTS = 24, PLAN_MOST_RANKS = 4096 };

// How the step is cut: what a config may leave open.
struct plan_cut {
    int64_t group_rows, chunk_rows;
    char recompute[8];
};

struct plan {
    struct drafter_sizes sizes;
    struct params params;
    bool trains;                         // not scoring only
    struct optimizer_config optimizer;   // lists borrowed from the config
    struct plan_cut first;               // what would be chosen if memory had no end
    struct execution execution;          // what is chosen
    struct arena arena;                  // table of what a step takes on one rank
    struct plan_part device[PLAN_PARTS]; // one rank: groups of the arena, workspaces, context
    size_t device_count;
    struct plan_part host[PLAN_PARTS];
    size_t host_count;
    size_t needed; // what the limit is held against
    bool fits;
};

// Resolves sizes and chooses an execution: the first of ever thriftier ones that fits the subject's limit,
// and the thriftiest possible when none does. `fixed`: this execution instead. -1: the config is
// faulty. Close with plan_release either way.
int plan_make(struct plan *plan, const struct plan_subject *subject, const struct config *config,
              const struct execution *fixed, struct error *err);
void plan_release(struct plan *plan);

// Bytes of a part of plan->device on each of `ranks` GPUs: optimizer state and master weights belong to
// ranks as whole tensors; the rank that has most of them counts.
size_t plan_part_bytes(const struct plan *plan, size_t part, int64_t ranks);
size_t plan_device_bytes(const struct plan *plan, int64_t ranks);
size_t plan_host_bytes(const struct plan *plan);
// Without the target's files: what is mapped is memory only as long as nobody else wants it.
size_t plan_host_needed(const struct plan *plan);
// On a CPU device and host share one memory, so both are needed; on a GPU the device's bytes.
size_t plan_needed(const struct plan *plan, int64_t ranks);

struct plan_cut plan_cut_of(const struct execution *execution);
bool plan_cut_equal(const struct plan_cut *a, const struct plan_cut *b);
// The next thriftier cut in *cut: what the config leaves open, smaller or computed again, in the order of
// the time it costs. *rung: 0 at first. False: there is none.
bool plan_thriftier(struct plan_cut *cut, const struct plan_cut *first, const struct config *config,
                    int64_t block_size, size_t *rung);

#endif
