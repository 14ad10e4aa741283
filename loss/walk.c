// Owns the walk: which blocks decoding would visit, given what each anchor accepts. Does not own which
// positions are anchors or what they accept.
#include "loss/metrics.h"

#include <math.h>
#include <stdbool.h>

// A maximal stretch of supervised positions within one document, and its first anchor's index.
struct run {
    int32_t begin, end; // positions in the row
    int64_t first_anchor;
};

// The run that starts at or after `from`; false: none.
static bool next_run(const struct row *row, int32_t from, struct run *run)
{
    while (from < row->tokens && row->loss_mask[from] == 0)
        from++;
    if (from >= row->tokens)
        return false;
    run->begin = from;
    run->end = from + 1;
    while (run->end < row->tokens && row->loss_mask[run->end] != 0 &&
           row->doc_of[run->end] == row->doc_of[from])
        run->end++;
    return true;
}

// Decoding stays in its document, so a chain ends with its run even where the next position starts
// another document's run. A document's first token is passed over where it is no anchor: there are
// drafters that need a token before it.
static void walk_run(const struct row *row, const struct run *run, const int32_t *anchors,
                     const int32_t *accepted, int64_t count, int64_t drafts, double *blocks,
                     double *tokens, walk_block_fn *visit, void *context)
{
    int64_t i = run->first_anchor;
    bool skipped = row->positions[run->begin] == 0 && (i == count || anchors[i] != run->begin);
    for (int32_t a = run->begin + skipped; a < run->end;) {
        while (i < count && anchors[i] < a)
            i++;
        if (i == count || anchors[i] != a)
            return;
        int32_t taken = accepted[i] < drafts ? accepted[i] : (int32_t)drafts;
        *blocks += 1.0;
        *tokens += (double)(taken + 1);
        if (visit != NULL)
            visit(context, row->doc_ids[row->doc_of[a]], row->positions[a], taken);
        a += taken + 1;
    }
}

void walk_row(struct walk *walk, const struct row *row, const int32_t *anchors,
              const int32_t *accepted, int64_t count, int64_t drafts, walk_block_fn *visit,
              void *context)
{
    struct run run = {0};
    while (next_run(row, run.end, &run)) {
        while (run.first_anchor < count && anchors[run.first_anchor] < run.begin)
            run.first_anchor++;
        walk_run(row, &run, anchors, accepted, count, drafts, &walk->blocks, &walk->tokens, visit,
                 context);
        for (int64_t n = 1; n < METRICS_MAX_BLOCK; n++)
            walk_run(row, &run, anchors, accepted, count, n < drafts ? n : drafts,
                     &walk->draft_blocks[n], &walk->draft_tokens[n], NULL, NULL);
    }
}

double walk_accept_len(const struct walk *walk)
{
    return walk->blocks > 0.0 ? walk->tokens / walk->blocks : (double)NAN;
}

double walk_accept_len_drafts(const struct walk *walk, int64_t drafts)
{
    if (drafts >= METRICS_MAX_BLOCK)
        return walk_accept_len(walk);
    return walk->draft_blocks[drafts] > 0.0
               ? walk->draft_tokens[drafts] / walk->draft_blocks[drafts]
               : (double)NAN;
}
