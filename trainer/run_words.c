// Owns what a run says of itself: its start, its memory, steps that taught nothing.
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/byte_size.h"
#include "base/log.h"
#include "trainer/plan_admit.h"
#include "trainer/run.h"

// VmHWM begins with the program. getrusage's number begins with the process that became it: that of a launcher
// that is larger would be told as the run's.
static double peak_resident(void)
{
    struct rusage usage;
    char line[256];
    long long kib = -1;
    FILE *status = fopen("/proc/self/status", "re");
    while (status != NULL && kib < 0 && fgets(line, sizeof(line), status) != NULL)
        if (sscanf(line, "VmHWM: %lld", &kib) != 1)
            kib = -1;
    if (status != NULL)
        fclose(status);
    if (kib >= 0)
        return (double)kib * 1024.0;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss * 1024.0;
}

double run_peak_memory(struct run *run)
{
    size_t free_bytes, total_bytes;
    if (strcmp(run->session.execution.device, "cpu") == 0)
        return peak_resident();
    run->session.backend->memory(&free_bytes, &total_bytes);
    run->peak_bytes = fmax(run->peak_bytes, (double)(total_bytes - free_bytes));
    return run->peak_bytes;
}

void run_describe_start(const struct run *run)
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
    bool eagle3 = run->session.sizes.kind == DRAFTER_EAGLE3;
    log_info("drafter: %lld layer%s, %s %lld, %.2f M trainable parameters",
             (long long)run->session.sizes.layers, run->session.sizes.layers == 1 ? "" : "s",
             eagle3 ? "EAGLE-3, ttt_steps" : "blocks of", (long long)run->session.sizes.block_size,
             (double)run->session.params.trainable * 1e-6);
    if (eagle3)
        log_info("anchors: every position that a ttt_step is scored at");
    else
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

void run_report_memory(struct run *run)
{
    const struct session *session = &run->session;
    double peak = run_peak_memory(run);
    char most[BYTE_SIZE_TEXT], begin[BYTE_SIZE_TEXT], planned[BYTE_SIZE_TEXT], own[BYTE_SIZE_TEXT],
        rest[BYTE_SIZE_TEXT];
    byte_size_text(peak, most);
    byte_size_text((double)run->begin_bytes, begin);
    byte_size_text(peak - (double)run->begin_bytes, own);
    byte_size_text((double)run->planned_bytes, planned);
    if (strcmp(session->execution.device, "cpu") == 0) {
        log_info(
            "memory: %s resident at most: %s when the run began (the program and its libraries) "
            "and %s since, where %s were planned for step and host part, and the target's mapped "
            "files come on top",
            most, begin, own, planned);
        return;
    }
    // What other processes hold is in use on the card, too, and is in no plan.
    double begun = (double)plan_begun_bytes(session_ranks(session), session->joined_bytes);
    byte_size_text((double)run->planned_bytes - begun, rest);
    log_info("GPU memory: %s in use at most: %s when the run began (CUDA context%s, and all that "
             "other processes hold) and %s since, where %s of the planned %s were to come",
             most, begin, session_ranks(session) > 1 ? " and NCCL" : "", own, rest, planned);
}

// Documents of a rank's step.
struct named_documents {
    uint64_t ids[NAMED_DOCUMENTS];
    int64_t count; // of the step; the first ones are in ids
};

static void warn_nonfinite(const struct run *run, const char *tensor, const char *whose,
                           const struct named_documents *documents)
{
    char list[NAMED_DOCUMENTS * 24] = "";
    size_t at = 0;
    for (int64_t i = 0; i < documents->count && i < NAMED_DOCUMENTS; i++)
        at += (size_t)snprintf(list + at, sizeof(list) - at, " %llu",
                               (unsigned long long)documents->ids[i]);
    log_warn(
        "step %lld: the gradient of %s is not finite%s; the step is skipped. Its documents:%s%s",
        (long long)run->counters.step + 1, tensor, whose, list,
        documents->count > NAMED_DOCUMENTS ? " ..." : "");
}

// The ranks whose own gradients were not finite, or all of them when only the sum was not.
static void name_ranks(const struct run *run, const struct step_outcome *outcome,
                       const struct named_documents *own)
{
    const struct session *session = &run->session;
    bool any = step_word_max(&run->step, WORD_NONFINITE) > 0.0;
    for (int r = 0; r < session_ranks(session); r++) {
        int64_t tensor = (int64_t)run->step.exchange.words[r * STEP_WORDS + WORD_NONFINITE];
        struct named_documents documents = *own;
        char whose[64];
        if (any && tensor == 0)
            continue;
        ranks_share(session->ranks, &documents, sizeof(documents), r);
        snprintf(whose, sizeof(whose), any ? " on rank %d" : " when summed over ranks; rank %d", r);
        if (session_rank(session) == 0)
            warn_nonfinite(run, any ? session->params.items[tensor - 1].name : outcome->tensor,
                           whose, &documents);
    }
}

void run_name_nonfinite(const struct run *run, const struct step_outcome *outcome)
{
    struct named_documents own = {.count = run->step_doc_count};
    memcpy(own.ids, run->step_docs, sizeof(own.ids));
    if (session_ranks(&run->session) > 1)
        name_ranks(run, outcome, &own);
    else
        warn_nonfinite(run, outcome->tensor, "", &own);
}

const char *run_nothing_of(const struct metrics *metrics)
{
    if (metrics->supervised == 0.0)
        return "nothing supervised";
    return metrics->valid_anchors == 0.0 ? "no valid anchor" : "no slot of nonzero weight";
}

static void warn_no_anchors(const struct run *run)
{
    const struct counters *c = &run->counters;
    const struct documents *d = &run->session.train;
    log_warn(
        "nothing was learnt in %lld steps: not one had a block to train on, in %s%s%s. A valid "
        "anchor is a supervised token (loss_mask) that another one follows in the same "
        "document%s; look with: dtrain data stats FILE...",
        (long long)c->step, d->shards[0].path, d->shard_count > 1 ? " to " : "",
        d->shard_count > 1 ? d->shards[d->shard_count - 1].path : "",
        run->config.anchors.tail == TAIL_WHOLE ? ", and with anchors.tail whole a whole block"
                                               : "");
}

// Anchors depend on masks and lengths, which later epochs do not change.
void run_warn_nothing_learnt(const struct run *run)
{
    const struct counters *c = &run->counters;
    bool first_epoch_ends = c->epoch == 1 && c->row == 0;
    bool run_ends = c->epoch == 0 && c->step == run->steps.total;
    if (c->skipped_empty + c->skipped_nonfinite < c->step || !(first_epoch_ends || run_ends) ||
        session_rank(&run->session) != 0)
        return;
    if (c->skipped_nonfinite == 0)
        warn_no_anchors(run);
    else
        log_warn("nothing was learnt in %lld steps: in %lld of them a gradient was not finite, and "
                 "the others had no block to train on; look with: dtrain data check FILE...",
                 (long long)c->step, (long long)c->skipped_nonfinite);
}
