// Owns one step of a run: its rows, the update, the counters and the report.
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/timer.h"
#include "data/spool.h"
#include "trainer/run.h"
#include "trainer/schedule.h"

// Too many bad documents? Those left out at the start count in every epoch, those met while reading
// when they are met: a document that is bad is met once an epoch.
int run_check_bad_fraction(const struct run *run, struct error *err)
{
    const struct documents *documents = &run->session.train;
    const struct counters *c = &run->counters;
    double epochs = (double)(c->epoch + (c->row > 0 || c->step == 0)); // begun
    double dropped = (double)documents->dropped_bad;
    double bad = dropped + (double)c->bad_documents / epochs,
           all = dropped + (double)documents->count;
    if (bad <= run->config.data.max_bad_fraction * all)
        return 0;
    return error_set(err,
                     "%.0f of %.0f documents have bad values, more than data.max_bad_fraction %g "
                     "allows; look at them with: dtrain data check FILE...",
                     bad, all, run->config.data.max_bad_fraction);
}

static void remember_documents(struct run *run, const struct row *row)
{
    for (int64_t d = 0; d < row->documents; d++, run->step_doc_count++)
        if (run->step_doc_count < NAMED_DOCUMENTS)
            run->step_docs[run->step_doc_count] = row->doc_ids[d];
}

// A copy that the step itself makes is time that it does not compute.
static void stage_row(struct run *run, struct row *row)
{
    double start = timer_now();
    step_stage_row(&run->step, row);
    run->copy_seconds += timer_now() - start;
}

// The next row, whose features are on their way. Returns as prefetch_next does.
static int take_row(struct run *run, struct row **row, struct error *err)
{
    double wait = 0.0;
    if (run->next_row != NULL) {
        *row = run->next_row;
        run->next_row = NULL;
        return 1;
    }
    int got = prefetch_next(run->prefetch, row, &wait, err);
    run->wait_seconds += wait;
    if (got == 1)
        stage_row(run, *row);
    return got;
}

// This rank's micro-steps of the next step. 0: done, 1: stopped by a signal, -1: failed.
static int run_rows(struct run *run, int64_t rows, struct error *err)
{
    step_begin(&run->step);
    run->wait_seconds = run->copy_seconds = run->read_seconds = run->read_bytes = 0.0;
    run->step_doc_count = 0;
    if (run_stop(run) ||
        (run->spool != NULL && run_spool_await_step(run->spool, &run->wait_seconds)))
        return 1;
    for (int64_t r = 0; r < rows; r++) {
        struct row *row = NULL;
        int got = take_row(run, &row, err);
        if (got < 0)
            return -1;
        if (got == 2)
            return 1;
        if (got == 0)
            BUG("the data ended before step %lld", (long long)run->counters.step + 1);
        if (prefetch_try_next(run->prefetch, &run->next_row))
            stage_row(run, run->next_row);
        run->read_seconds += row->read_seconds;
        run->read_bytes += (double)row->read_bytes;
        remember_documents(run, row);
        if (r + 1 == rows)
            step_last_row(&run->step);
        int stopped = step_row(&run->step, row);
        prefetch_return(run->prefetch, row);
        if (stopped || run_stop(run))
            return 1;
    }
    return 0;
}

// Moves the counters over a step that ran to its end.
static void count_step(struct run *run, int64_t rows, const struct step_outcome *outcome)
{
    struct counters *c = &run->counters;
    c->step++;
    c->row += rows;
    if (c->row >= run->steps.epoch_rows[c->epoch]) {
        c->epoch++;
        c->row = 0;
    }
    c->tokens += (int64_t)run->step.metrics.tokens;
    c->bad_documents += (int64_t)run->step.metrics.bad_documents;
    c->applied += outcome->applied;
    c->skipped_empty += outcome->empty;
    c->skipped_nonfinite += outcome->nonfinite;
    c->nonfinite_in_a_row = outcome->nonfinite ? c->nonfinite_in_a_row + 1 : 0;
}

static int report_step(struct run *run, const struct step_outcome *outcome, int64_t epoch,
                       double lr, double seconds, struct error *err)
{
    double weights[LOSS_TERM_COUNT];
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        weights[term] = (double)run->step.loss.weight[term];
    const double *part = run->step.clock.seconds;
    bool on_cpu = strcmp(run->session.execution.device, "cpu") == 0;
    if (session_rank(&run->session) != 0)
        return 0;
    struct step_report report = {.step = run->counters.step,
                                 .total_steps = run->steps.total,
                                 .epoch = epoch,
                                 .metrics = &run->step.metrics,
                                 .normalize = run->config.loss.normalize,
                                 .term_weights = weights,
                                 .block_size = run->session.sizes.block_size,
                                 .ttt = run->session.sizes.kind == DRAFTER_EAGLE3,
                                 .draft_vocab =
                                     run->session.has_map && run->config.loss.full_vocab_metrics,
                                 .lr = lr,
                                 .grad_norm = outcome->grad_norm,
                                 .clip_factor = outcome->clip_factor,
                                 .skipped = !outcome->applied,
                                 .seconds = seconds,
                                 .wait_seconds = step_word_max(&run->step, WORD_WAIT),
                                 .copy_seconds = part[STEP_COPY] + run->copy_seconds,
                                 .read_seconds = step_word_sum(&run->step, WORD_READ_TIME),
                                 .disk_seconds = step_word_sum(&run->step, WORD_DISK_TIME),
                                 .forward_seconds = part[STEP_FORWARD],
                                 .loss_seconds = part[STEP_LOSS],
                                 .backward_seconds = part[STEP_BACKWARD],
                                 .optimizer_seconds = part[STEP_OPTIMIZER],
                                 .exchange_seconds = part[STEP_EXCHANGE],
                                 .ranks = session_ranks(&run->session),
                                 .save_seconds = run->save_seconds,
                                 .read_bytes = step_word_sum(&run->step, WORD_READ_BYTES),
                                 .readers = run->config.data.readers * session_ranks(&run->session),
                                 .device = on_cpu ? "CPU" : "GPU",
                                 .flops = run_work_done(&run->work, &run->step.metrics),
                                 .peak_flops = run->work.peak_flops,
                                 .memory_bytes = run_peak_memory(run),
                                 .begin_bytes = (double)run->begin_bytes,
                                 .planned_bytes = (double)run->planned_bytes,
                                 .spool = run->spool != NULL};
    if (run->spool != NULL) {
        report.spool_wait_seconds = run_spool_waited(run->spool) ? run->wait_seconds : 0.0;
        report.spool_bytes = (double)spool_bytes(run_spool_source(run->spool));
    }
    run->save_seconds = 0.0;
    return run_folder_step(&run->folder, &report, run->config.log.every, err);
}

// What the other ranks are to know of this rank's step.
static void tell(struct run *run, int stopped)
{
    double *word = run->step.exchange.word;
    struct source *source = run->spool != NULL ? run_spool_source(run->spool) : run->source;
    double disk = source_disk_seconds(source);
    word[WORD_STOPPED] = stopped;
    word[WORD_WAIT] = run->wait_seconds;
    word[WORD_READ_TIME] = run->read_seconds;
    word[WORD_READ_BYTES] = run->read_bytes;
    word[WORD_DISK_TIME] = disk - run->disk_seconds;
    run->disk_seconds = disk;
    run_tell_saving(run);
}

// One optimizer step. 0: done, 1: stopped, -1: failed.
int run_step(struct run *run, struct error *err)
{
    double start = timer_now();
    struct counters *c = &run->counters;
    int64_t rows = run->steps.epoch_rows[c->epoch] - c->row, epoch = c->epoch;
    if (rows > run->config.data.rows_per_step)
        rows = run->config.data.rows_per_step;
    int status = run_rows(run, run_own_rows(run, rows), err);
    if (status < 0)
        return -1;
    tell(run, status);
    double lr =
        schedule_lr(&run->config.schedule, run->config.optimizer.lr, c->step + 1, run->steps.total);
    struct step_outcome outcome;
    step_apply(&run->step, lr, c->applied + 1, &outcome);
    run_conclude_saving(run);
    if (outcome.stopped)
        return 1;
    if (outcome.nonfinite) {
        // No document is to blame for a target that is not finite.
        if (c->skipped_nonfinite == 0 && target_check_finite(&run->session.target, err) != 0)
            return -1;
        run_name_nonfinite(run, &outcome);
    }
    if (outcome.empty && session_rank(&run->session) == 0)
        log_warn("step %lld: %s in its %lld rows; the weights stay as they are",
                 (long long)c->step + 1, run_nothing_of(&run->step.metrics), (long long)rows);
    count_step(run, rows, &outcome);
    if (run->spool != NULL)
        run_spool_used(run->spool);
    run_warn_nothing_learnt(run);
    if (report_step(run, &outcome, epoch, lr, timer_now() - start, err) != 0)
        return -1;
    if (outcome.nonfinite && c->nonfinite_in_a_row > run->config.run.max_nonfinite)
        return error_set(err,
                         "%lld steps in a row had a non-finite gradient (run.max_nonfinite "
                         "%lld); the first bad tensor is %s",
                         (long long)c->nonfinite_in_a_row, (long long)run->config.run.max_nonfinite,
                         outcome.tensor);
    return run_check_bad_fraction(run, err);
}
