// Owns the made-up row that shows which products a step consists of, and when they are timed. Does not
// own how (kernels/gemm_tune_cuda.cu), nor what is remembered of it (algorithm_cache.c).
#include "trainer/tune.h"

#include <stdlib.h>

#include "base/log.h"
#include "base/timer.h"
#include "trainer/algorithm_cache.h"

static const double tuning_seconds = 1.5;

static void *zeroed(size_t bytes)
{
    return memory_alloc(bytes, 1);
}

// The longest row there can be: one document, every token supervised. Its features are 0, since only
// the sizes of products count.
static void make_row(struct row *row, const struct step *step)
{
    const struct step_setup *s = &step->setup;
    int64_t tokens = s->config->data.seq_len;
    row_open(row, tokens, s->planes, s->target->hidden_size, zeroed);
    row->tokens = row->supervised = tokens;
    row->documents = 1;
    row->doc_offsets[1] = tokens;
    for (int64_t t = 0; t < tokens; t++) {
        row->input_ids[t] = (int32_t)(t % s->target->vocab_size);
        row->positions[t] = (int32_t)t;
        row->loss_mask[t] = 1;
    }
}

// One full group of anchors beside each other: they share most of their teacher rows, so chunks hold as
// many student rows as they can. 1: stopped.
static int run_group(struct step *step, const struct row *row)
{
    const struct step_setup *s = &step->setup;
    int64_t valid = row->tokens - 1, blocks = s->execution->group_rows / s->sizes->block_size;
    int64_t count = blocks < valid ? blocks : valid;
    int32_t *anchors = memory_alloc((size_t)count, sizeof(*anchors));
    for (int64_t i = 0; i < count; i++)
        anchors[i] = (int32_t)i;
    int stopped = step_row_anchors(step, row, anchors, count);
    free(anchors);
    return stopped;
}

// 1: stopped, so that nothing was timed.
static int choose(struct step *step, struct execution *execution)
{
    const struct backend *backend = step->setup.backend;
    struct row row;
    make_row(&row, step);
    backend->gemm_record(step->stream);
    step_begin(step);
    bool stopped = run_group(step, &row) != 0;
    backend->sync(step->stream);
    step_clock_read(&step->clock, backend, step->stream, 0);
    backend->gemm_tune(step->stream, stopped ? 0.0 : tuning_seconds, &execution->gemm);
    step_begin(step);
    backend->sync(step->stream);
    row_close(&row, NULL);
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
    char *folder = algorithm_cache_folder();
    struct error unknown = {0};
    bool before = folder != NULL && algorithm_cache_read(folder, &step->arena, execution) &&
                  backend->gemm_obey(step->stream, &execution->gemm, &unknown) == 0;
    int status = 0;
    if (!before) {
        execution->gemm.count = 0;
        bool stopped = choose(step, execution) != 0;
        if (!stopped && folder != NULL && algorithm_cache_keep(folder, &step->arena, execution))
            status = backend->gemm_obey(step->stream, &execution->gemm, err);
    }
    log_info("gemm: %lld algorithms %s in %.1f s", (long long)execution->gemm.count,
             before ? "as chosen before on this device" : "chosen", timer_now() - begin);
    free(folder);
    return status;
}
