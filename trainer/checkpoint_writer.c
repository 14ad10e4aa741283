// Owns when checkpoints are written: one thread, one snapshot, so that training waits for a copy only.
#include "trainer/checkpoint.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/checkpoint_folder.h"

// A write that has not ended after this long never will.
enum { WAIT_SECONDS = 600, PART_SECONDS = 5 };

struct checkpoint_writer {
    char *directory;
    const struct checkpoint_info *info;
    int64_t keep;
    struct model_state snapshot;
    bool background;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char *begun;  // the folder that several ranks write into; NULL: none
    double start; // of the newest write
    bool best, all_written;
    // under lock
    enum checkpoint_phase phase;
    bool quit;
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

// Several ranks write together.
static bool is_shared(const struct checkpoint_writer *writer)
{
    return ownership_shared(writer->snapshot.layout.ownership);
}

static bool is_first(const struct checkpoint_writer *writer)
{
    return !is_shared(writer) || writer->snapshot.layout.ownership->rank == 0;
}

static void set_phase(struct checkpoint_writer *writer, enum checkpoint_phase phase)
{
    pthread_mutex_lock(&writer->lock);
    writer->phase = phase;
    pthread_cond_broadcast(&writer->changed);
    pthread_mutex_unlock(&writer->lock);
}

static void log_failure(const struct checkpoint_writer *writer, const char *text)
{
    log_error("the checkpoint of step %lld could not be written; the run goes on, earlier "
              "checkpoints are as they were: %s",
              (long long)writer->snapshot.counters.step, text);
}

// A write has ended, well or not.
static void end_write(struct checkpoint_writer *writer, int result, const struct error *err)
{
    pthread_mutex_lock(&writer->lock);
    writer->result = result;
    writer->err = *err;
    writer->failures += result != 0;
    pthread_mutex_unlock(&writer->lock);
}

// Of a checkpoint that is complete, or is not going to be.
static void report(struct checkpoint_writer *writer, int result, const struct error *err)
{
    struct error after = {""};
    long long step = (long long)writer->snapshot.counters.step;
    if (result != 0) {
        log_failure(writer, err->text);
        return;
    }
    log_info("checkpoint of step %lld written in %.1f s%s", step, timer_now() - writer->start,
             writer->best ? ", the best so far" : "");
    if (settle(writer, writer->best, &after) != 0)
        log_error("after the checkpoint of step %lld: %s", step, after.text);
}

// All of it, alone.
static void write_snapshot(struct checkpoint_writer *writer)
{
    struct error err = {""};
    int result = checkpoint_write(writer->directory, &writer->snapshot, writer->info, &err);
    report(writer, result, &err);
    end_write(writer, result, &err);
    set_phase(writer, CHECKPOINT_IDLE);
}

static void write_part(struct checkpoint_writer *writer)
{
    struct error err = {""};
    int result = checkpoint_write_part(writer->begun, &writer->snapshot, writer->info, &err);
    if (result != 0)
        log_failure(writer, err.text);
    end_write(writer, result, &err);
    set_phase(writer, result == 0 ? CHECKPOINT_WRITTEN : CHECKPOINT_FAILED);
}

// Of rank 0.
static void conclude(struct checkpoint_writer *writer)
{
    struct error err = {""};
    if (writer->all_written) {
        int result = checkpoint_complete(writer->directory, writer->begun, &writer->snapshot,
                                         writer->info, &err);
        report(writer, result, &err);
        end_write(writer, result, &err);
    } else {
        checkpoint_discard(writer->begun);
    }
    set_phase(writer, CHECKPOINT_IDLE);
}

static bool has_work(void *context)
{
    struct checkpoint_writer *writer = context;
    pthread_mutex_lock(&writer->lock);
    bool work = writer->phase != CHECKPOINT_IDLE || writer->quit;
    pthread_mutex_unlock(&writer->lock);
    return work;
}

static bool is_at_work(enum checkpoint_phase phase)
{
    return phase == CHECKPOINT_WRITING || phase == CHECKPOINT_CONCLUDING;
}

static void work(struct checkpoint_writer *writer, enum checkpoint_phase phase)
{
    if (phase == CHECKPOINT_CONCLUDING)
        conclude(writer);
    else if (is_shared(writer))
        write_part(writer);
    else
        write_snapshot(writer);
}

static void *run_writer(void *argument)
{
    struct checkpoint_writer *writer = argument;
    model_state_populate(&writer->snapshot, has_work, writer);
    for (;;) {
        pthread_mutex_lock(&writer->lock);
        while (!is_at_work(writer->phase) && !writer->quit)
            pthread_cond_wait(&writer->changed, &writer->lock);
        enum checkpoint_phase phase = writer->phase;
        pthread_mutex_unlock(&writer->lock);
        if (!is_at_work(phase))
            return NULL;
        work(writer, phase);
    }
}

int checkpoint_writer_open(struct checkpoint_writer **writer, const char *directory,
                           const struct params *params, const struct ownership *ownership,
                           const struct checkpoint_info *info, int64_t keep, bool background,
                           struct error *err)
{
    struct checkpoint_writer *w = memory_alloc(1, sizeof(*w));
    w->directory = memory_strdup(directory);
    w->info = info;
    w->keep = keep;
    w->background = background;
    const struct state_layout layout = {params, ownership, &info->config->optimizer};
    model_state_open_as(&w->snapshot, &layout, ownership_shared(ownership) && ownership->rank == 0);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    *writer = w;
    int code = background ? pthread_create(&w->thread, NULL, run_writer, w) : 0;
    if (code == 0)
        return 0;
    w->background = false;
    checkpoint_writer_close(w);
    *writer = NULL;
    return error_set(err, "checkpoints: can not start the thread that writes them: %s",
                     strerror(code));
}

enum checkpoint_phase checkpoint_writer_phase(struct checkpoint_writer *writer, double seconds)
{
    struct timespec until = timer_after(seconds);
    int status = 0;
    pthread_mutex_lock(&writer->lock);
    while (is_at_work(writer->phase) && status == 0)
        status = pthread_cond_timedwait(&writer->changed, &writer->lock, &until);
    enum checkpoint_phase phase = writer->phase;
    pthread_mutex_unlock(&writer->lock);
    return phase;
}

// Until no write is running; false: it did not end in time.
static bool wait_idle(struct checkpoint_writer *writer)
{
    return !is_at_work(checkpoint_writer_phase(writer, WAIT_SECONDS));
}

struct model_state *checkpoint_writer_snapshot(struct checkpoint_writer *writer)
{
    if (!wait_idle(writer))
        die("%s: writing the checkpoint of step %lld has not ended after %d s", writer->directory,
            (long long)writer->snapshot.counters.step, WAIT_SECONDS);
    return &writer->snapshot;
}

static void begin_work(struct checkpoint_writer *writer, enum checkpoint_phase phase)
{
    set_phase(writer, phase);
    if (!writer->background)
        work(writer, phase);
}

void checkpoint_writer_save(struct checkpoint_writer *writer, bool best)
{
    BUG_UNLESS(wait_idle(writer) && !is_shared(writer));
    writer->best = best;
    writer->start = timer_now();
    begin_work(writer, CHECKPOINT_WRITING);
}

void checkpoint_writer_save_part(struct checkpoint_writer *writer, const char *begun, bool best)
{
    BUG_UNLESS(checkpoint_writer_phase(writer, 0.0) == CHECKPOINT_IDLE && is_shared(writer));
    free(writer->begun);
    writer->begun = memory_strdup(begun);
    writer->best = best;
    writer->start = timer_now();
    begin_work(writer, CHECKPOINT_WRITING);
}

void checkpoint_writer_conclude(struct checkpoint_writer *writer, bool all_written)
{
    enum checkpoint_phase phase = checkpoint_writer_phase(writer, 0.0);
    BUG_UNLESS(phase == CHECKPOINT_WRITTEN || phase == CHECKPOINT_FAILED);
    if (!all_written && phase == CHECKPOINT_WRITTEN) {
        struct error err = {""};
        error_set(&err, "the checkpoint of step %lld: another rank could not write its part",
                  (long long)writer->snapshot.counters.step);
        end_write(writer, -1, &err);
    }
    writer->all_written = all_written;
    if (is_first(writer))
        begin_work(writer, CHECKPOINT_CONCLUDING);
    else
        set_phase(writer, CHECKPOINT_IDLE);
}

void checkpoint_writer_failed(struct checkpoint_writer *writer, const char *text)
{
    struct error err = {""};
    error_set(&err, "%s", text);
    if (is_first(writer))
        log_failure(writer, text);
    end_write(writer, -1, &err);
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

bool checkpoint_writer_close(struct checkpoint_writer *writer)
{
    if (writer == NULL)
        return true;
    // A part that is still being written when a run on several ranks ends is of no use any more.
    double patience = is_shared(writer) ? PART_SECONDS : WAIT_SECONDS;
    if (is_at_work(checkpoint_writer_phase(writer, patience))) {
        log_error("%s: a checkpoint is still being written; it stays incomplete",
                  writer->directory);
        return false; // its thread still uses the snapshot
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
    free(writer->begun);
    free(writer->directory);
    free(writer);
    return true;
}
