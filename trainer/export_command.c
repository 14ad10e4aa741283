// Owns `dtrain export`: refusals, and the copy out of a checkpoint, which holds the z-lab layout.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/checkpoint.h"
#include "trainer/export.h"
#include "trainer/files.h"

// What a server may not run, from the checkpoint's config; the other sizes are not looked at.
static int served_sizes(struct dflash_sizes *sizes, const struct drafter_config *config,
                        struct error *err)
{
    if (config->kind != DRAFTER_DFLASH)
        return error_set(err,
                         "the checkpoint is of an eagle3 drafter; --format zlab is for dflash");
    *sizes = (struct dflash_sizes){.layers = config->layers,
                                   .predict_from_anchor = config->predict_from_anchor,
                                   .sliding_causal = !config->sliding_window_non_causal,
                                   .window_origin = config->window_origin};
    for (size_t i = 0; i < config->layer_types.count && i < DFLASH_MAX_LAYERS; i++)
        sizes->sliding[i] = strcmp(config->layer_types.items[i], "sliding_attention") == 0;
    return 0;
}

// predict_from_anchor is refused always: no server has a way to run it.
static int check_servable(const struct dflash_sizes *sizes, bool allow_unservable,
                          struct error *err)
{
    struct error why = {""};
    if (export_zlab_servable(sizes, &why) == 0)
        return 0;
    if (!allow_unservable || sizes->predict_from_anchor)
        return error_set(
            err,
            "not exported: servers do not run this drafter as it was "
            "trained%s\n%s",
            sizes->predict_from_anchor ? "" : " (--allow-unservable exports it all the same)",
            why.text);
    log_warn("servers do not run this drafter as it was trained: %s", why.text);
    return 0;
}

static void warn_of_windows(const struct dflash_sizes *sizes)
{
    int64_t sliding = 0;
    for (int64_t i = 0; i < sizes->layers; i++)
        sliding += sizes->sliding[i];
    if (sliding > 0)
        log_warn("this drafter has sliding layers: the Transformers code of z-lab ignores windows "
                 "and is not exact for it; vLLM and SGLang are");
    if (sliding > 0 && sliding < sizes->layers)
        log_warn("this drafter mixes sliding and full layers: vLLM needs its V2 model runner "
                 "for it");
}

static int check_checkpoint(const char *checkpoint, bool allow_unservable, struct error *err)
{
    struct config config;
    config_init(&config);
    char *path = memory_format("%s/config.yaml", checkpoint);
    struct dflash_sizes sizes;
    int result = checkpoint_check(checkpoint, err);
    if (result == 0)
        result = config_load(&config, path, NULL, 0, err);
    if (result == 0)
        result = served_sizes(&sizes, &config.drafter, err);
    if (result == 0)
        result = check_servable(&sizes, allow_unservable, err);
    if (result == 0)
        warn_of_windows(&sizes);
    free(path);
    config_release(&config);
    return result;
}

// The copy gets its name when it is whole.
static int copy_file(const char *checkpoint, const char *out, const char *name, struct error *err)
{
    char *from = memory_format("%s/%s", checkpoint, name), *to = memory_format("%s/%s", out, name);
    char *begun = memory_format("%s/.tmp-%s", out, name);
    int result = files_copy(from, begun, err);
    if (result == 0 && rename(begun, to) != 0) {
        unlink(begun);
        result = error_set(err, "%s: can not be created", to);
    }
    free(begun);
    free(to);
    free(from);
    return result;
}

int export_command(const char *checkpoint, const char *format, const char *out,
                   bool allow_unservable, struct error *err)
{
    static const char *const names[] = {"model.safetensors", "config.json"};
    enum { NAMES = sizeof(names) / sizeof(*names) };
    if (strcmp(format, "zlab") != 0)
        return error_set(err, "--format %s: this program writes zlab", format);
    if (check_checkpoint(checkpoint, allow_unservable, err) != 0)
        return -1;
    int result = files_make_folder(out, err);
    for (int i = 0; i < NAMES && result == 0; i++) {
        char *path = memory_format("%s/%s", out, names[i]);
        if (files_exists(path))
            result = error_set(err, "%s: exists already; choose another --out", path);
        free(path);
    }
    for (int i = 0; i < NAMES && result == 0; i++)
        result = copy_file(checkpoint, out, names[i], err);
    return result == 0 ? files_sync_folder(out, err) : result;
}
