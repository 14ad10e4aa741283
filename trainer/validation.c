// Owns the validation rows and their reading. One pass is an epoch of their prefetch.
#include "trainer/validation.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "data/prefetch.h"

struct validation {
    const struct session *session;
    int64_t limit; // rows wanted, 0: all
    int64_t rows;  // of a pass, this rank's
    struct source *source;
    struct prefetch *prefetch;
};

static void pack(void *context, uint64_t pass, struct packing *packing)
{
    const struct validation *v = context;
    (void)pass;
    session_pack_validation(v->session, v->limit, packing);
}

int validation_open(struct validation **validation, const struct session *session,
                    const struct step *step, int64_t rows, struct error *err)
{
    const struct config *config = session->config;
    struct prefetch_options options = {.depth = 1,
                                       .threads = 1,
                                       .on_bad_sample = config->data.on_bad_sample,
                                       .seq_len = config->data.seq_len,
                                       .stop_seconds = session_stop_seconds(session),
                                       .host_alloc = session->backend->host_alloc,
                                       .host_free = session->backend->host_free,
                                       .stop = step->stop,
                                       .stop_context = step->stop_context};
    struct validation *v = memory_alloc(1, sizeof(*v));
    struct packing packing;
    *v = (struct validation){.session = session, .limit = rows};
    pack(v, 0, &packing);
    v->rows = packing.rows;
    packing_release(&packing);
    uint64_t passes = v->rows > 0 ? UINT64_MAX : 0;
    if (source_open_shards(&v->source, &session->val, config->data.check_crc, err) != 0 ||
        prefetch_open(&v->prefetch, v->source, &options, pack, v, 0, 0, passes, err) != 0) {
        validation_close(v);
        return -1;
    }
    *validation = v;
    return 0;
}

static int score_rows(struct validation *v, struct step *step, struct metrics *metrics,
                      struct walk *walk, walk_block_fn *visit, void *context, struct error *err)
{
    for (int64_t r = 0; r < v->rows; r++) {
        struct row *row = NULL;
        double wait = 0.0;
        int status = prefetch_next(v->prefetch, &row, &wait, err);
        BUG_UNLESS(status != 0); // there are as many passes as anybody asks for
        if (status != 1)
            return status < 0 ? -1 : 1;
        int stopped = step_evaluate(step, row, metrics, walk, visit, context);
        prefetch_return(v->prefetch, row);
        if (stopped)
            return 1;
    }
    return 0;
}

// Sums over ranks, the same on all of them. 1: some rank has stopped.
static int add_up(struct ranks *ranks, struct metrics *metrics, struct walk *walk, int stopped)
{
    struct sums {
        double stopped;
        struct metrics metrics;
        struct walk walk;
    } sums = {(double)stopped, *metrics, *walk};
    double values[sizeof(sums) / sizeof(double)];
    memcpy(values, &sums, sizeof(values));
    ranks_sum(ranks, values, (int64_t)(sizeof(values) / sizeof(*values)));
    memcpy(&sums, values, sizeof(values));
    *metrics = sums.metrics;
    *walk = sums.walk;
    return sums.stopped > 0.0;
}

int validation_run(struct validation *v, struct step *step, struct metrics *metrics,
                   struct walk *walk, walk_block_fn *visit, void *context, struct error *err)
{
    int status = score_rows(v, step, metrics, walk, visit, context, err);
    if (status < 0 || session_ranks(v->session) == 1)
        return status;
    step_exchange_settle(step);
    return add_up(v->session->ranks, metrics, walk, status);
}

bool validation_stop(struct validation *v)
{
    return v == NULL || prefetch_stop(v->prefetch);
}

bool validation_close(struct validation *v)
{
    if (v == NULL)
        return true;
    if (!prefetch_close(v->prefetch))
        return false;
    source_close(v->source);
    free(v);
    return true;
}
