// What is divided among ranks: tensors by size, rows by work.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "drafter/drafter.h"
#include "trainer/ownership.h"
#include "trainer/row_shares.h"

enum { DOCUMENTS = 400, SEQ_LEN = 512, RANKS = 3 };

// ---- tensors -------------------------------------------------------------------------------------

static void make_params(struct params *params)
{
    const struct drafter_sizes sizes = {.layers = 3,
                                        .features = 3,
                                        .hidden = 40,
                                        .heads = 4,
                                        .kv_heads = 2,
                                        .head_dim = 6,
                                        .intermediate = 100};
    *params = (struct params){.count = 0};
    drafter_params(&sizes, params);
}

static void tensors_have_one_owner(void **state)
{
    (void)state;
    struct params params;
    make_params(&params);
    for (int ranks = 1; ranks < 60; ranks++) { // in the end more than there are tensors
        struct ownership o, again;
        ownership_open(&o, &params, ranks, 0);
        ownership_open(&again, &params, ranks, ranks - 1);
        assert_memory_equal(o.owner, again.owner, params.count * sizeof(*o.owner));
        int64_t *owned = memory_alloc((size_t)ranks, sizeof(*owned)), largest = 0;
        int64_t *end = memory_alloc((size_t)ranks, sizeof(*end));
        for (size_t i = 0; i < params.count; i++) {
            assert_in_range(o.owner[i], 0, ranks - 1);
            assert_true(ownership_mine(&o, i) == (o.owner[i] == 0));
            assert_true(o.offset[i] >= end[o.owner[i]] &&
                        o.offset[i] % (ranks > 1 ? PARAM_ALIGNMENT : 1) == 0);
            end[o.owner[i]] = o.offset[i] + params.items[i].count;
            assert_true(end[o.owner[i]] <= o.elements[o.owner[i]]);
            owned[o.owner[i]] += params.items[i].count;
            largest = params.items[i].count > largest ? params.items[i].count : largest;
        }
        for (int a = 0; a < ranks; a++)
            for (int b = 0; b < ranks; b++)
                assert_true(owned[a] - owned[b] <= largest);
        free(end);
        free(owned);
        ownership_close(&o);
        ownership_close(&again);
    }
    params_release(&params);
}

static void one_rank_owns_everything_in_place(void **state)
{
    (void)state;
    struct params params;
    struct ownership o;
    make_params(&params);
    ownership_open(&o, &params, 1, 0);
    assert_false(ownership_shared(&o));
    assert_int_equal(o.elements[0], params.elements);
    for (size_t i = 0; i < params.count; i++)
        assert_int_equal(ownership_offset(&o, &params, i), params.items[i].offset);
    ownership_close(&o);
    params_release(&params);
}

// Parts are numbered as the forward pass reads them; backward stages complete each of them once.
static void parts_and_stages_fit(void **state)
{
    (void)state;
    struct params params;
    make_params(&params);
    assert_int_equal(params.parts, 8);
    const struct {
        const char *name;
        int part, stage;
    } known[] = {{"fc.weight", 0, 4},
                 {"hidden_norm.weight", 0, 4},
                 {"layers.0.self_attn.k_proj.weight", 1, 3},
                 {"layers.2.self_attn.v_proj.weight", 3, 1},
                 {"layers.2.self_attn.k_norm.weight", 3, 1},
                 {"layers.0.self_attn.q_proj.weight", 4, 3},
                 {"layers.2.mlp.down_proj.weight", 6, 1},
                 {"norm.weight", 7, 0}};
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        const struct param *param = params_find(&params, known[i].name);
        assert_non_null(param);
        assert_int_equal(param->part, known[i].part);
        assert_int_equal(dflash_gradient_stage(3, param->part), known[i].stage);
    }
    assert_int_equal(dflash_gradient_stages(3), 5);
    params_release(&params);
}

// EAGLE-3: stages are the parts backwards, and there is something in each.
static void parts_and_stages_of_eagle3(void **state)
{
    (void)state;
    const struct drafter_sizes sizes = {.kind = DRAFTER_EAGLE3,
                                        .layers = 2,
                                        .features = 3,
                                        .hidden = 40,
                                        .heads = 4,
                                        .kv_heads = 2,
                                        .head_dim = 6,
                                        .intermediate = 100,
                                        .draft_vocab = 50,
                                        .head_norms = true,
                                        .trainable_head = true,
                                        .fc_norm = true};
    struct params params = {.count = 0};
    drafter_params(&sizes, &params);
    const struct {
        const char *name;
        int part;
    } known[] = {{"fc.weight", 0},
                 {"fc_norm.2.weight", 0},
                 {"layers.0.input_layernorm.weight", 1},
                 {"layers.0.hidden_norm.weight", 1},
                 {"layers.0.self_attn.v_proj.weight", 1},
                 {"layers.0.self_attn.q_norm.weight", 1},
                 {"layers.0.self_attn.o_proj.weight", 2},
                 {"layers.0.mlp.down_proj.weight", 2},
                 {"layers.1.self_attn.q_proj.weight", 3},
                 {"layers.1.post_attention_layernorm.weight", 4},
                 {"norm.weight", 5},
                 {"lm_head.weight", 5}};
    assert_int_equal(params.parts, 6);
    assert_int_equal(drafter_gradient_stages(&sizes), 6);
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        const struct param *param = params_find(&params, known[i].name);
        assert_non_null(param);
        assert_int_equal(param->part, known[i].part);
        assert_int_equal(drafter_gradient_stage(&sizes, param->part), 5 - known[i].part);
    }
    params_release(&params);
}

// ---- rows ----------------------------------------------------------------------------------------

static void make_documents(struct documents *documents)
{
    struct rng_key key = rng_key_make(3, 0, 0, RNG_TEST);
    *documents = (struct documents){.count = DOCUMENTS};
    documents->items = memory_alloc(DOCUMENTS, sizeof(*documents->items));
    for (uint64_t d = 0; d < DOCUMENTS; d++) {
        struct document *document = &documents->items[d];
        document->id = d + 1;
        document->length = 1 + (int32_t)(rng_u64(key, 2 * d) % SEQ_LEN);
        document->supervised =
            (int32_t)(rng_u64(key, 2 * d + 1) % (uint64_t)(document->length + 1));
    }
}

static double busiest(const struct row_shares *shares, const struct packing *packing,
                      const struct documents *documents, const struct row_work *work, int64_t begin,
                      int64_t end, double *mean, double *most_row)
{
    double busy[RANKS] = {0.0}, most = 0.0;
    *mean = *most_row = 0.0;
    for (int64_t r = begin; r < end; r++) {
        double row = row_work_estimate(work, documents, packing, r);
        busy[shares->owner[r]] += row;
        *mean += row / RANKS;
        *most_row = row > *most_row ? row : *most_row;
    }
    for (int rank = 0; rank < RANKS; rank++)
        most = busy[rank] > most ? busy[rank] : most;
    return most;
}

static void rows_are_spread_by_work(void **state)
{
    (void)state;
    struct documents documents;
    struct packing packing;
    struct row_shares shares, again;
    const struct row_work work = {
        .token = 1.0, .block = 20.0, .visible = 0.01, .most_per_row = 200};
    const int64_t per_step = 8;
    make_documents(&documents);
    packing_make(&packing, &documents, SEQ_LEN, 1, 0, true);
    row_shares_make(&shares, &packing, &documents, &work, per_step, RANKS);
    row_shares_make(&again, &packing, &documents, &work, per_step, RANKS);
    assert_memory_equal(shares.owner, again.owner, (size_t)packing.rows * sizeof(*shares.owner));
    double most = 0.0, least_possible = 0.0;
    for (int64_t begin = 0; begin < packing.rows; begin += per_step) {
        int64_t end = begin + per_step < packing.rows ? begin + per_step : packing.rows;
        double mean, row;
        double step = busiest(&shares, &packing, &documents, &work, begin, end, &mean, &row);
        assert_true(step <= (mean > row ? mean : row) * 4.0 / 3.0 + 1e-9); // longest first
        most += step;
        least_possible += mean > row ? mean : row;
    }
    assert_true(most <= 1.1 * least_possible);
    row_shares_release(&shares);
    row_shares_release(&again);
    packing_release(&packing);
    free(documents.items);
}

// Of EAGLE-3, whose teacher has as many columns as are looked at; DFlash's has the vocabulary.
static void work_has_the_columns_of_the_teacher(void **state)
{
    (void)state;
    struct drafter_sizes sizes = {.kind = DRAFTER_EAGLE3,
                                  .layers = 1,
                                  .features = 3,
                                  .hidden = 40,
                                  .heads = 4,
                                  .kv_heads = 2,
                                  .head_dim = 6,
                                  .intermediate = 100,
                                  .block_size = 4,
                                  .vocab = 900,
                                  .draft_vocab = 50};
    for (int kind = 0; kind < 2; kind++) {
        struct params params = {.count = 0};
        drafter_params(&sizes, &params);
        struct row_work whole = row_work_of(&sizes, &params, true);
        struct row_work kept = row_work_of(&sizes, &params, false);
        double more = kind == 0 ? 2.0 * 40.0 * (900.0 - 50.0) : 0.0;
        assert_true(whole.block - kept.block == more && kept.block > 0.0);
        assert_true(whole.token == kept.token && whole.visible == kept.visible);
        params_release(&params);
        sizes.kind = DRAFTER_DFLASH;
        sizes.draft_vocab = sizes.vocab;
    }
}

// The ranks' packings together are the packing.
static void ranks_keep_all_rows(void **state)
{
    (void)state;
    struct documents documents;
    struct packing all;
    struct row_shares shares;
    const struct row_work work = {.token = 1.0, .block = 20.0};
    make_documents(&documents);
    packing_make(&all, &documents, SEQ_LEN, 1, 0, true);
    row_shares_make(&shares, &all, &documents, &work, 7, RANKS);
    int64_t rows = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        struct packing own;
        packing_make(&own, &documents, SEQ_LEN, 1, 0, true);
        packing_keep(&own, shares.owner, rank);
        assert_int_equal(own.rows, row_shares_count(&shares, rank, 0, all.rows));
        for (int64_t r = 0, k = 0; r < all.rows; r++) {
            if (shares.owner[r] != rank)
                continue;
            int64_t begin = all.row_offsets[r], count = all.row_offsets[r + 1] - begin;
            assert_int_equal(own.row_offsets[k + 1] - own.row_offsets[k], count);
            assert_int_equal(own.row_places[k], all.row_places[r]);
            assert_memory_equal(own.document + own.row_offsets[k], all.document + begin,
                                (size_t)count * sizeof(*all.document));
            k++;
        }
        rows += own.rows;
        packing_release(&own);
    }
    assert_int_equal(rows, all.rows);
    row_shares_release(&shares);
    packing_release(&all);
    free(documents.items);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_have_one_owner),
        cmocka_unit_test(one_rank_owns_everything_in_place),
        cmocka_unit_test(parts_and_stages_fit),
        cmocka_unit_test(parts_and_stages_of_eagle3),
        cmocka_unit_test(rows_are_spread_by_work),
        cmocka_unit_test(work_has_the_columns_of_the_teacher),
        cmocka_unit_test(ranks_keep_all_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
