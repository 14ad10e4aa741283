// Owns a training run: epochs, steps, validation, checkpoints, signals. The step itself is step.c's.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/byte_size.h"
#include "base/log.h"
#include "base/timer.h"
#include "data/prefetch.h"
#include "trainer/checkpoint.h"
#include "trainer/commands.h"
#include "trainer/plan_admit.h"
#include "trainer/resume.h"
#include "trainer/run_folder.h"
#include "trainer/schedule.h"
#include "trainer/session.h"
#include "trainer/signals.h"
#include "trainer/tune.h"
#include "trainer/validation.h"

enum { NAMED_DOCUMENTS = 16 }; // documents of a step that an error lists

// When parts of the start had ended.
struct start_times {
    double begin, session, step, state, readers, products;
};

struct run {
    const struct options *options;
    struct config config;
    struct session session;
    struct release release; // that a fresh run starts from; open until then
    struct run_folder folder;
    struct start_times times;
    struct step step;
    struct model_state *snapshot; // borrowed from the writer
    struct checkpoint_writer *writer;
    struct checkpoint_info info;
    struct source *source;
    struct prefetch *prefetch;
    struct row *next_row; // taken from prefetch and staged; NULL: none
    struct validation *validation;
    struct counters counters;
    struct session_steps steps;
    double peak_bytes; // of device memory
    // of device memory: in use when the run began (a GPU's context, other processes), and planned
    size_t begin_bytes, planned_bytes;
    bool warned_validation; // that it has nothing to score
    int64_t saved_step;     // newest step handed to the writer
    uint64_t step_docs[NAMED_DOCUMENTS];
    int64_t step_doc_count;
    double wait_seconds, read_seconds, read_bytes, save_seconds; // of the running step
};

// The most so far: of the device, by everybody on it; on the CPU of this process.
static double peak_memory(struct run *run)
{
    size_t free_bytes, total_bytes;
    struct rusage usage;
    if (strcmp(run->session.execution.device, "cpu") == 0) {
        getrusage(RUSAGE_SELF, &usage);
        return (double)usage.ru_maxrss * 1024.0;
    }
    run->session.backend->memory(&free_bytes, &total_bytes);
    run->peak_bytes = fmax(run->peak_bytes, (double)(total_bytes - free_bytes));
    return run->peak_bytes;
}

static void describe_start(const struct run *run)
{
    const struct documents *d = &run->session.train;
    const struct execution *e = &run->session.execution;
    char planned[BYTE_SIZE_TEXT], begin[BYTE_SIZE_TEXT];
    log_info("data: %zu documents, %lld tokens, %.1f %% supervised; left out: %lld without "
             "supervised tokens, %lld bad; %lld cut to %lld tokens",
             d->count, (long long)d->tokens,
             100.0 * (double)d->supervised / (double)(d->tokens > 0 ? d->tokens : 1),
             (long long)d->dropped_unsupervised, (long long)d->dropped_bad, (long long)d->cut,
             (long long)run->config.data.seq_len);
    log_info("drafter: %lld layers, blocks of %lld, %.2f M trainable parameters",
             (long long)run->session.sizes.layers, (long long)run->session.sizes.block_size,
             (double)run->session.params.trainable * 1e-6);
    log_info("anchors: at most %lld per %s", (long long)run->config.anchors.max_anchors,
             run->config.anchors.per == ANCHORS_PER_ROW ? "row" : "document");
    log_info("execution: %s (%s), %s, groups of %lld rows, chunks of %lld, recompute %s, "
             "%lld threads, %s planned, %s in use before",
             e->device, e->hardware, e->compute, (long long)e->group_rows, (long long)e->chunk_rows,
             e->recompute, (long long)e->threads,
             byte_size_text((double)run->planned_bytes, planned),
             byte_size_text((double)run->begin_bytes, begin));
    const struct start_times *t = &run->times;
    log_info("start: %.1f s: documents and device %.1f, memory and target %.1f, weights %.1f, "
             "rows %.1f, products %.1f",
             t->products - t->begin, t->session - t->begin, t->step - t->session,
             t->state - t->step, t->readers - t->state, t->products - t->readers);
    if (run->counters.step < run->steps.total)
        log_info("steps: %lld, from step %lld", (long long)run->steps.total,
                 (long long)run->counters.step + 1);
    else
        log_info("steps: %lld, and %lld are taken: nothing is left; more run.max_steps or "
                 "run.epochs would go on",
                 (long long)run->steps.total, (long long)run->counters.step);
}

static int open_prefetch(struct run *run, struct error *err)
{
    const struct config *config = &run->config;
    struct prefetch_options options = {.depth = config->data.prefetch_rows,
                                       .threads = (int)config->data.readers,
                                       .on_bad_sample = config->data.on_bad_sample,
                                       .seq_len = config->data.seq_len,
                                       .host_alloc = run->session.backend->host_alloc,
                                       .host_free = run->session.backend->host_free,
                                       .stop = signals_stop};
    if (source_open_shards(&run->source, &run->session.train, config->data.check_crc, err) != 0)
        return -1;
    uint64_t epoch = (uint64_t)run->counters.epoch;
    if (epoch >= run->steps.epochs)
        return 0; // everything has been read
    return prefetch_open(&run->prefetch, run->source, &options, session_pack_epoch, &run->session,
                         epoch, run->counters.row, run->steps.epochs - epoch, err);
}

// Too many bad documents? Those left out at the start count in every epoch, those met while reading
// when they are met: a document that is bad is met once an epoch.
static int check_bad_fraction(const struct run *run, struct error *err)
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
        step_stage_row(&run->step, *row);
    return got;
}

// All micro-steps of the next step. 0: done, 1: stopped by a signal, -1: failed.
static int run_rows(struct run *run, int64_t rows, struct error *err)
{
    step_begin(&run->step);
    run->wait_seconds = run->read_seconds = run->read_bytes = 0.0;
    run->step_doc_count = 0;
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
            step_stage_row(&run->step, run->next_row);
        run->read_seconds += row->read_seconds;
        run->read_bytes += (double)row->read_bytes;
        remember_documents(run, row);
        int stopped = step_row(&run->step, row);
        prefetch_return(run->prefetch, row);
        if (stopped || signals_received() != 0)
            return 1;
    }
    return 0;
}

static void name_nonfinite(const struct run *run, const struct step_outcome *outcome)
{
    char list[NAMED_DOCUMENTS * 24] = "";
    size_t at = 0;
    for (int64_t i = 0; i < run->step_doc_count && i < NAMED_DOCUMENTS; i++)
        at += (size_t)snprintf(list + at, sizeof(list) - at, " %llu",
                               (unsigned long long)run->step_docs[i]);
    log_warn("step %lld: the gradient of %s is not finite; the step is skipped. Its documents:%s%s",
             (long long)run->counters.step + 1, outcome->tensor, list,
             run->step_doc_count > NAMED_DOCUMENTS ? " ..." : "");
}

// What a step had none of, when it had no weight.
static const char *nothing_of(const struct metrics *metrics)
{
    if (metrics->supervised == 0.0)
        return "nothing supervised";
    return metrics->valid_anchors == 0.0 ? "no valid anchor" : "no slot of nonzero weight";
}

// Anchors depend on masks and lengths, which later epochs do not change.
static void warn_nothing_learnt(const struct run *run)
{
    const struct counters *c = &run->counters;
    const struct config_texts *shards = &run->config.data.train;
    bool first_epoch_ends = c->epoch == 1 && c->row == 0;
    bool run_ends = c->epoch == 0 && c->step == run->steps.total;
    if (c->skipped_empty < c->step || !(first_epoch_ends || run_ends))
        return;
    log_warn(
        "nothing was learnt in %lld steps: not one had a block to train on, in %s%s%s. A valid "
        "anchor is a supervised token (loss_mask) that another one follows in the same "
        "document%s; look with: dtrain data stats FILE...",
        (long long)c->step, shards->items[0], shards->count > 1 ? " to " : "",
        shards->count > 1 ? shards->items[shards->count - 1] : "",
        run->config.anchors.tail == TAIL_WHOLE ? ", and with anchors.tail whole a whole block"
                                               : "");
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
    struct step_report report = {.step = run->counters.step,
                                 .total_steps = run->steps.total,
                                 .epoch = epoch,
                                 .metrics = &run->step.metrics,
                                 .normalize = run->config.loss.normalize,
                                 .term_weights = weights,
                                 .block_size = run->session.sizes.block_size,
                                 .lr = lr,
                                 .grad_norm = outcome->grad_norm,
                                 .clip_factor = outcome->clip_factor,
                                 .skipped = !outcome->applied,
                                 .seconds = seconds,
                                 .wait_seconds = run->wait_seconds,
                                 .read_seconds = run->read_seconds,
                                 .forward_seconds = part[STEP_FORWARD],
                                 .loss_seconds = part[STEP_LOSS],
                                 .backward_seconds = part[STEP_BACKWARD],
                                 .optimizer_seconds = part[STEP_OPTIMIZER],
                                 .save_seconds = run->save_seconds,
                                 .read_bytes = run->read_bytes,
                                 .memory_bytes = peak_memory(run),
                                 .planned_bytes = (double)run->planned_bytes};
    run->save_seconds = 0.0;
    return run_folder_step(&run->folder, &report, run->config.log.every, err);
}

// One optimizer step. 0: done, 1: stopped, -1: failed.
static int run_step(struct run *run, struct error *err)
{
    double start = timer_now();
    struct counters *c = &run->counters;
    int64_t rows = run->steps.epoch_rows[c->epoch] - c->row, epoch = c->epoch;
    if (rows > run->config.data.rows_per_step)
        rows = run->config.data.rows_per_step;
    int status = run_rows(run, rows, err);
    if (status != 0)
        return status;
    double lr =
        schedule_lr(&run->config.schedule, run->config.optimizer.lr, c->step + 1, run->steps.total);
    struct step_outcome outcome;
    step_apply(&run->step, lr, c->applied + 1, &outcome);
    if (outcome.nonfinite)
        name_nonfinite(run, &outcome);
    if (outcome.empty)
        log_warn("step %lld: %s in its %lld rows; the weights stay as they are",
                 (long long)c->step + 1, nothing_of(&run->step.metrics), (long long)rows);
    count_step(run, rows, &outcome);
    warn_nothing_learnt(run);
    if (report_step(run, &outcome, epoch, lr, timer_now() - start, err) != 0)
        return -1;
    if (outcome.nonfinite && c->nonfinite_in_a_row > run->config.run.max_nonfinite)
        return error_set(err,
                         "%lld steps in a row had a non-finite gradient (run.max_nonfinite "
                         "%lld); the first bad tensor is %s",
                         (long long)c->nonfinite_in_a_row, (long long)run->config.run.max_nonfinite,
                         outcome.tensor);
    return check_bad_fraction(run, err);
}

static void save(struct run *run, bool best)
{
    if (run->saved_step == run->counters.step && !best)
        return;
    double start = timer_now();
    struct model_state *snapshot = checkpoint_writer_snapshot(run->writer);
    step_save(&run->step, snapshot);
    snapshot->counters = run->counters;
    run->saved_step = run->counters.step;
    checkpoint_writer_save(run->writer, best);
    run->save_seconds += timer_now() - start;
}

// Scores the validation rows. Sets *best when accept_len_walk is the best so far. 0, 1 stopped, -1.
static int validate(struct run *run, bool *best, struct error *err)
{
    struct metrics metrics = {0};
    struct walk walk = {0};
    struct counters *c = &run->counters;
    double start = timer_now();
    int status = validation_run(run->validation, &run->step, &metrics, &walk, NULL, NULL, err);
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
    if (!scored && !run->warned_validation) {
        log_warn("no valid anchor in the validation rows of data.val: there is no accept_len_walk, "
                 "no best checkpoint, and validation.patience does not count");
        run->warned_validation = true;
    }
    c->last_validation = c->step;
    struct validation_report report = {.step = c->step,
                                       .epoch = c->epoch,
                                       .metrics = &metrics,
                                       .walk = &walk,
                                       .draft_tokens = &run->config.validation.draft_tokens,
                                       .normalize = run->config.loss.normalize,
                                       .block_size = run->session.sizes.block_size,
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
        save(run, true);
    else if (step > 0 && ((every > 0 && step % every == 0) || step == run->steps.total))
        save(run, false);
    return 0;
}

// The loop. Returns an exit status.
static int loop(struct run *run, struct error *err)
{
    int status = after_step(run, err);
    while (status == 0 && run->counters.step < run->steps.total && !patience_ends(run)) {
        status = signals_received() != 0 ? 1 : run_step(run, err);
        if (status == 0)
            status = after_step(run, err);
    }
    if (status < 0)
        return EXIT_FAILED;
    if (patience_ends(run) && status == 0)
        log_info("no better accept_len_walk in %lld validations: the run ends early",
                 (long long)run->counters.validations_without_better);
    if (run->counters.step > 0 || status == 1)
        save(run, false);
    if (status == 0)
        return EXIT_DONE;
    log_info("signal %d: stopping at step %lld", signals_received(), (long long)run->counters.step);
    return EXIT_STOPPED;
}

// Weights and moments, from a checkpoint or new. *status as in open_run.
static int load_state(struct run *run, struct resume *resume, int *status, struct error *err)
{
    struct session *session = &run->session;
    struct step_setup setup = session_step_setup(session, true);
    if (step_open(&run->step, &setup, err) != 0)
        return -1;
    run->times.step = timer_now();
    run->step.stop = signals_stop;
    struct model_state *state = checkpoint_writer_snapshot(run->writer);
    if (resume_load(resume, session, state, err) != 0) {
        *status = resume->failed ? EXIT_FAILED : EXIT_REFUSED;
        return -1;
    }
    run->counters = state->counters;
    run->saved_step =
        resume_is_own(resume, &run->folder, state->counters.step) ? state->counters.step : -1;
    if (resume->path != NULL)
        step_load(&run->step, state);
    else
        step_initialize(&run->step, &run->release);
    release_close(&run->release);
    run->times.state = timer_now();
    return 0;
}

// What was chosen before and the memory of today: a run that continues keeps its cut or is refused, one
// that has nothing to continue is cut anew.
static int admit_obeying(struct run *run, struct resume *resume, struct error *err)
{
    struct error why = {""};
    struct session *session = &run->session;
    const char *folder = resume->path != NULL ? resume->path : run->folder.path;
    if (plan_admit(session, ADMIT_FROZEN, &run->planned_bytes, &why) == 0) {
        log_info("obeying %s/execution.json in what the config leaves open", folder);
        return 0;
    }
    if (resume->path == NULL) {
        log_warn("%s/execution.json can not be obeyed, this run chooses everything anew:\n%.*s",
                 folder, (int)strcspn(why.text, "\n"), why.text);
        return plan_admit(session, ADMIT_NEW, &run->planned_bytes, err);
    }
    if (!resume->replan) {
        *err = why;
        return -1;
    }
    if (plan_admit(session, ADMIT_REPLANNED, &run->planned_bytes, err) != 0)
        return -1;
    if (!resume->warned)
        log_warn("--replan: the step is cut smaller than at the first start; results are not "
                 "bitwise the same");
    return 0;
}

static int admit(struct run *run, struct resume *resume, struct error *err)
{
    if (resume->path != NULL || resume->followed)
        return admit_obeying(run, resume, err);
    if (run->planned_bytes > 0)
        return 0; // before the folder was made
    return plan_admit(&run->session, ADMIT_NEW, &run->planned_bytes, err);
}

// Learning rates follow from the number of all steps, so another one changes those still to come.
static void compare_schedule(const struct run *run, const struct resume *resume)
{
    const struct config *now = &run->config;
    bool flat = now->schedule.kind == SCHEDULE_CONSTANT && !(now->schedule.warmup_ratio > 0.0);
    if (resume->path == NULL || flat ||
        (resume->epochs == now->run.epochs && resume->max_steps == now->run.max_steps))
        return;
    struct config config = *now;
    struct session session = run->session;
    struct session_steps before;
    config.run.epochs = resume->epochs;
    config.run.max_steps = resume->max_steps;
    session.config = &config;
    session_count_steps(&session, &before);
    if (before.total != run->steps.total)
        log_warn("%lld steps in all, where %lld were to be when %s was written: the learning rate "
                 "follows a schedule over %lld from here on",
                 (long long)run->steps.total, (long long)before.total, resume->path,
                 (long long)run->steps.total);
    session_steps_release(&before);
}

// Algorithms that a checkpoint was trained with and the library does not know stop the run; without a
// checkpoint there is nothing to continue.
static int tune(struct run *run, const struct resume *resume, struct error *err)
{
    struct execution *execution = &run->session.execution;
    struct error why = {""};
    if (step_tune(&run->step, execution, &why) == 0)
        return 0;
    if (resume->path != NULL) {
        *err = why;
        return error_add(err, "%s/execution.json holds it; --replan chooses anew", resume->path);
    }
    log_warn("the algorithms of %s/execution.json can not be obeyed, this run chooses anew:\n%s",
             run->folder.path, why.text);
    execution->gemm.count = 0;
    return step_tune(&run->step, execution, err);
}

// Where the run begins, once its folder is open. *status as in open_run.
static int start_run(struct run *run, struct resume *resume, int *status, struct error *err)
{
    struct config *config = &run->config;
    struct session *session = &run->session;
    if (resume_find(resume, &run->folder, session, err) != 0) {
        *status = resume->failed ? EXIT_FAILED : EXIT_REFUSED;
        return -1;
    }
    if (resume->path == NULL && session_open_release(session, &run->release, err) != 0)
        return -1;
    if (admit(run, resume, err) != 0)
        return -1;
    run->info = (struct checkpoint_info){.config = config,
                                         .execution = &session->execution,
                                         .sizes = &session->sizes,
                                         .target = &session->target,
                                         .target_name = session->target_name,
                                         .data_fingerprint = session_fingerprint(session),
                                         .command = run->options->command};
    if (checkpoint_writer_open(&run->writer, run->folder.checkpoints, &session->params, &run->info,
                               config->checkpoint.keep, config->checkpoint.background, err) != 0 ||
        load_state(run, resume, status, err) != 0 || check_bad_fraction(run, err) != 0)
        return -1;
    session_count_steps(session, &run->steps);
    compare_schedule(run, resume);
    *status = EXIT_FAILED;
    // Readers fill the first rows while products are timed.
    if (session->has_val &&
        validation_open(&run->validation, session, &run->step, config->validation.rows, err) != 0)
        return -1;
    if (open_prefetch(run, err) != 0)
        return -1;
    run->times.readers = timer_now();
    if (tune(run, resume, err) != 0)
        return -1;
    if (resume_freeze(&run->folder, session, err) != 0 ||
        run_folder_start(&run->folder, resume->path != NULL ? &run->counters : NULL,
                         config->log.tensorboard, err) != 0)
        return -1;
    run->times.products = timer_now();
    return 0;
}

// From the config to a run that is ready for its first step. Every fault is a refusal (status 2)
// unless *status says otherwise.
static int open_run(struct run *run, int *status, struct error *err)
{
    const struct options *options = run->options;
    struct config *config = &run->config;
    struct session *session = &run->session;
    *status = EXIT_REFUSED;
    if (session_config(config, options->config, options->sets, options->set_count,
                       SESSION_TRAIN | SESSION_VAL, err) != 0)
        return -1;
    if (config->run.dir == NULL)
        return error_set(err, "%s: run.dir: required; the folder for checkpoints and metrics",
                         options->config);
    if (session_open(session, config, SESSION_TRAIN | SESSION_VAL, err) != 0)
        return -1;
    run->times.session = timer_now();
    run->begin_bytes = (size_t)peak_memory(run);
    struct resume resume = {.choice = options->resume, .replan = options->replan};
    // A new run that does not fit leaves no folder behind.
    if (!resume_likely(&resume, config->run.dir) &&
        plan_admit(session, ADMIT_NEW, &run->planned_bytes, err) != 0)
        return -1;
    if (run_folder_open(&run->folder, config->run.dir, err) != 0)
        return -1;
    int result = start_run(run, &resume, status, err);
    resume_release(&resume);
    return result;
}

static void report_memory(struct run *run)
{
    char most[BYTE_SIZE_TEXT], begin[BYTE_SIZE_TEXT], planned[BYTE_SIZE_TEXT];
    byte_size_text(peak_memory(run), most);
    byte_size_text((double)run->begin_bytes, begin);
    byte_size_text((double)run->planned_bytes, planned);
    if (strcmp(run->session.execution.device, "cpu") == 0)
        log_info("memory: %s resident at most, %s planned for step and host part; the program, its "
                 "libraries and the target's mapped files come on top (%s when the run began)",
                 most, planned, begin);
    else
        log_info(
            "GPU memory: %s in use at most, %s planned, both with the CUDA context; %s were in "
            "use when the run began (context and other processes)",
            most, planned, begin);
}

static void close_run(struct run *run)
{
    step_close(&run->step); // ends copies from rows that prefetch frees
    validation_close(run->validation);
    if (run->prefetch != NULL)
        prefetch_close(run->prefetch);
    if (run->source != NULL)
        source_close(run->source);
    if (run->writer != NULL)
        checkpoint_writer_close(run->writer);
    run_folder_close(&run->folder);
    release_close(&run->release);
    session_close(&run->session);
    config_release(&run->config);
    session_steps_release(&run->steps);
}

int command_train(const struct options *options)
{
    struct run run = {.options = options, .folder = {.lock_fd = -1}};
    struct error err = {0};
    int status;
    run.times.begin = timer_now();
    config_init(&run.config);
    signals_install();
    if (open_run(&run, &status, &err) == 0) {
        describe_start(&run);
        status = loop(&run, &err);
        report_memory(&run);
        struct error write_error = {0};
        if (checkpoint_writer_wait(run.writer, &write_error) != 0 && status != EXIT_FAILED) {
            status = EXIT_FAILED;
            err = write_error;
        }
    }
    log_status_line(NULL);
    if (status == EXIT_DONE)
        log_info("done: %lld steps; results are in %s", (long long)run.counters.step,
                 run.config.run.dir);
    else if (err.text[0] != '\0')
        log_error("%s", err.text);
    close_run(&run);
    return status;
}
