// Owns when a run's checkpoints are written, and that its ranks agree on each: rank 0 names the folder, all
// write into it, and it counts when all have.
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/timer.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run.h"

enum { FOLDER_TEXT = 4096, WAIT_SECONDS = 600 };
static const double look_seconds = 0.2; // between agreements of ranks that wait

// What all ranks know of each other's parts decides for all of them alike.
static void conclude_when_written(struct run *run, const double *phases, int stride)
{
    bool all_written = true;
    for (int r = 0; r < session_ranks(&run->session); r++) {
        double phase = phases[r * stride];
        if (phase != CHECKPOINT_WRITTEN && phase != CHECKPOINT_FAILED)
            return;
        all_written = all_written && phase == CHECKPOINT_WRITTEN;
    }
    checkpoint_writer_conclude(run->writer, all_written);
}

void run_tell_saving(struct run *run)
{
    run->step.exchange.word[WORD_SAVING] = checkpoint_writer_phase(run->writer, 0.0);
}

void run_conclude_saving(struct run *run)
{
    if (session_ranks(&run->session) > 1)
        conclude_when_written(run, run->step.exchange.words + WORD_SAVING, STEP_WORDS);
}

// No rank has a checkpoint under way any more. Agreements are short, so that no rank waits long in one.
static void await_saving(struct run *run)
{
    int ranks = session_ranks(&run->session);
    double *phases = memory_alloc((size_t)ranks, sizeof(*phases));
    double begin = timer_now();
    bool idle = ranks == 1;
    while (!idle) {
        memset(phases, 0, (size_t)ranks * sizeof(*phases));
        phases[session_rank(&run->session)] = checkpoint_writer_phase(run->writer, look_seconds);
        ranks_sum(run->session.ranks, phases, ranks);
        idle = true;
        for (int r = 0; r < ranks; r++)
            idle = idle && phases[r] == CHECKPOINT_IDLE;
        conclude_when_written(run, phases, 1);
        if (timer_now() - begin > WAIT_SECONDS)
            die("%s: writing a checkpoint has not ended after %d s", run->folder.checkpoints,
                WAIT_SECONDS);
    }
    free(phases);
}

// Rank 0 makes the folder and tells its name, or why there is none.
static void save_part(struct run *run, bool best)
{
    struct {
        bool begun;
        char text[FOLDER_TEXT];
    } folder = {false, ""};
    if (session_rank(&run->session) == 0) {
        struct error err = {""};
        char *path = checkpoint_begin(run->folder.checkpoints, run->counters.step, &err);
        folder.begun = path != NULL && strlen(path) < sizeof(folder.text);
        snprintf(folder.text, sizeof(folder.text), "%s", path != NULL ? path : err.text);
        free(path);
    }
    ranks_share(run->session.ranks, &folder, sizeof(folder), 0);
    if (folder.begun)
        checkpoint_writer_save_part(run->writer, folder.text, best);
    else
        checkpoint_writer_failed(run->writer, folder.text);
    if (!run->config.checkpoint.background)
        await_saving(run);
}

void run_save(struct run *run, bool best)
{
    if (run->saved_step == run->counters.step && !best)
        return;
    double start = timer_now();
    await_saving(run);
    struct model_state *snapshot = checkpoint_writer_snapshot(run->writer);
    step_save(&run->step, snapshot);
    snapshot->counters = run->counters;
    run->saved_step = run->counters.step;
    if (session_ranks(&run->session) > 1)
        save_part(run, best);
    else
        checkpoint_writer_save(run->writer, best);
    run->save_seconds += timer_now() - start;
}

int run_finish_saving(struct run *run, struct error *err)
{
    await_saving(run);
    int result = checkpoint_writer_wait(run->writer, err);
    int64_t failed = result != 0;
    if (session_ranks(&run->session) > 1)
        ranks_max(run->session.ranks, &failed, 1);
    if (failed && result == 0)
        error_set(err, "the last checkpoint could not be written; rank 0 says why");
    return failed ? -1 : 0;
}
