// Owns the made-up row and update that show which products a step consists of, and when they are timed. Does not
// own how (kernels/gemm_tune_cuda.cu), nor what is remembered of it (algorithm_cache.c).
#include "trainer/tune.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/log.h"
#include "base/timer.h"
#include "trainer/algorithm_cache.h"

// Of a row, and of Muon's update; kept for the next run on such a device.
static const double tuning_seconds = 7.0, update_seconds = 3.0;

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
    struct feature_layout features = step_features(s);
    row_open(row, tokens, &features, zeroed);
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
    int64_t first = s->sizes->kind == DRAFTER_EAGLE3 ? 1 : 0; // whose anchor follows its position
    for (int64_t i = 0; i < count; i++)
        anchors[i] = (int32_t)(first + i);
    int stopped = step_row_anchors(step, row, anchors, count);
    free(anchors);
    return stopped;
}

// Where training steps leave out the columns outside the draft vocabulary, scoring has products of its own.
static int run_scoring(struct step *step, const struct row *row)
{
    const struct config *config = step->setup.config;
    struct metrics metrics = {0};
    struct walk walk = {0};
    if (config->drafter.draft_vocab == NULL || config->loss.full_vocab_metrics)
        return 0;
    return step_evaluate(step, row, &metrics, &walk, NULL, NULL);
}

static bool is_muon(const struct step *step)
{
    return step->setup.config->optimizer.kind == OPTIMIZER_MUON;
}

// 1: stopped, so that nothing was timed.
static int choose(struct step *step, struct execution *execution)
{
    const struct backend *backend = step->setup.backend;
    struct row row;
    make_row(&row, step);
    backend->gemm_record(step->stream);
    step_begin(step);
    // The second group adds to the gradients that the first has begun.
    bool stopped =
        run_group(step, &row) != 0 || run_group(step, &row) != 0 || run_scoring(step, &row) != 0;
    backend->sync(step->stream);
    step_clock_read(&step->clock, backend, step->stream, 0);
    if (is_muon(step))
        muon_show_products(&step->muon, &step->setup.config->optimizer, step->setup.params, backend,
                           step->stream);
    double seconds = tuning_seconds + (is_muon(step) ? update_seconds : 0.0);
    backend->gemm_tune(step->stream, stopped ? 0.0 : seconds, &execution->gemm);
    step_begin(step);
    backend->sync(step->stream);
    row_close(&row, NULL);
    return stopped;
}

// Obeys what another run kept in `file`. False: the library refuses it, so that the file goes.
static bool obey_kept(struct step *step, const struct execution *execution, const char *file)
{
    struct error why = {""};
    if (step->setup.backend->gemm_obey(step->stream, &execution->gemm, &why) == 0)
        return true;
    log_warn("%s can not be obeyed, this run chooses anew and removes it:\n%s", file, why.text);
    unlink(file);
    return false;
}

// What an earlier run chose, or else what timing shows, which later runs then take.
static void take_or_choose(struct step *step, struct execution *execution, const char *folder)
{
    double begin = timer_now();
    char *file = algorithm_cache_file(folder, &step->arena, execution);
    bool kept =
        algorithm_cache_read(folder, &step->arena, execution) && obey_kept(step, execution, file);
    if (!kept && choose(step, execution) == 0)
        if (algorithm_cache_keep(folder, &step->arena, execution) &&
            !obey_kept(step, execution, file))
            choose(step, execution);
    log_info("gemm: %lld algorithms %s in %.1f s; their file: %s", (long long)execution->gemm.count,
             kept ? "as chosen before" : "chosen", timer_now() - begin, file);
    free(file);
}

int step_tune(struct step *step, struct execution *execution, struct error *err)
{
    const struct backend *backend = step->setup.backend;
    if (backend->gemm_tune == NULL)
        return 0;
    if (execution->gemm.count > 0)
        return backend->gemm_obey(step->stream, &execution->gemm, err);
    char *folder = algorithm_cache_folder(step->setup.config->kernels.algorithms);
    if (folder != NULL) {
        take_or_choose(step, execution, folder);
    } else {
        double begin = timer_now();
        choose(step, execution);
        log_info("gemm: %lld algorithms chosen in %.1f s", (long long)execution->gemm.count,
                 timer_now() - begin);
    }
    free(folder);
    return 0;
}
