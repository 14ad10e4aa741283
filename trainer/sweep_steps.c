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

// The documents that were opened last: points whose section data is the same share them, and their valid
// anchors where these follow from the same keys.
struct opened {
    struct config config;
    struct session session;
    bool open;
    size_t point; // that they were opened for
    struct block_layout layout;
    int64_t *valid; // [documents] anchors by that layout; NULL: not counted
};

struct counted {
    bool sets;       // has a part in what is equal
    int64_t steps;   // that the config gives; 0: not counted
    double *anchors; // [steps] drawn up to the end of each; NULL: not asked for
};

static void close_opened(struct opened *opened)
{
    if (!opened->open)
        return;
    free(opened->valid);
    opened->valid = NULL;
    session_close(&opened->session);
    config_release(&opened->config);
    opened->open = false;
}

// Whether two points have the same values of all keys of some sections.
static bool same_sections(const struct sweep *sweep, size_t a, size_t b,
                          const char *const *sections)
{
    const struct sweep_grid *grid = &sweep->grid;
    for (size_t i = 0; i < grid->axis_count; i++)
        for (size_t s = 0; sections[s] != NULL; s++)
            if (strncmp(grid->axes[i].key, sections[s], strlen(sections[s])) == 0 &&
                sweep_grid_value(grid, a, i) != sweep_grid_value(grid, b, i))
                return false;
    return true;
}

// The training shards alone, of which alone steps are counted.
static int expand_train(struct config *config, struct error *err)
{
    struct config_texts val = config->data.val;
    config->data.val = (struct config_texts){.count = 0};
    int result = config_expand_files(config, err);
    free(config->data.val.items); // an empty list may have memory
    config->data.val = val;
    return result;
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
    static const char *const sections[] = {"data.", "target.", NULL};
    if (opened->open && same_sections(sweep, opened->point, point, sections)) {
        opened->session.config = config;
        return 0;
    }
    close_opened(opened);
    config_init(&opened->config);
    opened->open = true;
    opened->point = point;
    opened->session = (struct session){.config = &opened->config};
    if (sweep_load_point(sweep, point, &opened->config, err) != 0 ||
        expand_train(&opened->config, err) != 0 || session_open_train(&opened->session, err) != 0)
        return -1;
    opened->session.config = config;
    return 0;
}

// What decides which anchors are valid; the rest is as it is in all layouts.
static struct block_layout layout_of(const struct config *config)
{
    const struct drafter_config *drafter = &config->drafter;
    if (drafter->kind == DRAFTER_EAGLE3)
        return (struct block_layout){.block_size = drafter->ttt_steps,
                                     .eagle3 = true,
                                     .mask_index = config->loss.mask_index,
                                     .ttt_decay_base = config->loss.ttt_decay_base};
    if (config->anchors.tail == TAIL_WHOLE)
        return (struct block_layout){.block_size = drafter->block_size,
                                     .predict_from_anchor = drafter->predict_from_anchor,
                                     .tail = TAIL_WHOLE};
    return (struct block_layout){.tail = config->anchors.tail};
}

static bool same_layout(const struct block_layout *a, const struct block_layout *b)
{
    return a->block_size == b->block_size && a->predict_from_anchor == b->predict_from_anchor &&
           a->tail == b->tail && a->eagle3 == b->eagle3 && a->mask_index == b->mask_index &&
           !(a->ttt_decay_base < b->ttt_decay_base) && !(a->ttt_decay_base > b->ttt_decay_base);
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
    for (int32_t t = 0; t < document->length; t++) {
        row->positions[t] = t;
        *count += anchor_is_valid(row, layout, t);
    }
    return 0;
}

// Of each document, into opened->valid, unless they are there.
static int count_valid(struct opened *opened, struct error *err)
{
    const struct config *config = opened->session.config;
    const struct documents *documents = &opened->session.train;
    const struct block_layout layout = layout_of(config);
    size_t room = (size_t)config->data.seq_len;
    int64_t offsets[2] = {0};
    int status = 0;
    if (opened->valid != NULL && same_layout(&opened->layout, &layout))
        return 0;
    free(opened->valid);
    opened->valid = memory_alloc(documents->count + 1, sizeof(*opened->valid));
    opened->layout = layout;
    struct row row = {.doc_of = memory_alloc(room, sizeof(*row.doc_of)),
                      .positions = memory_alloc(room, sizeof(*row.positions)),
                      .loss_mask = memory_alloc(room, sizeof(*row.loss_mask)),
                      .doc_offsets = offsets};
    for (size_t d = 0; d < documents->count && status == 0; d++)
        status =
            valid_anchors(documents, &documents->items[d], &layout, &row, &opened->valid[d], err);
    free(row.loss_mask);
    free(row.positions);
    free(row.doc_of);
    return status;
}

static int64_t at_most(int64_t count, bool limited, int64_t most)
{
    return limited && count > most ? most : count;
}

static double row_anchors(const struct config *config, const struct packing *packing, int64_t row,
                          const int64_t *valid)
{
    const struct anchors_config *a = &config->anchors;
    bool limited = config->drafter.kind == DRAFTER_DFLASH; // EAGLE-3 takes all positions
    int64_t sum = 0;
    for (int64_t d = packing->row_offsets[row]; d < packing->row_offsets[row + 1]; d++)
        sum += at_most(valid[packing->document[d]], limited && a->per == ANCHORS_PER_DOCUMENT,
                       a->max_anchors);
    return (double)at_most(sum, limited && a->per == ANCHORS_PER_ROW, a->max_anchors);
}

// Over the steps of all epochs: a step never crosses an epoch's end. sums: those up to the end of each, or NULL.
static double sum_anchors(const struct session *session, const struct session_steps *steps,
                          const int64_t *valid, double *sums)
{
    int64_t step = 0, per_step = session->config->data.rows_per_step;
    double sum = 0.0;
    for (uint64_t epoch = 0; epoch < steps->epochs && step < steps->total; epoch++) {
        struct packing packing;
        session_pack_epoch(session, epoch, &packing);
        for (int64_t row = 0; row < packing.rows && step < steps->total; row++) {
            sum += row_anchors(session->config, &packing, row, valid);
            if ((row + 1) % per_step != 0 && row + 1 != packing.rows)
                continue;
            if (sums != NULL)
                sums[step] = sum;
            step++;
        }
        packing_release(&packing);
    }
    return sum;
}

static int count_point(struct opened *opened, bool anchors, struct counted *counted,
                       struct error *err)
{
    struct session_steps steps;
    if (anchors && count_valid(opened, err) != 0)
        return -1;
    session_count_steps(&opened->session, &steps);
    counted->steps = steps.total;
    if (anchors) {
        counted->anchors = memory_alloc((size_t)steps.total + 1, sizeof(*counted->anchors));
        sum_anchors(&opened->session, &steps, opened->valid, counted->anchors);
    }
    session_steps_release(&steps);
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

// Steps that an earlier start of the sweep has given a point stay.
static void take_steps(struct sweep_point *point, int64_t steps, struct error *err)
{
    if (point->steps > 0 && point->steps != steps)
        error_add(err,
                  "%s: took %lld steps when the sweep was begun and takes %lld now: documents of "
                  "data.train have changed",
                  point->name, (long long)point->steps, (long long)steps);
    point->steps = steps;
}

// A point that fits now and did not when the sweep was begun, and has too little to take as much as the others.
static void leave_out(struct sweep_point *point, double has, double others, const char *what)
{
    sweep_point_become(point, SWEEP_TOO_LARGE,
                       memory_format("did not fit when the sweep was begun; it has %.0f %s and the "
                                     "others take %.0f",
                                     has, what, others));
}

static void equal_steps(struct sweep *sweep, const struct counted *counted, struct error *err)
{
    int64_t least = INT64_MAX;
    for (size_t i = 0; i < sweep->point_count; i++)
        if (counted[i].sets && counted[i].steps < least)
            least = counted[i].steps;
    for (size_t i = 0; i < sweep->point_count; i++)
        if (counted[i].steps >= least)
            take_steps(&sweep->points[i], least, err);
        else if (counted[i].steps > 0)
            leave_out(&sweep->points[i], (double)counted[i].steps, (double)least, "steps");
}

static void own_steps(struct sweep *sweep, const struct counted *counted, struct error *err)
{
    for (size_t i = 0; i < sweep->point_count; i++)
        if (counted[i].steps > 0)
            take_steps(&sweep->points[i], counted[i].steps, err);
}

// As many as the point that draws the fewest in the steps that its config gives.
static void equal_anchors(struct sweep *sweep, const struct counted *counted, struct error *err)
{
    double least = INFINITY, *all = memory_alloc(sweep->point_count, sizeof(*all));
    for (size_t i = 0; i < sweep->point_count; i++) {
        if (counted[i].steps > 0)
            all[i] = weight_of(sweep, &sweep->points[i]) * counted[i].anchors[counted[i].steps - 1];
        if (counted[i].sets && all[i] < least)
            least = all[i];
    }
    for (size_t i = 0; i < sweep->point_count; i++) {
        struct sweep_point *point = &sweep->points[i];
        if (counted[i].steps == 0)
            continue;
        if (all[i] < least) {
            leave_out(point, all[i], least,
                      sweep->equal == SWEEP_EQUAL_ANCHORS ? "anchors" : "block rows");
            continue;
        }
        take_steps(point, first_with(&counted[i], least / weight_of(sweep, point)), err);
        point->anchors = counted[i].anchors[point->steps - 1];
    }
    free(all);
}

static bool counts_anchors(const struct sweep *sweep)
{
    return sweep->equal == SWEEP_EQUAL_ANCHORS || sweep->equal == SWEEP_EQUAL_BLOCK_ROWS;
}

// Steps alone follow from less.
static int count_alike(struct opened *opened, const struct sweep *sweep, size_t point,
                       struct counted *counted, struct error *err)
{
    static const char *const sections[] = {"data.", "target.", "run.", NULL};
    for (size_t i = point; !counts_anchors(sweep) && i-- > 0;)
        if (counted[i].steps > 0 && same_sections(sweep, i, point, sections)) {
            counted[point].steps = counted[i].steps;
            return 0;
        }
    return count_point(opened, counts_anchors(sweep), &counted[point], err);
}

static int count_one(struct opened *opened, struct sweep *sweep, size_t i, struct config *config,
                     struct counted *counted, struct error *err)
{
    if (!counted[i].sets && sweep->points[i].state == SWEEP_TOO_LARGE)
        return 0;
    if (sweep_load_point(sweep, i, config, err) != 0 ||
        open_documents(opened, sweep, i, config, err) != 0)
        return -1;
    int status = count_alike(opened, sweep, i, counted, err);
    opened->session.config = &opened->config; // the point's own ends here
    return status;
}

static int count_all(struct sweep *sweep, struct opened *opened, struct counted *counted,
                     struct error *err)
{
    int status = 0;
    for (size_t i = 0; i < sweep->point_count && status == 0; i++) {
        struct config config;
        config_init(&config);
        status = count_one(opened, sweep, i, &config, counted, err);
        config_release(&config);
        sweep_show_count(sweep, "counted the steps of", i + 1);
    }
    return status;
}

// A sweep that goes on keeps what was equal at its first start, whatever fits now.
static void find_setters(const struct sweep *sweep, struct counted *counted)
{
    bool begun = false;
    for (size_t i = 0; i < sweep->point_count; i++)
        begun = begun || sweep->points[i].steps > 0;
    for (size_t i = 0; i < sweep->point_count; i++)
        counted[i].sets =
            begun ? sweep->points[i].steps > 0 : sweep->points[i].state != SWEEP_TOO_LARGE;
}

static int set_all(struct sweep *sweep, const struct counted *counted, struct error *err)
{
    struct error changed = {""};
    if (counts_anchors(sweep))
        equal_anchors(sweep, counted, &changed);
    else if (sweep->equal == SWEEP_EQUAL_STEPS)
        equal_steps(sweep, counted, &changed);
    else if (sweep->equal == SWEEP_EQUAL_NONE)
        own_steps(sweep, counted, &changed);
    return changed.text[0] == '\0' ? 0 : sweep_refuse_to_go_on(sweep, changed.text, err);
}

// What a point's steps draw, where it had no part in what is equal.
static int count_drawn(struct opened *opened, struct sweep *sweep, size_t i, struct config *config,
                       struct error *err)
{
    struct session_steps steps;
    struct sweep_point *point = &sweep->points[i];
    if (sweep_load_point(sweep, i, config, err) != 0 ||
        open_documents(opened, sweep, i, config, err) != 0)
        return -1;
    config->run.max_steps = point->steps;
    if (sweep->equal == SWEEP_EQUAL_TIME)
        config->run.epochs = SWEEP_MANY_EPOCHS;
    int status = count_valid(opened, err);
    if (status == 0) {
        session_count_steps(&opened->session, &steps);
        point->anchors = sum_anchors(&opened->session, &steps, opened->valid, NULL);
        session_steps_release(&steps);
    }
    opened->session.config = &opened->config;
    return status;
}

// A point whose anchors are counted, and follow from the same as this one's; NULL: none.
static const struct sweep_point *drawn_alike(const struct sweep *sweep, size_t point)
{
    static const char *const keys[] = {"data.",
                                       "target.",
                                       "run.",
                                       "anchors.",
                                       "drafter.kind",
                                       "drafter.block_size",
                                       "drafter.predict_from_anchor",
                                       "drafter.ttt_steps",
                                       "loss.mask_index",
                                       "loss.ttt_decay_base",
                                       NULL};
    for (size_t i = point; i-- > 0;)
        if (sweep->points[i].steps == sweep->points[point].steps &&
            isfinite(sweep->points[i].anchors) && same_sections(sweep, i, point, keys))
            return &sweep->points[i];
    return NULL;
}

static int count_all_drawn(struct opened *opened, struct sweep *sweep, struct error *err)
{
    int status = 0;
    for (size_t i = 0; i < sweep->point_count && status == 0; i++) {
        struct sweep_point *point = &sweep->points[i];
        const struct sweep_point *alike = drawn_alike(sweep, i);
        struct config config;
        if (point->steps == 0 || isfinite(point->anchors))
            continue;
        config_init(&config);
        if (alike != NULL)
            point->anchors = alike->anchors;
        else
            status = count_drawn(opened, sweep, i, &config, err);
        config_release(&config);
        sweep_show_count(sweep, "counted the anchors of", i + 1);
    }
    return status;
}

int sweep_count_steps(struct sweep *sweep, struct error *err)
{
    struct opened opened = {.open = false};
    struct counted *counted = memory_alloc(sweep->point_count, sizeof(*counted));
    find_setters(sweep, counted);
    int status = count_all(sweep, &opened, counted, err);
    if (status == 0)
        status = set_all(sweep, counted, err);
    if (status == 0)
        status = count_all_drawn(&opened, sweep, err);
    for (size_t i = 0; i < sweep->point_count; i++)
        free(counted[i].anchors);
    free(counted);
    close_opened(&opened);
    return status;
}
