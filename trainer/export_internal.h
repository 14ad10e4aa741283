// What the export formats share.
#ifndef TRAINER_EXPORT_INTERNAL_H
#define TRAINER_EXPORT_INTERNAL_H

#include "trainer/export.h"
#include "trainer/json_text.h"

bool export_any_sliding(const struct drafter_sizes *sizes);
void export_add_texts(cJSON *object, const char *name, const char *text);
// The draft layers in the words of a Qwen3 configuration: sizes, norms, rotary embedding, layer types.
void export_add_layers(cJSON *object, const struct drafter_sizes *sizes);

#endif
