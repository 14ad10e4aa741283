// Servable drafters: bf16 model.safetensors and config.json. Every field a server reads states what
// was trained; what a format's servers can not run is refused with the reason.
#ifndef TRAINER_EXPORT_H
#define TRAINER_EXPORT_H

#include "drafter/dflash_sizes.h"
#include "trainer/model_state.h"

// Reasons why the z-lab layout's servers do not run this drafter; 0 when there are none, else -1 and a
// line each.
int export_zlab_servable(const struct dflash_sizes *sizes, struct error *err);
// Writes model.safetensors and config.json into an existing directory. Does not ask
// export_zlab_servable: checkpoints are written for every drafter.
int export_zlab_write(const char *directory, const struct params *params, const float *master,
                      const struct dflash_sizes *sizes, const struct target *target,
                      struct error *err);
// `dtrain export`: from a complete checkpoint, with the refusals; only what the checkpoint holds is read.
// allow_unservable waives those that are about windows, not predict_from_anchor. `out` is created and
// must not hold an export already.
int export_command(const char *checkpoint, const char *format, const char *out,
                   bool allow_unservable, struct error *err);

#endif
