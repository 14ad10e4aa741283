// Owns when checkpoints are written: one thread, one snapshot, so that training waits for a copy only.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/checkpoint.h"
#include "trainer/checkpoint_folder.h"

// A write that has not ended after this long never will.
enum { WAIT_SECONDS = 600 };

struct checkpoint_writer {
    char *directory;
    const struct checkpoint_info *info;
    int64_t keep;
    struct model_state snapshot;
    bool background;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    // under lock
    bool busy, best, quit;
    int64_t failures; // of all writes
    int result;       // of the newest write
    struct error err; // of the newest write, when it failed
};

// What belongs to a checkpoint once it is complete.
static int settle(const struct checkpoint_writer *writer, bool best, struct error *err)
{
    const struct counters *counters = &writer->snapshot.counters;
    if (best && checkpoint_mark_best(writer->directory, counters->step, err) != 0)
        return -1;
    if (checkpoint_set_aside_after(writer->directory, counters->step, err) != 0)
        return -1;
    int64_t best_step = writer->info->config->checkpoint.best ? counters->best_step : 0;
    return checkpoint_prune(writer->directory, writer->keep, best_step, err);
}

static void write_snapshot(struct checkpoint_writer *writer)
{
    struct error err = {""};
    double start = timer_now();
    long long step = (long long)writer->snapshot.counters.step;
    int result = checkpoint_write(writer->directory, &writer->snapshot, writer->info, &err);
    if (result == 0) {
        log_info("checkpoint of step %lld written in %.1f s%s", step, timer_now() - start,
                 writer->best ? ", the best so far" : "");
        if (settle(writer, writer->best, &err) != 0)
            log_error("after the checkpoint of step %lld: %s", step, err.text);
    } else {
        log_error("the checkpoint of step %lld could not be written; the run goes on, earlier "
                  "checkpoints are as they were: %s",
                  step, err.text);
    }
    pthread_mutex_lock(&writer->lock);
    writer->result = result;
    writer->err = err;
    writer->failures += result != 0;
    writer->busy = false;
    pthread_cond_broadcast(&writer->changed);
    pthread_mutex_unlock(&writer->lock);
}

static bool has_work(void *context)
{
    struct checkpoint_writer *writer = context;
    pthread_mutex_lock(&writer->lock);
    bool work = writer->busy || writer->quit;
    pthread_mutex_unlock(&writer->lock);
    return work;
}

static void *run_writer(void *argument)
{
    struct checkpoint_writer *writer = argument;
    model_state_populate(&writer->snapshot, has_work, writer);
    for (;;) {
        pthread_mutex_lock(&writer->lock);
        while (!writer->busy && !writer->quit)
            pthread_cond_wait(&writer->changed, &writer->lock);
        bool busy = writer->busy;
        pthread_mutex_unlock(&writer->lock);
        if (!busy)
            return NULL;
        write_snapshot(writer);
    }
}

int checkpoint_writer_open(struct checkpoint_writer **writer, const char *directory,
                           const struct params *params, const struct checkpoint_info *info,
                           int64_t keep, bool background, struct error *err)
{
    struct checkpoint_writer *w = memory_alloc(1, sizeof(*w));
    w->directory = memory_strdup(directory);
    w->info = info;
    w->keep = keep;
    w->background = background;
    model_state_open(&w->snapshot, params);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    *writer = w;
    if (!background || pthread_create(&w->thread, NULL, run_writer, w) == 0)
        return 0;
    w->background = false;
    checkpoint_writer_close(w);
    *writer = NULL;
    return error_set(err, "checkpoints: can not start the thread that writes them");
}

// Until no write is running; false: it did not end in time.
static bool wait_idle(struct checkpoint_writer *writer)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += WAIT_SECONDS;
    int status = 0;
    pthread_mutex_lock(&writer->lock);
    while (writer->busy && status == 0)
        status = pthread_cond_timedwait(&writer->changed, &writer->lock, &until);
    bool idle = !writer->busy;
    pthread_mutex_unlock(&writer->lock);
    return idle;
}

struct model_state *checkpoint_writer_snapshot(struct checkpoint_writer *writer)
{
    if (!wait_idle(writer))
        die("%s: writing the checkpoint of step %lld has not ended after %d s", writer->directory,
            (long long)writer->snapshot.counters.step, WAIT_SECONDS);
    return &writer->snapshot;
}

void checkpoint_writer_save(struct checkpoint_writer *writer, bool best)
{
    BUG_UNLESS(wait_idle(writer));
    pthread_mutex_lock(&writer->lock);
    writer->busy = true;
    writer->best = best;
    pthread_cond_broadcast(&writer->changed);
    pthread_mutex_unlock(&writer->lock);
    if (!writer->background)
        write_snapshot(writer);
}

int checkpoint_writer_wait(struct checkpoint_writer *writer, struct error *err)
{
    if (!wait_idle(writer))
        return error_set(err, "%s: writing the checkpoint of step %lld has not ended after %d s",
                         writer->directory, (long long)writer->snapshot.counters.step,
                         WAIT_SECONDS);
    if (writer->failures > 0)
        log_warn("%s: %lld checkpoints could not be written", writer->directory,
                 (long long)writer->failures);
    return writer->result == 0 ? 0 : error_set(err, "%s", writer->err.text);
}

void checkpoint_writer_close(struct checkpoint_writer *writer)
{
    if (!wait_idle(writer)) {
        log_error("%s: a checkpoint is still being written; it stays incomplete",
                  writer->directory);
        return; // its thread still uses the snapshot
    }
    pthread_mutex_lock(&writer->lock);
    writer->quit = true;
    pthread_cond_broadcast(&writer->changed);
    pthread_mutex_unlock(&writer->lock);
    if (writer->background)
        pthread_join(writer->thread, NULL);
    pthread_cond_destroy(&writer->changed);
    pthread_mutex_destroy(&writer->lock);
    model_state_close(&writer->snapshot);
    free(writer->directory);
    free(writer);
}
