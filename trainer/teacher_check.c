// Owns the recomputation of the teacher on a sample of a shard's positions.
#include "trainer/teacher_check.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/log.h"
#include "base/rng.h"
#include "data/shard.h"
#include "data/target.h"
#include "kernels/kernels.h"

enum { SAMPLE = 64 };

// Logits at bf16 hidden states and bf16 weights differ by rounding: relative to the largest logit.
static const double logit_tolerance = 0.03, lse_tolerance = 0.03, least_top1 = 0.9;

struct sample {
    int64_t token; // in the shard
    int32_t next;  // the token that follows in its document, -1 at the end
    bool supervised_next;
    int32_t argmax;   // recomputed
    float logit, lse; // recomputed
    int32_t top1;     // the shard's columns
    float top1_logit, teacher_lse;
};

static void to_float(const struct target_tensor *tensor, float *out)
{
    int64_t count = tensor->rows * tensor->columns;
    for (int64_t i = 0; i < count; i++)
        out[i] = tensor->dtype == DTYPE_BF16 ? bf16_to_float(((const bf16 *)tensor->data)[i])
                                             : ((const float *)tensor->data)[i];
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
static int read_hidden(const struct shard *shard, const struct sample *samples, int64_t count,
                       float *hidden, struct error *err)
{
    int64_t h = shard->hidden_size;
    bf16 *token = memory_alloc((size_t)(shard->planes * h), sizeof(*token));
    int status = 0;
    for (int64_t i = 0; i < count && status == 0; i++) {
        status = shard_read_hidden(shard, samples[i].token, 1, token, err);
        for (int64_t j = 0; j < h && status == 0; j++)
            hidden[i * h + j] = bf16_to_float(token[(shard->planes - 1) * h + j]);
    }
    free(token);
    return status;
}

static void reduce(const float *logits, int64_t vocab, struct sample *s)
{
    double sum = 0.0;
    s->argmax = 0;
    for (int64_t v = 1; v < vocab; v++)
        if (logits[v] > logits[s->argmax])
            s->argmax = (int32_t)v;
    s->logit = logits[s->argmax];
    for (int64_t v = 0; v < vocab; v++)
        sum += exp((double)logits[v] - (double)s->logit);
    s->lse = (float)((double)s->logit + log(sum));
}

static void recompute(const struct shard *shard, const struct target *target, const float *head,
                      const float *norm, float *hidden, struct sample *samples, int64_t count)
{
    const struct backend *backend = backend_cpu();
    int threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    struct stream *stream = backend->stream_open(threads, backend->stream_workspace_bytes(threads));
    int64_t h = target->hidden_size, v = target->vocab_size;
    float *logits = memory_alloc((size_t)(count * v), sizeof(*logits));
    if (shard->last_hidden == LAST_HIDDEN_PRE_NORM)
        backend->kernels->rms_norm_forward(
            stream, &(struct rms_norm){.rows = count,
                                       .width = h,
                                       .eps = (float)target->rms_norm_eps,
                                       .weight_offset = target->norm_weight_offset,
                                       .x = hidden,
                                       .weight = norm,
                                       .y = hidden});
    backend->kernels->gemm(stream, &(struct gemm){.m = count,
                                                  .n = v,
                                                  .k = h,
                                                  .transpose_b = true,
                                                  .alpha = target->logit_scale,
                                                  .a = hidden,
                                                  .b = head,
                                                  .c = logits});
    for (int64_t i = 0; i < count; i++)
        reduce(logits + i * v, v, &samples[i]);
    free(logits);
    backend->stream_close(stream);
}

// Compares with the teacher columns. 1: does not match.
static int judge_columns(const struct shard *shard, const struct sample *samples, int64_t count,
                         FILE *out)
{
    int64_t same = 0, bad = 0;
    double worst_logit = 0.0, worst_lse = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const struct sample *s = &samples[i];
        double scale = fmax(1.0, fabs((double)s->top1_logit));
        double logit = fabs((double)s->logit - (double)s->top1_logit) / scale;
        double lse =
            fabs((double)s->lse - (double)s->teacher_lse) / fmax(1.0, fabs((double)s->teacher_lse));
        same += s->argmax == s->top1;
        bad += !(logit <= logit_tolerance) || !(lse <= lse_tolerance);
        worst_logit = fmax(worst_logit, logit);
        worst_lse = fmax(worst_lse, lse);
    }
    double share = (double)same / (double)count;
    bool fails = bad > count / 20 || share < least_top1;
    fprintf(out,
            "%s: teacher recomputed at %lld positions: top-1 agrees at %.1f %%, worst relative "
            "difference of its logit %.4f, of the log-sum-exp %.4f: %s\n",
            shard->path, (long long)count, 100.0 * share, worst_logit, worst_lse,
            fails ? "DOES NOT MATCH the target's own columns; wrong head, norm (w or 1+w, applied "
                    "twice or not at all) or alignment"
                  : "matches");
    return fails;
}

static int judge_next(const struct shard *shard, const struct sample *samples, int64_t count,
                      FILE *out)
{
    int64_t same = 0, seen = 0;
    for (int64_t i = 0; i < count; i++)
        if (samples[i].next >= 0 && samples[i].supervised_next) {
            seen++;
            same += samples[i].argmax == samples[i].next;
        }
    fprintf(out,
            "%s: no teacher columns: the recomputed teacher's argmax is the next token at %lld of "
            "%lld supervised positions (weaker: a slightly wrong norm keeps most of them)\n",
            shard->path, (long long)same, (long long)seen);
    return seen >= 16 && same * 5 < seen; // below a fifth: nothing fits
}

static int check_shard(const struct shard *shard, const struct target *target, const float *head,
                       const float *norm, FILE *out, struct error *err)
{
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
        recompute(shard, target, head, norm, hidden, samples, count);
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
    if (target_open(&target, target_path, err) != 0)
        return -1;
    float *head = memory_alloc((size_t)(target.vocab_size * target.hidden_size), sizeof(*head));
    float *norm = memory_alloc((size_t)target.hidden_size, sizeof(*norm));
    to_float(&target.head, head);
    to_float(&target.norm, norm);
    int result = 0;
    for (size_t i = 0; i < count && result >= 0; i++) {
        struct shard shard;
        struct error fault = {0};
        if (shard_open(&shard, paths[i], &fault) != 0)
            continue; // data check has named it
        int status = shard.tokens > 0 ? check_shard(&shard, &target, head, norm, out, err) : 0;
        result = status != 0 ? status : result;
        shard_close(&shard);
    }
    free(head);
    free(norm);
    target_close(&target);
    return result;
}
