// Owns the recomputation of the teacher on a sample of positions, and what it says of a shard and of each
// of its documents.
#include "trainer/teacher_check.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/log.h"
#include "base/rng.h"
#include "data/shard.h"
#include "data/shard_probe.h"
#include "data/target.h"
#include "kernels/kernels.h"

enum {
    SAMPLE = 256,
    PIECE_ROWS = 8192, // of the head, as fp32 at once
    LEAST_SEEN = 64,   // positions with a next token that say anything
    // Documents, one by one.
    LEAST_EACH = 8, // positions of a document; where all are too much work, fewer documents
    MOST_EACH = 64,
    MOST_CLOSER = 128, // of one that stands out
    BATCH = 1024,      // positions recomputed at once
    LEAST_WORK = 512,  // positions of a shard, however large the target
    MOST_WORK = 16384,
    MOST_NAMED = 8 // documents of a shard and a verdict in words; the others are counted
};

// What rounding may do to a logit n . w: bf16 rounds n (of the norm's output, and of the state before
// it) by 2^-9 of each element at most, so the sum by about 2^-9 |n * w| with elements taken apart, of
// which four are allowed; a logit given in bf16 is off by 2^-9 of itself. Measured on sound shards, in
// shares of this bound: at most 0.4 with SmolLM2-135M (bf16 logits), 0.15 with the tiny example.
static const double rounding = 0x1p-9, spread_allowed = 4.0;
// A fault shifts every position: a norm applied twice moves the median of the tiny example to 1.1, w
// instead of 1 + w to hundreds.
static const double most_median = 0.5, most_beyond = 0.05;
// The next token is the argmax in a quarter of positions at the least when all is right, in under a
// tenth when head, norm or alignment are wrong.
static const double least_next = 0.15;

// One document. Head times state in multiply-adds that a shard's documents may take (a few seconds of two
// cores), and as much again for those that stand out.
static const double work = 0x1p39;
// Chance that a sound shard has a document that is told, shared among its documents.
static const double chance = 1e-3;
// Columns: positions beyond rounding in a sound document, or twice what the other documents have; and
// the share that a fault has at the least.
static const double least_beyond = 0.01, fault_beyond = 0.25;
// Of positions where the argmax is either the next token or the one that a shift by one would make it,
// the latter are few when all is right: a quarter is far more than that.
static const double shift_share = 0.25;
// A document is far below the others when even half of their rate does not explain it.
static const double far_below = 0.5;

struct sample {
    int64_t token; // in the shard
    int32_t next;  // the token that follows in its document, -1 at the end
    bool supervised_next;
    bool finite; // the hidden state; others are data check's to name
    int32_t argmax;
    double most, sum;    // recomputed: the largest logit; sum of exp(logit - most)
    double logit, bound; // recomputed: of the shard's top-1 token, and what it may be off by
    int32_t top1;        // the shard's columns
    float top1_logit, teacher_lse;
    // of documents one by one: which one, and with the states one token late, early, what the argmax is:
    // a token, and a top-1 of the columns; -1 outside of the document
    int64_t index;
    int32_t shifted_next[2], shifted_top1[2];
};

// Rows [first, first + rows) of a tensor.
static void to_float(const struct target_tensor *tensor, int64_t first, int64_t rows, float *out)
{
    int64_t begin = first * tensor->columns, count = rows * tensor->columns;
    for (int64_t i = 0; i < count; i++)
        out[i] = tensor->dtype == DTYPE_BF16
                     ? bf16_to_float(((const bf16 *)tensor->data)[begin + i])
                     : ((const float *)tensor->data)[begin + i];
}

static int draw(const struct shard *shard, struct sample *samples, int64_t count, struct error *err)
{
    struct rng_key key = rng_key_make(0, 0, (uint64_t)shard->tokens, RNG_TEST);
    for (int64_t i = 0; i < count; i++) {
        struct sample *s = &samples[i];
        uint8_t mask = 0;
        int64_t document = 0;
        s->token = (int64_t)(rng_u64(key, (uint64_t)i) % (uint64_t)shard->tokens);
        while (shard->doc_offsets[document + 1] <= s->token)
            document++;
        s->next = -1;
        if (s->token + 1 < shard->doc_offsets[document + 1] &&
            (shard_read_ids(shard, s->token + 1, 1, &s->next, err) != 0 ||
             shard_read_mask(shard, s->token + 1, 1, &mask, err) != 0))
            return -1;
        s->supervised_next = mask == 1;
        if (shard->has_teacher && shard_read_teacher(shard, s->token, 1, &s->top1, &s->top1_logit,
                                                     &s->teacher_lse, err) != 0)
            return -1;
    }
    return 0;
}

// The last hidden states of the sample as fp32 rows [count, H].
static int read_hidden(const struct shard *shard, struct sample *samples, int64_t count,
                       float *hidden, struct error *err)
{
    int64_t h = shard->hidden_size;
    bf16 *token = memory_alloc((size_t)shard->features.stride, sizeof(*token));
    int status = 0;
    for (int64_t i = 0; i < count && status == 0; i++) {
        status = shard_read_hidden(shard, samples[i].token, 1, token, err);
        samples[i].finite = true;
        for (int64_t j = 0; j < h && status == 0; j++) {
            bf16 value = token[shard->features.last + j];
            samples[i].finite = samples[i].finite && !bf16_is_nonfinite(value);
            hidden[i * h + j] = bf16_to_float(value);
        }
    }
    free(token);
    return status;
}

// One more piece of a position's logits: tokens first, first + 1, ...
static void add_logits(struct sample *s, const float *logits, int64_t first, int64_t count)
{
    double most = s->most;
    for (int64_t v = 0; v < count; v++)
        if ((double)logits[v] > most) {
            most = (double)logits[v];
            s->argmax = (int32_t)(first + v);
        }
    s->sum *= exp(s->most - most);
    for (int64_t v = 0; v < count; v++)
        s->sum += exp((double)logits[v] - most);
    s->most = most;
}

// normed, head: [H] of the position and of its top-1 token.
static void take_top1(struct sample *s, const float *normed, const float *head, int64_t h,
                      double scale)
{
    double logit = 0.0, squares = 0.0;
    for (int64_t j = 0; j < h; j++) {
        double product = scale * (double)normed[j] * (double)head[j];
        logit += product;
        squares += product * product;
    }
    s->logit = logit;
    s->bound = rounding * (spread_allowed * sqrt(squares) + fabs(logit));
}

struct teacher {
    const struct target *target;
    const struct backend *backend;
    struct stream *stream;
    float *norm; // [H]
    float *head; // [PIECE_ROWS, H]
};

static void teacher_init(struct teacher *teacher, const struct target *target)
{
    int threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    const struct backend *backend = backend_cpu();
    int64_t h = target->hidden_size;
    *teacher = (struct teacher){
        .target = target,
        .backend = backend,
        .stream = backend->stream_open(&(struct stream_options){
            .threads = threads, .workspace_bytes = backend->stream_workspace_bytes(threads)}),
        .norm = memory_alloc((size_t)h, sizeof(float)),
        .head = memory_alloc((size_t)(PIECE_ROWS * h), sizeof(float))};
    to_float(&target->norm, 0, 1, teacher->norm);
}

static void teacher_release(struct teacher *teacher)
{
    teacher->backend->stream_close(teacher->stream);
    free(teacher->norm);
    free(teacher->head);
}

static void apply_norm(const struct teacher *teacher, float *hidden, int64_t count)
{
    const struct target *target = teacher->target;
    teacher->backend->kernels->rms_norm_forward(
        teacher->stream, &(struct rms_norm){.rows = count,
                                            .width = target->hidden_size,
                                            .eps = (float)target->rms_norm_eps,
                                            .weight_offset = target->norm_weight_offset,
                                            .x = hidden,
                                            .weight = teacher->norm,
                                            .y = hidden});
}

// hidden: [count, H], as the head wants them.
static void recompute(const struct teacher *teacher, bool has_teacher, const float *hidden,
                      struct sample *samples, int64_t count)
{
    const struct target *target = teacher->target;
    int64_t h = target->hidden_size, v = target->vocab_size;
    float *logits = memory_alloc((size_t)(count * PIECE_ROWS), sizeof(*logits));
    for (int64_t i = 0; i < count; i++) {
        samples[i].most = -INFINITY;
        samples[i].sum = 0.0;
    }
    for (int64_t first = 0; first < v; first += PIECE_ROWS) {
        int64_t rows = v - first < PIECE_ROWS ? v - first : PIECE_ROWS;
        to_float(&target->head, first, rows, teacher->head);
        teacher->backend->kernels->gemm(teacher->stream,
                                        &(struct gemm){.m = count,
                                                       .n = rows,
                                                       .k = h,
                                                       .transpose_b = true,
                                                       .alpha = target->logit_scale,
                                                       .a = hidden,
                                                       .b = teacher->head,
                                                       .c = logits});
        for (int64_t i = 0; i < count; i++) {
            struct sample *s = &samples[i];
            add_logits(s, logits + i * rows, first, rows);
            if (has_teacher && s->top1 >= first && s->top1 < first + rows)
                take_top1(s, hidden + i * h, teacher->head + (s->top1 - first) * h, h,
                          (double)target->logit_scale);
        }
    }
    free(logits);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// How far a position is from the shard's columns, in shares of what rounding may do: its logit, its
// log-sum-exp, and how much another token is ahead of the top-1.
static double distance(const struct sample *s)
{
    double logit = fabs(s->logit - (double)s->top1_logit);
    double lse = fabs(s->most + log(s->sum) - (double)s->teacher_lse);
    double ahead = 0.5 * (s->most - s->logit);
    if (!isfinite(logit + lse + ahead))
        return INFINITY; // no number in the columns, or none recomputed
    return fmax(fmax(logit, lse), ahead) / (s->bound + 1e-6);
}

// Compares with the teacher columns. 1: does not match.
static int judge_columns(const struct shard *shard, const struct sample *samples, int64_t count,
                         FILE *out)
{
    double distances[SAMPLE], beyond = 0.0, same = 0.0;
    int64_t seen = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!samples[i].finite)
            continue;
        distances[seen] = distance(&samples[i]);
        beyond += distances[seen++] > 1.0;
        same += samples[i].argmax == samples[i].top1;
    }
    if (seen == 0)
        return 0; // nothing finite: data check has named it
    qsort(distances, (size_t)seen, sizeof(*distances), by_value);
    double median = distances[seen / 2];
    bool fails = median > most_median || beyond > most_beyond * (double)seen;
    fprintf(
        out,
        "%s: teacher recomputed at %lld positions: top-1 is the same at %.1f %%; differences of "
        "logit and log-sum-exp, as a share of what bf16 rounding explains: median %.2f, largest "
        "%.2f: %s\n",
        shard->path, (long long)seen, 100.0 * same / (double)seen, median, distances[seen - 1],
        fails ? "DOES NOT MATCH the target's own columns; wrong head, norm (w or 1+w, applied "
                "twice or not at all) or alignment"
              : "matches");
    return fails;
}

// How often the recomputed teacher's argmax is the next token, of supervised positions. Returns whether
// that is too rare to be text of this target.
static bool count_next(const struct sample *samples, int64_t count, int64_t *same, int64_t *seen)
{
    *same = *seen = 0;
    for (int64_t i = 0; i < count; i++)
        if (samples[i].finite && samples[i].supervised_next) {
            ++*seen;
            *same += samples[i].argmax == samples[i].next;
        }
    return *seen >= LEAST_SEEN && (double)*same < least_next * (double)*seen;
}

// Beside matching columns, only told: a data set need not be text that the target would write.
static void tell_next(const struct shard *shard, const struct sample *samples, int64_t count,
                      FILE *out)
{
    int64_t same, seen;
    bool rare = count_next(samples, count, &same, &seen);
    fprintf(out,
            "%s: the next token is the teacher's argmax at %lld of %lld supervised positions%s\n",
            shard->path, (long long)same, (long long)seen,
            rare ? ": RARE; are ids and masks aligned with the states?" : "");
}

static int judge_next(const struct shard *shard, const struct sample *samples, int64_t count,
                      FILE *out)
{
    int64_t same, seen;
    bool fails = count_next(samples, count, &same, &seen);
    fprintf(out,
            "%s: no teacher columns: the recomputed teacher's argmax is the next token at %lld of "
            "%lld supervised positions (weaker: a slightly wrong norm keeps most of them)%s\n",
            shard->path, (long long)same, (long long)seen,
            fails ? ": DOES NOT FIT; wrong head, norm or alignment" : "");
    return fails;
}

// How often the recomputed teacher agrees with a document. Shift 0: as it would with states one token
// late, 1: early.
struct agreement {
    int64_t document;
    bool closer;                          // looked at again, at more positions
    int64_t seen, next_seen, next_same;   // finite positions; with a supervised next token
    int64_t shift_seen[2], shift_same[2]; // next token, shifted
    int64_t gained[2], lost[2]; // positions that only the shift, only no shift agrees with
    int64_t beyond, top1_seen[2], top1_same[2]; // columns: beyond rounding; top-1, shifted
};

struct look {
    const struct shard *shard;
    const struct teacher *teacher;
    struct agreement *found; // [count]
    int64_t count;
    struct agreement total;
    int64_t positions;      // recomputed so far
    struct sample *samples; // [BATCH], pending of them not yet recomputed
    float *hidden;          // [BATCH, H]
    int64_t pending;
};

// Reads what the columns say at a position and beside it.
static int read_columns(const struct shard *shard, int64_t begin, int64_t end, struct sample *s,
                        struct error *err)
{
    int64_t first = s->token > begin ? s->token - 1 : s->token;
    int64_t last = s->token + 1 < end ? s->token + 1 : s->token, here = s->token - first;
    int32_t top1[3];
    float logit[3], lse[3];
    if (shard_read_teacher(shard, first, last + 1 - first, top1, logit, lse, err) != 0)
        return -1;
    s->top1 = top1[here];
    s->top1_logit = logit[here];
    s->teacher_lse = lse[here];
    s->shifted_top1[0] = here > 0 ? top1[here - 1] : -1;
    s->shifted_top1[1] = last > s->token ? top1[here + 1] : -1;
    return 0;
}

// Positions of a document, spread evenly over those with a supervised next token, or over all of it.
static int draw_document(const struct shard *shard, int64_t document, int64_t wanted,
                         struct sample *samples, int64_t *count, struct error *err)
{
    int64_t begin = shard->doc_offsets[document], length = shard->doc_offsets[document + 1] - begin;
    int32_t *ids = memory_alloc((size_t)length + 1, sizeof(*ids));
    uint8_t *mask = memory_alloc((size_t)length + 1, sizeof(*mask));
    int64_t *places = memory_alloc((size_t)length + 1, sizeof(*places)), places_count = 0;
    int status = shard_read_ids(shard, begin, length, ids, err);
    if (status == 0)
        status = shard_read_mask(shard, begin, length, mask, err);
    for (int64_t t = 0; t + 1 < length; t++)
        if (mask[t + 1] == 1)
            places[places_count++] = t;
    for (int64_t t = 0; places_count == 0 && t < length; t++)
        places[t] = t;
    places_count = places_count == 0 ? length : places_count;
    *count = places_count < wanted ? places_count : wanted;
    for (int64_t i = 0; i < *count && status == 0; i++) {
        int64_t t = places[(2 * i + 1) * places_count / (2 * *count)];
        samples[i] = (struct sample){.token = begin + t,
                                     .next = t + 1 < length ? ids[t + 1] : -1,
                                     .supervised_next = t + 1 < length && mask[t + 1] == 1,
                                     .shifted_next = {ids[t], t + 2 < length ? ids[t + 2] : -1}};
        if (shard->has_teacher)
            status = read_columns(shard, begin, begin + length, &samples[i], err);
    }
    free(ids);
    free(mask);
    free(places);
    return status;
}

static void tally(struct agreement *a, const struct sample *s, bool has_teacher)
{
    bool same = s->argmax == s->next;
    if (!s->finite)
        return;
    a->seen++;
    a->beyond += has_teacher && distance(s) > 1.0;
    for (int shift = 0; has_teacher && shift < 2; shift++) {
        a->top1_seen[shift] += s->shifted_top1[shift] >= 0;
        a->top1_same[shift] += s->argmax == s->shifted_top1[shift];
    }
    if (!s->supervised_next)
        return;
    a->next_seen++;
    a->next_same += same;
    for (int shift = 0; shift < 2; shift++) {
        bool shifted = s->argmax == s->shifted_next[shift];
        a->shift_seen[shift] += s->shifted_next[shift] >= 0;
        a->shift_same[shift] += shifted;
        a->gained[shift] += shifted && !same;
        a->lost[shift] += same && !shifted && s->shifted_next[shift] >= 0;
    }
}

// Adds b to a, or takes it away (sign -1).
static void agreement_add(struct agreement *a, const struct agreement *b, int64_t sign)
{
    a->seen += sign * b->seen;
    a->next_seen += sign * b->next_seen;
    a->next_same += sign * b->next_same;
    a->beyond += sign * b->beyond;
    for (int shift = 0; shift < 2; shift++) {
        a->gained[shift] += sign * b->gained[shift];
        a->lost[shift] += sign * b->lost[shift];
    }
}

static int look_flush(struct look *look, struct error *err)
{
    const struct shard *shard = look->shard;
    int64_t count = look->pending;
    look->pending = 0;
    look->positions += count;
    if (count == 0)
        return 0;
    if (read_hidden(shard, look->samples, count, look->hidden, err) != 0)
        return -1;
    if (shard->last_hidden == LAST_HIDDEN_PRE_NORM)
        apply_norm(look->teacher, look->hidden, count);
    recompute(look->teacher, shard->has_teacher, look->hidden, look->samples, count);
    for (int64_t i = 0; i < count; i++)
        tally(&look->found[look->samples[i].index], &look->samples[i], shard->has_teacher);
    return 0;
}

static int look_at(struct look *look, int64_t index, int64_t wanted, struct error *err)
{
    int64_t count = 0;
    struct agreement *a = &look->found[index];
    *a = (struct agreement){.document = a->document};
    if (look->pending + wanted > BATCH && look_flush(look, err) != 0)
        return -1;
    struct sample *samples = look->samples + look->pending;
    if (draw_document(look->shard, a->document, wanted, samples, &count, err) != 0)
        return -1;
    for (int64_t i = 0; i < count; i++)
        samples[i].index = index;
    look->pending += count;
    return 0;
}

// The chance of k or more (upper), or of k or fewer, among n when each has the chance p.
static double binomial_tail(int64_t n, int64_t k, double p, bool upper)
{
    double sum = 0.0;
    p = fmin(fmax(p, 1e-9), 1.0 - 1e-9);
    for (int64_t i = upper ? k : 0; i <= (upper ? n : k); i++)
        sum +=
            exp(lgamma((double)n + 1.0) - lgamma((double)i + 1.0) - lgamma((double)(n - i) + 1.0) +
                (double)i * log(p) + (double)(n - i) * log1p(-p));
    return sum;
}

static double share(int64_t part, int64_t whole)
{
    return whole > 0 ? (double)part / (double)whole : 0.0;
}

// How much a document stands out, above 0 if it does: the next token with a shift or far too rarely, or
// columns beyond rounding.
static double suspicion(const struct look *look, const struct agreement *a)
{
    double rate = share(look->total.next_same, look->total.next_seen);
    double most = far_below * rate - share(a->next_same, a->next_seen);
    if (a->next_seen == 0)
        most = 0.0;
    for (int shift = 0; shift < 2; shift++)
        most = fmax(most, share(a->gained[shift] - a->lost[shift], a->next_seen));
    return fmax(most, share(a->beyond, a->seen) - fault_beyond);
}

static void look_total(struct look *look)
{
    look->total = (struct agreement){0};
    for (int64_t i = 0; i < look->count; i++)
        agreement_add(&look->total, &look->found[i], 1);
}

// Looks again at documents that stand out, the most suspicious first, while there is work left.
static int look_closer(struct look *look, int64_t positions, struct error *err)
{
    look_total(look);
    for (int64_t spent = 0; spent < positions; spent += MOST_CLOSER) {
        int64_t worst = -1;
        double most = 0.0;
        for (int64_t i = 0; i < look->count; i++)
            if (!look->found[i].closer && suspicion(look, &look->found[i]) > most) {
                most = suspicion(look, &look->found[i]);
                worst = i;
            }
        if (worst < 0)
            break;
        if (look_at(look, worst, MOST_CLOSER, err) != 0)
            return -1;
        look->found[worst].closer = true;
    }
    if (look_flush(look, err) != 0)
        return -1;
    look_total(look);
    return 0;
}

// The shift that a document agrees with so much more than as it stands that no sound text explains it, or -1.
static int shift_of(const struct look *look, const struct agreement *a)
{
    for (int shift = 0; shift < 2; shift++) {
        int64_t gained = a->gained[shift], lost = a->lost[shift];
        if (gained > lost && binomial_tail(gained + lost, gained, shift_share, true) <
                                 chance / (2.0 * (double)look->count))
            return shift;
    }
    return -1;
}

static bool columns_differ(const struct look *look, const struct agreement *a,
                           const struct agreement *rest)
{
    double sound = fmax(least_beyond, 2.0 * share(rest->beyond, rest->seen));
    return share(a->beyond, a->seen) > fault_beyond &&
           binomial_tail(a->seen, a->beyond, sound, true) < chance / (double)look->count;
}

static bool is_far_below(const struct look *look, const struct agreement *a,
                         const struct agreement *rest)
{
    double rate = far_below * share(rest->next_same, rest->next_seen);
    return rest->next_seen >= LEAST_SEEN && a->next_seen > 0 &&
           share(a->next_same, a->next_seen) < rate &&
           binomial_tail(a->next_seen, a->next_same, rate, false) < chance / (double)look->count;
}

static const char *const shift_words[] = {"LATE", "EARLY"};

static void tell_columns(FILE *out, const struct agreement *a, const struct agreement *rest)
{
    fprintf(out,
            "differs from the shard's own columns by more than rounding at %lld of %lld positions "
            "(other documents: %lld of %lld)",
            (long long)a->beyond, (long long)a->seen, (long long)rest->beyond,
            (long long)rest->seen);
    for (int shift = 0; shift < 2; shift++)
        if (a->top1_same[shift] * 4 > a->top1_seen[shift] * 3)
            fprintf(
                out,
                ", but its argmax is the top-1 of the token %s at %lld of %lld: the states look "
                "ONE TOKEN %s",
                shift == 0 ? "before" : "behind", (long long)a->top1_same[shift],
                (long long)a->top1_seen[shift], shift_words[shift]);
    fputs(": DOES NOT MATCH\n", out);
}

static void tell_agreement(FILE *out, const struct agreement *a, const struct agreement *rest,
                           int shift, bool fails)
{
    fprintf(out,
            "its argmax is the next token at %lld of %lld supervised positions (other documents: "
            "%lld of %lld)",
            (long long)a->next_same, (long long)a->next_seen, (long long)rest->next_same,
            (long long)rest->next_seen);
    if (shift >= 0)
        fprintf(
            out, ", but at %lld of %lld when shifted by one token: the states look ONE TOKEN %s",
            (long long)a->shift_same[shift], (long long)a->shift_seen[shift], shift_words[shift]);
    fputs(fails ? ": DOES NOT FIT\n"
                : ": warning; other text than the others', or not the states of this text\n",
          out);
}

enum verdict { SOUND, STANDS_OUT, WRONG, VERDICTS };

struct judgement {
    enum verdict verdict;
    bool columns;          // they are what is wrong
    int shift;             // that fits better, -1: none
    struct agreement rest; // the other documents
};

// States that are only shifted agree about as often as those of the others do. Odd text may agree more often with a
// shift too (where the target repeats what it reads), but then seldom at all.
static bool shift_explains(const struct agreement *a, const struct agreement *rest, int shift)
{
    double others = rest->next_seen >= LEAST_SEEN
                        ? far_below * share(rest->next_same, rest->next_seen)
                        : least_next;
    return share(a->shift_same[shift], a->shift_seen[shift]) >= others;
}

static struct judgement judge_document(const struct look *look, const struct agreement *a)
{
    struct judgement j = {.shift = shift_of(look, a), .rest = look->total};
    bool has_teacher = look->shard->has_teacher, unlike;
    agreement_add(&j.rest, a, -1);
    j.columns = has_teacher && columns_differ(look, a, &j.rest);
    // A target whose argmax is mostly the token itself, with columns that say so, is no fault of this
    // document.
    unlike = j.shift >= 0 && shift_explains(a, &j.rest, j.shift) &&
             (!has_teacher || j.rest.lost[j.shift] > j.rest.gained[j.shift]);
    if (j.columns || unlike)
        j.verdict = WRONG;
    else if (j.shift >= 0 || is_far_below(look, a, &j.rest))
        j.verdict = STANDS_OUT;
    return j;
}

static void tell_document(const struct shard *shard, const struct agreement *a,
                          const struct judgement *j, FILE *out)
{
    fprintf(out, "%s: document %lld (doc_id %llu): the recomputed teacher: ", shard->path,
            (long long)a->document, (unsigned long long)shard->doc_ids[a->document]);
    if (j->columns)
        tell_columns(out, a, &j->rest);
    else
        tell_agreement(out, a, &j->rest, j->shift, j->verdict == WRONG);
}

static int judge_documents(const struct look *look, FILE *out)
{
    int64_t counts[VERDICTS] = {0};
    for (int64_t i = 0; i < look->count; i++) {
        struct judgement j = judge_document(look, &look->found[i]);
        if (counts[j.verdict]++ < MOST_NAMED && j.verdict != SOUND)
            tell_document(look->shard, &look->found[i], &j, out);
    }
    fprintf(out, "%s: %lld of %lld documents looked at one by one, at %lld positions: ",
            look->shard->path, (long long)look->count, (long long)look->shard->documents,
            (long long)look->positions);
    if (counts[SOUND] == look->count)
        fputs("none stands out\n", out);
    else
        fprintf(out, "%lld can not be right, %lld more stand out%s\n", (long long)counts[WRONG],
                (long long)counts[STANDS_OUT],
                counts[WRONG] > MOST_NAMED || counts[STANDS_OUT] > MOST_NAMED
                    ? " (the first of each are named)"
                    : "");
    return counts[WRONG] > 0;
}

// Every document of a shard at a few positions, or as many documents as the work allows, spread evenly.
static int check_documents(const struct shard *shard, const struct teacher *teacher, FILE *out,
                           struct error *err)
{
    double size = (double)shard->vocab_size * (double)shard->hidden_size;
    int64_t positions = (int64_t)fmin(fmax(work / size, LEAST_WORK), MOST_WORK);
    int64_t each = positions / shard->documents;
    each = each < LEAST_EACH ? LEAST_EACH : each > MOST_EACH ? MOST_EACH : each;
    int64_t count = positions / each < shard->documents ? positions / each : shard->documents;
    struct look look = {
        .shard = shard,
        .teacher = teacher,
        .found = memory_alloc((size_t)count, sizeof(*look.found)),
        .count = count,
        .samples = memory_alloc(BATCH, sizeof(*look.samples)),
        .hidden = memory_alloc((size_t)(BATCH * shard->hidden_size), sizeof(*look.hidden))};
    int status = 0;
    for (int64_t i = 0; i < count && status == 0; i++) {
        look.found[i].document = i * shard->documents / count;
        status = look_at(&look, i, each, err);
    }
    if (status == 0)
        status = look_flush(&look, err);
    if (status == 0)
        status = look_closer(&look, positions, err);
    if (status == 0)
        status = judge_documents(&look, out);
    free(look.found);
    free(look.samples);
    free(look.hidden);
    return status;
}

static int check_shard(const struct shard *shard, const struct teacher *teacher, FILE *out,
                       struct error *err)
{
    const struct target *target = teacher->target;
    struct sample samples[SAMPLE] = {0};
    int64_t count = shard->tokens < SAMPLE ? shard->tokens : SAMPLE;
    if (shard->last_hidden == LAST_HIDDEN_ABSENT) {
        fprintf(out, "%s: last_hidden is absent: there is no teacher to check\n", shard->path);
        return 0;
    }
    if (shard->hidden_size != target->hidden_size || shard->vocab_size != target->vocab_size)
        return error_set(err,
                         "%s: hidden_size %lld and vocab_size %lld, but target %s has %lld "
                         "and %lld",
                         shard->path, (long long)shard->hidden_size, (long long)shard->vocab_size,
                         target->path, (long long)target->hidden_size,
                         (long long)target->vocab_size);
    float *hidden = memory_alloc((size_t)(count * shard->hidden_size), sizeof(*hidden));
    int status = draw(shard, samples, count, err);
    if (status == 0)
        status = read_hidden(shard, samples, count, hidden, err);
    if (status == 0) {
        if (shard->last_hidden == LAST_HIDDEN_PRE_NORM)
            apply_norm(teacher, hidden, count);
        recompute(teacher, shard->has_teacher, hidden, samples, count);
        if (shard->has_teacher)
            tell_next(shard, samples, count, out);
        status = shard->has_teacher ? judge_columns(shard, samples, count, out)
                                    : judge_next(shard, samples, count, out);
    }
    free(hidden);
    if (status >= 0) {
        int documents = check_documents(shard, teacher, out, err);
        status = documents != 0 ? documents : status;
    }
    return status;
}

int teacher_check(const char *const *paths, size_t count, const char *target_path, FILE *out,
                  struct error *err)
{
    struct target target;
    struct teacher teacher;
    if (target_open(&target, target_path, err) != 0)
        return -1;
    teacher_init(&teacher, &target);
    int result = 0;
    char **damaged = shard_probe(paths, count);
    for (size_t i = 0; i < count && result >= 0; i++) {
        struct shard shard;
        struct error fault = {0};
        if (shard_open_probed(&shard, paths[i], damaged[i], &fault) != 0)
            continue; // data check has named it
        int status = shard.tokens > 0 ? check_shard(&shard, &teacher, out, err) : 0;
        result = status != 0 ? status : result;
        shard_close(&shard);
    }
    shard_probe_free(damaged, count);
    teacher_release(&teacher);
    target_close(&target);
    return result;
}
