// Owns the names in a checkpoints folder: step-00001200 (complete with DONE), .tmp-step-* (begun),
// .deleting-step-* (being pruned), step-*.incomplete and step-*.abandoned (put aside), best (a link).
// Does not own what is inside a checkpoint.
#include "trainer/checkpoint_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/checkpoint.h"
#include "trainer/files.h"

static const char begun_prefix[] = ".tmp-", deleting_prefix[] = ".deleting-";

char *checkpoint_path(const char *directory, int64_t step)
{
    return memory_format("%s/step-%08lld", directory, (long long)step);
}

// "step-" and digits, nothing else.
static bool step_of(const char *name, int64_t *step)
{
    if (strncmp(name, "step-", 5) != 0 || name[5] == '\0' || strlen(name) > 5 + 18 ||
        strspn(name + 5, "0123456789") != strlen(name + 5))
        return false;
    *step = strtoll(name + 5, NULL, 10);
    return true;
}

bool checkpoint_is_complete(const char *path)
{
    char *done = memory_format("%s/DONE", path);
    bool complete = files_size(done) >= 0;
    free(done);
    return complete;
}

// What one directory of a checkpoints folder is.
enum state { STATE_STRAY, STATE_COMPLETE, STATE_INCOMPLETE, STATE_DELETING };

struct entry {
    char *name;
    enum state state;
    int64_t step; // of complete and incomplete steps
};

struct listing {
    struct entry *entries;
    size_t count;
};

static void listing_release(struct listing *listing)
{
    for (size_t i = 0; i < listing->count; i++)
        free(listing->entries[i].name);
    free(listing->entries);
    *listing = (struct listing){0};
}

static struct entry classify(const char *directory, const char *name)
{
    struct entry entry = {.name = memory_strdup(name), .state = STATE_STRAY};
    char *path = memory_format("%s/%s", directory, name);
    if (files_is_folder(path)) {
        if (strncmp(name, begun_prefix, strlen(begun_prefix)) == 0)
            entry.state = STATE_INCOMPLETE;
        else if (strncmp(name, deleting_prefix, strlen(deleting_prefix)) == 0)
            entry.state = STATE_DELETING;
        else if (step_of(name, &entry.step))
            entry.state = checkpoint_is_complete(path) ? STATE_COMPLETE : STATE_INCOMPLETE;
    }
    free(path);
    return entry;
}

// In the order of names. A folder that is not there lists nothing.
static int list(struct listing *listing, const char *directory, struct error *err)
{
    struct dirent **found = NULL;
    int count = scandir(directory, &found, NULL, alphasort);
    *listing = (struct listing){0};
    if (count < 0 && errno == ENOENT)
        return 0;
    if (count < 0)
        return error_set(err, "%s: can not open: %s", directory, strerror(errno));
    listing->entries = memory_alloc((size_t)count, sizeof(*listing->entries));
    listing->count = (size_t)count;
    for (int i = 0; i < count; i++) {
        listing->entries[i] = classify(directory, found[i]->d_name);
        free(found[i]);
    }
    free(found);
    return 0;
}

static void append_name(char *names, size_t size, const char *name)
{
    size_t at = strlen(names);
    snprintf(names + at, size - at, "%s%s", at > 0 ? ", " : "", name);
}

int checkpoint_find_latest(const char *directory, char **path, struct error *err)
{
    struct listing listing;
    *path = NULL;
    if (list(&listing, directory, err) != 0)
        return -1;
    const struct entry *newest = NULL;
    char others[2048] = "";
    for (size_t i = 0; i < listing.count; i++) {
        const struct entry *entry = &listing.entries[i];
        if (entry->state == STATE_INCOMPLETE)
            append_name(others, sizeof(others), entry->name);
        if (entry->state == STATE_COMPLETE && (newest == NULL || entry->step > newest->step))
            newest = entry;
    }
    if (others[0] != '\0')
        log_warn("%s: left as they are, since writing them was not finished: %s", directory,
                 others);
    if (newest != NULL)
        *path = memory_format("%s/%s", directory, newest->name);
    listing_release(&listing);
    return 0;
}

char *checkpoint_begin(const char *directory, int64_t step, struct error *err)
{
    enum { TRIES = 1000 }; // leftovers of killed runs keep their names
    for (int n = 1;; n++) {
        char *path =
            memory_format("%s/%sstep-%08lld-%d", directory, begun_prefix, (long long)step, n);
        if (mkdir(path, 0777) == 0)
            return path;
        bool taken = errno == EEXIST && n < TRIES;
        if (!taken)
            error_set(err, "%s: can not create the folder: %s", path, strerror(errno));
        free(path);
        if (!taken)
            return NULL;
    }
}

// Renames to the first free name of path.suffix, path.suffix.2, ...
static int set_aside(const char *path, const char *suffix, struct error *err)
{
    char *aside = memory_format("%s.%s", path, suffix);
    for (int n = 2; files_exists(aside); n++) {
        free(aside);
        aside = memory_format("%s.%s.%d", path, suffix, n);
    }
    int result = 0;
    if (rename(path, aside) != 0)
        result = error_set(err, "%s: can not rename to %s: %s", path, aside, strerror(errno));
    free(aside);
    return result;
}

static int write_done(const char *path, struct error *err)
{
    char *done = memory_format("%s/DONE", path);
    int result = files_write_text(done, "", err);
    free(done);
    return result != 0 ? result : files_sync_folder(path, err);
}

// The new checkpoint is complete before it takes the old one's place, so that one is there always.
static int replace_complete(const char *directory, const char *path, const char *temporary,
                            struct error *err)
{
    if (write_done(temporary, err) != 0)
        return -1;
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_EXCHANGE) == 0) {
        if (files_sync_folder(directory, err) != 0)
            return -1;
        return files_remove_folder(temporary, err);
    }
    // A file system that can not exchange: the old one waits under another name meanwhile.
    if (set_aside(path, "abandoned", err) != 0)
        return -1;
    if (rename(temporary, path) != 0)
        return error_set(err, "%s: can not rename to %s: %s", temporary, path, strerror(errno));
    return 0;
}

static int place_new(const char *directory, const char *path, const char *temporary,
                     struct error *err)
{
    if (files_exists(path)) {
        log_warn("%s: not complete; put aside as %s.incomplete", path, path);
        if (set_aside(path, "incomplete", err) != 0)
            return -1;
    }
    if (rename(temporary, path) != 0)
        return error_set(err, "%s: can not rename to %s: %s", temporary, path, strerror(errno));
    int result = files_sync_folder(directory, err);
    if (result == 0)
        result = write_done(path, err);
    if (result != 0)
        files_remove_folder(path, &(struct error){""});
    return result;
}

int checkpoint_publish(const char *directory, const char *temporary, int64_t step,
                       struct error *err)
{
    char *path = checkpoint_path(directory, step);
    int result = files_sync_folder(temporary, err);
    if (result == 0)
        result = checkpoint_is_complete(path) ? replace_complete(directory, path, temporary, err)
                                              : place_new(directory, path, temporary, err);
    if (result == 0)
        result = files_sync_folder(directory, err);
    free(path);
    return result;
}

int checkpoint_set_aside_after(const char *directory, int64_t step, struct error *err)
{
    struct listing listing;
    if (list(&listing, directory, err) != 0)
        return -1;
    char names[2048] = "";
    int result = 0;
    for (size_t i = 0; i < listing.count && result == 0; i++) {
        const struct entry *entry = &listing.entries[i];
        if (entry->state != STATE_COMPLETE || entry->step <= step)
            continue;
        char *path = memory_format("%s/%s", directory, entry->name);
        result = set_aside(path, "abandoned", err);
        free(path);
        append_name(names, sizeof(names), entry->name);
    }
    if (names[0] != '\0')
        log_warn("%s: checkpoints after step %lld are of an earlier run and were renamed to "
                 "*.abandoned: %s",
                 directory, (long long)step, names);
    listing_release(&listing);
    return result;
}

// A rename first, so that a checkpoint is never half there under its own name.
static int delete_checkpoint(const char *directory, const struct entry *entry, struct error *err)
{
    char *path = memory_format("%s/%s", directory, entry->name);
    char *gone = entry->state == STATE_DELETING
                     ? memory_strdup(path)
                     : memory_format("%s/%s%s", directory, deleting_prefix, entry->name);
    int result = 0;
    if (entry->state != STATE_DELETING && rename(path, gone) != 0)
        result = error_set(err, "%s: can not rename to %s: %s", path, gone, strerror(errno));
    else
        result = files_remove_folder(gone, err);
    free(gone);
    free(path);
    return result;
}

static int by_step_newest_first(const void *a, const void *b)
{
    int64_t x = ((const struct entry *)a)->step, y = ((const struct entry *)b)->step;
    return (x < y) - (x > y);
}

int checkpoint_prune(const char *directory, int64_t keep, int64_t best_step, struct error *err)
{
    struct listing listing;
    if (list(&listing, directory, err) != 0)
        return -1;
    if (listing.count > 0)
        qsort(listing.entries, listing.count, sizeof(*listing.entries), by_step_newest_first);
    int64_t kept = 0;
    int result = 0;
    for (size_t i = 0; i < listing.count && result == 0; i++) {
        const struct entry *entry = &listing.entries[i];
        bool old = entry->state == STATE_COMPLETE && kept++ >= keep &&
                   (best_step == 0 || entry->step != best_step);
        if (old || entry->state == STATE_DELETING)
            result = delete_checkpoint(directory, entry, err);
    }
    listing_release(&listing);
    return result;
}

int checkpoint_mark_best(const char *directory, int64_t step, struct error *err)
{
    char *path = checkpoint_path(directory, step);
    char *link = memory_format("%s/best", directory);
    char *begun = memory_format("%s/.best-%ld", directory, (long)getpid());
    int result = 0;
    if (!checkpoint_is_complete(path)) {
        result = error_set(err, "%s: not a complete checkpoint; it can not be the best", path);
    } else {
        unlink(begun);
        if (symlink(strrchr(path, '/') + 1, begun) != 0)
            result = error_set(err, "%s: can not create the link: %s", begun, strerror(errno));
        else if (rename(begun, link) != 0)
            result = error_set(err, "%s: can not replace: %s", link, strerror(errno));
        if (result != 0)
            unlink(begun);
        else
            result = files_sync_folder(directory, err);
    }
    free(begun);
    free(link);
    free(path);
    return result;
}
