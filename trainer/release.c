// Owns a released drafter's tensors: what is missing, extra or misshapen, and their values as fp32.
// config.json is compared in release_config.c, names and tensors of EAGLE-3 alone are release_eagle3.c's.
#include "trainer/release_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/log.h"
#include "trainer/files.h"
#include "trainer/json_text.h"

static bool is_allowed(struct release_check *check, const char *name)
{
    const struct config_texts *allow = check->wanted->allow;
    bool allowed = false;
    for (size_t i = 0; allow != NULL && i < allow->count; i++)
        if (strcmp(allow->items[i], name) == 0)
            allowed = check->used[i] = true;
    return allowed;
}

void release_fault(struct release_check *check, const char *name, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (is_allowed(check, name)) {
        log_warn("%s: %s: %s (accepted by drafter.init_allow)", check->file, name, text);
        return;
    }
    check->faults++;
    error_add(check->err, "%s: %s: %s", check->file, name, text);
}

// ---- tensors -------------------------------------------------------------------------------------

static bool has_shape(const struct safetensors_entry *entry, int dims, const int64_t *shape)
{
    bool same = entry->dims == dims;
    for (int d = 0; same && d < dims; d++)
        same = entry->shape[d] == shape[d];
    return same;
}

static bool has_type(const struct safetensors_entry *entry)
{
    return strcmp(entry->dtype, "BF16") == 0 || strcmp(entry->dtype, "F32") == 0;
}

static void shape_text(int dims, const int64_t *shape, char *text, size_t size)
{
    size_t at = 0;
    text[0] = '\0';
    for (int d = 0; d < dims && at < size; d++)
        at +=
            (size_t)snprintf(text + at, size - at, d > 0 ? ", %lld" : "%lld", (long long)shape[d]);
}

// Whether the entry can be read as a tensor of this shape.
static bool check_entry(struct release_check *check, const struct safetensors_entry *entry,
                        int dims, const int64_t *shape)
{
    char got[128], wanted[64];
    shape_text(entry->dims, entry->shape, got, sizeof(got));
    shape_text(dims, shape, wanted, sizeof(wanted));
    bool fits = has_shape(entry, dims, shape);
    if (!fits)
        release_fault(check, entry->name, "has the shape [%s], wanted is [%s]", got, wanted);
    else if (!has_type(entry))
        release_fault(check, entry->name, "is %s; BF16 and F32 are read", entry->dtype);
    return fits && has_type(entry);
}

// Values [first, first + count) of an entry that has_type.
static void copy_values(const struct safetensors_entry *entry, int64_t first, int64_t count,
                        float *out)
{
    if (strcmp(entry->dtype, "F32") == 0) {
        memcpy(out, entry->bytes + (size_t)first * sizeof(*out), (size_t)count * sizeof(*out));
        return;
    }
    const unsigned char *bytes = entry->bytes + (size_t)first * sizeof(bf16);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) {
        bf16 value;
        memcpy(&value, bytes + (size_t)i * sizeof(value), sizeof(value));
        out[i] = bf16_to_float(value);
    }
}

// A training that starts from NaN learns nothing; no name allows that.
static void check_finite(struct release_check *check, const struct safetensors_entry *entry,
                         int64_t count)
{
    enum { BLOCK = 65536 };
    float *values = memory_alloc(BLOCK, sizeof(*values));
    int64_t bad = -1;
    for (int64_t at = 0; at < count && bad < 0; at += BLOCK) {
        int64_t some = count - at < BLOCK ? count - at : BLOCK;
        copy_values(entry, at, some, values);
        for (int64_t i = 0; i < some && bad < 0; i++)
            if (!isfinite(values[i]))
                bad = at + i;
    }
    if (bad >= 0) {
        check->faults++;
        error_add(check->err, "%s: %s: element %lld is NaN or infinite; the file is damaged",
                  check->file, entry->name, (long long)bad);
    }
    free(values);
}

static bf16 target_value(const struct target_tensor *tensor, int64_t index)
{
    return tensor->dtype == DTYPE_BF16 ? ((const bf16 *)tensor->data)[index]
                                       : bf16_from_float(((const float *)tensor->data)[index]);
}

// Training and scoring take the target's own values, so a copy that differs is another drafter.
void release_check_copy(struct release_check *check, const struct safetensors_entry *entry,
                        const struct target_tensor *tensor, const int32_t *ids, int64_t rows,
                        const char *hint)
{
    int64_t width = check->wanted->sizes->hidden, bad = -1;
    if (!check_entry(check, entry, 2, (const int64_t[]){rows, width}))
        return;
    float *values = memory_alloc((size_t)width, sizeof(*values));
    for (int64_t r = 0; r < rows && bad < 0; r++) {
        int64_t first = (ids != NULL ? ids[r] : r) * width;
        copy_values(entry, r * width, width, values);
        for (int64_t i = 0; i < width; i++)
            if (bf16_from_float(values[i]) != target_value(tensor, first + i))
                bad = r;
    }
    if (bad >= 0)
        release_fault(check, entry->name, "row %lld is not that of the target, %s, which is used%s",
                      (long long)bad, check->wanted->target->path, hint);
    free(values);
}

static void check_param(struct release_check *check, const struct safetensors *model,
                        const struct param *param)
{
    struct release_place place = release_find(model, check->wanted->params, param);
    if (place.entry == NULL) {
        release_fault(check, param->name, "the tensor is missing");
        return;
    }
    check->read[place.entry - model->entries] = true;
    int64_t shape[SAFETENSORS_DIMS] = {place.rows, param->shape[1]};
    if (check_entry(check, place.entry, param->dims, shape) && place.row == 0)
        check_finite(check, place.entry, param->count / param->shape[0] * place.rows);
}

static bool check_other(struct release_check *check, const struct release *release,
                        const struct safetensors_entry *entry)
{
    const struct release_wanted *wanted = check->wanted;
    if (wanted->sizes->kind == DRAFTER_EAGLE3)
        return release_check_eagle3_tensor(check, &release->model, entry);
    bool copies = release->layout == RELEASE_SPECULATORS;
    bool embed = strcmp(entry->name, "embed_tokens.weight") == 0;
    if (!copies || (!embed && strcmp(entry->name, "lm_head.weight") != 0))
        return false;
    release_check_copy(check, entry, embed ? &wanted->target->embed : &wanted->target->head, NULL,
                       wanted->sizes->vocab, "");
    return true;
}

static void check_tensors(struct release_check *check, const struct release *release)
{
    const struct params *params = check->wanted->params;
    const struct safetensors *model = &release->model;
    check->read = memory_alloc(model->count + 1, sizeof(*check->read));
    for (size_t i = 0; i < params->count; i++)
        check_param(check, model, &params->items[i]);
    for (size_t i = 0; i < model->count; i++)
        if (!check->read[i] && !check_other(check, release, &model->entries[i]))
            release_fault(check, model->entries[i].name, "this drafter has no such tensor");
    if (check->wanted->sizes->kind == DRAFTER_EAGLE3)
        release_check_eagle3_map(check, model);
    free(check->read);
}

// ---- the directory -------------------------------------------------------------------------------

// Servers replace the embedding of the mask token by this file, wherever it is beside a drafter.
static void check_mask_embedding(struct release_check *check, const char *directory)
{
    char *path = memory_format("%s/mask_embedding.pt", directory);
    check->file = path;
    if (files_exists(path))
        release_fault(check, "mask_embedding.pt",
                      "the drafter has a mask embedding of its own; dtrain takes the target's row "
                      "of drafter.mask_token_id");
    free(path);
}

static int check_config(struct release *release, struct release_check *check, const char *path)
{
    struct json_file file;
    if (json_open(&file, path, check->err) != 0)
        return -1;
    check->file = path;
    int result = release_recognise(file.root, check->wanted->sizes->kind, path, &release->layout,
                                   check->err);
    if (result == 0)
        release_check_config(check, file.root, release->layout);
    json_close(&file);
    return result;
}

static void warn_of_unused(const struct release_check *check)
{
    const struct config_texts *allow = check->wanted->allow;
    for (size_t i = 0; allow != NULL && i < allow->count; i++)
        if (!check->used[i])
            log_warn("drafter.init_allow: %s: nothing of that name differs", allow->items[i]);
}

int release_open(struct release *release, const char *directory,
                 const struct release_wanted *wanted, struct error *err)
{
    *release = (struct release){.layout = RELEASE_ZLAB};
    size_t names = wanted->allow != NULL ? wanted->allow->count : 0;
    struct release_check check = {.wanted = wanted, .err = err};
    check.used = memory_alloc(names + 1, sizeof(*check.used));
    char *config = memory_format("%s/config.json", directory);
    char *model = memory_format("%s/model.safetensors", directory);
    struct error why = {""};
    int result = check_config(release, &check, config);
    if (result == 0 && safetensors_open(&release->model, model, &why) != 0) {
        result = error_add(err, "%s", why.text);
        char *index = memory_format("%s.index.json", model);
        if (files_exists(index))
            error_add(err, "%s: weights in several files are not read; save them as one", index);
        free(index);
    }
    if (result == 0) {
        check_mask_embedding(&check, directory);
        check.file = model;
        check_tensors(&check, release);
        result = check.faults > 0 ? -1 : 0;
    }
    if (result == 0)
        warn_of_unused(&check);
    free(model);
    free(config);
    free(check.used);
    return result;
}

void release_close(struct release *release)
{
    safetensors_close(&release->model);
    *release = (struct release){.layout = RELEASE_ZLAB};
}

void release_values(const struct release *release, const struct params *params, int64_t first,
                    int64_t count, float *out)
{
    bool empty = release == NULL || release->model.count == 0;
    for (size_t i = 0; i < params->count && !empty; i++) {
        const struct param *param = &params->items[i];
        struct release_place place = release_find(&release->model, params, param);
        int64_t begin = first > param->offset ? first - param->offset : 0;
        int64_t end = first + count - param->offset;
        int64_t shape[SAFETENSORS_DIMS] = {place.rows, param->shape[1]};
        if (end > param->count)
            end = param->count;
        if (begin >= end || place.entry == NULL || !has_type(place.entry) ||
            !has_shape(place.entry, param->dims, shape))
            continue;
        int64_t skipped = place.row * (param->count / param->shape[0]);
        copy_values(place.entry, skipped + begin, end - begin,
                    out + (begin + param->offset - first));
    }
}
