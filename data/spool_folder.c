// Owns the names and small files of a spool. Does not open shards and decides nothing.
#include "data/spool_folder.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"

enum { STATE_VERSION = 1, STATE_BYTES = 4096 };

// ---- shards --------------------------------------------------------------------------------------

char *spool_file_path(const char *folder, int64_t first, int64_t last)
{
    return memory_format("%s/features-%012lld-%012lld.h5", folder, (long long)first,
                         (long long)last);
}

// Numbers of 12 digits, or more where they are larger.
static bool parse_name(const char *name, struct spool_file *file)
{
    long long first, last;
    int used = 0;
    if (sscanf(name, "features-%lld-%lld.h5%n", &first, &last, &used) != 2 || used == 0 ||
        name[used] != '\0' || first < 0 || last < first)
        return false;
    char *wanted = spool_file_path("", first, last); // refuses signs, spaces, other widths
    bool same = strcmp(wanted + 1, name) == 0;
    free(wanted);
    *file = (struct spool_file){.first = first, .last = last};
    return same;
}

static int by_serial(const void *left, const void *right)
{
    const struct spool_file *a = left, *b = right;
    if (a->first != b->first)
        return a->first < b->first ? -1 : 1;
    return (a->last > b->last) - (a->last < b->last);
}

int spool_list(struct spool_listing *listing, const char *folder, struct error *err)
{
    *listing = (struct spool_listing){.items = NULL};
    size_t capacity = 0;
    DIR *directory = opendir(folder);
    if (directory == NULL && errno == ENOENT)
        return 0; // another rank has yet to make it
    if (directory == NULL)
        return error_set(err, "%s: can not be read: %s", folder, strerror(errno));
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        struct spool_file file;
        struct stat status;
        // A name that is gone when it is looked at was removed meanwhile.
        if (!parse_name(entry->d_name, &file) ||
            fstatat(dirfd(directory), entry->d_name, &status, 0) != 0 || !S_ISREG(status.st_mode))
            continue;
        file.bytes = status.st_size;
        if (listing->count == capacity) {
            capacity = 2 * capacity + 16;
            listing->items = memory_resize(listing->items, capacity, sizeof(*listing->items));
        }
        listing->items[listing->count++] = file;
        listing->bytes += file.bytes;
    }
    closedir(directory);
    if (listing->count > 0)
        qsort(listing->items, listing->count, sizeof(*listing->items), by_serial);
    return 0;
}

void spool_listing_release(struct spool_listing *listing)
{
    free(listing->items);
    *listing = (struct spool_listing){.items = NULL};
}

// ---- state ---------------------------------------------------------------------------------------

static char *state_text(const struct spool_state *state)
{
    char order[24], host[256] = "";
    snprintf(order, sizeof(order), "%016llx", (unsigned long long)state->order);
    gethostname(host, sizeof(host) - 1);
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "format", "dtrain-spool");
    cJSON_AddNumberToObject(root, "format_version", STATE_VERSION);
    cJSON_AddStringToObject(root, "order", order);
    cJSON_AddNumberToObject(root, "documents", (double)state->documents);
    cJSON_AddNumberToObject(root, "serial", (double)state->serial);
    cJSON_AddNumberToObject(root, "needed", (double)state->needed);
    cJSON_AddNumberToObject(root, "end", (double)state->end);
    cJSON_AddNumberToObject(root, "bytes", (double)state->bytes);
    cJSON_AddBoolToObject(root, "finished", state->finished);
    cJSON_AddStringToObject(root, "host", host);
    cJSON_AddNumberToObject(root, "process", (double)getpid());
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    if (text == NULL)
        die("out of memory");
    return text;
}

// Not made durable: a run that starts writes it anew, so only processes have to agree on it.
int spool_state_write(const char *folder, const struct spool_state *state, struct error *err)
{
    char *path = memory_format("%s/spool.json", folder);
    char *temporary = memory_format("%s/spool.json.tmp", folder);
    char *text = state_text(state);
    int result = 0;
    errno = 0;
    FILE *file = fopen(temporary, "we");
    bool written = file != NULL && fprintf(file, "%s\n", text) > 0;
    if (file != NULL && fclose(file) != 0)
        written = false;
    if (!written || rename(temporary, path) != 0)
        result = error_set(err, "%s: can not be written: %s", path,
                           errno != 0 ? strerror(errno) : "unknown");
    cJSON_free(text);
    free(temporary);
    free(path);
    return result;
}

static bool take_count(const cJSON *root, const char *name, int64_t *value)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, name);
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0.0) || !(item->valuedouble < 0x1p53))
        return false;
    *value = (int64_t)item->valuedouble;
    return true;
}

static bool parse_state(struct spool_state *state, const char *text)
{
    cJSON *root = cJSON_Parse(text);
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(root, "format");
    const cJSON *order = cJSON_GetObjectItemCaseSensitive(root, "order");
    int64_t version = 0;
    char *end = NULL;
    bool good = cJSON_IsString(format) && strcmp(format->valuestring, "dtrain-spool") == 0 &&
                take_count(root, "format_version", &version) && version == STATE_VERSION &&
                cJSON_IsString(order) && strlen(order->valuestring) == 16 &&
                take_count(root, "documents", &state->documents) &&
                take_count(root, "serial", &state->serial) &&
                take_count(root, "needed", &state->needed) &&
                take_count(root, "end", &state->end) && take_count(root, "bytes", &state->bytes);
    if (good) {
        state->order = strtoull(order->valuestring, &end, 16);
        good = *end == '\0';
        state->finished = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(root, "finished"));
    }
    cJSON_Delete(root);
    return good;
}

int spool_state_read(struct spool_state *state, const char *folder, struct error *err)
{
    char *path = memory_format("%s/spool.json", folder);
    char text[STATE_BYTES] = "";
    int result = 1;
    FILE *file = fopen(path, "re");
    if (file == NULL && errno == ENOENT) {
        result = 0;
    } else if (file == NULL) {
        result = error_set(err, "%s: can not be read: %s", path, strerror(errno));
    } else {
        text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
        if (!parse_state(state, text))
            result = error_set(err,
                               "%s: not the state of a spool that this version knows; remove it, "
                               "or choose another data.spool",
                               path);
    }
    if (file != NULL)
        fclose(file);
    free(path);
    return result;
}

// ---- locks ---------------------------------------------------------------------------------------

static int make_folder(const char *folder, struct error *err)
{
    struct stat status;
    if (mkdir(folder, 0777) == 0 ||
        (errno == EEXIST && stat(folder, &status) == 0 && S_ISDIR(status.st_mode)))
        return 0;
    return error_set(err, "%s: is no folder and can not be made one: %s", folder, strerror(errno));
}

static int lock_taken(const char *folder, int fd, struct error *err)
{
    char holder[320] = "";
    ssize_t n = pread(fd, holder, sizeof(holder) - 1, 0);
    holder[n > 0 ? n : 0] = '\0';
    holder[strcspn(holder, "\n")] = '\0';
    return error_set(err, "%s: another run reads this spool (%s); a spool feeds one run", folder,
                     holder[0] != '\0' ? holder : "it has not said which");
}

int spool_lock(const char *folder, struct error *err)
{
    if (make_folder(folder, err) != 0)
        return -1;
    char *path = memory_format("%s/trainer.lock", folder);
    char host[256] = "";
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        error_set(err, "%s: can not be made: %s", path, strerror(errno));
    } else if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK)
            lock_taken(folder, fd, err);
        else
            error_set(err, "%s: can not be locked: %s", path, strerror(errno));
        close(fd);
        fd = -1;
    } else {
        gethostname(host, sizeof(host) - 1);
        // Who holds it is a courtesy: the lock counts without it.
        if (ftruncate(fd, 0) != 0 || dprintf(fd, "process %ld on %s\n", (long)getpid(), host) < 0)
            log_warn("%s: writing failed: %s", path, strerror(errno));
    }
    free(path);
    return fd;
}

bool spool_extractor_runs(const char *folder)
{
    char *path = memory_format("%s/extractor.lock", folder);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    bool held = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (fd >= 0)
        close(fd);
    free(path);
    return held;
}
