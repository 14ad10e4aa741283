// Owns `dtrain export`: refusals, and the way out of a checkpoint, which holds the z-lab layout (EAGLE-3:
// SpecForge's).
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/checkpoint.h"
#include "trainer/export_internal.h"
#include "trainer/files.h"
#include "trainer/json_text.h"
#include "trainer/release.h"

int export_format_find(const char *name)
{
    static const char *const names[] = {"zlab", "specforge", "speculators"};
    for (int i = 0; i < (int)(sizeof(names) / sizeof(*names)); i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    return -1;
}

// What is exported, opened as far as the format needs it.
struct source {
    const struct export_request *request;
    struct config config;
    struct target target;
    struct drafter_sizes sizes;
    struct params params;
    struct release release; // the checkpoint's own export
    struct vocab_map map;   // that it holds; without one draft_size is 0
    char *target_name;
};

// What a server may not run, from the checkpoint's config; the other sizes are not looked at.
static void served_sizes(struct source *source)
{
    const struct drafter_config *config = &source->config.drafter;
    bool eagle3 = config->kind == DRAFTER_EAGLE3;
    source->sizes = (struct drafter_sizes){.kind = config->kind,
                                           .layers = config->layers,
                                           .head_norms = !eagle3 || config->style == STYLE_QWEN3,
                                           .predict_from_anchor = config->predict_from_anchor,
                                           .sliding_causal = !config->sliding_window_non_causal,
                                           .window_origin = config->window_origin,
                                           .mask_token_id = config->mask_token_id,
                                           .norm_before_residual = config->norm_before_residual,
                                           .norm_before_fc = config->norm_before_fc,
                                           .fc_norm = config->fc_norm,
                                           .markov_rank = config->markov_rank};
    for (size_t i = 0; i < config->layer_types.count && i < DRAFTER_MAX_LAYERS; i++)
        source->sizes.sliding[i] = strcmp(config->layer_types.items[i], "sliding_attention") == 0;
}

// EAGLE-3 brings its own head, and embeds by itself: no server has these factors of a target there.
static int refuse_scales(const struct drafter_sizes *sizes, const char *where, double embed,
                         double logits, struct error *err)
{
    const char *instead = sizes->kind == DRAFTER_DFLASH
                              ? "; --format zlab leaves both to the target"
                              : ", nor has any that EAGLE-3 drafters are served from";
    int faults = 0;
    if (embed != 1.0)
        faults |= error_add(err,
                            "not exported: target %s multiplies its embedding by %g, and this "
                            "layout has no field for it%s",
                            where, embed, instead);
    if (logits != 1.0)
        faults |= error_add(err,
                            "not exported: target %s multiplies its logits by %g, and this layout "
                            "has no field for it%s",
                            where, logits, instead);
    return faults;
}

static double factor_of(const struct json_file *file, const char *name)
{
    const cJSON *item = cJSON_GetObjectItem(file->root, name);
    return cJSON_IsNumber(item) ? item->valuedouble : 1.0;
}

// Sizes that come from the target where config.yaml does not have them, from the checkpoint's own export, which
// states a target's factors where EAGLE-3 would need them.
static int read_sizes(struct source *source, struct error *err)
{
    struct drafter_sizes *sizes = &source->sizes;
    struct json_file file;
    char *path = memory_format("%s/config.json", source->request->checkpoint);
    int result = json_open(&file, path, err);
    free(path);
    if (result != 0)
        return -1;
    if (json_get_int(&file, "vocab_size", &sizes->vocab, err) != 0 ||
        json_get_int(&file, "hidden_size", &sizes->hidden, err) != 0 ||
        json_get_int(&file, "num_attention_heads", &sizes->heads, err) != 0)
        result = -1;
    if (result == 0 && sizes->heads < 1)
        result = error_set(err, "%s: num_attention_heads: 0 or less", file.path);
    if (result == 0 && sizes->kind == DRAFTER_EAGLE3)
        result = refuse_scales(sizes, source->config.target.path, factor_of(&file, "embed_scale"),
                               factor_of(&file, "logit_scale"), err);
    json_close(&file);
    return result;
}

static void warn_of_windows(const struct drafter_sizes *sizes, enum export_format format)
{
    int64_t sliding = 0;
    if (sizes->kind != DRAFTER_DFLASH)
        return;
    for (int64_t i = 0; i < sizes->layers; i++)
        sliding += sizes->sliding[i];
    if (sliding > 0)
        log_warn("this drafter has sliding layers: the Transformers code of z-lab ignores windows "
                 "and is not exact for it; vLLM and SGLang are");
    if (sliding > 0 && sliding < sizes->layers && format != EXPORT_SPECULATORS)
        log_warn("this drafter mixes sliding and full layers: vLLM needs its V2 model runner "
                 "for it");
}

static int open_checkpoint(struct source *source, struct error *err)
{
    const struct export_request *request = source->request;
    char *path = memory_format("%s/config.yaml", request->checkpoint);
    int result = config_load(&source->config, path, NULL, 0, err);
    if (result == 0) {
        served_sizes(source);
        result = read_sizes(source, err);
    }
    if (result == 0)
        result = export_check_servable(&source->sizes, request->format, request->allow, err);
    free(path);
    return result;
}

// ---- with the target -----------------------------------------------------------------------------

// The layers that the features came from, which the config may have left to the shards.
static int read_layer_ids(const char *checkpoint, int64_t *ids, int64_t *count, struct error *err)
{
    struct json_file file;
    char *path = memory_format("%s/config.json", checkpoint);
    int result = json_open(&file, path, err);
    free(path);
    if (result != 0)
        return -1;
    const cJSON *dflash = cJSON_GetObjectItem(file.root, "dflash_config"), *item = NULL;
    const cJSON *eagle = cJSON_GetObjectItem(file.root, "eagle_config");
    const cJSON *list = cJSON_GetObjectItem(dflash, "target_layer_ids");
    if (eagle != NULL)
        list = cJSON_GetObjectItem(eagle, "eagle_aux_hidden_state_layer_ids");
    *count = 0;
    cJSON_ArrayForEach(item, list) if (*count < DRAFTER_MAX_LAYERS) ids[(*count)++] =
        (int64_t)item->valuedouble;
    json_close(&file);
    return 0;
}

// The name that servers load the target by: the run's, else the directory.
static int read_target_name(struct source *source, struct error *err)
{
    struct json_file file;
    char name[1024];
    char *path = memory_format("%s/provenance.json", source->request->checkpoint);
    int result = json_open(&file, path, err);
    free(path);
    if (result != 0)
        return -1;
    result = json_get_text(&file, "target", name, sizeof(name), err);
    if (result == 0)
        source->target_name = memory_strdup(name[0] != '\0' ? name : source->target.path);
    json_close(&file);
    return result;
}

// The draft vocabulary that the checkpoint's own export holds.
static int read_map(struct source *source, struct error *err)
{
    struct safetensors model;
    char *path = memory_format("%s/model.safetensors", source->request->checkpoint);
    int result = safetensors_open(&model, path, err);
    if (result == 0 && safetensors_find(&model, "d2t") != NULL)
        result = vocab_map_tables(&source->map, &model, err);
    if (result == 0 && source->map.draft_size > 0)
        source->sizes.draft_vocab = source->map.draft_size;
    safetensors_close(&model);
    free(path);
    return result;
}

// The drafter with all its sizes. The checkpoint's config.json must say the same, or the target is not
// the one that was trained for.
static int open_drafter(struct source *source, struct error *err)
{
    const struct export_request *request = source->request;
    const char *target = request->target != NULL ? request->target : source->config.target.path;
    int64_t ids[DRAFTER_MAX_LAYERS], count;
    if (target_open(&source->target, target, err) != 0)
        return error_prefix(err, "%s", request->target != NULL ? "--target" : "target.path");
    if (read_layer_ids(request->checkpoint, ids, &count, err) != 0 ||
        drafter_sizes_resolve(&source->sizes, &source->config.drafter, &source->target, ids, count,
                              err) != 0 ||
        read_map(source, err) != 0)
        return -1;
    drafter_params(&source->sizes, &source->params);
    const struct release_wanted wanted = {&source->sizes, &source->params, &source->target, NULL,
                                          source->map.draft_size > 0 ? &source->map : NULL};
    if (release_open(&source->release, request->checkpoint, &wanted, err) != 0)
        return error_prefix(err, "the target is not the one of this checkpoint");
    if (checkpoint_check_target(request->checkpoint, &source->target, err) != 0)
        return error_add(err, "--target names the one to export with");
    if (target_check_finite(&source->target, err) != 0)
        return -1;
    if (refuse_scales(&source->sizes, source->target.path, (double)source->target.embed_scale,
                      (double)source->target.logit_scale, err) != 0 ||
        export_check_servable(&source->sizes, request->format, request->allow, err) != 0)
        return -1;
    return read_target_name(source, err);
}

static void close_source(struct source *source)
{
    free(source->target_name);
    release_close(&source->release);
    vocab_map_release(&source->map);
    params_release(&source->params);
    target_close(&source->target);
    config_release(&source->config);
}

// ---- the files -----------------------------------------------------------------------------------

enum { MODEL, CONFIG, FILES };
static const char *const names[FILES] = {"model.safetensors", "config.json"};

static int write_files(const struct source *source, char *const *paths, struct error *err)
{
    if (source->request->format == EXPORT_SPECULATORS) {
        const struct export_speculators drafter = {&source->sizes, &source->target,
                                                   source->target_name, &source->release.model};
        return export_speculators_write(&drafter, paths[MODEL], paths[CONFIG], err);
    }
    int result = 0;
    for (int i = 0; i < FILES && result == 0; i++) {
        char *from = memory_format("%s/%s", source->request->checkpoint, names[i]);
        result = files_copy(from, paths[i], err);
        free(from);
    }
    return result;
}

static int refuse_others(const char *out, struct error *err)
{
    int result = 0;
    for (int i = 0; i < FILES && result == 0; i++) {
        char *path = memory_format("%s/%s", out, names[i]);
        if (files_exists(path))
            result = error_set(err, "%s: exists already; choose another --out", path);
        free(path);
    }
    return result;
}

int export_check_out(const char *out, struct error *err)
{
    return files_check_folder(out, err) != 0 ? error_prefix(err, "--out") : refuse_others(out, err);
}

// Files get their names when all of them are whole.
static int publish(const struct source *source, struct error *err)
{
    const char *out = source->request->out;
    char *begun[FILES], *final[FILES];
    for (int i = 0; i < FILES; i++) {
        begun[i] = memory_format("%s/.tmp-%s", out, names[i]);
        final[i] = memory_format("%s/%s", out, names[i]);
    }
    int result = refuse_others(out, err);
    if (result == 0)
        result = write_files(source, begun, err);
    int named = 0;
    while (named < FILES && result == 0) {
        if (rename(begun[named], final[named]) == 0)
            named++;
        else
            result = error_set(err, "%s: can not be created: %s", final[named], strerror(errno));
    }
    for (int i = 0; i < FILES; i++) {
        unlink(begun[i]); // of a failure
        if (i < named && result != 0)
            unlink(final[i]);
        free(begun[i]);
        free(final[i]);
    }
    return result;
}

int export_checked(const struct export_request *request, struct error *err)
{
    struct source source = {.request = request};
    struct files_made made = {.paths = NULL};
    config_init(&source.config);
    int result = open_checkpoint(&source, err);
    if (result == 0 && request->format == EXPORT_SPECULATORS)
        result = open_drafter(&source, err);
    if (result == 0) {
        warn_of_windows(&source.sizes, request->format);
        result = files_make_folder_noted(request->out, &made, err);
    }
    if (result == 0)
        result = publish(&source, err);
    if (result == 0)
        result = files_sync_folder(request->out, err);
    files_made_end(&made, result != 0);
    close_source(&source);
    return result;
}

int export_command(const struct export_request *request, struct error *err)
{
    if (checkpoint_check(request->checkpoint, err) != 0 ||
        checkpoint_check_served(request->checkpoint, err) != 0)
        return -1;
    return export_checked(request, err);
}
