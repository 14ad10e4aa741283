// Values that a plan says fit: the largest of a key, of several together, and where none does.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/support/plan_preset.h"
#include "trainer/plan_fit.h"

// Bytes of the preset with one more set; the step cut as `now` unless open.
static struct plan planned_with(const struct preset *p, const char *key, int64_t value)
{
    struct config config = p->config;
    struct config_int_key found;
    struct plan plan;
    struct error err = {""};
    assert_int_equal(config_find_int(&config, key, &found, &err), 0);
    *found.value = value;
    if (plan_make(&plan, &p->input.subject, &config, NULL, &err) != 0)
        fail_msg("%s", err.text);
    return plan;
}

static void check_fit(const struct preset *p, const struct plan *now, const char *key)
{
    struct plan_fit fit;
    struct error err = {""};
    if (plan_fit_key(&fit, &p->input.subject, &p->config, now, key, true, &err) != 0)
        fail_msg("%s", err.text);
    assert_true(fit.found && fit.bounded && !fit.independent);
    assert_int_equal(fit.largest.value % fit.granule, 0);
    assert_int_equal(fit.next.value, fit.largest.value + fit.granule);
    struct plan largest = planned_with(p, fit.key, fit.largest.value);
    struct plan next = planned_with(p, fit.key, fit.next.value);
    assert_true(largest.fits && largest.needed == fit.largest.needed);
    assert_true(!next.fits && next.needed > p->input.subject.limit);
    assert_int_equal(largest.execution.group_rows, fit.cut.group_rows);
    plan_release(&next);
    plan_release(&largest);
}

static void what_is_said_to_fit_fits(void **state)
{
    (void)state;
    static const char *const sets[] = {"drafter.layer_types=[]"};
    static const size_t limits[] = {40, 48, 96, 139};
    for (size_t n = 0; n < 2; n++)
        for (size_t i = 0; i < sizeof(limits) / sizeof(*limits); i++) {
            struct preset p;
            struct plan plan;
            preset_open(&p, preset_dflash[n], sets, 1);
            p.input.subject.limit = limits[i] * preset_gib;
            preset_plan(&plan, &p);
            check_fit(&p, &plan, "seq_len");
            check_fit(&p, &plan, "drafter.layers");
            check_fit(&p, &plan, "memory.chunk_rows");
            plan_release(&plan);
            preset_close(&p);
        }
}

// A fit of one key in v4 with a limit; the plan it starts from fits or not.
static struct plan_fit fit_with(struct preset *p, const char *key, size_t limit)
{
    struct plan plan;
    struct plan_fit fit;
    struct error err = {""};
    p->input.subject.limit = limit;
    preset_plan(&plan, p);
    if (plan_fit_key(&fit, &p->input.subject, &p->config, &plan, key, true, &err) != 0)
        fail_msg("%s", err.text);
    plan_release(&plan);
    return fit;
}

static size_t least_with(struct preset *p, const char *key, int64_t value)
{
    p->input.subject.limit = 1; // the thriftiest cut
    struct plan plan = planned_with(p, key, value);
    size_t needed = plan.needed;
    plan_release(&plan);
    return needed;
}

// Down from a value that does not fit: the smallest is tried, too, and steps are as fine as they must be.
static void small_values_are_found(void **state)
{
    (void)state;
    static const struct {
        const char *key;
        int64_t least, some, nearly;
    } keys[] = {{"data.seq_len", 2, 700, 512},
                {"drafter.layers", 1, 3, 3},
                {"drafter.block_size", 2, 7, 7}};
    static const char *const sets[] = {"drafter.layer_types=[]"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
        struct preset p;
        preset_open(&p, "v4.yaml", sets, 1);
        size_t least = least_with(&p, keys[i].key, keys[i].least);
        struct plan_fit none = fit_with(&p, keys[i].key, least / 4);
        assert_true(!none.found && none.bounded && !none.next.fits);
        assert_true(none.next.needed > least / 4 && none.next.needed <= least);
        struct plan_fit smallest = fit_with(&p, keys[i].key, least);
        assert_true(smallest.found && smallest.largest.value >= keys[i].least);
        size_t limit = least_with(&p, keys[i].key, keys[i].some);
        struct plan_fit some = fit_with(&p, keys[i].key, limit);
        assert_true(some.found && some.largest.fits && some.largest.needed <= limit);
        assert_in_range(some.largest.value, keys[i].nearly, 1 << 20);
        assert_true(some.next.value > some.largest.value && some.next.needed > limit);
        preset_close(&p);
    }
}

// A value that fits is never answered with a smaller one.
static void what_fits_is_not_made_smaller(void **state)
{
    (void)state;
    static const char *const sets[] = {"data.seq_len=9000"};
    struct preset p;
    preset_open(&p, "v4.yaml", sets, 1);
    struct plan_fit fit = fit_with(&p, "data.seq_len", least_with(&p, "data.seq_len", 9000));
    assert_true(fit.found && fit.largest.value >= 9000 && fit.next.value > fit.largest.value);
    assert_true(fit.largest.value == 9000 || fit.largest.value % fit.granule == 0);
    preset_close(&p);
}

static void independence_is_seen_not_guessed(void **state)
{
    (void)state;
    static const char *const sets[] = {"data.prefetch_rows=64"};
    struct preset p;
    preset_open(&p, "v4.yaml", NULL, 0);
    struct plan_fit rows = fit_with(&p, "data.prefetch_rows", 96 * preset_gib);
    assert_true(rows.independent && rows.host_grows);
    struct plan_fit readers = fit_with(&p, "data.readers", 96 * preset_gib);
    assert_true(readers.independent && !readers.host_grows);
    preset_close(&p);
    preset_open(&p, "v4.yaml", sets, 1);
    rows = fit_with(&p, "data.prefetch_rows", 96 * preset_gib);
    assert_true(rows.found && !rows.independent && !rows.bounded && rows.largest.value == 64);
    preset_close(&p);
}

static void layer_types_follow_the_layers(void **state)
{
    (void)state;
    struct preset p;
    struct plan plan;
    struct plan_fit fit;
    struct error err = {""};
    preset_open(&p, "v4.yaml", NULL, 0);
    p.input.subject.limit = 96 * preset_gib;
    preset_plan(&plan, &p);
    assert_int_equal(plan_fit_key(&fit, &p.input.subject, &p.config, &plan, "layers", false, &err),
                     0);
    assert_true(fit.found && fit.largest.value > 5 && fit.lists_types);
    assert_int_equal(p.config.drafter.layer_types.count, 5); // the config itself is as it was
    assert_int_equal(
        plan_fit_key(&fit, &p.input.subject, &p.config, &plan, "max_anchors", false, &err), 0);
    assert_true(fit.independent);
    plan_release(&plan);
    preset_close(&p);
}

static void keys_grow_together(void **state)
{
    (void)state;
    static const char *const keys[] = {"data.seq_len", "memory.group_rows"};
    struct preset p;
    struct plan plan;
    struct plan_fit_together fit;
    struct error err = {""};
    preset_open(&p, "v4.yaml", NULL, 0);
    p.input.subject.limit = 96 * preset_gib;
    preset_plan(&plan, &p);
    assert_int_equal(plan_fit_together(&fit, &p.input.subject, &p.config, &plan, keys, 2, &err), 0);
    assert_true(fit.found && fit.bounded && fit.factor > 1.0);
    assert_true(fit.value[0] > 8192 && fit.value[1] > 8192);
    assert_true(fit.needed <= 96 * preset_gib && fit.next_needed > 96 * preset_gib);
    plan_release(&plan);
    preset_close(&p);
}

// Below the steps in which a key is tried at first, smaller ones are: not its least value at once.
static void keys_shrink_together(void **state)
{
    (void)state;
    static const char *const keys[] = {"data.seq_len", "memory.group_rows"};
    static const char *const sets[] = {"data.seq_len=1024", "memory.group_rows=512",
                                       "memory.chunk_rows=512", "memory.recompute=cheap"};
    struct preset p;
    struct plan plan;
    struct plan_fit_together fit;
    struct error err = {""};
    preset_open(&p, "v4.yaml", sets, 4);
    p.input.subject.limit = 96 * preset_gib;
    preset_plan(&plan, &p);
    p.input.subject.limit = plan.needed - 1;
    assert_int_equal(plan_fit_together(&fit, &p.input.subject, &p.config, &plan, keys, 2, &err), 0);
    assert_true(fit.found && fit.bounded && fit.factor < 1.0);
    assert_true(fit.value[0] >= 512 && fit.value[0] < 1024);
    assert_true(fit.needed < plan.needed && fit.next_needed >= plan.needed);
    plan_release(&plan);
    preset_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_said_to_fit_fits),
        cmocka_unit_test(small_values_are_found),
        cmocka_unit_test(what_fits_is_not_made_smaller),
        cmocka_unit_test(independence_is_seen_not_guessed),
        cmocka_unit_test(layer_types_follow_the_layers),
        cmocka_unit_test(keys_grow_together),
        cmocka_unit_test(keys_shrink_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
