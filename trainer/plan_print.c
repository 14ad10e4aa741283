// Owns the text of a plan: tables in GiB, choices with their reasons, work and disk.
#include "trainer/plan_print.h"

#include <inttypes.h>
#include <string.h>

#include "base/byte_size.h"

static const int64_t rank_columns[] = {1, 2, 4, 8};
enum { RANK_COLUMNS = sizeof(rank_columns) / sizeof(*rank_columns) };

const char *plan_number(int64_t value, char text[PLAN_NUMBER_TEXT])
{
    char digits[24];
    int n = snprintf(digits, sizeof(digits), "%" PRId64, value < 0 ? -value : value);
    char *at = text;
    if (value < 0)
        *at++ = '-';
    for (int i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0)
            *at++ = ',';
        *at++ = digits[i];
    }
    *at = '\0';
    return text;
}

// The unit of a table: what its total is large in.
struct unit {
    const char *name;
    double size;
};

static struct unit byte_unit(size_t total)
{
    return total >= (size_t)1 << 30 ? (struct unit){"GiB", 0x1p30} : (struct unit){"MiB", 0x1p20};
}

static struct unit flop_unit(double total)
{
    return total >= 1e12 ? (struct unit){"TFLOP", 1e12} : (struct unit){"GFLOP", 1e9};
}

static void print_model(const struct plan_report *r, FILE *out)
{
    const struct drafter_sizes *s = &r->plan->sizes;
    const struct plan_subject *subject = &r->input->subject;
    char a[PLAN_NUMBER_TEXT], b[PLAN_NUMBER_TEXT];
    fprintf(out, "target    %s\n", r->input->target_from);
    fprintf(out, "          hidden %s, vocabulary %s, %s\n", plan_number(s->hidden, a),
            plan_number(s->vocab, b),
            subject->target->tied ? "the embedding is the head" : "a head of its own");
    fprintf(out, "drafter   %lld layer%s, %lld/%lld heads of %lld, MLP %s, ", (long long)s->layers,
            s->layers == 1 ? "" : "s", (long long)s->heads, (long long)s->kv_heads,
            (long long)s->head_dim, plan_number(s->intermediate, a));
    if (s->kind == DRAFTER_EAGLE3)
        fprintf(out, "%lld ttt_steps, a %s head of %s tokens: ", (long long)s->ttt_steps,
                s->trainable_head ? "trained" : "frozen", plan_number(s->draft_vocab, a));
    else
        fprintf(out, "blocks of %lld: ", (long long)s->block_size);
    if (s->markov_rank > 0)
        fprintf(out, "a Markov head of rank %lld, ", (long long)s->markov_rank);
    fprintf(out, "%.1f M parameters, computed in %s\n", (double)r->plan->params.trainable * 1e-6,
            r->plan->execution.compute);
    fprintf(out, "rows      %lld a step, %s tokens of %lld planes (%s bytes a token)\n",
            (long long)r->config->data.rows_per_step, plan_number(r->config->data.seq_len, a),
            (long long)subject->planes, plan_number((int64_t)plan_token_bytes(subject), b));
    fprintf(out, "          from %s\n", r->input->data_from);
    if (r->input->no_shards[0] != '\0')
        fprintf(out, "          no shards yet: %s\n", r->input->no_shards);
    for (const char *line = r->input->missing_shards.text; *line != '\0'; line += line[0] == '\n') {
        size_t n = strcspn(line, "\n");
        fprintf(out, "          left out: %.*s\n", (int)n, line);
        line += n;
    }
}

static void print_rank_row(const struct plan_report *r, FILE *out, size_t part, struct unit unit)
{
    const struct plan *plan = r->plan;
    fprintf(out, "  %-20s", part < plan->device_count ? plan->device[part].name : "total");
    for (size_t i = 0; i < RANK_COLUMNS; i++) {
        size_t bytes = part < plan->device_count ? plan_part_bytes(plan, part, rank_columns[i])
                                                 : plan_device_bytes(plan, rank_columns[i]);
        fprintf(out, " %9.2f", (double)bytes / unit.size);
    }
    fprintf(out, "\n");
}

static size_t shared_bytes(const struct arena *arena, const char *group)
{
    size_t sum = 0;
    for (size_t i = 0; i < arena->count; i++)
        if (arena->entries[i].shared && strcmp(arena->entries[i].group, group) == 0)
            sum += arena->entries[i].bytes;
    return sum;
}

// Parts of unions that are not the largest.
static void print_shared(const struct plan_report *r, FILE *out, struct unit unit)
{
    const struct plan *plan = r->plan;
    bool any = false;
    for (size_t i = 0; i < plan->device_count; i++) {
        size_t bytes = shared_bytes(&plan->arena, plan->device[i].name);
        if (bytes > 0)
            fprintf(out, "%s %s %.2f",
                    any ? "," : "  In the same place as what is counted, at another time:",
                    plan->device[i].name, (double)bytes / unit.size);
        any |= bytes > 0;
    }
    if (any)
        fprintf(out, ".\n");
}

static void print_share(const struct plan_report *r, FILE *out)
{
    char text[BYTE_SIZE_TEXT], label[64];
    if (r->device_memory == 0)
        return;
    snprintf(label, sizeof(label), "of %s", byte_size_text((double)r->device_memory, text));
    fprintf(out, "  %-20s", label);
    for (size_t i = 0; i < RANK_COLUMNS; i++)
        fprintf(out, " %7.1f %%",
                100.0 * (double)plan_needed(r->plan, rank_columns[i]) / (double)r->device_memory);
    fprintf(out, "\n");
}

static void print_device(const struct plan_report *r, FILE *out)
{
    struct unit unit = byte_unit(plan_device_bytes(r->plan, 1));
    char title[32];
    bool cpu = strcmp(r->plan->execution.device, "cpu") == 0;
    snprintf(title, sizeof(title), "%s, %s on", cpu ? "step" : "GPU memory", unit.name);
    fprintf(out, "\n%-22s", title);
    for (size_t i = 0; i < RANK_COLUMNS; i++) {
        snprintf(title, sizeof(title), "%lld rank%s", (long long)rank_columns[i],
                 i == 0 ? "" : "s");
        fprintf(out, " %9s", title);
    }
    fprintf(out, "\n");
    for (size_t part = 0; part <= r->plan->device_count; part++)
        print_rank_row(r, out, part, unit);
    print_share(r, out);
    print_shared(r, out, unit);
    fprintf(out,
            "  On several ranks optimizer state and master weights belong to ranks as whole\n"
            "  tensors.%s\n",
            cpu ? "" : " The CUDA context and NCCL are estimates.");
}

static void print_host(const struct plan_report *r, FILE *out)
{
    const struct plan *plan = r->plan;
    struct unit unit = byte_unit(plan_host_bytes(plan));
    fprintf(out, "\nhost memory, %s a rank\n", unit.name);
    for (size_t i = 0; i < plan->host_count; i++)
        fprintf(out, "  %-21s %8.2f\n", plan->host[i].name,
                (double)plan->host[i].bytes / unit.size);
    fprintf(out, "  %-21s %8.2f\n", "total", (double)plan_host_bytes(plan) / unit.size);
}

static void print_choice(const struct plan_report *r, FILE *out, const char *name,
                         const char *value)
{
    char why[PLAN_WHY_TEXT];
    fprintf(out, "  %-11s %-8s %s\n", name, value, plan_why(r->plan, r->config, name, why));
}

static void print_choices(const struct plan_report *r, FILE *out)
{
    const struct execution *e = &r->plan->execution;
    char text[PLAN_NUMBER_TEXT];
    fprintf(out, "\nchoices (memory.*)\n");
    print_choice(r, out, "group_rows", plan_number(e->group_rows, text));
    print_choice(r, out, "chunk_rows", plan_number(e->chunk_rows, text));
    print_choice(r, out, "recompute", e->recompute);
    print_choice(r, out, "logits", e->logits);
}

// What a step computes on: blocks at anchors, or positions with all their ttt_steps.
static void print_step_rows(const struct plan_report *r, FILE *out)
{
    const struct plan_work *w = r->work;
    const struct drafter_sizes *s = &r->plan->sizes;
    char a[PLAN_NUMBER_TEXT], b[PLAN_NUMBER_TEXT];
    fprintf(out, "\none step: %lld row%s of %s ", (long long)w->rows, w->rows == 1 ? "" : "s",
            plan_number((int64_t)w->anchors, a));
    if (s->kind == DRAFTER_EAGLE3)
        fprintf(out, "positions, %lld ttt_step%s each, ", (long long)s->ttt_steps,
                s->ttt_steps == 1 ? "" : "s");
    else
        fprintf(out, "anchors, %s block rows each, ", plan_number((int64_t)w->block_rows, b));
    fprintf(out, "in %.0f group%s\n", w->groups, w->groups > 1.0 ? "s" : "");
}

static void print_work(const struct plan_report *r, FILE *out)
{
    const struct plan_work *w = r->work;
    struct unit unit = flop_unit(w->flops);
    print_step_rows(r, out);
    const struct {
        const char *name;
        double flops;
    } lines[] = {{"context", w->context},
                 {"layers forward", w->forward},
                 {"layers backward", w->backward},
                 {"layers again", w->recompute},
                 {"attention", w->attention},
                 {"loss, students", w->student},
                 {"loss, teachers", w->teacher},
                 {"loss, gradient", w->gradient},
                 {"Muon", w->update},
                 {"total", w->flops}};
    for (size_t i = 0; i < sizeof(lines) / sizeof(*lines); i++)
        if (lines[i].flops > 0.0)
            fprintf(out, "  %-20s %9.2f %s\n", lines[i].name, lines[i].flops / unit.size,
                    unit.name);
    fprintf(out,
            "  %s sees %.0f tokens of context\n"
            "  on average%s.\n",
            r->plan->sizes.kind == DRAFTER_EAGLE3
                ? "Every token supervised; a position"
                : "Every anchor drawn, every token supervised; a block row",
            w->visible, w->guessed ? ", were every row one document" : " over these documents");
    if (strcmp(r->plan->execution.device, "cpu") == 0)
        return;
    fprintf(out, "  %-20s %9.2f s at %.0f TFLOP/s and %.1f TB/s for the update, on one GPU\n",
            "at least", w->seconds, r->tflops, plan_bandwidth * 1e-12);
    if (r->input->subject.ranks > 1)
        fprintf(out, "  %-20s %9.2f s on %lld GPUs\n", "at least", w->rank_seconds,
                (long long)r->input->subject.ranks);
}

static const char *time_text(double seconds, char text[PLAN_NUMBER_TEXT])
{
    bool hours = seconds >= 3600.0, minutes = seconds >= 60.0;
    snprintf(text, PLAN_NUMBER_TEXT, "%.1f %s",
             seconds / (hours     ? 3600.0
                        : minutes ? 60.0
                                  : 1.0),
             hours     ? "h"
             : minutes ? "min"
                       : "s");
    return text;
}

static void print_run(const struct plan_report *r, FILE *out)
{
    const struct plan_work *w = r->work;
    char a[PLAN_NUMBER_TEXT], b[PLAN_NUMBER_TEXT];
    int64_t rows = r->input->documents.rows;
    fprintf(out, "\nthe run: epochs %s", plan_number(r->config->run.epochs, a));
    if (r->config->run.max_steps > 0)
        fprintf(out, ", max_steps %s", plan_number(r->config->run.max_steps, a));
    if (rows > 0)
        fprintf(out, "\n  %-20s %s rows, %s steps\n", "an epoch", plan_number(rows, a),
                plan_number(w->epoch_steps, b));
    else
        fprintf(out,
                "\n  Rows of an epoch are not known without the shards of data.train: one for\n"
                "  every %s tokens at least.\n",
                plan_number(r->config->data.seq_len, a));
    if (w->steps == 0)
        return;
    bool about = rows > 0 && r->config->run.epochs > 1 && w->steps != r->config->run.max_steps;
    fprintf(out, "  %-20s %s%s%s\n", "steps", about ? "about " : "", plan_number(w->steps, a),
            rows > 0 ? "" : " at most, by run.max_steps");
    if (strcmp(r->plan->execution.device, "cpu") != 0)
        fprintf(out, "  %-20s %s, validation and checkpoints not counted\n", "at least",
                time_text(w->seconds * (double)w->steps, a));
    if (rows > 0)
        fprintf(out,
                "  Training leaves out documents without a supervised token, which count here;\n"
                "  another epoch may have a row more or less.\n");
}

static void print_disk(const struct plan_report *r, FILE *out)
{
    char a[BYTE_SIZE_TEXT], b[BYTE_SIZE_TEXT], c[PLAN_NUMBER_TEXT], d[PLAN_NUMBER_TEXT];
    const struct plan_documents *documents = &r->input->documents;
    double token = plan_token_bytes(&r->input->subject);
    double checkpoint = plan_checkpoint_bytes(r->plan);
    double kept = (double)(r->config->checkpoint.keep + (r->config->checkpoint.best ? 1 : 0));
    fprintf(out, "\ndisk\n  %-20s %s a step\n", "read", byte_size_text(r->work->read_bytes, a));
    if (documents->tokens > 0)
        fprintf(out, "  %-20s %s: %s tokens of %s documents\n", "data set",
                byte_size_text(documents->file_bytes, a), plan_number(documents->tokens, c),
                plan_number(documents->documents, d));
    else
        fprintf(out, "  %-20s %s for a million tokens\n", "data set",
                byte_size_text(1e6 * token, a));
    fprintf(out, "  %-20s %s, %s for the %.0f that are kept\n", "checkpoint",
            byte_size_text(checkpoint, a), byte_size_text(checkpoint * kept, b), kept);
}

// What was asked for several ranks need not hold on one.
static void print_one_rank(const struct plan_report *r, FILE *out)
{
    char text[BYTE_SIZE_TEXT];
    size_t needed = plan_needed(r->plan, 1);
    fprintf(out, "; on one rank this cut %s: %s",
            needed <= r->device_memory ? "fits" : "does not fit",
            byte_size_text((double)needed, text));
}

static void print_verdict(const struct plan_report *r, FILE *out)
{
    char need[BYTE_SIZE_TEXT], have[BYTE_SIZE_TEXT], gap[BYTE_SIZE_TEXT];
    double needed = (double)r->plan->needed, limit = (double)r->device_memory;
    if (r->device_memory == 0) {
        fprintf(out, "\nneeds %s", byte_size_text(needed, need));
        if (r->input->subject.ranks > 1)
            fprintf(out, " on each of %lld ranks, %s on one", (long long)r->input->subject.ranks,
                    byte_size_text((double)plan_needed(r->plan, 1), have));
        fprintf(out, "; --device-memory 96GiB says whether that fits\n");
        return;
    }
    byte_size_text(needed, need);
    byte_size_text(limit, have);
    byte_size_text(needed > limit ? needed - limit : limit - needed, gap);
    fprintf(out, "\n%s", r->plan->fits ? "fits" : "does not fit");
    if (r->input->subject.ranks > 1)
        fprintf(out, " on each of %lld ranks", (long long)r->input->subject.ranks);
    fprintf(out, ": %s of %s (%s), %s %s", need, have, r->memory_from, gap,
            r->plan->fits ? "to spare" : "too much");
    if (r->input->subject.ranks > 1)
        print_one_rank(r, out);
    fprintf(out, "%s\n", r->plan->fits || r->fitting ? "" : "; --fit finds what does");
}

void plan_print(const struct plan_report *r, FILE *out)
{
    bool cpu = strcmp(r->plan->execution.device, "cpu") == 0;
    const char *where = "";
    if (r->input->device == PLAN_DEVICE_NONE)
        where = r->config->run.device == DEVICE_AUTO
                    ? "; there is none here, so a run here would take the CPU: --set run.device=cpu"
                    : "; there is none here, and none is needed";
    fprintf(out, "plan of %s for %s%s\n\n", r->config->file != NULL ? r->config->file : "a config",
            cpu ? "the CPU" : "a GPU", where);
    print_model(r, out);
    print_device(r, out);
    print_host(r, out);
    print_choices(r, out);
    print_work(r, out);
    print_run(r, out);
    print_disk(r, out);
    print_verdict(r, out);
}

void plan_summary(const struct plan *plan, int64_t ranks, char *text, size_t size)
{
    char bytes[BYTE_SIZE_TEXT];
    size_t at = 0;
    text[0] = '\0';
    for (size_t i = 0; i < plan->device_count && at < size; i++)
        if (plan_part_bytes(plan, i, ranks) > 0)
            at += (size_t)snprintf(text + at, size - at, "%s %s, ", plan->device[i].name,
                                   byte_size_text((double)plan_part_bytes(plan, i, ranks), bytes));
    bool cpu = strcmp(plan->execution.device, "cpu") == 0;
    if (cpu && at < size)
        at += (size_t)snprintf(
            text + at, size - at, "host %s, ",
            byte_size_text((double)(plan_needed(plan, ranks) - plan_device_bytes(plan, ranks)),
                           bytes));
    if (at < size)
        snprintf(text + at, size - at, "together %s",
                 byte_size_text((double)plan_needed(plan, ranks), bytes));
}
