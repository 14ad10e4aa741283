// Owns `dtrain export --raw`: the export of a checkpoint whose servable weights are a moving average, with the
// weights themselves in their place.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bf16.h"
#include "base/crc32c.h"
#include "base/memory.h"
#include "data/safetensors.h"
#include "trainer/checkpoint.h"
#include "trainer/export_internal.h"
#include "trainer/files.h"

enum { SLICE = 1 << 16 }; // values at a time

// Bytes of a file from `at` on.
static int put(int fd, const char *path, const void *bytes, size_t size, off_t at,
               struct error *err)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(fd, (const char *)bytes + done, size - done, at + (off_t)done);
        if (n < 0 && errno != EINTR)
            return error_set(err, "%s: can not write: %s", path, strerror(errno));
        done += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

// A tensor's fp32 values over its bf16 ones in the file.
static int put_tensor(int fd, const char *path, const struct safetensors *model,
                      const struct safetensors_entry *to, const struct safetensors_entry *from,
                      struct error *err)
{
    size_t count = from->size / sizeof(float);
    off_t at = to->bytes - (const unsigned char *)model->map;
    int result = 0;
    if (strcmp(to->dtype, "BF16") != 0 || to->size != count * sizeof(bf16))
        return error_set(err, "%s: tensor '%s' is not the one of master.safetensors, in bf16",
                         model->path, to->name);
    bf16 *values = memory_alloc(SLICE, sizeof(*values));
    for (size_t first = 0; first < count && result == 0; first += SLICE) {
        size_t n = count - first < SLICE ? count - first : SLICE;
        for (size_t i = 0; i < n; i++) {
            float value; // tensors in a file may lie anywhere
            memcpy(&value, from->bytes + (first + i) * sizeof(value), sizeof(value));
            values[i] = bf16_from_float(value);
        }
        result =
            put(fd, path, values, n * sizeof(*values), at + (off_t)(first * sizeof(*values)), err);
    }
    free(values);
    return result;
}

// A tensor under each name that it has in the model.
static int put_named(int fd, const char *path, const struct safetensors *model,
                     const struct safetensors_entry *from, struct error *err)
{
    char *names[EXPORT_NAMES] = {NULL};
    int found = 0, result = 0;
    export_served_names(from->name, names);
    for (int i = 0; i < EXPORT_NAMES; i++) {
        const struct safetensors_entry *to =
            names[i] != NULL ? safetensors_find(model, names[i]) : NULL;
        found += to != NULL;
        if (to != NULL && result == 0)
            result = put_tensor(fd, path, model, to, from, err);
        free(names[i]);
    }
    if (found == 0)
        result = error_set(err, "%s: tensor '%s' is missing", model->path, from->name);
    return result;
}

// Every tensor of one file of masters into the copy of the model.
static int put_masters(int fd, const char *path, const struct safetensors *model,
                       const char *masters, struct error *err)
{
    struct safetensors file;
    int result = safetensors_open(&file, masters, err);
    for (size_t i = 0; i < file.count && result == 0; i++) {
        const struct safetensors_entry *entry = &file.entries[i];
        result = checkpoint_check_tensor(&file, entry, crc32c(0, entry->bytes, entry->size), err);
        if (result == 0)
            result = put_named(fd, path, model, entry, err);
    }
    safetensors_close(&file);
    return result;
}

// A folder that is the checkpoint but for the values of its servable weights: all else are links.
struct raw {
    const char *checkpoint, *folder;
    struct files_made made;
    char *real; // the checkpoint's absolute path
    char *path; // of the model in the folder
    struct safetensors model;
    int fd;
};

// One file of the checkpoint.
static int take_file(const struct raw *raw, const char *name, struct error *err)
{
    if (name[0] == '.' || strcmp(name, "model.safetensors") == 0)
        return 0;
    char *from = memory_format("%s/%s", raw->real, name);
    char *to = memory_format("%s/%s", raw->folder, name);
    int result = 0;
    if (symlink(from, to) != 0)
        result = error_set(err, "%s: can not create the link: %s", to, strerror(errno));
    else if (strncmp(name, "master", strlen("master")) == 0)
        result = put_masters(raw->fd, raw->path, &raw->model, from, err);
    free(to);
    free(from);
    return result;
}

static int take_files(const struct raw *raw, struct error *err)
{
    struct dirent **found = NULL;
    int count = scandir(raw->real, &found, NULL, alphasort), result = 0;
    if (count < 0)
        return error_set(err, "%s: can not open: %s", raw->real, strerror(errno));
    for (int i = 0; i < count; i++) {
        if (result == 0)
            result = take_file(raw, found[i]->d_name, err);
        free(found[i]);
    }
    free(found);
    return result;
}

static int make_folder(struct raw *raw, struct error *err)
{
    char *from = memory_format("%s/model.safetensors", raw->checkpoint);
    int result = files_make_folder_noted(raw->folder, &raw->made, err);
    if (result == 0)
        result = files_copy(from, raw->path, err);
    if (result == 0)
        result = safetensors_open(&raw->model, from, err);
    if (result == 0 && (raw->fd = open(raw->path, O_WRONLY | O_CLOEXEC)) < 0)
        result = error_set(err, "%s: can not open: %s", raw->path, strerror(errno));
    if (result == 0)
        result = take_files(raw, err);
    if (raw->fd >= 0)
        close(raw->fd);
    safetensors_close(&raw->model);
    free(from);
    return result;
}

int export_raw_command(const struct export_request *request, struct error *err)
{
    if (checkpoint_check(request->checkpoint, err) != 0 ||
        checkpoint_check_served(request->checkpoint, err) != 0)
        return -1;
    if (!checkpoint_has_average(request->checkpoint))
        return export_checked(request, err);
    char *folder = memory_format("%s/.tmp-raw", request->out);
    struct raw raw = {.checkpoint = request->checkpoint,
                      .folder = folder,
                      .real = realpath(request->checkpoint, NULL),
                      .path = memory_format("%s/model.safetensors", folder),
                      .fd = -1};
    struct export_request of_raw = *request;
    of_raw.checkpoint = folder;
    int result = 0;
    if (files_is_folder(folder)) // of an export that was killed
        result = files_remove_folder(folder, err);
    if (result == 0)
        result = make_folder(&raw, err);
    if (result == 0)
        result = export_checked(&of_raw, err);
    if (files_is_folder(folder))
        files_remove_folder(folder, result == 0 ? err : &(struct error){""});
    files_made_end(&raw.made, result != 0);
    free(raw.path);
    free(raw.real);
    free(folder);
    return result;
}
