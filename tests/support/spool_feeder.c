// Owns an extractor without a model.
#include "tests/support/spool_feeder.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "data/spool_folder.h"

static void pause_shortly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
}

// ---- one shard -----------------------------------------------------------------------------------

int64_t *feeder_order(const char *order, const struct fixture *source, int64_t *count)
{
    int64_t *documents = NULL, capacity = 0;
    char line[256];
    FILE *file = fopen(order, "re");
    *count = 0;
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        unsigned long long epoch, id;
        long long serial, step;
        if (sscanf(line, "%lld %llu %lld %llu", &serial, &epoch, &step, &id) != 4)
            continue;
        if (*count == capacity) {
            capacity = 2 * capacity + 64;
            documents = memory_resize(documents, (size_t)capacity, sizeof(*documents));
        }
        int64_t d = 0;
        while (d < source->content.documents && source->content.doc_ids[d] != id)
            d++;
        BUG_UNLESS(serial == *count && d < source->content.documents);
        documents[(*count)++] = d;
    }
    if (file != NULL)
        fclose(file);
    return documents;
}

int feeder_write(const char *folder, const struct fixture *source, const int64_t *order,
                 int64_t first, int64_t last, struct error *err)
{
    const struct shard_content *all = &source->content;
    int64_t count = last - first + 1, width = all->planes * all->hidden_size;
    struct shard_content some = *all;
    int64_t *offsets = memory_alloc((size_t)count + 1, sizeof(*offsets));
    uint64_t *doc_ids = memory_alloc((size_t)count, sizeof(*doc_ids));
    int32_t *ids = memory_alloc((size_t)all->tokens * (size_t)count, sizeof(*ids));
    uint8_t *mask = memory_alloc((size_t)all->tokens * (size_t)count, 1);
    bf16 *hidden = memory_alloc((size_t)(all->tokens * width) * (size_t)count, sizeof(*hidden));
    for (int64_t i = 0; i < count; i++) {
        int64_t d = order[first + i], from = all->doc_offsets[d], to = offsets[i];
        int64_t length = all->doc_offsets[d + 1] - from;
        offsets[i + 1] = to + length;
        doc_ids[i] = all->doc_ids[d];
        memcpy(ids + to, all->input_ids + from, (size_t)length * sizeof(*ids));
        memcpy(mask + to, all->loss_mask + from, (size_t)length);
        memcpy(hidden + to * width, all->hidden_states + from * width,
               (size_t)(length * width) * sizeof(*hidden));
    }
    some.documents = count;
    some.tokens = offsets[count];
    some.doc_offsets = offsets;
    some.doc_ids = doc_ids;
    some.input_ids = ids;
    some.loss_mask = mask;
    some.hidden_states = hidden;
    some.teacher_top1 = NULL;
    char *path = spool_file_path(folder, first, last);
    int result = shard_write(path, &some, err);
    free(path);
    free(hidden);
    free(mask);
    free(ids);
    free(doc_ids);
    free(offsets);
    return result;
}

// ---- the process ---------------------------------------------------------------------------------

static bool is_there(const struct spool_listing *listing, int64_t first)
{
    for (size_t i = 0; i < listing->count; i++)
        if (listing->items[i].first == first)
            return true;
    return false;
}

// The first shard that is needed and missing: its first document, or -1. Shards end with their epoch.
static int64_t next_missing(const struct feeder *feeder, const struct spool_state *state,
                            const struct spool_listing *listing, int64_t *last)
{
    for (int64_t first = 0, end; first < state->end; first = end) {
        int64_t epoch_end = (first / state->documents + 1) * state->documents;
        end = first + feeder->documents;
        end = end < epoch_end ? end : epoch_end;
        end = end < state->end ? end : state->end;
        *last = end - 1;
        if (*last >= state->serial && !is_there(listing, first))
            return first;
    }
    return -1;
}

// Room for one more shard, taken for as large as the largest.
static bool has_room(const struct spool_listing *listing, const struct spool_state *state)
{
    int64_t largest = 0;
    for (size_t i = 0; i < listing->count; i++)
        if (listing->items[i].bytes > largest)
            largest = listing->items[i].bytes;
    return listing->bytes + largest <= state->bytes;
}

// Shards far ahead, left from before the run went back, make room for what is needed first.
static void remove_last(const char *folder, const struct spool_listing *listing, int64_t after)
{
    const struct spool_file *file = &listing->items[listing->count - 1];
    if (listing->count == 0 || file->first <= after)
        return;
    char *path = spool_file_path(folder, file->first, file->last);
    unlink(path);
    free(path);
}

static void feed(const struct feeder *feeder)
{
    struct error err = {""};
    int64_t count = 0, last = 0;
    int64_t *order = feeder_order(feeder->order, feeder->source, &count);
    for (;; pause_shortly()) {
        struct spool_state state;
        struct spool_listing listing;
        if (spool_state_read(&state, feeder->folder, &err) <= 0)
            continue;
        if (state.finished)
            _exit(0);
        if (spool_list(&listing, feeder->folder, &err) != 0)
            _exit(3);
        int64_t first = next_missing(feeder, &state, &listing, &last);
        bool room = first >= 0 && (first < state.needed || has_room(&listing, &state));
        if (first >= 0 && !room)
            remove_last(feeder->folder, &listing, first);
        spool_listing_release(&listing);
        if (!room)
            continue;
        usleep(feeder->pause_us);
        if (last >= count || feeder_write(feeder->folder, feeder->source, order, first, last, &err))
            _exit(4);
    }
}

void feeder_start(struct feeder *feeder)
{
    feeder->pid = fork();
    if (feeder->pid < 0)
        die("fork: %s", strerror(errno));
    if (feeder->pid > 0)
        return;
    char *path = memory_format("%s/extractor.lock", feeder->folder);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0)
        flock(fd, LOCK_EX | LOCK_NB);
    feed(feeder);
}

static bool still_runs(const struct feeder *feeder)
{
    siginfo_t info = {0};
    if (waitid(P_PID, (id_t)feeder->pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0)
        die("waitid: %s", strerror(errno));
    return info.si_pid == 0;
}

void feeder_kill(struct feeder *feeder)
{
    if (feeder->pid == 0)
        return;
    kill(feeder->pid, SIGKILL);
    waitpid(feeder->pid, NULL, 0);
    feeder->pid = 0;
}

int feeder_wait(struct feeder *feeder, double seconds)
{
    double end = timer_now() + seconds;
    int status = 0;
    while (still_runs(feeder) && timer_now() < end)
        pause_shortly();
    if (still_runs(feeder)) {
        feeder_kill(feeder);
        fail_msg("the feeder did not end in time");
    }
    waitpid(feeder->pid, &status, 0);
    feeder->pid = 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
