// Owns the comparison of a run's plan with the memory that is free, and the words of a refusal.
#include "trainer/plan_admit.h"

#include <string.h>

#include "base/byte_size.h"
#include "base/host_memory.h"
#include "base/log.h"
#include "kernels/cuda_sizes.h"
#include "trainer/plan_fit.h"
#include "trainer/plan_print.h"

// Ranks that share a machine's memory.
static size_t machine_ranks(const struct session *session)
{
    return session->local_ranks > 1 ? (size_t)session->local_ranks : 1;
}

// All ranks choose alike, so the one that has least decides.
static size_t least_of_ranks(const struct session *session, size_t bytes)
{
    int64_t least = -(int64_t)bytes;
    if (session_ranks(session) > 1)
        ranks_max(session->ranks, &least, 1);
    return (size_t)-least;
}

size_t plan_begun_bytes(int64_t ranks, size_t joined_bytes)
{
    size_t nccl = ranks_gpu_bytes(ranks);
    return CUDA_CONTEXT_BEGUN_BYTES + (joined_bytes < nccl ? joined_bytes : nccl);
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

// What a run may take in all. On a GPU most of the context that the plan counts is there already, and what NCCL takes.
static size_t free_memory(const struct session *session)
{
    size_t left = 0, total = 0, used, begun;
    uint64_t limit = config_memory_limit(session->config);
    session->backend->memory(&left, &total);
    used = total - left;
    begun = plan_begun_bytes(session_ranks(session), session->joined_bytes);
    if (strcmp(session->backend->name, "cpu") == 0)
        left = least(left / machine_ranks(session),
                     host_memory_address_space((int)session->execution.threads));
    else
        left += used < begun ? used : begun;
    return least_of_ranks(session, limit > 0 && limit < left ? (size_t)limit : left);
}

struct plan_subject plan_session_subject(const struct session *session, bool training)
{
    const struct documents *documents = session_documents(session);
    struct plan_subject subject = {.target = &session->target,
                                   .backend = session->backend,
                                   .features = session->features,
                                   .planes = documents->planes,
                                   .last_plane = session->last_plane,
                                   .last_hidden = documents->last_hidden,
                                   .float8 = documents->features.float8,
                                   .training = training,
                                   .validates = session->has_val,
                                   .documents =
                                       (int64_t)(session->train.count + session->val.count),
                                   .draft_vocab = session->has_map ? session->map.draft_size : 0,
                                   .ranks = session_ranks(session)};
    memcpy(subject.plane, session->plane, sizeof(subject.plane));
    memcpy(subject.layer_ids, session->sizes.target_layer_ids, sizeof(subject.layer_ids));
    return subject;
}

// ---- refusal -------------------------------------------------------------------------------------

struct refusal {
    const struct plan_subject *subject;
    const struct config *config;
    const struct plan *plan;
    enum plan_admission how;
    struct error offers;
    int lines; // of values that fit
};

// A run that continues may only be cut otherwise when it is told so.
static const char *with(const struct refusal *r)
{
    return r->how == ADMIT_FROZEN || r->how == ADMIT_REPLANNED ? "--replan " : "";
}

static void offer(struct refusal *r, const char *sets, size_t needed, const char *price)
{
    char bytes[BYTE_SIZE_TEXT];
    error_add(&r->offers, "  %s%s needs %s%s", with(r), sets, byte_size_text((double)needed, bytes),
              price);
    r->lines++;
}

// A variant of the memory section, said when it fits. Returns what it needs.
static size_t offer_memory(struct refusal *r, const struct memory_config *memory, const char *sets,
                           const char *price)
{
    struct config config = *r->config;
    struct plan plan;
    struct error err = {""};
    config.memory = *memory;
    if (plan_make(&plan, r->subject, &config, NULL, &err) == 0 && plan.fits)
        offer(r, sets, plan.needed, price);
    size_t needed = plan.needed;
    plan_release(&plan);
    return needed;
}

// The largest value that fits; of none how far the one that takes least is away.
static void offer_largest(struct refusal *r, const char *key, const char *price)
{
    struct plan_fit fit;
    struct error err = {""};
    char sets[128], need[BYTE_SIZE_TEXT], gap[BYTE_SIZE_TEXT];
    if (plan_fit_key(&fit, r->subject, r->config, r->plan, key, true, &err) != 0)
        return;
    if (fit.found) {
        snprintf(sets, sizeof(sets),
                 fit.lists_types ? "%s=%lld with a list drafter.layer_types of as many"
                                 : "--set %s=%lld",
                 key, (long long)fit.largest.value);
        offer(r, sets, fit.largest.needed, price);
    } else if (fit.next.needed > r->subject->limit) {
        error_add(&r->offers, "  no %s: %lld still needs %s, %s too much", key,
                  (long long)fit.next.value, byte_size_text((double)fit.next.needed, need),
                  byte_size_text((double)(fit.next.needed - r->subject->limit), gap));
    }
}

// Keys that cost only time, each alone, then all of them.
static void offer_cuts(struct refusal *r)
{
    const struct memory_config given = r->config->memory;
    struct memory_config memory = given;
    bool halves = strcmp(r->plan->execution.compute, "bf16") == 0 && given.logits == LOGITS_FP32;
    static const char slower[] = ", and a longer step";
    if (given.group_rows != 0)
        offer_largest(r, "memory.group_rows", slower);
    if (given.chunk_rows != 0)
        offer_largest(r, "memory.chunk_rows", slower);
    if (given.recompute == RECOMPUTE_NONE || given.recompute == RECOMPUTE_CHEAP) {
        memory.recompute = RECOMPUTE_LAYER;
        offer_memory(r, &memory, "--set memory.recompute=layer", slower);
        memory = given;
    }
    if (halves) {
        memory.logits = LOGITS_BF16;
        offer_memory(r, &memory, "--set memory.logits=bf16", ", and less exact gradients");
        memory = given;
    }
    if (r->lines > 0)
        return;
    static const char open[] =
        "--set memory.group_rows=0 --set memory.chunk_rows=0 --set memory.recompute=auto";
    char sets[160], bytes[BYTE_SIZE_TEXT];
    memory.group_rows = memory.chunk_rows = 0;
    memory.recompute = RECOMPUTE_AUTO;
    size_t needed = offer_memory(r, &memory, open, slower);
    if (r->lines == 0 && halves) {
        memory.logits = LOGITS_BF16;
        snprintf(sets, sizeof(sets), "%s --set memory.logits=bf16", open);
        needed = offer_memory(r, &memory, sets, ", a longer step and less exact gradients");
    }
    if (r->lines == 0)
        error_add(&r->offers, "  none of memory.*: all of them together still need %s",
                  byte_size_text((double)needed, bytes));
}

static void offer_replan(struct refusal *r)
{
    struct plan plan;
    struct error err = {""};
    char bytes[BYTE_SIZE_TEXT];
    if (plan_make(&plan, r->subject, r->config, NULL, &err) == 0 && plan.fits) {
        error_add(&r->offers,
                  "  --replan lets it be cut smaller: %s; the continued run is then not bitwise "
                  "the same",
                  byte_size_text((double)plan.needed, bytes));
        r->lines++;
    }
    plan_release(&plan);
}

static int add_offers(struct refusal *r, struct error *err)
{
    bool resumes = r->how == ADMIT_FROZEN || r->how == ADMIT_REPLANNED;
    if (r->how == ADMIT_FROZEN)
        offer_replan(r);
    if (r->lines == 0)
        offer_cuts(r);
    if (r->how == ADMIT_NEW) {
        offer_largest(r, "data.seq_len", ", and documents are cut at it");
        offer_largest(r, "drafter.layers", ", and another drafter");
    }
    error_add(err, "%s\n%s",
              r->lines > 0 ? "nearest that fit:" : "nothing near fits:", r->offers.text);
    if (resumes && r->lines == 0)
        error_add(err, "a smaller data.seq_len or fewer drafter.layers need a new run");
    // A plan takes auto for a GPU, also where there is none.
    bool cpu = strcmp(r->plan->execution.device, "cpu") == 0;
    return r->how != ADMIT_NEW ? -1
                               : error_add(err, "dtrain plan --config %s --fit%s looks further",
                                           r->config->file, cpu ? " --set run.device=cpu" : "");
}

static const char *limited_by(const struct plan_subject *subject, const struct config *config,
                              const struct plan *plan)
{
    if (config_memory_limit(config) == subject->limit)
        return "allowed by memory.limit";
    if (strcmp(plan->execution.device, "cpu") != 0)
        return "free";
    if (host_memory_address_space((int)plan->execution.threads) <= subject->limit)
        return "left by ulimit -v";
    return host_memory_read().in_group ? "left by the control group of this container or job"
                                       : "free";
}

static int refuse(const struct plan_subject *subject, const struct config *config,
                  const struct plan *plan, enum plan_admission how, struct error *err)
{
    struct refusal r = {.subject = subject, .config = config, .plan = plan, .how = how};
    char need[BYTE_SIZE_TEXT], have[BYTE_SIZE_TEXT], parts[1024];
    bool cpu = strcmp(plan->execution.device, "cpu") == 0;
    plan_summary(plan, subject->ranks, parts, sizeof(parts));
    error_set(err, "this run needs %s of %s memory, %s are %s",
              byte_size_text((double)plan->needed, need), cpu ? "this machine's" : "GPU",
              byte_size_text((double)subject->limit, have), limited_by(subject, config, plan));
    error_add(err, "  %s", parts);
    error_add(err, "  with group_rows %lld, chunk_rows %lld, recompute %s, logits %s%s",
              (long long)plan->execution.group_rows, (long long)plan->execution.chunk_rows,
              plan->execution.recompute, plan->execution.logits,
              how == ADMIT_FROZEN ? ", as its first start chose"
                                  : ": the least that the config leaves open");
    return add_offers(&r, err);
}

// Beside a GPU, the host's part is memory of its own, most of it pinned.
static int check_host(const struct session *session, const struct plan *plan, struct error *err)
{
    size_t available = 0, total = 0, needed = plan_host_needed(plan);
    char need[BYTE_SIZE_TEXT], have[BYTE_SIZE_TEXT], text[BYTE_SIZE_TEXT], parts[512] = "";
    size_t at = 0;
    if (strcmp(plan->execution.device, "cpu") == 0)
        return 0;
    backend_cpu()->memory(&available, &total);
    available = least_of_ranks(session, available / machine_ranks(session));
    if (needed <= available)
        return 0;
    for (size_t i = 0; i < plan->host_count && at < sizeof(parts); i++)
        at +=
            (size_t)snprintf(parts + at, sizeof(parts) - at, "%s%s %s", i > 0 ? ", " : "",
                             plan->host[i].name, byte_size_text((double)plan->host[i].bytes, text));
    error_set(err, "this run needs %s of host memory%s, %s are available%s",
              byte_size_text((double)needed, need), machine_ranks(session) > 1 ? " a rank" : "",
              byte_size_text((double)available, have),
              host_memory_read().in_group ? " in the control group of this container or job" : "");
    return error_add(err,
                     "  %s\nfewer data.prefetch_rows, a smaller data.seq_len or fewer "
                     "drafter.layers need less",
                     parts);
}

// What was cut below the usual, once it is known to fit.
static void log_cut(const struct plan *plan)
{
    struct plan_cut now = plan_cut_of(&plan->execution);
    const struct plan_cut *usual = &plan->first;
    char group[64] = "", chunk[64] = "", recompute[64] = "", need[BYTE_SIZE_TEXT];
    if (plan_cut_equal(&now, usual))
        return;
    if (now.group_rows != usual->group_rows)
        snprintf(group, sizeof(group), "group_rows %lld instead of %lld, ",
                 (long long)now.group_rows, (long long)usual->group_rows);
    if (now.chunk_rows != usual->chunk_rows)
        snprintf(chunk, sizeof(chunk), "chunk_rows %lld instead of %lld, ",
                 (long long)now.chunk_rows, (long long)usual->chunk_rows);
    if (strcmp(now.recompute, usual->recompute) != 0)
        snprintf(recompute, sizeof(recompute), "recompute %s instead of %s, ", now.recompute,
                 usual->recompute);
    log_info("memory: %s%s%sso that %s suffice", group, chunk, recompute,
             byte_size_text((double)plan->needed, need));
}

int plan_admit(struct session *session, enum plan_admission how, size_t *planned, struct error *err)
{
    struct plan plan;
    bool frozen = how == ADMIT_FROZEN;
    struct plan_subject subject = plan_session_subject(session, how != ADMIT_SCORING);
    subject.limit = free_memory(session);
    int status =
        plan_make(&plan, &subject, session->config, frozen ? &session->execution : NULL, err);
    if (status == 0 && !plan.fits)
        status = refuse(&subject, session->config, &plan, how, err);
    if (status == 0)
        status = check_host(session, &plan, err);
    if (status == 0 && !frozen)
        log_cut(&plan);
    if (status == 0)
        session->execution = plan.execution;
    if (planned != NULL)
        *planned = plan.needed;
    plan_release(&plan);
    return status;
}
