// Servable drafters: bf16 model.safetensors and config.json. Every field a server reads states what
// was trained; what a format's servers can not run is refused with the reason.
#ifndef TRAINER_EXPORT_H
#define TRAINER_EXPORT_H

#include "data/safetensors.h"
#include "data/vocab_map.h"
#include "drafter/drafter_sizes.h"
#include "trainer/model_state.h"

// SpecForge reads and writes DFlash drafters in z-lab's layout, and has one of its own for EAGLE-3.
enum export_format { EXPORT_ZLAB, EXPORT_SPECFORGE, EXPORT_SPECULATORS };
// zlab, specforge, speculators; -1: no format of this program.
int export_format_find(const char *name);

// Names that --allow-unservable may list, separated by commas.
int export_check_allowed(const char *allow, struct error *err);
// Reasons why the format's servers do not run this drafter, a line each. `allow` names those that are
// only logged ("": all that can be, NULL: none).
int export_check_servable(const struct drafter_sizes *sizes, enum export_format format,
                          const char *allow, struct error *err);
// What servers read of a checkpoint, into an existing directory: model.safetensors and config.json in
// z-lab's layout of DFlash, in SpecForge's of EAGLE-3. Does not ask export_check_servable: checkpoints are
// written for every drafter.
struct export_weights {
    const float *master; // [params->elements], to be rounded; NULL: served
    const bf16 *served;  // [params->elements]
};
struct export_drafter {
    const struct params *params;
    struct export_weights weights;
    const struct drafter_sizes *sizes;
    const struct target *target;
    const struct vocab_map *map; // NULL: the whole vocabulary
};
int export_servable_write(const char *directory, const struct export_drafter *drafter,
                          struct error *err);

// A drafter in speculators' layout, with the target's embedding and head.
struct export_speculators {
    const struct drafter_sizes *sizes;
    const struct target *target;
    const char *target_name;         // as servers find it
    const struct safetensors *model; // as export_servable_write wrote it
};
int export_speculators_write(const struct export_speculators *drafter, const char *model_path,
                             const char *config_path, struct error *err);

struct export_request {
    const char *checkpoint, *out;
    enum export_format format;
    const char *target; // directory; NULL: the target.path that the checkpoint's config names
    const char *allow;  // as in export_check_servable
};
// `dtrain export`: from a complete checkpoint, with the refusals. Only speculators' layout reads more
// than the checkpoint: the target. `out` is created and must not hold an export already.
int export_command(const struct export_request *request, struct error *err);
// Whether `out` is such a folder, before any work.
int export_check_out(const char *out, struct error *err);
// The same as export_command with the weights themselves where the checkpoint's servable ones are their moving average.
int export_raw_command(const struct export_request *request, struct error *err);

#endif
