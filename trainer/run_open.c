// Owns the opening and closing of a run: what it continues, what memory it may take, its readers.
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/timer.h"
#include "trainer/plan_admit.h"
#include "trainer/resume.h"
#include "trainer/run.h"
#include "trainer/schedule.h"
#include "trainer/signals.h"
#include "trainer/tune.h"

bool run_stop(void *context)
{
    const struct run *run = context;
    return (run->ranks != NULL ? ranks_signal(run->ranks) : signals_received()) != 0;
}

// This rank's rows among rows [begin, end) of the running epoch.
static int64_t own_rows(struct run *run, int64_t begin, int64_t end)
{
    const struct session *session = &run->session;
    struct packing packing;
    if (session_ranks(session) == 1)
        return end - begin;
    if (run->shares_epoch != run->counters.epoch) {
        row_shares_release(&run->shares);
        session_pack_epoch(session, (uint64_t)run->counters.epoch, &packing);
        session_share_rows(session, &packing, &run->shares);
        packing_release(&packing);
        run->shares_epoch = run->counters.epoch;
    }
    return row_shares_count(&run->shares, session_rank(session), begin, end);
}

int64_t run_own_rows(struct run *run, int64_t rows)
{
    return own_rows(run, run->counters.row, run->counters.row + rows);
}

// Where the features of the training documents come from.
static int open_source(struct run *run, struct error *err)
{
    const struct data_config *data = &run->config.data;
    if (data->spool == NULL)
        return source_open_shards(&run->source, &run->session.train, data->check_crc, err);
    const struct run_spool_options options = {.session = &run->session,
                                              .steps = &run->steps,
                                              .counters = &run->counters,
                                              .stop = run_stop,
                                              .stop_context = run};
    return run_spool_open(&run->spool, &options, err);
}

static int open_prefetch(struct run *run, struct error *err)
{
    const struct config *config = &run->config;
    struct prefetch_options options = {.depth = config->data.prefetch_rows,
                                       .threads = (int)config->data.readers,
                                       .on_bad_sample = config->data.on_bad_sample,
                                       .seq_len = config->data.seq_len,
                                       .stop_seconds = session_stop_seconds(&run->session),
                                       .host_alloc = run->session.backend->host_alloc,
                                       .host_free = run->session.backend->host_free,
                                       .stop = run_stop,
                                       .stop_context = run};
    struct source *source = run->source;
    if (run->spool != NULL) {
        source = run_spool_source(run->spool);
        options.stop = run_spool_stop;
        options.stop_context = run->spool;
        options.stall_seconds = 1e9; // data.spool_wait is the limit
    }
    uint64_t epoch = (uint64_t)run->counters.epoch;
    if (epoch >= run->steps.epochs)
        return 0; // everything has been read
    return prefetch_open(&run->prefetch, source, &options, session_pack_own, &run->session, epoch,
                         own_rows(run, 0, run->counters.row), run->steps.epochs - epoch, err);
}

// Weights and moments, from a checkpoint or new. *status as in open_run.
static int load_state(struct run *run, struct resume *resume, int *status, struct error *err)
{
    struct session *session = &run->session;
    struct step_setup setup = session_step_setup(session, true);
    if (step_open(&run->step, &setup, err) != 0)
        return -1;
    run->times.step = timer_now();
    run->step.stop = run_stop;
    run->step.stop_context = run;
    struct model_state *state = checkpoint_writer_snapshot(run->writer);
    if (resume_load(resume, session, state, err) != 0) {
        *status = resume->failed ? EXIT_FAILED : EXIT_REFUSED;
        return -1;
    }
    run->counters = state->counters;
    run->saved_step =
        resume_is_own(resume, &run->folder, state->counters.step) ? state->counters.step : -1;
    ranks_share(run->ranks, &run->saved_step, sizeof(run->saved_step), 0);
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

// Rank 0 looks where the run continues, the others take what it has found.
static int find_start(struct run *run, struct resume *resume, int *status, struct error *err)
{
    struct session *session = &run->session;
    if (session_rank(session) == 0 && resume_find(resume, &run->folder, session, err) != 0) {
        *status = resume->failed ? EXIT_FAILED : EXIT_REFUSED;
        return -1;
    }
    if (session_ranks(session) > 1)
        resume_share(resume, session);
    return 0;
}

// Algorithms that a checkpoint was trained with and the library does not know stop the run; without a
// checkpoint there is nothing to continue.
static int tune_alone(struct run *run, const struct resume *resume, struct error *err)
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

// Rank 0 chooses for all.
static int tune(struct run *run, const struct resume *resume, struct error *err)
{
    struct session *session = &run->session;
    if (session->backend->gemm_tune == NULL)
        return 0;
    if (session_rank(session) == 0 && tune_alone(run, resume, err) != 0)
        return -1;
    if (session_ranks(session) == 1)
        return 0;
    ranks_share(session->ranks, &session->execution, sizeof(session->execution), 0);
    return session_rank(session) == 0 ? 0 : step_tune(&run->step, &session->execution, err);
}

// A checkpoint's counters that were edited would lead behind the rows.
static int check_place(const struct run *run, const struct resume *resume, struct error *err)
{
    const struct counters *c = &run->counters;
    const struct session_steps *steps = &run->steps;
    if (c->step >= steps->total ||
        ((uint64_t)c->epoch < steps->epochs && c->row < steps->epoch_rows[c->epoch]))
        return 0;
    return error_set(err,
                     "%s/state.json: step %lld ends with row %lld of epoch %lld, which is not "
                     "one of this run's; the file was edited",
                     resume->path, (long long)c->step, (long long)c->row, (long long)c->epoch);
}

// What rank 0 alone writes from here on.
static int start_folder(struct run *run, const struct resume *resume, struct error *err)
{
    if (session_rank(&run->session) != 0)
        return 0;
    if (resume_freeze(&run->folder, &run->session, err) != 0)
        return -1;
    return run_folder_start(&run->folder, resume->path != NULL ? &run->counters : NULL,
                            run->config.log.tensorboard, err);
}

static int open_writer(struct run *run, struct error *err)
{
    const struct config *config = &run->config;
    const struct session *session = &run->session;
    run->info = (struct checkpoint_info){.config = config,
                                         .execution = &session->execution,
                                         .sizes = &session->sizes,
                                         .target = &session->target,
                                         .map = session->has_map ? &session->map : NULL,
                                         .target_name = session->target_name,
                                         .data_fingerprint = session_fingerprint(session),
                                         .target_fingerprint = target_fingerprint(&session->target),
                                         .command = run->options->command};
    return checkpoint_writer_open(&run->writer, run->folder.checkpoints, &session->params,
                                  &session->ownership, &run->info, config->checkpoint.keep,
                                  config->checkpoint.background, err);
}

// Where the run begins, once its folder is open. *status as in run_open.
static int start_run(struct run *run, struct resume *resume, int *status, struct error *err)
{
    struct config *config = &run->config;
    struct session *session = &run->session;
    if (find_start(run, resume, status, err) != 0)
        return -1;
    if (resume->path == NULL && session_open_release(session, &run->release, err) != 0)
        return -1;
    if (admit(run, resume, err) != 0)
        return -1;
    if (open_writer(run, err) != 0) {
        *status = EXIT_FAILED;
        return -1;
    }
    if (load_state(run, resume, status, err) != 0 || run_check_bad_fraction(run, err) != 0)
        return -1;
    session_count_steps(session, &run->steps);
    if (check_place(run, resume, err) != 0) {
        *status = EXIT_FAILED;
        return -1;
    }
    if (run_work_open(&run->work, session, err) != 0)
        return -1;
    compare_schedule(run, resume);
    if (open_source(run, err) != 0)
        return -1;
    *status = EXIT_FAILED;
    log_configure((enum log_level)config->log.level, session_rank(session));
    // Readers fill the first rows while products are timed.
    if (session->has_val &&
        validation_open(&run->validation, session, &run->step, config->validation.rows, err) != 0)
        return -1;
    if (open_prefetch(run, err) != 0)
        return -1;
    run->times.readers = timer_now();
    if (tune(run, resume, err) != 0)
        return -1;
    if (start_folder(run, resume, err) != 0)
        return -1;
    run->times.products = timer_now();
    return 0;
}

// Ranks have threads, so documents come first; what is wrong with them is told when the ranks have met.
static int open_session(struct run *run, struct error *err)
{
    struct error fault = {""};
    struct config *config = &run->config;
    if (log_rank() != 0) // what all ranks would say at the start is rank 0's to say
        log_configure(LOG_ERROR, log_rank());
    int status = session_open_data(&run->session, config, SESSION_TRAIN | SESSION_VAL, &fault);
    if (ranks_open(&run->ranks, config, err) != 0)
        return -1;
    if (ranks_rank(run->ranks) != 0)
        log_configure(LOG_ERROR, ranks_rank(run->ranks));
    if (status != 0)
        return error_set(err, "%s", fault.text);
    if (session_open_model(&run->session, err) != 0)
        return -1;
    return session_join(&run->session, run->ranks, err);
}

int run_open(struct run *run, int *status, struct error *err)
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
    if (open_session(run, err) != 0)
        return -1;
    run->times.session = timer_now();
    run->begin_bytes = (size_t)run_peak_memory(run);
    struct resume resume = {.choice = options->resume, .replan = options->replan};
    // A new run that does not fit leaves no folder behind.
    bool likely = resume_likely(&resume, config->run.dir);
    ranks_share(run->ranks, &likely, sizeof(likely), 0);
    if (!likely && plan_admit(session, ADMIT_NEW, &run->planned_bytes, err) != 0)
        return -1;
    if (session_rank(session) != 0)
        run_folder_name(&run->folder, config->run.dir);
    else if (run_folder_open(&run->folder, config->run.dir, err) != 0)
        return -1;
    int result = start_run(run, &resume, status, err);
    resume_release(&resume);
    return result;
}

void run_close(struct run *run)
{
    // Readers share the session and log; their rows stay until step_close has ended copies from them.
    bool ended = validation_stop(run->validation);
    ended = prefetch_stop(run->prefetch) && ended;
    ranks_close(run->ranks);
    step_close(&run->step);
    ended = checkpoint_writer_close(run->writer) && ended;
    run_folder_close(&run->folder);
    release_close(&run->release);
    if (!ended)
        return; // the process ends; until then a thread that is left behind may use all that is left
    validation_close(run->validation);
    prefetch_close(run->prefetch);
    source_close(run->source);
    run_spool_close(run->spool);
    session_close(&run->session);
    config_release(&run->config);
    session_steps_release(&run->steps);
    row_shares_release(&run->shares);
    free(run);
}
