// Owns `dtrain data check` and `dtrain data stats`: the walk over files and documents, and the report.
// What is a fault of a shard is decided in shard.c, of a document in shard_scan.c.
#include "data/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "data/id_table.h"
#include "data/shard_probe.h"
#include "data/shard_scan.h"

enum {
    PIECE_BYTES = 64 << 20, // features read at once
    BUCKETS = 32            // lengths by powers of two
};

struct report {
    int64_t documents[BUCKETS], tokens[BUCKETS];
    int64_t shortest, longest;
    uint64_t bytes;
};

// A check, or the counting alone (scan false).
struct check {
    FILE *out;
    struct check_summary *summary;
    struct report report;
    struct id_table ids;
    char **paths; // of the files opened so far, by their index in ids
    int64_t opened;
    struct shard first; // what the others must agree with; open while has_first
    bool has_first;
    // of the document at hand
    int32_t *token_ids;
    uint8_t *mask;
    bf16 *hidden;
    int64_t token_capacity, hidden_capacity;
};

static void print_faults(struct check *check, const char *lines)
{
    while (*lines != '\0') {
        size_t length = strcspn(lines, "\n");
        fprintf(check->out, "%.*s\n", (int)length, lines);
        check->summary->faults++;
        lines += length + (lines[length] == '\n');
    }
}

static void report_document(struct check *check, int64_t length, int64_t supervised)
{
    struct report *report = &check->report;
    int bucket = 0;
    while (length >> (bucket + 1) > 0 && bucket + 1 < BUCKETS)
        bucket++;
    report->documents[bucket]++;
    report->tokens[bucket] += length;
    if (check->summary->documents == 0 || length < report->shortest)
        report->shortest = length;
    if (length > report->longest)
        report->longest = length;
    check->summary->documents++;
    check->summary->tokens += length;
    check->summary->supervised += supervised;
    check->summary->unsupervised += supervised == 0;
}

static void reserve_tokens(struct check *check, int64_t tokens)
{
    if (tokens <= check->token_capacity)
        return;
    check->token_capacity = tokens;
    check->token_ids = memory_resize(check->token_ids, (size_t)tokens, sizeof(*check->token_ids));
    check->mask = memory_resize(check->mask, (size_t)tokens, sizeof(*check->mask));
}

// Rows of features that are read at once.
static int64_t reserve_hidden(struct check *check, const struct shard *shard, int64_t length)
{
    int64_t values = shard->features.stride;
    int64_t rows = PIECE_BYTES / (values * (int64_t)sizeof(bf16));
    rows = rows < 1 ? 1 : rows;
    rows = rows < length ? rows : length;
    if (rows * values > check->hidden_capacity) {
        check->hidden_capacity = rows * values;
        check->hidden = memory_resize(check->hidden, (size_t)check->hidden_capacity, sizeof(bf16));
    }
    return rows;
}

static int scan_hidden(struct check *check, const struct shard *shard, int64_t document,
                       struct error *found)
{
    int64_t first = shard->doc_offsets[document];
    int64_t length = shard->doc_offsets[document + 1] - first;
    int64_t piece = reserve_hidden(check, shard, length);
    struct shard_scan scan;
    struct error unreadable = {""};
    shard_scan_open(&scan, shard, document, length, check->token_ids, check->mask, true, found);
    for (int64_t row = 0; row < length; row += piece) {
        int64_t rows = length - row < piece ? length - row : piece;
        if (shard_read_hidden(shard, first + row, rows, check->hidden, &unreadable) != 0) {
            scan.check_crc = false; // of what could be read it says nothing
            break;
        }
        shard_scan_feed(&scan, check->hidden, rows);
    }
    int result = shard_scan_close(&scan);
    if (unreadable.text[0] != '\0')
        result = error_add(found, "%s: document %" PRId64 ": %s", shard->path, document,
                           unreadable.text);
    return result;
}

static void check_duplicate(struct check *check, const struct shard *shard, int64_t document)
{
    const struct id_place *place =
        id_table_add(&check->ids, shard->doc_ids[document], (size_t)check->opened, document);
    if (place == NULL)
        return;
    struct error found = {""};
    error_set(&found,
              "%s: document %" PRId64 ": doc_id %" PRIu64 " is also that of document %d of %s",
              shard->path, document, shard->doc_ids[document], (int)place->document,
              check->paths[place->shard]);
    print_faults(check, found.text);
}

static int64_t count_supervised(const uint8_t *mask, int64_t length)
{
    int64_t supervised = 0;
    for (int64_t i = 0; i < length; i++)
        supervised += mask[i] == 1;
    return supervised;
}

static void check_document(struct check *check, const struct shard *shard, int64_t document,
                           struct verdict *verdict)
{
    int64_t first = shard->doc_offsets[document];
    int64_t length = shard->doc_offsets[document + 1] - first;
    struct error found = {""}, unreadable = {""};
    int result = 0;
    check_duplicate(check, shard, document);
    reserve_tokens(check, length);
    if (shard_read_ids(shard, first, length, check->token_ids, &unreadable) != 0 ||
        shard_read_mask(shard, first, length, check->mask, &unreadable) != 0) {
        result = error_set(&found, "%s: document %" PRId64 ": %s", shard->path, document,
                           unreadable.text);
    } else {
        int64_t supervised = count_supervised(check->mask, length);
        report_document(check, length, supervised);
        result = scan_hidden(check, shard, document, &found);
        if (supervised == 0)
            fprintf(check->out, "%s: document %" PRId64 ": no supervised token\n", shard->path,
                    document);
        check->summary->faults += supervised == 0;
    }
    if (result == 0)
        return;
    print_faults(check, found.text);
    verdict_add(verdict, shard, document, found.text);
}

// Teacher columns are proofs, not training data: faults in them make no document bad.
static void check_teacher(struct check *check, const struct shard *shard)
{
    enum { ROWS = 65536 };
    int32_t *top1 = memory_alloc(ROWS, sizeof(*top1));
    float *logit = memory_alloc(ROWS, sizeof(*logit)), *lse = memory_alloc(ROWS, sizeof(*lse));
    struct error found = {""};
    int64_t document = 0;
    for (int64_t first = 0; first < shard->tokens && found.text[0] == '\0'; first += ROWS) {
        int64_t count = shard->tokens - first < ROWS ? shard->tokens - first : ROWS;
        if (shard_read_teacher(shard, first, count, top1, logit, lse, &found) != 0)
            break;
        for (int64_t i = 0; i < count && found.text[0] == '\0'; i++) {
            while (shard->doc_offsets[document + 1] <= first + i)
                document++;
            if (top1[i] < 0 || top1[i] >= shard->vocab_size || !isfinite(logit[i]) ||
                !isfinite(lse[i]))
                error_set(&found,
                          "%s: document %" PRId64 ": row %" PRId64
                          ": teacher_top1 %d, teacher_top1_logit %g, teacher_lse %g are not what a "
                          "target computes",
                          shard->path, document, first + i - shard->doc_offsets[document],
                          (int)top1[i], (double)logit[i], (double)lse[i]);
        }
    }
    print_faults(check, found.text);
    free(top1);
    free(logit);
    free(lse);
}

static void write_verdict(const struct verdict *verdict, const struct shard *shard)
{
    struct error err = {""};
    if (verdict_write(verdict, shard, &err) != 0)
        log_warn("%s; training will not leave out the bad documents", err.text);
}

static void check_shard(struct check *check, const struct shard *shard, bool write_verdicts)
{
    struct verdict verdict;
    double start = timer_now();
    verdict_init(&verdict, shard);
    for (int64_t d = 0; d < shard->documents; d++)
        check_document(check, shard, d, &verdict);
    if (shard->has_teacher)
        check_teacher(check, shard);
    check->summary->bad_documents += verdict.bad_count;
    if (write_verdicts)
        write_verdict(&verdict, shard);
    verdict_release(&verdict);
    double seconds = timer_now() - start;
    log_debug("%s: %.2f GB checked in %.1f s", shard->path, (double)shard->file_size * 1e-9,
              seconds);
}

// Masks alone.
static int count_shard(struct check *check, const struct shard *shard, struct error *err)
{
    for (int64_t d = 0; d < shard->documents; d++) {
        int64_t first = shard->doc_offsets[d], length = shard->doc_offsets[d + 1] - first;
        reserve_tokens(check, length);
        if (shard_read_mask(shard, first, length, check->mask, err) != 0)
            return -1;
        report_document(check, length, count_supervised(check->mask, length));
    }
    return 0;
}

static void print_histogram(const struct report *report, FILE *out)
{
    fprintf(out, "%-21s %12s %14s\n", "tokens in a document", "documents", "tokens");
    for (int b = 0; b < BUCKETS; b++) {
        char range[48];
        if (report->documents[b] == 0)
            continue;
        snprintf(range, sizeof(range), "%" PRId64 " to %" PRId64, (int64_t)1 << b,
                 ((int64_t)2 << b) - 1);
        fprintf(out, "%-21s %12" PRId64 " %14" PRId64 "\n", range, report->documents[b],
                report->tokens[b]);
    }
}

static void print_report(const struct check *check, bool checked)
{
    const struct check_summary *summary = check->summary;
    FILE *out = check->out;
    double tokens = summary->tokens > 0 ? (double)summary->tokens : 1.0;
    double documents = summary->documents > 0 ? (double)summary->documents : 1.0;
    fprintf(out, "files %" PRId64 ", documents %" PRId64 ", tokens %" PRId64 "\n", summary->files,
            summary->documents, summary->tokens);
    fprintf(out, "bytes %" PRIu64 " (%.0f a token)\n", check->report.bytes,
            (double)check->report.bytes / tokens);
    fprintf(out, "supervised tokens %" PRId64 " (%.1f %%), documents without any %" PRId64 "\n",
            summary->supervised, 100.0 * (double)summary->supervised / tokens,
            summary->unsupervised);
    fprintf(out, "length: shortest %" PRId64 ", mean %.1f, longest %" PRId64 "\n",
            check->report.shortest, (double)summary->tokens / documents, check->report.longest);
    print_histogram(&check->report, out);
    if (checked)
        fprintf(out, "faults %" PRId64 ", bad documents %" PRId64 "\n", summary->faults,
                summary->bad_documents);
}

static void check_init(struct check *check, FILE *out, struct check_summary *summary, size_t count)
{
    *check = (struct check){.out = out, .summary = summary};
    *summary = (struct check_summary){.files = (int64_t)count};
    id_table_init(&check->ids);
    check->paths = memory_alloc(count, sizeof(*check->paths));
}

static void check_release(struct check *check)
{
    for (int64_t i = 0; i < check->opened; i++)
        free(check->paths[i]);
    if (check->has_first)
        shard_close(&check->first);
    free(check->paths);
    free(check->token_ids);
    free(check->mask);
    free(check->hidden);
    id_table_release(&check->ids);
}

// Takes over the shard: keeps the first one, closes the others.
static void finish_shard(struct check *check, struct shard *shard)
{
    check->paths[check->opened++] = memory_strdup(shard->path);
    check->report.bytes += shard->file_size;
    if (check->has_first) {
        shard_close(shard);
    } else {
        check->first = *shard;
        check->has_first = true;
    }
}

int data_check(const char *const *paths, size_t count, bool write_verdicts, FILE *out,
               struct check_summary *summary, struct error *err)
{
    if (count == 0)
        return error_set(err, "no shards were given");
    struct check check;
    char **damaged = shard_probe(paths, count);
    check_init(&check, out, summary, count);
    for (size_t i = 0; i < count; i++) {
        struct error found = {""};
        struct shard shard;
        if (shard_open_probed(&shard, paths[i], damaged[i], &found) != 0) {
            print_faults(&check, found.text);
            continue;
        }
        check.paths[check.opened] = shard.path;
        if (check.has_first && shard_compare(&check.first, &shard, &found) != 0)
            print_faults(&check, found.text);
        check_shard(&check, &shard, write_verdicts);
        finish_shard(&check, &shard);
    }
    print_report(&check, true);
    check_release(&check);
    shard_probe_free(damaged, count);
    if (fflush(out) != 0 || ferror(out))
        return error_set(err, "the report can not be written");
    return summary->faults > 0 ? 1 : 0;
}

int data_stats(const char *const *paths, size_t count, FILE *out, struct error *err)
{
    if (count == 0)
        return error_set(err, "no shards were given");
    struct check check;
    struct check_summary summary;
    int result = 0;
    char **damaged = shard_probe(paths, count);
    check_init(&check, out, &summary, count);
    for (size_t i = 0; i < count && result == 0; i++) {
        struct shard shard;
        result = shard_open_probed(&shard, paths[i], damaged[i], err);
        if (result != 0)
            break;
        result = count_shard(&check, &shard, err);
        finish_shard(&check, &shard);
    }
    if (result == 0)
        print_report(&check, false);
    check_release(&check);
    shard_probe_free(damaged, count);
    return result;
}
