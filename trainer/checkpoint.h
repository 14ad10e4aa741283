// Checkpoints: RUN/checkpoints/step-00001200/ with master.safetensors, adam_m.safetensors,
// adam_v.safetensors and, of runs with optimizer.ema, ema.safetensors (fp32, whole tensors by name),
// state.json (counters, data fingerprint, sizes and checksums of files), config.yaml, execution.json,
// provenance.json, model.safetensors + config.json (servable, z-lab layout; EAGLE-3: SpecForge's), and an
// empty DONE, written last. Of several ranks each writes the tensors it owns into files of its own,
// master-00001-of-00002.safetensors and so on; all else is rank 0's. Any number of ranks reads it.
#ifndef TRAINER_CHECKPOINT_H
#define TRAINER_CHECKPOINT_H

#include "configs/config.h"
#include "data/safetensors.h"
#include "data/vocab_map.h"
#include "drafter/drafter_sizes.h"
#include "trainer/execution.h"
#include "trainer/model_state.h"

// Everything a checkpoint says besides the state.
struct checkpoint_info {
    const struct config *config;
    const struct execution *execution;
    const struct drafter_sizes *sizes;
    const struct target *target;
    const struct vocab_map *map; // of eagle3; NULL: the whole vocabulary
    const char *target_name;     // for the export
    uint64_t data_fingerprint, target_fingerprint;
    const char *command; // as typed
};

// Writes DIR/step-<step> by way of a temporary name, fsync, rename, DONE. On failure the error is
// filled, what was begun is removed as far as possible, earlier checkpoints are untouched.
int checkpoint_write(const char *directory, const struct model_state *state,
                     const struct checkpoint_info *info, struct error *err);

// The same in parts, for several ranks: rank 0 makes the folder `begun` (checkpoint_folder.h); each rank
// writes its part there; when all have, rank 0 completes it, or discards it when one could not.
int checkpoint_write_part(const char *begun, const struct model_state *state,
                          const struct checkpoint_info *info, struct error *err);
int checkpoint_complete(const char *directory, const char *begun, const struct model_state *state,
                        const struct checkpoint_info *info, struct error *err);
void checkpoint_discard(const char *begun);

// Reads the tensors that state owns and has room for from a checkpoint directory: by name, with their shapes
// and checksums checked; errors name the file and the tensor. fingerprint may be NULL.
int checkpoint_read(const char *path, struct model_state *state, uint64_t *fingerprint,
                    struct error *err);

// Whether it holds a moving average of the weights.
bool checkpoint_has_average(const char *path);
// Reads the masters, or their average, into state->master; all else of the state stays as it is.
int checkpoint_read_weights(const char *path, struct model_state *state, bool average,
                            struct error *err);

// Every fault of a checkpoint directory: files that are missing or of another size than was written, texts that
// are not those that were written, no DONE; a line each.
int checkpoint_check(const char *path, struct error *err);
// Whether its run had this target's weights, as far as target_fingerprint tells. A checkpoint that does not
// say, of version 1, passes.
int checkpoint_check_target(const char *path, const struct target *target, struct error *err);
// Whether model.safetensors is what was written: all of it is read.
int checkpoint_check_served(const char *path, struct error *err);
// Whether a tensor of a file of the state is what was written; sum: the CRC-32C of its bytes, as they were read.
int checkpoint_check_tensor(const struct safetensors *file, const struct safetensors_entry *entry,
                            uint32_t sum, struct error *err);

// The newest complete checkpoint of a checkpoints folder in *path (caller frees; NULL when there is
// none). One warning names every directory that is not complete; strays are ignored; nothing deleted.
int checkpoint_find_latest(const char *directory, char **path, struct error *err);

// Deletes complete checkpoints beyond the `keep` newest, except `best_step` (0: none). Incomplete ones
// and strays are left alone. Marks best: `best` is a symbolic link to the best step's directory.
int checkpoint_prune(const char *directory, int64_t keep, int64_t best_step, struct error *err);
int checkpoint_mark_best(const char *directory, int64_t step, struct error *err);

// Background writing: one thread, one snapshot. A save asked for while one is running waits for it.
// Of several ranks each has a writer. A part that is written waits there until all ranks are known to have
// written theirs, or not: checkpoint_writer_conclude.
enum checkpoint_phase {
    CHECKPOINT_IDLE,
    CHECKPOINT_WRITING,
    CHECKPOINT_WRITTEN, // this rank's part
    CHECKPOINT_FAILED,  // to write this rank's part
    CHECKPOINT_CONCLUDING,
};
struct checkpoint_writer;
// ownership: of the snapshot; NULL: one rank.
int checkpoint_writer_open(struct checkpoint_writer **writer, const char *directory,
                           const struct params *params, const struct ownership *ownership,
                           const struct checkpoint_info *info, int64_t keep, bool background,
                           struct error *err);
// The host snapshot to fill before checkpoint_writer_save; waits until an earlier write has ended.
struct model_state *checkpoint_writer_snapshot(struct checkpoint_writer *writer);
// Starts writing the snapshot; best: mark it as best when it is complete. A failed write is logged and
// counted, the run goes on.
void checkpoint_writer_save(struct checkpoint_writer *writer, bool best);
// The same of several ranks, into the folder that rank 0 has made.
void checkpoint_writer_save_part(struct checkpoint_writer *writer, const char *begun, bool best);
// Waits up to `seconds` while this process is at work, then says where it is.
enum checkpoint_phase checkpoint_writer_phase(struct checkpoint_writer *writer, double seconds);
// All ranks have written their parts, or one has failed to: rank 0 completes or discards the checkpoint in
// the background, the others are idle again.
void checkpoint_writer_conclude(struct checkpoint_writer *writer, bool all_written);
// A checkpoint that could not be begun.
void checkpoint_writer_failed(struct checkpoint_writer *writer, const char *text);
// Waits for the last write. Returns -1 with the error of the newest write if that one failed.
int checkpoint_writer_wait(struct checkpoint_writer *writer, struct error *err);
// False: a write does not end, and its thread is left behind; all that the writer was opened with has to stay.
// NULL: nothing to do.
bool checkpoint_writer_close(struct checkpoint_writer *writer);

#endif
