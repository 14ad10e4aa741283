// Owns the look at the file system after loading: patterns of shards, files that must exist. Does not
// open them.
#include "configs/config.h"

#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "base/memory.h"
#include "configs/config_faults.h"

// One shard of a list, and what tells whether two paths are one file.
struct found_file {
    char *path; // owned
    dev_t device;
    ino_t inode;
};

struct found_files {
    struct found_file *items;
    size_t count, capacity;
};

// The key whose list is expanded.
struct file_list {
    const struct config *config;
    const char *key; // of section data
    int line;
    struct config_faults *faults;
};

#define LIST_FAULT(l, ...)                                                                         \
    config_fault((l)->faults, (l)->config, (l)->line, "data", (l)->key, __VA_ARGS__)

static void add_file(const struct file_list *l, struct found_files *files, const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0) {
        LIST_FAULT(l, "%s: %s", path, strerror(errno));
        return;
    }
    if (S_ISDIR(info.st_mode)) {
        LIST_FAULT(l, "%s is a folder; name the shards in it, e.g. %s/*.h5", path, path);
        return;
    }
    if (files->count == files->capacity) {
        files->capacity = 2 * files->capacity + 16;
        files->items = memory_resize(files->items, files->capacity, sizeof(*files->items));
    }
    files->items[files->count++] =
        (struct found_file){memory_strdup(path), info.st_dev, info.st_ino};
}

// A folder that is not there has no files; one that can not be read stops the search.
static int folder_failed(const char *path, int error)
{
    (void)path;
    return error != ENOENT && error != ENOTDIR;
}

static void add_pattern(const struct file_list *l, struct found_files *files, const char *pattern)
{
    struct stat info;
    // A file may have '[' in its name, so what exists is a path before it is a pattern.
    if (stat(pattern, &info) == 0 || strpbrk(pattern, "*?[") == NULL) {
        add_file(l, files, pattern);
        return;
    }
    glob_t matches;
    int status = glob(pattern, 0, folder_failed, &matches);
    if (status == GLOB_NOSPACE)
        die("out of memory");
    if (status == GLOB_NOMATCH)
        LIST_FAULT(l, "no file matches %s", pattern);
    else if (status != 0)
        LIST_FAULT(l, "%s: a folder of the pattern can not be read", pattern);
    for (size_t i = 0; status == 0 && i < matches.gl_pathc; i++)
        add_file(l, files, matches.gl_pathv[i]);
    globfree(&matches);
}

static int by_identity(const void *a, const void *b)
{
    const struct found_file *x = a, *y = b;
    if (x->device != y->device)
        return x->device < y->device ? -1 : 1;
    if (x->inode != y->inode)
        return x->inode < y->inode ? -1 : 1;
    return strcmp(x->path, y->path);
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct found_file *)a)->path, ((const struct found_file *)b)->path);
}

// Training twice on a file because two patterns match it is never what was meant.
static void refuse_repeats(const struct file_list *l, struct found_files *files)
{
    qsort(files->items, files->count, sizeof(*files->items), by_identity);
    for (size_t i = 1; i < files->count; i++) {
        const struct found_file *a = &files->items[i - 1], *b = &files->items[i];
        if (a->device != b->device || a->inode != b->inode)
            continue;
        if (strcmp(a->path, b->path) == 0)
            LIST_FAULT(l, "%s is listed twice", a->path);
        else
            LIST_FAULT(l, "%s and %s are the same file", a->path, b->path);
    }
}

// The files of one list, sorted by path; faults are added to the list's.
static void expand(const struct file_list *l, const struct config_texts *patterns,
                   struct config_texts *files)
{
    struct found_files found = {0};
    for (size_t i = 0; i < patterns->count; i++)
        add_pattern(l, &found, patterns->items[i]);
    if (found.count > 0) {
        refuse_repeats(l, &found);
        qsort(found.items, found.count, sizeof(*found.items), by_path);
    }
    *files = (struct config_texts){memory_alloc(found.count, sizeof(char *)), found.count};
    for (size_t i = 0; i < found.count; i++)
        files->items[i] = found.items[i].path;
    free(found.items);
}

static void release_texts(struct config_texts *texts)
{
    for (size_t i = 0; i < texts->count; i++)
        free(texts->items[i]);
    free(texts->items);
    *texts = (struct config_texts){0};
}

static void expand_both(const struct config *config, struct config_texts *train,
                        struct config_texts *val, struct config_faults *faults)
{
    struct file_list l = {config, "train", config->lines.data.train, faults};
    expand(&l, &config->data.train, train);
    l.key = "val";
    l.line = config->lines.data.val;
    expand(&l, &config->data.val, val);
}

int config_expand_files(struct config *config, struct error *err)
{
    struct config_faults faults = {0};
    struct config_texts train, val;
    expand_both(config, &train, &val, &faults);
    if (faults.count == 0) {
        release_texts(&config->data.train);
        release_texts(&config->data.val);
        config->data.train = train;
        config->data.val = val;
    } else {
        release_texts(&train);
        release_texts(&val);
    }
    return config_faults_end(&faults, err);
}

// Identities of what there is of a list. The caller frees the items; paths are borrowed.
static struct found_files identify(const struct config_texts *texts)
{
    struct found_files files = {.items = memory_alloc(texts->count + 1, sizeof(*files.items))};
    struct stat info;
    for (size_t i = 0; i < texts->count; i++)
        if (stat(texts->items[i], &info) == 0)
            files.items[files.count++] =
                (struct found_file){texts->items[i], info.st_dev, info.st_ino};
    return files;
}

size_t config_shared_files(const struct config *config, struct error *text)
{
    struct config_faults shared = {0};
    if (config->data.val.count == 0)
        return 0; // the files to train on may be many, on slow disks
    struct found_files train = identify(&config->data.train), val = identify(&config->data.val);
    for (size_t v = 0; v < val.count; v++)
        for (size_t t = 0; t < train.count; t++)
            if (train.items[t].device == val.items[v].device &&
                train.items[t].inode == val.items[v].inode)
                config_fault(&shared, config, config->lines.data.val, "data", "val",
                             "%s is also in data.train: validation is not held out",
                             val.items[v].path);
    free(train.items);
    free(val.items);
    config_faults_end(&shared, text);
    return shared.count;
}

static void check_path(const struct config *config, struct config_faults *faults, int line,
                       const char *section, const char *key, const char *path)
{
    struct stat info;
    if (path && stat(path, &info) != 0)
        config_fault(faults, config, line, section, key, "%s: %s", path, strerror(errno));
}

int config_check_files(const struct config *config, struct error *err)
{
    struct config_faults faults = {0};
    struct config_texts train, val;
    check_path(config, &faults, config->lines.target.path, "target", "path", config->target.path);
    expand_both(config, &train, &val, &faults);
    release_texts(&train);
    release_texts(&val);
    check_path(config, &faults, config->lines.data.manifest, "data", "manifest",
               config->data.manifest);
    check_path(config, &faults, config->lines.drafter.draft_vocab, "drafter", "draft_vocab",
               config->drafter.draft_vocab);
    return config_faults_end(&faults, err);
}
