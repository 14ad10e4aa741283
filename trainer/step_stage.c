// Owns the rows' features on their way to the backend: two buffers, so that one row's features come
// while another row is computed.
#include "trainer/step_stage.h"

#include "base/log.h"

void step_stage_open(struct step_stage *stage, const struct backend *backend)
{
    stage->backend = backend;
    for (int i = 0; i < STEP_STAGES; i++)
        stage->places[i].copies = backend->stream_open(&(struct stream_options){.threads = 1});
}

void step_stage_close(struct step_stage *stage)
{
    for (int i = 0; i < STEP_STAGES; i++)
        if (stage->places[i].copies != NULL)
            stage->backend->stream_close(stage->places[i].copies);
    *stage = (struct step_stage){.backend = NULL};
}

void step_stage_put(struct step_stage *stage, struct stream *compute, const struct row *row)
{
    // The place that was used last is the running row's, unless the other waits for its turn.
    int at = (stage->last + 1) % STEP_STAGES;
    if (stage->places[at].row != NULL)
        at = stage->last;
    struct staged_row *place = &stage->places[at];
    BUG_UNLESS(place->row == NULL);
    place->row = row;
    stage->last = at;
    stage->backend->stream_wait(place->copies, compute); // who read this place before
    stage->backend->copy_in(place->copies, place->features, row->hidden,
                            (size_t)(row->tokens * row->features.stride) * sizeof(bf16));
}

static struct staged_row *find(struct step_stage *stage, const struct row *row)
{
    for (int i = 0; i < STEP_STAGES; i++)
        if (stage->places[i].row == row)
            return &stage->places[i];
    return NULL;
}

struct staged_row *step_stage_take(struct step_stage *stage, struct stream *compute,
                                   const struct row *row)
{
    struct staged_row *place = find(stage, row);
    if (place == NULL) {
        step_stage_put(stage, compute, row);
        place = &stage->places[stage->last];
    }
    place->row = NULL;
    stage->backend->stream_wait(compute, place->copies);
    return place;
}

void step_stage_drop(struct step_stage *stage, const struct row *row)
{
    struct staged_row *place = find(stage, row);
    if (place == NULL)
        return;
    place->row = NULL;
    stage->backend->sync(place->copies);
}
