// Owns how many steps each point takes, and the exact number of anchors that these draw: from documents
// and masks alone, as training packs and draws them.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "data/anchors.h"
#include "trainer/session.h"
#include "trainer/sweep.h"

// The documents that were opened last: points whose section data is the same share them.
struct opened {
    struct config config;
    struct session session;
    bool open;
};

struct counted {
    int64_t steps;
    double *anchors; // [steps] drawn up to the end of each; NULL: not asked for
};

static void close_opened(struct opened *opened)
{
    if (!opened->open)
        return;
    session_close(&opened->session);
    config_release(&opened->config);
    opened->open = false;
}

static bool same_data(const struct sweep *sweep, size_t a, size_t b)
{
    const struct sweep_grid *grid = &sweep->grid;
    for (size_t i = 0; i < grid->axis_count; i++)
        if ((strncmp(grid->axes[i].key, "data.", 5) == 0 ||
             strncmp(grid->axes[i].key, "target.", 7) == 0) &&
            sweep_grid_value(grid, a, i) != sweep_grid_value(grid, b, i))
            return false;
    return true;
}

int sweep_load_point(const struct sweep *sweep, size_t point, struct config *config,
                     struct error *err)
{
    struct sweep_sets sets;
    const struct options *o = sweep->options;
    sweep_sets_open(&sets, &sweep->grid, point, o->sets, o->set_count);
    struct error missing = {""};
    int result = config_load(config, o->config, sets.items, sets.count, err);
    if (result == 0 &&
        (config_check_files(config, &missing) != 0 || config_expand_files(config, &missing) != 0) &&
        !o->plan_only) // memory can be planned without them
        result = error_set(err, "%s", missing.text);
    sweep_sets_close(&sets);
    return result;
}

// Opens what the point trains on, or keeps what is open. The session's config is the point's own.
static int open_documents(struct opened *opened, const struct sweep *sweep, size_t point,
                          struct config *config, struct error *err)
{
    if (opened->open && same_data(sweep, point - 1, point)) {
        opened->session.config = config;
        return 0;
    }
    close_opened(opened);
    config_init(&opened->config);
    opened->open = true;
    opened->session = (struct session){.config = &opened->config};
    if (sweep_load_point(sweep, point, &opened->config, err) != 0 ||
        session_open_train(&opened->session, err) != 0)
        return -1;
    opened->session.config = config;
    return 0;
}

// Valid anchors of a document, as anchors_draw counts them.
static int valid_anchors(const struct documents *documents, const struct document *document,
                         const struct block_layout *layout, struct row *row, int64_t *count,
                         struct error *err)
{
    const struct shard *shard = &documents->shards[document->shard];
    if (shard_read_mask(shard, document->first, document->length, row->loss_mask, err) != 0)
        return -1;
    row->doc_offsets[1] = document->length;
    *count = 0;
    for (int32_t t = 0; t < document->length; t++)
        *count += anchor_is_valid(row, layout, t);
    return 0;
}

// Of each document, at most max_anchors where that counts per document. NULL: a file can not be read.
static int64_t *anchors_by_document(const struct session *session, struct error *err)
{
    const struct config *config = session->config;
    const struct documents *documents = &session->train;
    const struct block_layout layout = {.block_size = config->drafter.block_size,
                                        .predict_from_anchor = config->drafter.predict_from_anchor,
                                        .tail = config->anchors.tail};
    bool limited = config->anchors.per == ANCHORS_PER_DOCUMENT;
    size_t room = (size_t)config->data.seq_len;
    int64_t offsets[2] = {0}, *anchors = memory_alloc(documents->count + 1, sizeof(*anchors));
    struct row row = {.doc_of = memory_alloc(room, sizeof(*row.doc_of)),
                      .loss_mask = memory_alloc(room, sizeof(*row.loss_mask)),
                      .doc_offsets = offsets};
    int status = 0;
    for (size_t d = 0; d < documents->count && status == 0; d++) {
        status = valid_anchors(documents, &documents->items[d], &layout, &row, &anchors[d], err);
        if (limited && anchors[d] > config->anchors.max_anchors)
            anchors[d] = config->anchors.max_anchors;
    }
    free(row.loss_mask);
    free(row.doc_of);
    if (status == 0)
        return anchors;
    free(anchors);
    return NULL;
}

static double row_anchors(const struct config *config, const struct packing *packing, int64_t row,
                          const int64_t *by_document)
{
    int64_t sum = 0;
    for (int64_t d = packing->row_offsets[row]; d < packing->row_offsets[row + 1]; d++)
        sum += by_document[packing->document[d]];
    bool limited = config->anchors.per == ANCHORS_PER_ROW && sum > config->anchors.max_anchors;
    return (double)(limited ? config->anchors.max_anchors : sum);
}

// Sums over the steps of all epochs: a step never crosses an epoch's end.
static void sum_anchors(const struct session *session, const struct session_steps *steps,
                        const int64_t *by_document, double *sums)
{
    int64_t step = 0, per_step = session->config->data.rows_per_step;
    double sum = 0.0;
    for (uint64_t epoch = 0; epoch < steps->epochs && step < steps->total; epoch++) {
        struct packing packing;
        session_pack_epoch(session, epoch, &packing);
        for (int64_t row = 0; row < packing.rows && step < steps->total; row++) {
            sum += row_anchors(session->config, &packing, row, by_document);
            if ((row + 1) % per_step == 0 || row + 1 == packing.rows)
                sums[step++] = sum;
        }
        packing_release(&packing);
    }
}

static int count_point(const struct session *session, bool anchors, struct counted *counted,
                       struct error *err)
{
    struct session_steps steps;
    int64_t *by_document = NULL;
    if (anchors && (by_document = anchors_by_document(session, err)) == NULL)
        return -1;
    session_count_steps(session, &steps);
    counted->steps = steps.total;
    if (anchors) {
        counted->anchors = memory_alloc((size_t)steps.total + 1, sizeof(*counted->anchors));
        sum_anchors(session, &steps, by_document, counted->anchors);
    }
    session_steps_release(&steps);
    free(by_document);
    return 0;
}

// The first step by whose end `wanted` are drawn.
static int64_t first_with(const struct counted *counted, double wanted)
{
    int64_t step = 0;
    while (step + 1 < counted->steps && counted->anchors[step] < wanted)
        step++;
    return step + 1;
}

// What a point draws counts once a block, or once each of a block's rows.
static double weight_of(const struct sweep *sweep, const struct sweep_point *point)
{
    return sweep->equal == SWEEP_EQUAL_BLOCK_ROWS ? (double)point->block_size : 1.0;
}

static void equal_steps(struct sweep *sweep, const struct counted *counted)
{
    int64_t least = counted[0].steps;
    for (size_t i = 0; i < sweep->point_count; i++)
        least = counted[i].steps < least ? counted[i].steps : least;
    for (size_t i = 0; i < sweep->point_count; i++)
        sweep->points[i].steps = sweep->equal == SWEEP_EQUAL_STEPS ? least : counted[i].steps;
}

// As many as the point that draws the fewest in the steps that its config gives.
static void equal_anchors(struct sweep *sweep, const struct counted *counted)
{
    double least = INFINITY;
    for (size_t i = 0; i < sweep->point_count; i++) {
        double all = weight_of(sweep, &sweep->points[i]) * counted[i].anchors[counted[i].steps - 1];
        least = all < least ? all : least;
    }
    for (size_t i = 0; i < sweep->point_count; i++) {
        struct sweep_point *point = &sweep->points[i];
        point->steps = first_with(&counted[i], least / weight_of(sweep, point));
        point->anchors = counted[i].anchors[point->steps - 1];
    }
}

static int count_all(struct sweep *sweep, struct opened *opened, struct counted *counted,
                     struct error *err)
{
    bool anchors = sweep->equal == SWEEP_EQUAL_ANCHORS || sweep->equal == SWEEP_EQUAL_BLOCK_ROWS;
    for (size_t i = 0; i < sweep->point_count; i++) {
        struct config config;
        config_init(&config);
        int status = sweep_load_point(sweep, i, &config, err);
        if (status == 0 && anchors && config.drafter.kind != DRAFTER_DFLASH)
            status = error_set(err, "--equal %s: only dflash draws anchors; say --equal steps",
                               sweep_equal_name(sweep->equal));
        if (status == 0 && config.data.spool != NULL)
            status =
                error_set(err, "data.spool: its features are gone when they have been used, so "
                               "points can not share them; a sweep needs shards (data.train)");
        if (status == 0)
            status = open_documents(opened, sweep, i, &config, err);
        if (status == 0) {
            sweep->points[i].block_size = config.drafter.kind == DRAFTER_DFLASH
                                              ? config.drafter.block_size
                                              : config.drafter.ttt_steps;
            status = count_point(&opened->session, anchors, &counted[i], err);
            opened->session.config = &opened->config; // the point's own ends here
        }
        config_release(&config);
        if (status != 0)
            return -1;
    }
    return 0;
}

int sweep_count_steps(struct sweep *sweep, struct error *err)
{
    struct opened opened = {.open = false};
    struct counted *counted = memory_alloc(sweep->point_count, sizeof(*counted));
    int status = count_all(sweep, &opened, counted, err);
    if (status == 0 && counted[0].anchors != NULL)
        equal_anchors(sweep, counted);
    else if (status == 0 && sweep->equal != SWEEP_EQUAL_TIME)
        equal_steps(sweep, counted);
    for (size_t i = 0; i < sweep->point_count; i++)
        free(counted[i].anchors);
    free(counted);
    close_opened(&opened);
    return status;
}
