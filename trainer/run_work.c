// Owns the peak rates of known devices and the count of a run's useful operations.
#include "trainer/run_work.h"

#include <ctype.h>
#include <string.h>

#include "trainer/plan_admit.h"

// Of the makers' data sheets, without sparsity. A longer name stands before its beginning.
static const struct {
    const char *name;
    double tflops;
} peaks[] = {
    {"GB200", 2500.0},    {"B200", 2250.0},    {"GH200", 989.0},        {"H200", 989.0},
    {"H100 PCIe", 756.0}, {"H100 NVL", 835.0}, {"H100", 989.0},         {"H800 PCIe", 756.0},
    {"H800", 989.0},      {"H20", 148.0},      {"A100", 312.0},         {"A800", 312.0},
    {"A40", 149.7},       {"A30", 165.0},      {"A10", 125.0},          {"L40S", 362.0},
    {"L40", 181.0},       {"L4", 121.0},       {"RTX 6000 Ada", 364.2}, {"RTX A6000", 154.8},
    {"RTX 5090", 209.5},  {"RTX 4090", 165.2}, {"RTX 3090", 71.0},
};

// As whole words: H20 is not in H200.
static bool is_named(const char *hardware, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = hardware; (at = strstr(at, name)) != NULL; at++)
        if ((at == hardware || !isalnum((unsigned char)at[-1])) &&
            !isalnum((unsigned char)at[length]))
            return true;
    return false;
}

double run_work_peak(const char *hardware)
{
    if (is_named(hardware, "MIG")) // a part of a device
        return 0.0;
    for (size_t i = 0; i < sizeof(peaks) / sizeof(*peaks); i++)
        if (is_named(hardware, peaks[i].name))
            return peaks[i].tflops;
    return 0.0;
}

static double peak_of(const struct session *session)
{
    const struct execution *e = &session->execution;
    double tflops = session->config->log.peak_tflops;
    if (!(tflops > 0.0) && strcmp(e->device, "cpu") != 0 && strcmp(e->compute, "bf16") == 0)
        tflops = run_work_peak(e->hardware);
    return tflops * 1e12 * (double)session_ranks(session);
}

static struct plan_documents count_documents(const struct documents *documents)
{
    struct plan_documents d = {.shards = (int64_t)documents->shard_count,
                               .documents = (int64_t)documents->count,
                               .tokens = documents->tokens};
    double squares = 0.0;
    for (size_t i = 0; i < documents->count; i++)
        squares += (double)documents->items[i].length * (double)documents->items[i].length;
    d.mean_length = d.tokens > 0 ? squares / (double)d.tokens : 0.0;
    return d;
}

int run_work_open(struct run_work *work, const struct session *session, struct error *err)
{
    struct plan plan;
    struct plan_subject subject = plan_session_subject(session, true);
    struct plan_documents documents = count_documents(&session->train);
    int status = plan_make(&plan, &subject, session->config, &session->execution, err);
    if (status == 0)
        plan_work(&work->planned, &plan, &subject, session->config, &documents, PLAN_TFLOPS);
    plan_release(&plan);
    work->peak_flops = peak_of(session);
    return status;
}

double run_work_done(const struct run_work *work, const struct metrics *metrics)
{
    return plan_work_useful(&work->planned, &(struct plan_counts){.tokens = metrics->tokens,
                                                                  .anchors = metrics->anchors,
                                                                  .slots = metrics->slots,
                                                                  .covered = metrics->covered});
}
