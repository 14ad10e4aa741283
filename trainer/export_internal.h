// What the export formats share.
#ifndef TRAINER_EXPORT_INTERNAL_H
#define TRAINER_EXPORT_INTERNAL_H

#include "trainer/export.h"
#include "trainer/json_text.h"

// export_command without a look at whether the checkpoint's files are whole: the caller has checked or made them.
int export_checked(const struct export_request *request, struct error *err);

bool export_any_sliding(const struct drafter_sizes *sizes);
void export_add_texts(cJSON *object, const char *name, const char *text);
// The draft layers in the words of a Qwen3 configuration, or of Llama's where they have no norms of heads:
// sizes, norms, rotary embedding, layer types.
void export_add_layers(cJSON *object, const struct drafter_sizes *sizes);
// With a Markov head a DFlash drafter is what speculators' layout calls DSpark.
bool export_is_dspark(const struct drafter_sizes *sizes);
// A checkpoint's own file states a Markov head, which no server knows.
void export_add_markov(cJSON *object, const struct drafter_sizes *sizes);
void export_add_layer_ids(cJSON *object, const char *name, const struct drafter_sizes *sizes,
                          int64_t shift);

// Of a model.safetensors: declares its tensors, begins and writes them.
typedef int export_fill_fn(struct safetensors_writer *writer, const void *context,
                           struct error *err);
int export_write_model(const char *path, export_fill_fn *fill, const void *context,
                       struct error *err);
// Values of a parameter as bf16 into a tensor.
int export_write_param(struct safetensors_writer *writer, int index,
                       const struct export_weights *weights, const struct param *param,
                       struct error *err);
// Rows of a target's matrix as bf16: the first `rows`, or those of ids [rows].
int export_write_rows(struct safetensors_writer *writer, int index,
                      const struct target_tensor *tensor, const int32_t *ids, int64_t rows,
                      struct error *err);

// EAGLE-3: the layout of SpecForge and SGLang, and from such a file speculators'.
int export_specforge_model(const char *path, const struct export_drafter *drafter,
                           struct error *err);
cJSON *export_specforge_config(const struct drafter_sizes *sizes, const struct target *target);
int export_eagle3_speculators_fill(struct safetensors_writer *writer, const void *drafter,
                                   struct error *err);
void export_add_eagle3_speculator(cJSON *object, const struct drafter_sizes *sizes);

// The names that a parameter may have in a checkpoint's servable file; NULL: no other. The caller frees them.
enum { EXPORT_NAMES = 2 };
void export_served_names(const char *name, char *names[EXPORT_NAMES]);

#endif
