// Owns the words for why a step is cut as it is.
#include <stdio.h>
#include <string.h>

#include "base/byte_size.h"
#include "trainer/plan_print.h"

static const char *device(const struct plan *plan)
{
    return strcmp(plan->execution.device, "cpu") == 0 ? "a CPU" : "a GPU";
}

static void why_group(const struct plan *plan, const struct config *config, char *text)
{
    char number[PLAN_NUMBER_TEXT];
    int64_t most = execution_most_rows(config, &plan->sizes);
    if (plan->execution.group_rows != plan->first.group_rows)
        snprintf(text, PLAN_WHY_TEXT, "less than the usual %s of %s, so that it fits",
                 plan_number(plan->first.group_rows, number), device(plan));
    else if (plan->execution.group_rows + plan->sizes.block_size > most)
        snprintf(text, PLAN_WHY_TEXT, "as many as a row can have");
    else if (config->memory.group_rows != 0 &&
             config->memory.group_rows != plan->execution.group_rows)
        snprintf(text, PLAN_WHY_TEXT, "%s were given, which are not whole blocks of %lld",
                 plan_number(config->memory.group_rows, number), (long long)plan->sizes.block_size);
    else if (config->memory.group_rows != 0)
        snprintf(text, PLAN_WHY_TEXT, "given");
    else
        snprintf(text, PLAN_WHY_TEXT, "usual for %s: more take memory and no longer save time",
                 device(plan));
}

static void why_chunk(const struct plan *plan, const struct config *config, char *text)
{
    char number[PLAN_NUMBER_TEXT], size[BYTE_SIZE_TEXT];
    const struct execution *e = &plan->execution;
    double bytes = (double)e->chunk_rows * (double)plan->sizes.vocab *
                   (strcmp(e->logits, "bf16") == 0 ? 2.0 : 4.0);
    byte_size_text(bytes, size);
    if (e->chunk_rows != plan->first.chunk_rows)
        snprintf(text, PLAN_WHY_TEXT, "less than the usual %s, so that it fits: %s of logits",
                 plan_number(plan->first.chunk_rows, number), size);
    else
        snprintf(text, PLAN_WHY_TEXT, "%s: students and teachers, %s of logits",
                 config->memory.chunk_rows == 0               ? "chosen"
                 : config->memory.chunk_rows == e->chunk_rows ? "given"
                                                              : "fewer were given, the least",
                 size);
}

static void why_recompute(const struct plan *plan, const struct config *config, char *text)
{
    const char *level = plan->execution.recompute;
    const char *what = strcmp(level, "layer") == 0 ? "the backward pass computes whole layers again"
                       : strcmp(level, "cheap") == 0
                           ? "the backward pass computes norms and MLP activations again"
                           : "the backward pass computes nothing again";
    const char *why = config->memory.recompute != RECOMPUTE_AUTO  ? "given"
                      : strcmp(level, plan->first.recompute) != 0 ? "so that it fits"
                      : config->memory.mode == MEMORY_LOW         ? "by memory.mode low"
                                                                  : "usual";
    snprintf(text, PLAN_WHY_TEXT, "%s: %s", why, what);
}

static void why_logits(const struct plan *plan, char *text)
{
    if (strcmp(plan->execution.logits, "bf16") == 0)
        snprintf(text, PLAN_WHY_TEXT, "given: half the bytes, less exact gradients");
    else if (strcmp(plan->execution.compute, "bf16") == 0)
        snprintf(text, PLAN_WHY_TEXT, "exact; bf16 would halve them and is never chosen unasked");
    else
        snprintf(text, PLAN_WHY_TEXT, "as run.compute");
}

const char *plan_why(const struct plan *plan, const struct config *config, const char *what,
                     char text[PLAN_WHY_TEXT])
{
    if (strcmp(what, "group_rows") == 0)
        why_group(plan, config, text);
    else if (strcmp(what, "chunk_rows") == 0)
        why_chunk(plan, config, text);
    else if (strcmp(what, "recompute") == 0)
        why_recompute(plan, config, text);
    else
        why_logits(plan, text);
    return text;
}
