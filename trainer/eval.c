// `dtrain eval`: acceptance of a checkpoint on the validation shards.
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "trainer/checkpoint.h"
#include "trainer/commands.h"
#include "trainer/files.h"
#include "trainer/plan_admit.h"
#include "trainer/resume.h"
#include "trainer/session.h"
#include "trainer/signals.h"
#include "trainer/validation.h"

static void write_block(void *context, uint64_t doc_id, int32_t position, int32_t accepted)
{
    fprintf(context, "{\"doc_id\": %llu, \"anchor\": %d, \"accepted\": %d}\n",
            (unsigned long long)doc_id, position, accepted);
}

static void print_report(const struct session *session, const struct metrics *metrics,
                         const struct walk *walk)
{
    int64_t b = session->sizes.block_size;
    int64_t drafts = b - (session->sizes.predict_from_anchor ? 0 : 1);
    printf("rows                 %.0f\n", metrics->rows);
    printf("tokens               %.0f\n", metrics->tokens);
    printf("supervised           %.0f\n", metrics->supervised);
    printf("loss                 %.6f\n", metrics_loss(metrics, session->config->loss.normalize));
    printf("accept_len_walk      %.4f  (%.0f blocks)\n", walk_accept_len(walk), walk->blocks);
    for (int64_t n = 1; n < drafts; n++)
        printf("  with %2lld drafts     %.4f\n", (long long)n, walk_accept_len_drafts(walk, n));
    printf("accept_len           %.4f\n", metrics_accept_len(metrics));
    printf("eal_marginal         %.4f\n", metrics_eal_marginal(metrics));
    printf("overlap              %.4f\n", metrics_overlap(metrics));
    printf("acc                 ");
    for (int64_t k = 0; k < b; k++)
        if (metrics->scored[k] > 0.0)
            printf(" %.4f", metrics_accuracy(metrics, (int)k));
    printf("\n");
    if (session->sizes.kind != DRAFTER_EAGLE3)
        return;
    printf("acc_given           ");
    for (int64_t k = 0; k < b; k++)
        if (metrics->reached[k] > 0.0)
            printf(" %.4f", metrics_conditional(metrics, (int)k));
    printf("\n");
    if (session->has_map)
        printf(
            "outside              %.0f slots whose teacher wants a token that is not in the draft "
            "vocabulary\n",
            metrics->outside);
}

static void round_to_bf16(float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = bf16_to_float(bf16_from_float(values[i]));
}

// Loads the checkpoint's weights into a step that only scores.
static int load_weights(const struct session *session, const struct options *options,
                        struct step *step, struct error *err)
{
    struct model_state state;
    struct step_setup setup = session_step_setup(session, false);
    model_state_open_weights(&state, &session->params);
    bool average = !options->raw && checkpoint_has_average(options->checkpoint);
    int status = checkpoint_read_weights(options->checkpoint, &state, average, err);
    if (status == 0 && average)
        printf("weights              moving average (--raw: those that it is of)\n");
    if (status == 0 && options->served)
        round_to_bf16(state.master, session->params.elements);
    if (status == 0)
        status = step_open(step, &setup, err);
    if (status == 0)
        step_load(step, &state);
    model_state_close(&state);
    return status;
}

static int check_blocks(const struct options *options, struct error *err)
{
    if (options->blocks != NULL && files_check_write(options->blocks, err) != 0)
        return error_prefix(err, "--blocks");
    return 0;
}

static int open_blocks(const struct options *options, FILE **blocks, struct error *err)
{
    if (options->blocks != NULL && (*blocks = fopen(options->blocks, "we")) == NULL)
        return error_set(err, "--blocks %s: can not be written: %s", options->blocks,
                         strerror(errno));
    return 0;
}

static int check_loss(const struct session *session, const struct metrics *metrics,
                      struct error *err)
{
    if (isfinite(metrics_loss(metrics, session->config->loss.normalize)))
        return 0;
    if (target_check_finite(&session->target, err) != 0)
        return -1;
    return error_set(err, "the loss is not finite: a value of the checkpoint or of the features is "
                          "not; dtrain data check tells of the latter");
}

// Closes `blocks`.
static int evaluate(const struct options *options, struct session *session, struct step *step,
                    struct validation **validation, FILE *blocks, struct error *err)
{
    struct metrics metrics = {0};
    struct walk walk = {0};
    step->stop = signals_stop;
    int status = validation_open(validation, session, step, options->rows, err);
    if (status == 0)
        status = validation_run(*validation, step, &metrics, &walk,
                                blocks != NULL ? write_block : NULL, blocks, err);
    if (blocks != NULL && fclose(blocks) != 0 && status == 0)
        status = error_set(err, "--blocks %s: %s", options->blocks, strerror(errno));
    if (status == 1)
        return error_set(err, "stopped by signal %d", signals_received());
    if (status == 0)
        print_report(session, &metrics, &walk);
    if (status == 0 && walk.blocks > 0.0)
        status = check_loss(session, &metrics, err);
    if (status == 0 && !(walk.blocks > 0.0))
        log_warn("no valid anchor in the rows that were scored: these numbers say nothing");
    return status;
}

int command_eval(const struct options *options)
{
    struct config config;
    struct session session = {0};
    struct step step = {0};
    struct validation *validation = NULL;
    FILE *blocks = NULL;
    struct error err = {0};
    int status = EXIT_REFUSED;
    config_init(&config);
    signals_install();
    if (check_blocks(options, &err) != 0 ||
        session_config(&config, options->config, options->sets, options->set_count, SESSION_VAL,
                       &err) != 0 ||
        session_open(&session, &config, SESSION_VAL, &err) != 0)
        goto out;
    status = EXIT_FAILED;
    if (checkpoint_check(options->checkpoint, &err) != 0)
        goto out;
    status = EXIT_REFUSED;
    if (resume_check_drafter(options->checkpoint, &session, &err) != 0 ||
        plan_admit(&session, ADMIT_SCORING, NULL, &err) != 0)
        goto out;
    status = EXIT_FAILED;
    if (load_weights(&session, options, &step, &err) != 0)
        goto out;
    status = EXIT_REFUSED;
    if (open_blocks(options, &blocks, &err) != 0)
        goto out;
    status = evaluate(options, &session, &step, &validation, blocks, &err) == 0 ? EXIT_DONE
                                                                                : EXIT_FAILED;
out:
    if (status != EXIT_DONE)
        log_error("%s", err.text);
    step_close(&step); // ends copies from rows that validation frees
    if (!validation_close(validation))
        return status; // a reader that is left behind may use what is left
    session_close(&session);
    config_release(&config);
    return status;
}
