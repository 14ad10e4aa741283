// Owns a training run's course: epochs, validation, checkpoints, signals. A step is run_step.c's.
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/run.h"
#include "trainer/run_end.h"
#include "trainer/signals.h"
#include "trainer/sweep.h"

// Scores the validation rows. Sets *best when accept_len_walk is the best so far. 0, 1 stopped, -1.
static int validate(struct run *run, bool *best, struct error *err)
{
    struct metrics metrics = {0};
    struct walk walk = {0};
    struct counters *c = &run->counters;
    double start = timer_now();
    step_exchange_average(&run->step);
    int status = validation_run(run->validation, &run->step, &metrics, &walk, NULL, NULL, err);
    if (status < 0)
        return -1; // the end of the run: other ranks would not join in what brings the weights back
    step_exchange_average(&run->step);
    if (status != 0)
        return status;
    double accept_len = walk_accept_len(&walk);
    bool scored = walk.blocks > 0.0; // else it says nothing about the weights
    *best = c->step > 0 && scored && accept_len > c->best_accept_len_walk;
    if (*best) {
        c->best_accept_len_walk = accept_len;
        c->best_step = c->step;
        c->validations_without_better = 0;
    } else if (c->step > 0 && scored) {
        c->validations_without_better++;
    }
    bool first = session_rank(&run->session) == 0;
    if (!scored && !run->warned_validation && first) {
        log_warn("no valid anchor in the validation rows of data.val: there is no accept_len_walk, "
                 "no best checkpoint, and validation.patience does not count");
        run->warned_validation = true;
    }
    c->last_validation = c->step;
    if (!first)
        return 0;
    struct validation_report report = {.step = c->step,
                                       .epoch = c->epoch,
                                       .metrics = &metrics,
                                       .walk = &walk,
                                       .draft_tokens = &run->config.validation.draft_tokens,
                                       .normalize = run->config.loss.normalize,
                                       .block_size = run->session.sizes.block_size,
                                       .ttt = run->session.sizes.kind == DRAFTER_EAGLE3,
                                       .draft_vocab = run->session.has_map,
                                       .seconds = timer_now() - start,
                                       .best = *best};
    return run_folder_validation(&run->folder, &report, err);
}

static bool validation_due(const struct run *run)
{
    const struct counters *c = &run->counters;
    if (!run->session.has_val || c->last_validation == c->step)
        return false;
    if (c->step == 0)
        return run->config.validation.at_start;
    if (c->step == run->steps.total)
        return true;
    return run->config.validation.every > 0 && c->step % run->config.validation.every == 0;
}

static bool patience_ends(const struct run *run)
{
    int64_t patience = run->config.validation.patience;
    return patience > 0 && run->counters.validations_without_better >= patience;
}

// Validation and checkpoint that are due after the counters' step. 0, 1 stopped, -1 failed.
static int after_step(struct run *run, struct error *err)
{
    int64_t step = run->counters.step, every = run->config.checkpoint.every;
    bool best = false;
    if (validation_due(run)) {
        int status = validate(run, &best, err);
        if (status != 0)
            return status;
    }
    if (best && run->config.checkpoint.best)
        run_save(run, true);
    else if (step > 0 && ((every > 0 && step % every == 0) || step == run->steps.total))
        run_save(run, false);
    return 0;
}

// The loop. Returns an exit status.
static int loop(struct run *run, struct error *err)
{
    int status = after_step(run, err);
    while (status == 0 && run->counters.step < run->steps.total && !patience_ends(run)) {
        status = run_step(run, err);
        if (status == 0)
            status = after_step(run, err);
    }
    if (status < 0)
        return EXIT_FAILED;
    if (patience_ends(run) && status == 0)
        log_info("no better accept_len_walk in %lld validations: the run ends early",
                 (long long)run->counters.validations_without_better);
    if (run->counters.step > 0 || status == 1)
        run_save(run, false);
    if (status == 0)
        return EXIT_DONE;
    if (ranks_signal(run->ranks) != 0)
        log_info("signal %d: stopping at step %lld", ranks_signal(run->ranks),
                 (long long)run->counters.step);
    else
        log_info("stopping at step %lld", (long long)run->counters.step);
    return EXIT_STOPPED;
}

// What has ended a rank ends all of them: one that fails alone tells the others.
static void tell_failure(struct run *run, int status, const struct error *err)
{
    if (run->ranks == NULL)
        log_error("%s", err->text);
    else if (status == EXIT_REFUSED)
        ranks_refuse(run->ranks, err->text);
    else
        ranks_fail(run->ranks, err->text);
}

// Says in the run folder that the run has come to its end: its last checkpoint is complete.
static int finish(const struct run *run, struct error *err)
{
    const struct run_end end = {.step = run->counters.step,
                                .total_steps = run->steps.total,
                                .patience = run->counters.step < run->steps.total};
    return session_rank(&run->session) == 0 ? run_end_write(run->folder.path, &end, err) : 0;
}

// The run's last words: how it goes on.
static void tell_stop(const struct run *run)
{
    const char *resume = run->options->resume;
    bool same = resume == NULL || strcmp(resume, "auto") == 0;
    const char *command = sweep_is_point(run->options->config) ? "the sweep's command"
                          : same                               ? "the same command"
                                 : "the same command without --resume";
    log_info("stopped after %lld of %lld steps: %s goes on", (long long)run->counters.step,
             (long long)run->steps.total, command);
}

int command_train(const struct options *options)
{
    struct run *run = memory_alloc(1, sizeof(*run)); // run_close frees it
    struct error err = {0};
    int status;
    *run = (struct run){.options = options, .folder = {.lock_fd = -1}, .shares_epoch = -1};
    run->times.begin = timer_now();
    config_init(&run->config);
    signals_install();
    if (run_open(run, &status, &err) == 0) {
        run_describe_start(run);
        if (session_rank(&run->session) == 0)
            run_end_forget(run->folder.path);
        status = loop(run, &err);
        run_report_memory(run);
        if (status != EXIT_FAILED && run_finish_saving(run, &err) != 0)
            status = EXIT_FAILED;
        // Only now: a run that is killed before its last checkpoint is complete goes back.
        if (status == EXIT_DONE && run->spool != NULL)
            run_spool_finish(run->spool);
        if (status == EXIT_DONE && finish(run, &err) != 0)
            status = EXIT_FAILED;
    }
    log_status_line(NULL);
    if (status == EXIT_DONE)
        log_info("done: %lld steps; results are in %s", (long long)run->counters.step,
                 run->config.run.dir);
    else if (status == EXIT_STOPPED)
        tell_stop(run);
    else if (err.text[0] != '\0')
        tell_failure(run, status, &err);
    run_close(run);
    return status;
}
