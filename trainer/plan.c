// Owns the sums of a plan: which parts there are and how large. Owns no choice (plan_choose.c) and no
// output (plan_print.c).
#include "trainer/plan.h"
#include "trainer/plan_work.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "kernels/cuda_sizes.h"

#define PART_NCCL "NCCL" // of several ranks

static bool on_cpu(const struct execution *e)
{
    return strcmp(e->device, "cpu") == 0;
}

static bool computes_fp32(const struct plan *plan)
{
    return strcmp(plan->execution.compute, "fp32") == 0;
}

static void add_part(struct plan_part *parts, size_t *count, const char *name, size_t bytes)
{
    BUG_UNLESS(*count < PLAN_PARTS);
    snprintf(parts[*count].name, sizeof(parts[*count].name), "%s", name);
    parts[(*count)++].bytes = bytes;
}

static bool has_part(const struct plan *plan, const char *name)
{
    for (size_t i = 0; i < plan->device_count; i++)
        if (strcmp(plan->device[i].name, name) == 0)
            return true;
    return false;
}

static void sum_device(struct plan *plan, const struct plan_subject *subject)
{
    const struct arena *arena = &plan->arena;
    plan->device_count = 0;
    for (size_t i = 0; i < arena->count; i++) {
        const char *group = arena->entries[i].group;
        if (!has_part(plan, group))
            add_part(plan->device, &plan->device_count, group, arena_group_bytes(arena, group));
    }
    add_part(plan->device, &plan->device_count, "workspaces",
             subject->backend->stream_workspace_bytes((int)plan->execution.threads));
    if (!on_cpu(&plan->execution))
        add_part(plan->device, &plan->device_count, "CUDA context", CUDA_CONTEXT_BYTES);
    if (!on_cpu(&plan->execution))
        add_part(plan->device, &plan->device_count, PART_NCCL, 0);
}

struct feature_layout plan_token_layout(const struct plan_subject *subject)
{
    return feature_layout_make(subject->planes, subject->last_plane >= 0,
                               subject->target->hidden_size, subject->float8);
}

// A packed row in host memory (data/row.h): features, and ids, positions, documents and masks.
static size_t row_bytes(const struct plan_subject *subject, int64_t seq_len)
{
    struct feature_layout features = plan_token_layout(subject);
    size_t token = (size_t)features.stride * sizeof(bf16);
    size_t small = 3 * sizeof(int32_t) + 2 * sizeof(uint8_t) + 2 * sizeof(int64_t) + sizeof(void *);
    return (size_t)seq_len * (token + small);
}

// Embedding, head and norm as they lie in files: mapped, so that the system may drop them.
static size_t target_bytes(const struct target *target)
{
    size_t bytes = 0;
    const struct target_tensor *tensors[] = {&target->embed, &target->norm, &target->head};
    for (size_t i = 0; i < (target->tied ? 2 : 3); i++)
        bytes += (size_t)(tensors[i]->rows * tensors[i]->columns) * dtype_size(tensors[i]->dtype);
    return bytes;
}

// Of the rank whose state is largest.
static size_t state_bytes_of(const struct plan *plan, int64_t ranks, int arrays, size_t unit)
{
    struct ownership ownership;
    ownership_open(&ownership, &plan->params, (int)ranks, 0);
    const struct state_layout layout = {&plan->params, &ownership, &plan->optimizer};
    size_t bytes = state_most_bytes(&layout, arrays, unit);
    ownership_close(&ownership);
    return bytes;
}

// Of the rank that owns most; of several, rank 0 has all weights as servers read them besides.
static size_t snapshot_bytes(const struct plan *plan, int64_t ranks)
{
    size_t bytes = state_bytes_of(plan, ranks, STATE_ARRAYS, 1);
    return bytes + (ranks > 1 ? (size_t)plan->params.elements * sizeof(bf16) : 0);
}

static void sum_host(struct plan *plan, const struct plan_subject *subject,
                     const struct config *config)
{
    size_t row = row_bytes(subject, config->data.seq_len);
    plan->host_count = 0;
    if (subject->training) {
        add_part(plan->host, &plan->host_count, "prefetched rows",
                 (size_t)(config->data.prefetch_rows + 1) * row);
        add_part(plan->host, &plan->host_count, "checkpoint snapshot",
                 snapshot_bytes(plan, subject->ranks));
    }
    if (subject->validates || !subject->training)
        add_part(plan->host, &plan->host_count, "validation rows", 2 * row);
    if (subject->documents > 0)
        add_part(plan->host, &plan->host_count, "documents",
                 (size_t)subject->documents * sizeof(struct document));
    add_part(plan->host, &plan->host_count, "target (mapped files)", target_bytes(subject->target));
}

static void sum(struct plan *plan, const struct plan_subject *subject, const struct config *config)
{
    struct step_setup setup = {.config = config,
                               .execution = &plan->execution,
                               .backend = subject->backend,
                               .target = subject->target,
                               .sizes = &plan->sizes,
                               .params = &plan->params,
                               .planes = subject->planes,
                               .plane = subject->plane,
                               .last_plane = subject->last_plane,
                               .last_hidden = subject->last_hidden,
                               .float8 = subject->float8,
                               .training = subject->training};
    arena_release(&plan->arena);
    arena_init(&plan->arena);
    step_plan(&plan->arena, &setup);
    sum_device(plan, subject);
    sum_host(plan, subject, config);
    plan->needed = plan_needed(plan, subject->ranks);
    plan->fits = subject->limit == 0 || plan->needed <= subject->limit;
}

int plan_make(struct plan *plan, const struct plan_subject *subject, const struct config *config,
              const struct execution *fixed, struct error *err)
{
    *plan = (struct plan){.fits = false};
    if (drafter_sizes_resolve(&plan->sizes, &config->drafter, subject->target, subject->layer_ids,
                              subject->features, err) != 0)
        return -1;
    if (subject->draft_vocab > 0)
        plan->sizes.draft_vocab = subject->draft_vocab;
    drafter_params(&plan->sizes, &plan->params);
    if (execution_choose(&plan->execution, config, &plan->sizes, subject->backend, err) != 0)
        return -1;
    plan->execution.world_size = subject->ranks;
    plan->trains = subject->training;
    plan->optimizer = config->optimizer;
    plan->first = plan_cut_of(&plan->execution);
    if (fixed != NULL)
        plan->execution = *fixed;
    struct plan_cut cut = plan->first;
    size_t rung = 0;
    sum(plan, subject, config);
    while (!plan->fits && fixed == NULL &&
           plan_thriftier(&cut, &plan->first, config, plan->sizes.block_size, &rung)) {
        plan->execution.group_rows = cut.group_rows;
        plan->execution.chunk_rows = cut.chunk_rows;
        memcpy(plan->execution.recompute, cut.recompute, sizeof(cut.recompute));
        sum(plan, subject, config);
    }
    return 0;
}

void plan_release(struct plan *plan)
{
    arena_release(&plan->arena);
    params_release(&plan->params);
}

static size_t planned(size_t bytes)
{
    return (bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
}

// Masters and moments of the rank that owns most. In fp32 the masters are the weights; owned by ranks they
// are not, and every rank needs them all.
static size_t optimizer_bytes(const struct plan *plan, int64_t ranks)
{
    int arrays = plan->trains ? STATE_ARRAYS : 1;
    size_t bytes = state_bytes_of(plan, ranks, arrays, ARENA_ALIGNMENT);
    if (computes_fp32(plan))
        bytes += planned((size_t)plan->params.elements * sizeof(float));
    return bytes;
}

size_t plan_part_bytes(const struct plan *plan, size_t part, int64_t ranks)
{
    const struct plan_part *p = &plan->device[part];
    BUG_UNLESS(ranks > 0 && ranks <= PLAN_MOST_RANKS);
    if (ranks > 1 && strcmp(p->name, "optimizer") == 0)
        return optimizer_bytes(plan, ranks);
    if (strcmp(p->name, PART_NCCL) == 0)
        return ranks_gpu_bytes(ranks);
    size_t bytes = p->bytes;
    if (ranks > 1 && strcmp(p->name, "weights") == 0)
        bytes += planned((size_t)plan->params.norm_elements * sizeof(float));
    if (ranks > 1 && strcmp(p->name, "gradients") == 0)
        bytes += planned(plan->params.count * sizeof(double)); // squares of each rank's own
    return bytes;
}

size_t plan_device_bytes(const struct plan *plan, int64_t ranks)
{
    size_t bytes = 0;
    for (size_t i = 0; i < plan->device_count; i++)
        bytes += plan_part_bytes(plan, i, ranks);
    return bytes;
}

size_t plan_host_bytes(const struct plan *plan)
{
    size_t bytes = 0;
    for (size_t i = 0; i < plan->host_count; i++)
        bytes += plan->host[i].bytes;
    return bytes;
}

size_t plan_host_needed(const struct plan *plan)
{
    size_t bytes = 0;
    for (size_t i = 0; i < plan->host_count; i++)
        if (strncmp(plan->host[i].name, "target", 6) != 0)
            bytes += plan->host[i].bytes;
    return bytes;
}

size_t plan_needed(const struct plan *plan, int64_t ranks)
{
    size_t bytes = plan_device_bytes(plan, ranks);
    return on_cpu(&plan->execution) ? bytes + plan_host_needed(plan) : bytes;
}
