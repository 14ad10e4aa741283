// Owns the names of reported numbers and what becomes of them: a line in metrics.jsonl, scalars in
// events/, the progress line. Does not own how they are computed (loss/metrics.h).
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "trainer/json_text.h"
#include "trainer/run_folder.h"

static const char *const term_names[LOSS_TERM_COUNT] = {
    [LOSS_KL] = "kl",           [LOSS_REVERSE_KL] = "reverse_kl",
    [LOSS_JS] = "js",           [LOSS_CE_TEACHER] = "ce_teacher",
    [LOSS_CE_DATA] = "ce_data", [LOSS_TV] = "tv",
    [LOSS_NLA] = "nla",         [LOSS_LK] = "lk",
};

// One object of metrics.jsonl in the making; what is a curve goes to events/ as well.
struct line {
    cJSON *object;
    const char *prefix;        // of names: "" or "val_"
    const char *group;         // of tags: "train" or "val"
    const char *slots;         // of the tags of accuracies
    struct event_file *events; // NULL: none
};

static void add_value(struct line *line, const char *name, double value)
{
    char full[64];
    snprintf(full, sizeof(full), "%s%s", line->prefix, name);
    json_add_real(line->object, full, value);
}

static void add_whole(struct line *line, const char *name, double value)
{
    char full[64];
    snprintf(full, sizeof(full), "%s%s", line->prefix, name);
    json_add_int(line->object, full, (int64_t)value);
}

// TensorBoard's tag of a value: group/name, the name without prefix.
static void draw(const struct line *line, const char *group, const char *name, double value)
{
    if (line->events == NULL || !isfinite(value))
        return;
    char tag[64];
    snprintf(tag, sizeof(tag), "%s/%s", group, name);
    event_file_scalar(line->events, tag, value);
}

// A value that is also a curve.
static void add_curve(struct line *line, const char *name, double value)
{
    add_value(line, name, value);
    draw(line, line->group, name, value);
}

// A curve of what the run takes, not of what it learns.
static void add_cost(struct line *line, const char *group, const char *name, double value)
{
    add_value(line, name, value);
    draw(line, group, name, value);
}

static struct line begin_line(const struct run_folder *folder, int64_t step, int64_t epoch,
                              bool validation)
{
    struct line line = {.object = cJSON_CreateObject(),
                        .prefix = validation ? "val_" : "",
                        .group = validation ? "val" : "train",
                        .slots = validation ? "val_acc" : "acc",
                        .events = folder->events};
    if (line.events != NULL)
        event_file_begin(line.events, step);
    json_add_int(line.object, "step", step);
    json_add_int(line.object, "epoch", epoch);
    return line;
}

static double ratio(double part, double whole)
{
    return whole > 0.0 ? part / whole : (double)NAN;
}

typedef double accuracy_fn(const struct metrics *metrics, int k);

static void add_slots(struct line *line, const char *name, const char *tag, accuracy_fn *accuracy,
                      const struct metrics *metrics, int64_t block_size)
{
    char text[32];
    snprintf(text, sizeof(text), "%s%s", line->prefix, name);
    cJSON *array = cJSON_AddArrayToObject(line->object, text);
    for (int64_t k = 0; k < block_size; k++) {
        double value = accuracy(metrics, (int)k);
        cJSON_AddItemToArray(array, json_real(value));
        snprintf(text, sizeof(text), "%s_%02lld", tag, (long long)k);
        draw(line, line->slots, text, value);
    }
}

// Scored slots whose teacher wants a token outside the draft vocabulary.
static double outside_share(const struct metrics *metrics)
{
    double scored = 0.0;
    for (int k = 0; k < METRICS_MAX_BLOCK; k++)
        scored += metrics->scored[k];
    return ratio(metrics->outside, scored);
}

static void add_eagle3(struct line *line, const struct metrics *metrics, int64_t ttt_steps,
                       bool ttt, bool draft_vocab)
{
    if (ttt)
        add_slots(line, "acc_given", "given", metrics_conditional, metrics, ttt_steps);
    if (draft_vocab)
        add_curve(line, "outside_share", outside_share(metrics));
}

// What training and validation have in common.
static void add_metrics(struct line *line, const struct metrics *metrics, int normalize,
                        int64_t block_size)
{
    add_curve(line, "loss", metrics->slots > 0.0 ? metrics_loss(metrics, normalize) : (double)NAN);
    add_curve(line, "accept_len", metrics_accept_len(metrics));
    add_curve(line, "eal_marginal", metrics_eal_marginal(metrics));
    add_slots(line, "acc", "slot", metrics_accuracy, metrics, block_size);
    add_curve(line, "overlap", metrics_overlap(metrics));
    add_whole(line, "rows", metrics->rows);
    add_whole(line, "tokens", metrics->tokens);
    add_value(line, "supervised_share", ratio(metrics->supervised, metrics->tokens));
    add_value(line, "coverage", ratio(metrics->covered, metrics->supervised));
    add_whole(line, "anchors", metrics->anchors);
    add_whole(line, "valid_anchors", metrics->valid_anchors);
    add_whole(line, "slots", metrics->slots);
    add_value(line, "weight", metrics->weight);
    add_whole(line, "bad_documents", metrics->bad_documents);
}

static void add_terms(struct line *line, const struct step_report *report)
{
    const struct metrics *metrics = report->metrics;
    double divisor = report->normalize == NORMALIZE_COUNT ? metrics->slots : metrics->weight;
    for (int t = 0; t < LOSS_TERM_COUNT; t++) {
        char name[32];
        snprintf(name, sizeof(name), "loss_%s", term_names[t]);
        if (report->term_weights[t] > 0.0)
            add_curve(line, name, ratio(metrics->terms[t], divisor));
    }
}

static void add_times(struct line *line, const struct step_report *r)
{
    static const char time[] = "time";
    add_cost(line, time, "seconds", r->seconds);
    add_cost(line, time, "wait_seconds", r->wait_seconds);
    add_cost(line, time, "copy_seconds", r->copy_seconds);
    add_cost(line, time, "forward_seconds", r->forward_seconds);
    add_cost(line, time, "loss_seconds", r->loss_seconds);
    add_cost(line, time, "backward_seconds", r->backward_seconds);
    add_cost(line, time, "optimizer_seconds", r->optimizer_seconds);
    if (r->ranks > 1)
        add_cost(line, time, "exchange_seconds", r->exchange_seconds);
    add_cost(line, time, "save_seconds", r->save_seconds);
    add_cost(line, time, "read_seconds", r->read_seconds);
    add_cost(line, time, "disk_seconds", r->disk_seconds);
    if (r->spool)
        add_cost(line, time, "spool_wait_seconds", r->spool_wait_seconds);
}

static void add_rates(struct line *line, const struct step_report *r)
{
    static const char speed[] = "speed";
    double block_rows = r->metrics->anchors * (double)r->block_size;
    add_cost(line, speed, "tokens_per_second", ratio(r->metrics->tokens, r->seconds));
    add_cost(line, speed, "block_rows_per_second", ratio(block_rows, r->seconds));
    add_cost(line, speed, "wait_share", ratio(r->wait_seconds + r->copy_seconds, r->seconds));
    add_value(line, "flops", r->flops);
    if (r->peak_flops > 0.0)
        add_cost(line, speed, "mfu", ratio(r->flops, r->seconds * r->peak_flops));
    add_whole(line, "read_bytes", r->read_bytes);
    add_cost(line, speed, "read_gb_per_second", 1e-9 * ratio(r->read_bytes, r->read_seconds));
    add_whole(line, "memory_bytes", r->memory_bytes);
    draw(line, speed, "memory_bytes", r->memory_bytes);
    add_whole(line, "begin_bytes", r->begin_bytes);
    add_whole(line, "planned_bytes", r->planned_bytes);
    if (r->spool)
        add_whole(line, "spool_bytes", r->spool_bytes);
}

// One write, taken back when it is not whole: lines that follow must not continue half a line.
static int write_line(struct run_folder *folder, const char *text, struct error *err)
{
    int fd = fileno(folder->metrics);
    off_t end = lseek(fd, 0, SEEK_END);
    size_t size = strlen(text), done = 0;
    while (done < size) {
        ssize_t n = write(fd, text + done, size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            break;
        done += (size_t)n;
    }
    if (done == size)
        return 0;
    int cause = errno;
    if (done > 0 && ftruncate(fd, end) != 0)
        log_warn("%s/metrics.jsonl: half a line could not be taken back: %s", folder->path,
                 strerror(errno));
    if (cause != ENOSPC && cause != EDQUOT)
        return error_set(err, "%s/metrics.jsonl: writing failed: %s", folder->path,
                         strerror(cause));
    if (!folder->metrics_failed)
        log_warn("%s/metrics.jsonl: %s; the run goes on without its lines until there is room",
                 folder->path, strerror(cause));
    folder->metrics_failed = true;
    return 0;
}

static int end_line(struct run_folder *folder, struct line *line, struct error *err)
{
    char *body = cJSON_PrintUnformatted(line->object);
    char *text = memory_format("%s\n", body);
    int result = write_line(folder, text, err);
    if (line->events != NULL)
        event_file_end(line->events);
    free(text);
    cJSON_free(body);
    cJSON_Delete(line->object);
    return result;
}

// ---- progress ------------------------------------------------------------------------------------

static void format_time(char *text, size_t size, double seconds)
{
    long long s = (long long)seconds;
    snprintf(text, size, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
}

static void fade(double *sum, double value)
{
    *sum = 0.95 * *sum + value; // the last 20 steps or so
}

static void remember(struct run_folder *folder, const struct step_report *report)
{
    struct recent *recent = &folder->recent;
    fade(&recent->steps, 1.0);
    fade(&recent->seconds, report->seconds);
    fade(&recent->wait, report->wait_seconds);
    fade(&recent->copy, report->copy_seconds);
    fade(&recent->forward, report->forward_seconds);
    fade(&recent->loss, report->loss_seconds);
    fade(&recent->backward, report->backward_seconds);
    fade(&recent->optimizer, report->optimizer_seconds);
    fade(&recent->exchange, report->exchange_seconds);
    fade(&recent->save, report->save_seconds);
    fade(&recent->tokens, report->metrics->tokens);
    fade(&recent->flops, report->flops);
    folder->steps += 1.0;
}

// Of steps as they were recently, checkpoints between them, and validations as they came so far.
static double time_left(const struct run_folder *folder, const struct step_report *report)
{
    const struct recent *recent = &folder->recent;
    double step = (recent->seconds + recent->save) / recent->steps;
    double validation = folder->validation_seconds / folder->steps;
    return (step + validation) * (double)(report->total_steps - report->step);
}

// "  forward 24 %, loss 31 %": where the time goes, without what takes none.
static void format_parts(const struct recent *recent, char *text, size_t size)
{
    const struct {
        const char *name;
        double seconds;
    } parts[] = {{"data", recent->wait},         {"copy", recent->copy},
                 {"forward", recent->forward},   {"loss", recent->loss},
                 {"backward", recent->backward}, {"update", recent->optimizer},
                 {"exchange", recent->exchange}, {"checkpoint", recent->save}};
    size_t at = 0;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts) && at < size; i++) {
        double percent = 100.0 * ratio(parts[i].seconds, recent->seconds);
        if (percent >= 0.5)
            at += (size_t)snprintf(text + at, size - at, "%s%s %.0f %%", at > 0 ? ", " : "  ",
                                   parts[i].name, percent);
    }
}

static void show_progress(struct run_folder *folder, const struct step_report *report,
                          int64_t every)
{
    const struct recent *recent = &folder->recent;
    remember(folder, report);
    bool last = report->step == report->total_steps;
    if (!folder->terminal && report->step % every != 0 && !last)
        return;
    char eta[32], mfu[32] = "", outside[48] = "", parts[240] = "", text[640];
    format_time(eta, sizeof(eta), time_left(folder, report));
    if (report->peak_flops > 0.0)
        snprintf(mfu, sizeof(mfu), "  MFU %.1f %%",
                 100.0 * ratio(recent->flops, recent->seconds * report->peak_flops));
    if (report->draft_vocab)
        snprintf(outside, sizeof(outside), "  outside the draft vocabulary %.1f %%",
                 100.0 * outside_share(report->metrics));
    if (!folder->terminal)
        format_parts(recent, parts, sizeof(parts));
    // What matters first: a terminal's line is cut to its width.
    snprintf(text, sizeof(text),
             "step %lld/%lld  ETA %s%s  loss %.4f  accept_len %.3f%s  %.0f tokens/s  data wait "
             "%.0f %%%s  "
             "lr %.3g  %.2f GB%s",
             (long long)report->step, (long long)report->total_steps, eta,
             report->skipped ? "  (skipped)" : "", metrics_loss(report->metrics, report->normalize),
             metrics_accept_len(report->metrics), outside, ratio(recent->tokens, recent->seconds),
             100.0 * ratio(recent->wait + recent->copy, recent->seconds), mfu, report->lr,
             1e-9 * report->memory_bytes, parts);
    if (folder->terminal)
        log_status_line(text);
    else
        log_info("%s", text);
}

// ---- the two reports -----------------------------------------------------------------------------

int run_folder_step(struct run_folder *folder, const struct step_report *report, int64_t every,
                    struct error *err)
{
    struct line line = begin_line(folder, report->step, report->epoch, false);
    add_metrics(&line, report->metrics, report->normalize, report->block_size);
    add_eagle3(&line, report->metrics, report->block_size, report->ttt, report->draft_vocab);
    add_terms(&line, report);
    add_curve(&line, "lr", report->lr);
    add_curve(&line, "grad_norm", report->grad_norm);
    add_curve(&line, "clip_factor", report->clip_factor);
    cJSON_AddBoolToObject(line.object, "skipped", report->skipped);
    add_times(&line, report);
    add_rates(&line, report);
    show_progress(folder, report, every);
    wait_watch_step(&folder->watch, report);
    return end_line(folder, &line, err);
}

int run_folder_validation(struct run_folder *folder, const struct validation_report *report,
                          struct error *err)
{
    struct line line = begin_line(folder, report->step, report->epoch, true);
    double walk = walk_accept_len(report->walk);
    add_curve(&line, "accept_len_walk", walk);
    for (size_t i = 0; i < report->draft_tokens->count; i++) {
        int64_t n = report->draft_tokens->items[i];
        char name[40];
        snprintf(name, sizeof(name), "accept_len_walk_%lld", (long long)n);
        add_curve(&line, name, walk_accept_len_drafts(report->walk, n));
    }
    add_whole(&line, "walk_blocks", report->walk->blocks);
    add_metrics(&line, report->metrics, report->normalize, report->block_size);
    add_eagle3(&line, report->metrics, report->block_size, report->ttt, report->draft_vocab);
    add_value(&line, "seconds", report->seconds);
    cJSON_AddBoolToObject(line.object, "val_best", report->best);
    if (folder->steps > 0.0) // the one before the first step does not come again
        folder->validation_seconds += report->seconds;
    log_info("validation at step %lld: accept_len_walk %.4f%s, accept_len %.4f, loss %.4f, %.1f s",
             (long long)report->step, walk, report->best ? " (best)" : "",
             metrics_accept_len(report->metrics), metrics_loss(report->metrics, report->normalize),
             report->seconds);
    return end_line(folder, &line, err);
}
