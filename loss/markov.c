// Owns what a Markov head adds to the loss of a chunk: the product of each slot's row of w1 with w2, on top of
// the student's logits, and the gradients of both tables. Does not own order and chunks (loss.c).
//
// dw1 is a sum over the slots of a group with the same token in front. They are sorted by it once a group, so
// that each row of dw1 has one sum, in one order.
#include <stdlib.h>

#include "base/log.h"
#include "loss/loss_internal.h"

// Of the index: the token in front of each sorted row's prediction; then, for the sums, rows in order of
// their tokens, where each token's rows begin, and the tokens.
enum { TOKEN_OF_ROW, TOKEN_ORDER, TOKEN_BEGIN, TOKEN, TOKEN_INDICES };

bool loss_has_markov(const struct loss *loss)
{
    return loss->options.markov.rank > 0;
}

static int64_t index_width(const struct loss *loss)
{
    return loss->options.group_rows + 1; // where the last token's rows end
}

void loss_markov_plan(struct loss *loss, struct arena *arena)
{
    const struct loss_options *o = &loss->options;
    int64_t rank = o->markov.rank;
    if (!loss_has_markov(loss))
        return;
    loss->previous =
        arena_take(arena, "loss", "previous", o->compute, loss_most_students(loss), rank, 1);
    loss->token_index =
        arena_take(arena, "loss", "token_index", DTYPE_I32, TOKEN_INDICES, index_width(loss), 1);
    loss->dprevious = arena_take(arena, "loss", "dprevious", DTYPE_F32, o->group_rows, rank, 1);
}

void loss_markov_open(struct loss *loss)
{
    size_t rows = (size_t)index_width(loss);
    if (!loss_has_markov(loss))
        return;
    loss->by_token = memory_alloc(rows, sizeof(*loss->by_token));
    loss->h_token_index =
        loss->backend->host_alloc(rows * TOKEN_INDICES * sizeof(*loss->h_token_index));
}

void loss_markov_close(struct loss *loss)
{
    free(loss->by_token);
    if (loss_has_markov(loss))
        loss->backend->host_free(loss->h_token_index);
}

static int compare_tokens(const void *a, const void *b)
{
    const struct loss_token *x = a, *y = b;
    if (x->token != y->token)
        return x->token < y->token ? -1 : 1;
    return (x->row > y->row) - (x->row < y->row);
}

void loss_markov_index(struct loss *loss, const struct backend *backend, struct stream *stream,
                       const struct loss_group *group)
{
    int64_t width = index_width(loss), count = group->slot_count, tokens = 0;
    int32_t *of_row = loss->h_token_index + TOKEN_OF_ROW * width,
            *order = loss->h_token_index + TOKEN_ORDER * width,
            *begin = loss->h_token_index + TOKEN_BEGIN * width,
            *token = loss->h_token_index + TOKEN * width;
    // The position whose teacher row predicts a token is the one in front of it.
    for (int64_t i = 0; i < count; i++) {
        of_row[i] = group->input_ids[loss->order[i].teacher_row];
        loss->by_token[i] = (struct loss_token){of_row[i], (int32_t)i};
    }
    qsort(loss->by_token, (size_t)count, sizeof(*loss->by_token), compare_tokens);
    for (int64_t i = 0; i < count; i++) {
        order[i] = loss->by_token[i].row;
        if (i > 0 && loss->by_token[i].token == loss->by_token[i - 1].token)
            continue;
        begin[tokens] = (int32_t)i;
        token[tokens++] = loss->by_token[i].token;
    }
    begin[tokens] = (int32_t)count;
    loss->token_count = tokens;
    backend->copy_in(stream, loss->token_index, loss->h_token_index,
                     (size_t)(width * TOKEN_INDICES) * sizeof(*loss->token_index));
}

// Rows of w1 in the order of the chunk's rows.
static void gather_previous(struct loss *loss, const struct backend *backend, struct stream *stream,
                            const struct loss_chunk *chunk, const float *row_scale)
{
    const struct loss_options *o = &loss->options;
    backend->kernels->gather_rows(
        stream, &(struct gather_rows){.rows = chunk->rows,
                                      .width = o->markov.rank,
                                      .in = o->markov.w1,
                                      .in_rows = o->vocab,
                                      .in_stride = o->markov.rank,
                                      .in_type = o->compute,
                                      .out_type = o->compute,
                                      .index = loss->token_index +
                                               TOKEN_OF_ROW * index_width(loss) + chunk->first,
                                      .scale = 1.0f,
                                      .row_scale = row_scale,
                                      .out = loss->previous});
}

void loss_markov_logits(struct loss *loss, const struct backend *backend, struct stream *stream,
                        const struct loss_chunk *chunk)
{
    const struct loss_options *o = &loss->options;
    gather_previous(loss, backend, stream, chunk, NULL);
    backend->kernels->gemm(stream, &(struct gemm){.m = chunk->rows,
                                                  .n = loss->width,
                                                  .k = o->markov.rank,
                                                  .transpose_b = true,
                                                  .alpha = 1.0f,
                                                  .beta = 1.0f,
                                                  .a = loss->previous,
                                                  .b = o->markov.w2,
                                                  .c = loss->logits,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = o->logits});
}

void loss_markov_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                          const struct loss_chunk *chunk)
{
    const struct loss_markov *markov = &loss->options.markov;
    loss_input_gradient(loss, backend, stream, chunk, markov->w2, markov->rank, 1.0f,
                        loss->dprevious + chunk->first * markov->rank, DTYPE_F32);
    gather_previous(loss, backend, stream, chunk, loss->scale + chunk->first);
    loss_weight_gradient(loss, backend, stream, chunk, loss->previous, markov->rank, 1.0f,
                         markov->dw2);
}

void loss_markov_sums(struct loss *loss, const struct backend *backend, struct stream *stream,
                      const struct loss_group *group)
{
    int64_t width = index_width(loss);
    backend->kernels->sum_rows(stream,
                               &(struct sum_rows){.sums = loss->token_count,
                                                  .width = loss->options.markov.rank,
                                                  .in = loss->dprevious,
                                                  .from = loss->token_index + TOKEN_ORDER * width,
                                                  .begin = loss->token_index + TOKEN_BEGIN * width,
                                                  .index = loss->token_index + TOKEN * width,
                                                  .scale = loss->scale,
                                                  .out = loss->options.markov.dw1,
                                                  .in_rows = group->slot_count,
                                                  .out_rows = loss->options.vocab});
}
