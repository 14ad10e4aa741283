// Owns system calls on folders and small files, each checked, each error naming the path.
#include "trainer/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/memory.h"

static void note(struct files_made *made, const char *path)
{
    made->paths = memory_resize(made->paths, made->count + 1, sizeof(*made->paths));
    made->paths[made->count++] = memory_strdup(path);
}

int files_make_folder_noted(const char *path, struct files_made *made, struct error *err)
{
    char *part = memory_strdup(path);
    int result = 0;
    for (char *slash = strchr(part + 1, '/');; slash = strchr(slash + 1, '/')) {
        if (slash != NULL)
            *slash = '\0';
        if (mkdir(part, 0777) == 0) {
            note(made, part);
        } else if (errno != EEXIST || !files_is_folder(part)) {
            result = error_set(err, "%s: can not create the folder: %s", part, strerror(errno));
            break;
        }
        if (slash == NULL)
            break;
        *slash = '/';
    }
    free(part);
    return result;
}

void files_made_end(struct files_made *made, bool remove_empty)
{
    for (size_t i = made->count; i-- > 0;) {
        if (remove_empty)
            rmdir(made->paths[i]); // fails where something has been put
        free(made->paths[i]);
    }
    free(made->paths);
    *made = (struct files_made){.paths = NULL};
}

int files_make_folder(const char *path, struct error *err)
{
    struct files_made made = {.paths = NULL};
    int result = files_make_folder_noted(path, &made, err);
    files_made_end(&made, false);
    return result;
}

bool files_exists(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

bool files_is_folder(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

bool files_same(const char *first, const char *second)
{
    struct stat a, b;
    return stat(first, &a) == 0 && stat(second, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

int64_t files_size(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) ? (int64_t)info.st_size : -1;
}

int files_write(const char *path, files_write_fn *write, void *context, struct error *err)
{
    FILE *out = fopen(path, "we");
    if (out == NULL)
        return error_set(err, "%s: can not create: %s", path, strerror(errno));
    write(context, out);
    bool failed = fflush(out) != 0 || ferror(out) != 0 || fsync(fileno(out)) != 0;
    int cause = errno;
    if (fclose(out) != 0 && !failed) {
        failed = true;
        cause = errno;
    }
    if (!failed)
        return 0;
    unlink(path);
    return error_set(err, "%s: writing failed: %s", path, strerror(cause));
}

static void put_text(void *context, FILE *out)
{
    fputs(context, out);
}

int files_write_text(const char *path, const char *text, struct error *err)
{
    char *copy = memory_strdup(text);
    int result = files_write(path, put_text, copy, err);
    free(copy);
    return result;
}

char *files_read_text(const char *path, struct error *err)
{
    FILE *in = fopen(path, "re");
    if (in == NULL) {
        error_set(err, "%s: can not open: %s", path, strerror(errno));
        return NULL;
    }
    size_t size = 0, room = 4096;
    char *text = memory_alloc(room + 1, 1);
    for (size_t n; (n = fread(text + size, 1, room - size, in)) > 0;) {
        size += n;
        if (size == room) {
            room *= 2;
            text = memory_resize(text, room + 1, 1);
        }
    }
    text[size] = '\0';
    if (ferror(in) != 0) {
        error_set(err, "%s: reading failed: %s", path, strerror(errno));
        free(text);
        text = NULL;
    }
    fclose(in);
    return text;
}

int files_crc32c(const char *path, uint32_t *sum, struct error *err)
{
    enum { PIECE = 1 << 20 };
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return error_set(err, "%s: can not open: %s", path, strerror(errno));
    unsigned char *bytes = memory_alloc(PIECE, 1);
    *sum = 0;
    for (size_t got; (got = fread(bytes, 1, PIECE, file)) > 0;)
        *sum = crc32c(*sum, bytes, got);
    int result = ferror(file) ? error_set(err, "%s: reading failed: %s", path, strerror(errno)) : 0;
    fclose(file);
    free(bytes);
    return result;
}

static void put_file(void *context, FILE *out)
{
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), context)) > 0;)
        fwrite(buffer, 1, n, out);
}

int files_copy(const char *from, const char *to, struct error *err)
{
    FILE *in = fopen(from, "re");
    if (in == NULL)
        return error_set(err, "%s: can not open: %s", from, strerror(errno));
    int result = files_write(to, put_file, in, err);
    if (result == 0 && ferror(in) != 0) {
        unlink(to);
        result = error_set(err, "%s: reading failed", from);
    }
    fclose(in);
    return result;
}

int files_sync_folder(const char *path, struct error *err)
{
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return error_set(err, "%s: can not open: %s", path, strerror(errno));
    // Some network file systems can not sync a folder; they have no rename to lose either.
    int result = 0;
    if (fsync(folder) != 0 && errno != EINVAL && errno != ENOTSUP)
        result = error_set(err, "%s: fsync failed: %s", path, strerror(errno));
    close(folder);
    return result;
}

int files_check_rereadable(const char *path, struct error *err)
{
    struct stat info;
    if (stat(path, &info) != 0 || (!S_ISFIFO(info.st_mode) && !S_ISSOCK(info.st_mode)))
        return 0;
    return error_set(err, "%s: is a pipe, and is read more than once; write it to a file", path);
}

// The folder that holds a path. The caller frees.
static char *folder_of(const char *path)
{
    char *copy = memory_strdup(path), *folder = memory_strdup(dirname(copy));
    free(copy);
    return folder;
}

// By a file that is made and removed: rights do not tell of file systems that are read-only or no place for files.
static int try_folder(const char *folder, struct error *err)
{
    char *probe = memory_format("%s/.dtrain-XXXXXX", folder);
    int result = 0, file = mkostemp(probe, O_CLOEXEC);
    if (file < 0) {
        result = error_set(err, "%s: no file can be created here: %s", folder, strerror(errno));
    } else {
        close(file);
        unlink(probe);
    }
    free(probe);
    return result;
}

static int try_folder_of(const char *path, struct error *err)
{
    char *folder = folder_of(path);
    int result = files_is_folder(folder)
                     ? try_folder(folder, err)
                     : error_set(err, "%s: there is no folder %s; make it first", path, folder);
    free(folder);
    return result;
}

static bool names_folder(const char *path)
{
    size_t length = strlen(path);
    return length == 0 || path[length - 1] == '/' || files_is_folder(path);
}

// Shards and manifests. `--out *.h5` without a name of its own takes the first shard for one.
static bool holds_hdf5(const char *path)
{
    static const char signature[] = "\x89HDF\r\n\x1a\n";
    char found[sizeof(signature) - 1];
    FILE *file = fopen(path, "rbe");
    if (file == NULL)
        return false;
    size_t size = fread(found, 1, sizeof(found), file);
    fclose(file);
    return size == sizeof(found) && memcmp(found, signature, size) == 0;
}

static int check_name(const char *path, struct error *err)
{
    if (names_folder(path))
        return error_set(err, "%s: is a folder; name a file", path);
    if (files_size(path) > 0 && holds_hdf5(path))
        return error_set(err, "%s: is there and holds HDF5 data; name another file, or remove it",
                         path);
    return 0;
}

int files_check_replace(const char *path, struct error *err)
{
    if (check_name(path, err) != 0)
        return -1;
    if (files_exists(path) && files_size(path) < 0)
        return error_set(err, "%s: is not a plain file, and would be replaced", path);
    return try_folder_of(path, err);
}

int files_check_write(const char *path, struct error *err)
{
    if (check_name(path, err) != 0)
        return -1;
    if (!files_exists(path))
        return try_folder_of(path, err);
    if (access(path, W_OK) != 0)
        return error_set(err, "%s: can not be written: %s", path, strerror(errno));
    return 0;
}

int files_check_folder(const char *path, struct error *err)
{
    char *there = memory_strdup(path);
    while (!files_exists(there) && strcmp(there, "/") != 0 && strcmp(there, ".") != 0) {
        char *above = folder_of(there);
        free(there);
        there = above;
    }
    // What is not there then is the current folder, which may not be searched.
    int result = files_is_folder(there) || !files_exists(there)
                     ? try_folder(there, err)
                     : error_set(err, "%s: is not a folder", there);
    free(there);
    return result;
}

int files_remove_folder(const char *path, struct error *err)
{
    struct dirent **found = NULL;
    int count = scandir(path, &found, NULL, alphasort), result = 0;
    if (count < 0)
        return error_set(err, "%s: can not open: %s", path, strerror(errno));
    for (int i = 0; i < count; i++) {
        const char *name = found[i]->d_name;
        char *file = memory_format("%s/%s", path, name);
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && unlink(file) != 0)
            result = error_set(err, "%s: can not delete: %s", file, strerror(errno));
        free(file);
        free(found[i]);
    }
    free(found);
    if (result == 0 && rmdir(path) != 0)
        result = error_set(err, "%s: can not delete: %s", path, strerror(errno));
    return result;
}
