// Owns the tensors of a released EAGLE-3 drafter that DFlash has not: other names of parameters, tensors
// that are several parameters, the draft vocabulary, copies of the target.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "trainer/release_internal.h"

// ---- where parameters are ------------------------------------------------------------------------

// The first layer may be called midlayer, later layers' norm of what enters them hidden_norm (SGLang).
static const struct safetensors_entry *find_named(const struct safetensors *model, const char *name)
{
    static const char first[] = "layers.0.", norm[] = ".input_layernorm.weight";
    const struct safetensors_entry *entry = safetensors_find(model, name);
    size_t prefix = strlen(first), n = strlen(name);
    char *other = NULL;
    if (strncmp(name, first, prefix) == 0)
        other = memory_format("midlayer.%s", name + prefix);
    else if (strncmp(name, "layers.", 7) == 0 && n > strlen(norm) &&
             strcmp(name + n - strlen(norm), norm) == 0)
        other = memory_format("%.*s.hidden_norm.weight", (int)(n - strlen(norm)), name);
    if (entry == NULL && other != NULL)
        entry = safetensors_find(model, other);
    free(other);
    return entry;
}

// Parameters that may be one tensor: its name, and theirs in order of its rows.
static const struct fused {
    const char *name, *parts[3];
} all_fused[] = {
    {"self_attn.qkv_proj.weight",
     {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}},
    {"mlp.gate_up_proj.weight", {"mlp.gate_proj.weight", "mlp.up_proj.weight", NULL}},
};

// The place in the fused tensor, where that is in the file.
static struct release_place find_fused(const struct safetensors *model, const struct params *params,
                                       const char *layer, const char *part,
                                       const struct fused *fused)
{
    struct release_place place = {.entry = NULL};
    bool found = false;
    for (int i = 0; i < 3 && fused->parts[i] != NULL; i++) {
        char *name = memory_format("%s%s", layer, fused->parts[i]);
        const struct param *param = params_find(params, name);
        free(name);
        if (param == NULL)
            return place;
        if (strcmp(fused->parts[i], part) == 0) {
            place.row = place.rows;
            found = true;
        }
        place.rows += param->shape[0];
    }
    char *name = memory_format("%s%s", layer, fused->name);
    if (found)
        place.entry = find_named(model, name);
    free(name);
    return place;
}

struct release_place release_find(const struct safetensors *model, const struct params *params,
                                  const struct param *param)
{
    struct release_place place = {find_named(model, param->name), 0, param->shape[0]};
    int length = 0, number;
    if (place.entry != NULL || sscanf(param->name, "layers.%d.%n", &number, &length) != 1 ||
        length == 0)
        return place;
    char *layer = memory_format("%.*s", length, param->name);
    for (size_t i = 0; i < sizeof(all_fused) / sizeof(*all_fused) && place.entry == NULL; i++) {
        struct release_place in =
            find_fused(model, params, layer, param->name + length, &all_fused[i]);
        if (in.entry != NULL)
            place = in;
    }
    free(layer);
    return place;
}

// ---- what is no parameter ------------------------------------------------------------------------

// The second name of a norm that the parameter's own name has, too: then both must be the same.
static bool check_second_norm(struct release_check *check, const struct safetensors *model,
                              const struct safetensors_entry *entry)
{
    static const char norm[] = ".hidden_norm.weight";
    size_t n = strlen(entry->name);
    if (strncmp(entry->name, "layers.", 7) != 0 || n <= strlen(norm) ||
        strcmp(entry->name + n - strlen(norm), norm) != 0)
        return false;
    char *name = memory_format("%.*s.input_layernorm.weight", (int)(n - strlen(norm)), entry->name);
    const struct safetensors_entry *own = safetensors_find(model, name);
    bool second = own != NULL && params_find(check->wanted->params, name) != NULL;
    if (second && (own->size != entry->size || memcmp(own->bytes, entry->bytes, own->size) != 0))
        release_fault(check, entry->name,
                      "differs from %s; servers take the one or the other for what enters a layer",
                      name);
    free(name);
    return second;
}

// The first draft id that is another token than in the run's map; -1: none.
static int64_t first_other(const struct vocab_map *map, const struct vocab_map *wanted)
{
    for (int64_t i = 0; i < wanted->draft_size; i++)
        if (map->ids[i] != wanted->ids[i])
            return i;
    return -1;
}

static void check_map(struct release_check *check, const struct safetensors *model)
{
    const struct vocab_map *wanted = check->wanted->map;
    struct vocab_map map;
    struct error why = {""};
    if (vocab_map_tables(&map, model, &why) != 0) {
        release_fault(check, "d2t", "%s", why.text);
        vocab_map_release(&map);
        return;
    }
    int64_t other;
    if (map.vocab_size != check->wanted->sizes->vocab)
        release_fault(check, "t2d", "%lld tokens, but the target has %lld",
                      (long long)map.vocab_size, (long long)check->wanted->sizes->vocab);
    else if (wanted == NULL && map.draft_size != map.vocab_size)
        release_fault(check, "d2t",
                      "a draft vocabulary of %lld tokens, but drafter.draft_vocab is not given",
                      (long long)map.draft_size);
    else if (wanted != NULL && map.draft_size != wanted->draft_size)
        release_fault(check, "d2t", "%lld tokens, but drafter.draft_vocab has %lld",
                      (long long)map.draft_size, (long long)wanted->draft_size);
    else if (wanted != NULL && (other = first_other(&map, wanted)) >= 0)
        release_fault(check, "d2t",
                      "draft id %lld is token %d, but drafter.draft_vocab makes it %d",
                      (long long)other, (int)map.ids[other], (int)wanted->ids[other]);
    vocab_map_release(&map);
}

bool release_check_eagle3_tensor(struct release_check *check, const struct safetensors *model,
                                 const struct safetensors_entry *entry)
{
    const struct release_wanted *wanted = check->wanted;
    if (strcmp(entry->name, "d2t") == 0) {
        check_map(check, model);
        return true;
    }
    if (strcmp(entry->name, "t2d") == 0) // with d2t
        return safetensors_find(model, "d2t") != NULL;
    if (strcmp(entry->name, "embed_tokens.weight") == 0) {
        release_check_copy(check, entry, &wanted->target->embed, NULL, wanted->sizes->vocab, "");
        return true;
    }
    if (strcmp(entry->name, "lm_head.weight") == 0) { // as a parameter it has been read
        release_check_copy(
            check, entry, &wanted->target->head, wanted->map != NULL ? wanted->map->ids : NULL,
            wanted->sizes->draft_vocab, "; drafter.lm_head: trainable starts from the file's");
        return true;
    }
    return check_second_norm(check, model, entry);
}

void release_check_eagle3_map(struct release_check *check, const struct safetensors *model)
{
    const struct vocab_map *wanted = check->wanted->map;
    if (wanted != NULL && wanted->draft_size != wanted->vocab_size &&
        safetensors_find(model, "d2t") == NULL)
        release_fault(check, "d2t", "the tensor is missing, but drafter.draft_vocab is given");
}
