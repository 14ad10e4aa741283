// Owns the made-up rows that show which products a step consists of, and when they are timed. Does not
// own how (kernels/gemm_tune_cuda.cu).
#include "trainer/tune.h"

#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/log.h"
#include "base/rng.h"
#include "base/timer.h"

static const double tuning_seconds = 3.0;

// Random features: a piece, then copies of what is there.
static void fill_features(bf16 *features, size_t count)
{
    enum { PIECE = 1 << 16 };
    struct rng_key key = rng_key_make(0, 0, 0, RNG_TEST);
    size_t done = count < PIECE ? count : PIECE;
    for (size_t i = 0; i < done; i++)
        features[i] = bf16_from_float(rng_normal(key, i));
    while (done < count) {
        size_t more = count - done < done ? count - done : done;
        memcpy(features + done, features, more * sizeof(*features));
        done += more;
    }
}

// The longest row there can be: one document, every token supervised.
static void make_row(struct row *row, const struct step *step)
{
    const struct step_setup *s = &step->setup;
    int64_t tokens = s->config->data.seq_len;
    row_open(row, tokens, s->planes, s->target->hidden_size, s->backend->host_alloc);
    row->tokens = row->supervised = tokens;
    row->documents = 1;
    row->doc_offsets[1] = tokens;
    for (int64_t t = 0; t < tokens; t++) {
        row->input_ids[t] = (int32_t)(t % s->target->vocab_size);
        row->positions[t] = (int32_t)t;
        row->loss_mask[t] = 1;
    }
    fill_features(row->hidden, (size_t)(tokens * s->planes * s->target->hidden_size));
}

// One full group: anchors beside each other, which share most of their teacher rows, or far apart,
// which share none. 1: stopped.
static int run_group(struct step *step, const struct row *row, bool dense)
{
    const struct step_setup *s = &step->setup;
    int64_t valid = row->tokens - 1, blocks = s->execution->group_rows / s->sizes->block_size;
    int64_t count = blocks < valid ? blocks : valid, stride = dense ? 1 : valid / count;
    int32_t *anchors = memory_alloc((size_t)count, sizeof(*anchors));
    for (int64_t i = 0; i < count; i++)
        anchors[i] = (int32_t)(i * stride);
    int stopped = step_row_anchors(step, row, anchors, count);
    free(anchors);
    return stopped;
}

int step_tune(struct step *step, struct execution *execution, struct error *err)
{
    const struct backend *backend = step->setup.backend;
    if (backend->gemm_tune == NULL)
        return 0;
    if (execution->gemm.count > 0)
        return backend->gemm_obey(step->stream, &execution->gemm, err);
    double begin = timer_now();
    struct row row;
    make_row(&row, step);
    backend->gemm_record(step->stream);
    step_begin(step);
    bool stopped = run_group(step, &row, true) != 0 || run_group(step, &row, false) != 0;
    backend->sync(step->stream);
    step_clock_read(&step->clock, backend, step->stream, 0);
    backend->gemm_tune(step->stream, stopped ? 0.0 : tuning_seconds, &execution->gemm);
    step_begin(step);
    backend->sync(step->stream);
    row_close(&row, backend->host_free);
    log_info("gemm: %lld algorithms chosen in %.1f s", (long long)execution->gemm.count,
             timer_now() - begin);
    return 0;
}
