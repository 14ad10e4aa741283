// Owns the recomputation of the teacher on a sample of a shard's positions.
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
    LEAST_SEEN = 64    // positions with a next token that say anything
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
