// Owns opening HDF5 files, their attributes, and the lock around libhdf5. Datasets are in
// hdf5_array.c.
#include "data/hdf5_file.h"

#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/memory.h"
#include "data/hdf5_internal.h"

enum {
    TEXT_MAX = 65536, // bytes of a string attribute
    SUPERBLOCK_BYTES = 64
};

// Global because libhdf5's own state is: builds without thread safety allow one caller at a time in
// the whole process.
static pthread_mutex_t library_lock = PTHREAD_MUTEX_INITIALIZER;

// What the library does at exit crashes where a file could not be written to its end, and every file that could be
// is closed by then.
static void leave_exit_alone(void)
{
    H5dont_atexit();
}

void hdf5_lock(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_mutex_lock(&library_lock);
    pthread_once(&once, leave_exit_alone); // before the library's first call
    // Thread-safe builds keep an error stack, and its printing, per thread.
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

void hdf5_unlock(void)
{
    pthread_mutex_unlock(&library_lock);
}

static herr_t keep_description(unsigned n, const H5E_error2_t *entry, void *text)
{
    (void)n;
    if (entry->desc != NULL && entry->desc[0] != '\0')
        snprintf(text, HDF5_REASON_MAX, "%s", entry->desc);
    return 0;
}

void hdf5_reason(char text[HDF5_REASON_MAX])
{
    snprintf(text, HDF5_REASON_MAX, "no reason given");
    // From the outer call inwards: the last one kept is what failed first.
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_description, text);
    H5Eclear2(H5E_DEFAULT);
    if (strstr(text, "bad version number") != NULL) {
        size_t end = strlen(text);
        snprintf(text + end, HDF5_REASON_MAX - end,
                 " (damaged, or written in a format newer than HDF5 %d.%d.%d, which reads it here)",
                 H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE);
    }
}

// More shards than the soft limit of open files are usual; the hard limit is far higher.
static int open_for_reading(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 || errno != EMFILE)
        return fd;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max)
        return -1;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        return -1;
    return open(path, O_RDONLY | O_CLOEXEC);
}

static int check_regular(struct hdf5_file *file, struct error *err)
{
    struct stat status;
    if (stat(file->path, &status) != 0)
        return error_set(err, "%s: can not be read: %s", file->path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(err, "%s: not a regular file", file->path);
    file->fd = open_for_reading(file->path);
    if (file->fd < 0 || fstat(file->fd, &status) != 0)
        return error_set(err, "%s: can not be opened: %s", file->path, strerror(errno));
    file->size = (uint64_t)status.st_size;
    file->time_ns = (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec;
    if (file->size == 0)
        return error_set(err, "%s: empty file (0 bytes)", file->path);
    return 0;
}

static uint64_t little_endian_64(const unsigned char *bytes)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | bytes[i];
    return value;
}

// End of the file as its superblock states it (HDF5 file format specification, section II.A); 0 when
// it does not say. Only for the words about a truncated file.
static uint64_t stated_size(const struct hdf5_file *file)
{
    static const unsigned char signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    unsigned char block[SUPERBLOCK_BYTES] = {0};
    if (pread(file->fd, block, sizeof(block), 0) < (ssize_t)sizeof(block) ||
        memcmp(block, signature, sizeof(signature)) != 0)
        return 0;
    int version = block[8];
    if (version <= 1 && block[13] == 8)
        return little_endian_64(block + (version == 0 ? 40 : 44));
    if ((version == 2 || version == 3) && block[9] == 8)
        return little_endian_64(block + 28);
    return 0;
}

static int open_failed(const struct hdf5_file *file, struct error *err)
{
    char reason[HDF5_REASON_MAX];
    hdf5_reason(reason);
    uint64_t stated = stated_size(file);
    if (stated > file->size)
        return error_set(err, "%s: truncated: the file has %llu bytes, its header says %llu",
                         file->path, (unsigned long long)file->size, (unsigned long long)stated);
    return error_set(err, "%s: not a readable HDF5 file: %s", file->path, reason);
}

static int open_library(struct hdf5_file *file, struct error *err)
{
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    // Closing the file closes what a failed open left behind.
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
#if H5_VERSION_GE(1, 10, 7)
    // Shards are complete when they get their name; many network file systems have no locks.
    H5Pset_file_locking(access, 0, 1);
#endif
    file->id = H5Fopen(file->path, H5F_ACC_RDONLY, access);
    int result = file->id < 0 ? open_failed(file, err) : 0; // before another call clears the reason
    H5Pclose(access);
    if (result != 0)
        return -1;
    hid_t creation = H5Fget_create_plist(file->id);
    hsize_t user_block = 0;
    if (creation >= 0) {
        H5Pget_userblock(creation, &user_block);
        H5Pclose(creation);
    }
    file->user_block = user_block != 0;
    return 0;
}

int hdf5_file_open(struct hdf5_file *file, const char *path, struct error *err)
{
    *file = (struct hdf5_file){.path = path, .id = -1, .fd = -1};
    if (check_regular(file, err) != 0 || open_library(file, err) != 0) {
        hdf5_file_close(file);
        return -1;
    }
    return 0;
}

void hdf5_file_close_library(struct hdf5_file *file)
{
    if (file->id >= 0)
        H5Fclose(file->id);
    file->id = -1;
}

void hdf5_file_close(struct hdf5_file *file)
{
    hdf5_file_close_library(file);
    if (file->fd >= 0)
        close(file->fd);
    file->fd = -1;
}

bool hdf5_attribute_exists(const struct hdf5_file *file, const char *name)
{
    return H5Aexists(file->id, name) > 0;
}

// An open attribute with type and number of elements.
struct attribute {
    hid_t id, type, space;
    int64_t elements;
    H5T_class_t kind;
};

static void attribute_close(struct attribute *attribute)
{
    if (attribute->space >= 0)
        H5Sclose(attribute->space);
    if (attribute->type >= 0)
        H5Tclose(attribute->type);
    if (attribute->id >= 0)
        H5Aclose(attribute->id);
}

static int attribute_open(struct attribute *attribute, const struct hdf5_file *file,
                          const char *name, struct error *err)
{
    *attribute = (struct attribute){.id = -1, .type = -1, .space = -1};
    attribute->id = H5Aopen(file->id, name, H5P_DEFAULT);
    if (attribute->id >= 0) {
        attribute->type = H5Aget_type(attribute->id);
        attribute->space = H5Aget_space(attribute->id);
    }
    if (attribute->type < 0 || attribute->space < 0) {
        char reason[HDF5_REASON_MAX];
        hdf5_reason(reason);
        return error_add(err, "%s: attribute %s can not be read: %s", file->path, name, reason);
    }
    attribute->kind = H5Tget_class(attribute->type);
    attribute->elements = H5Sget_simple_extent_npoints(attribute->space);
    return 0;
}

int hdf5_attribute_integers(const struct hdf5_file *file, const char *name, int64_t *values,
                            int64_t capacity, int64_t *count, struct error *err)
{
    struct attribute attribute;
    int result = attribute_open(&attribute, file, name, err);
    if (result != 0)
        goto out;
    if (attribute.kind != H5T_INTEGER || H5Sget_simple_extent_ndims(attribute.space) > 1) {
        result = error_add(err, "%s: attribute %s is not an integer or a list of integers",
                           file->path, name);
        goto out;
    }
    if (attribute.elements < 1 || attribute.elements > capacity) {
        result = error_add(err, "%s: attribute %s has %lld values; 1 to %lld are possible",
                           file->path, name, (long long)attribute.elements, (long long)capacity);
        goto out;
    }
    if (H5Aread(attribute.id, H5T_NATIVE_INT64, values) < 0) {
        char reason[HDF5_REASON_MAX];
        hdf5_reason(reason);
        result = error_add(err, "%s: attribute %s can not be read: %s", file->path, name, reason);
        goto out;
    }
    *count = attribute.elements;
out:
    attribute_close(&attribute);
    return result;
}

static char *fixed_text(const struct attribute *attribute)
{
    size_t size = H5Tget_size(attribute->type);
    if (size == 0 || size > TEXT_MAX)
        return NULL;
    char *text = memory_alloc(size + 1, 1);
    if (H5Aread(attribute->id, attribute->type, text) < 0) {
        free(text);
        return NULL;
    }
    if (H5Tget_strpad(attribute->type) == H5T_STR_SPACEPAD)
        while (size > 0 && (text[size - 1] == ' ' || text[size - 1] == '\0'))
            text[--size] = '\0';
    return text;
}

static char *variable_text(const struct attribute *attribute)
{
    char *stored = NULL;
    if (H5Aread(attribute->id, attribute->type, &stored) < 0)
        return NULL;
    char *text = NULL;
    if (stored == NULL || strnlen(stored, TEXT_MAX + 1) <= TEXT_MAX)
        text = memory_strdup(stored != NULL ? stored : "");
    H5Dvlen_reclaim(attribute->type, attribute->space, H5P_DEFAULT, &stored);
    return text;
}

int hdf5_attribute_text(const struct hdf5_file *file, const char *name, char **text,
                        struct error *err)
{
    struct attribute attribute;
    int result = attribute_open(&attribute, file, name, err);
    if (result != 0)
        goto out;
    if (attribute.kind != H5T_STRING || attribute.elements != 1) {
        result = error_add(err, "%s: attribute %s is not one string", file->path, name);
        goto out;
    }
    *text =
        H5Tis_variable_str(attribute.type) > 0 ? variable_text(&attribute) : fixed_text(&attribute);
    if (*text == NULL) {
        char reason[HDF5_REASON_MAX];
        hdf5_reason(reason);
        result = error_add(err, "%s: attribute %s can not be read, or is longer than %d bytes: %s",
                           file->path, name, TEXT_MAX, reason);
    }
out:
    attribute_close(&attribute);
    return result;
}
