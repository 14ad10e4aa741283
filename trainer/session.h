// What every command that touches a model opens: config, target, documents, sizes, parameters, backend.
#ifndef TRAINER_SESSION_H
#define TRAINER_SESSION_H

#include "data/packing.h"
#include "data/vocab_map.h"
#include "trainer/row_shares.h"
#include "trainer/step.h"

enum session_needs {
    SESSION_TRAIN = 1, // training documents
    SESSION_VAL = 2,   // validation documents
};

struct session {
    struct config *config; // borrowed
    struct target target;
    struct documents train, val;
    bool has_train, has_val;
    int32_t plane[DRAFTER_MAX_LAYERS];
    int64_t features;     // L in use
    int32_t last_plane;   // -1: none
    struct vocab_map map; // draft vocabulary, where has_map says that there is one
    bool has_map;
    struct drafter_sizes sizes;
    struct params params;
    const struct backend *backend;
    struct execution execution;
    const char *target_name; // for exports
    // after session_join; without it this process is alone
    struct ranks *ranks; // borrowed; readers do not touch it
    int rank, rank_count;
    struct ownership ownership;
    int local_ranks; // on the machine that has most of them; 0: not joined
    // Of the device's memory, more in use than before the ranks were connected: on GPUs, NCCL's.
    size_t joined_bytes;
};

// Reads the config file and `sets`, warns of keys without effect, checks that the files it names exist,
// expands patterns. Shards that `needs` does not ask for are dropped from the config unlooked at.
int session_config(struct config *config, const char *file, const char *const *sets,
                   size_t set_count, int needs, struct error *err);

// Refuses what the config may say and this version can not do.
int session_check_built(const struct config *config, struct error *err);

// Opens everything and checks it against each other; nothing has been written when it fails, and every
// fault is one of config or data (exit status 2).
int session_open(struct session *session, struct config *config, int needs, struct error *err);
// The training documents alone, for commands that need nothing else.
int session_open_train(struct session *session, struct error *err);
// The same in two parts: documents, whose files are looked at in a process of their own, so that no other
// thread should be there yet; and all else, from the target to the backend.
int session_open_data(struct session *session, struct config *config, int needs, struct error *err);
int session_open_model(struct session *session, struct error *err);
void session_close(struct session *session);
// Connects the session's backend with the other ranks and divides the parameters among them.
int session_join(struct session *session, struct ranks *ranks, struct error *err);
int session_ranks(const struct session *session); // how many
int session_rank(const struct session *session);  // which of them
// Documents whose planes, head and so on a step is set up for: train if open, else val.
const struct documents *session_documents(const struct session *session);
// What a resumed run must find again: all training documents, which of them are trained on, and the
// target's weights.
uint64_t session_fingerprint(const struct session *session);
// drafter.init_from, compared with the session; without it the release has no tensors.
int session_open_release(const struct session *session, struct release *release, struct error *err);
struct step_setup session_step_setup(const struct session *session, bool training);

// All rows of a training epoch.
void session_pack_epoch(const struct session *session, uint64_t epoch, struct packing *packing);
// How long the end of a run waits for a reader that is stuck; 0: as long as for one that makes no progress.
double session_stop_seconds(const struct session *session);
// Which rank computes which of them.
void session_share_rows(const struct session *session, const struct packing *packing,
                        struct row_shares *shares);
// A prefetch_epoch_fn: this rank's rows of a training epoch; context is the session.
void session_pack_own(void *session, uint64_t epoch, struct packing *packing);
// This rank's rows of the documents of validation, the first `limit` rows at most (0: all).
void session_pack_validation(const struct session *session, int64_t limit, struct packing *packing);

// The steps of the config's epochs, or the first run.max_steps of them. A step never crosses an epoch's
// end.
struct session_steps {
    int64_t *epoch_rows; // [epochs] packed rows
    uint64_t epochs;     // that the steps need
    int64_t total;
};
void session_count_steps(const struct session *session, struct session_steps *steps);
void session_steps_release(struct session_steps *steps);

#endif
