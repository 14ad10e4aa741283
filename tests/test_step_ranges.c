// Ranges that a profiler sees: which parts of a step they name, inside each other as they run, and closed
// when a step is given up.
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/step_fixture.h"

static char told[1024]; // names as they open, ")" where one closes
static int depth;

static void push(const char *name)
{
    assert_true(strlen(told) + strlen(name) + 2 < sizeof(told));
    strcat(told, name);
    strcat(told, "(");
    depth++;
}

static void pop(void)
{
    assert_true(depth > 0);
    assert_true(strlen(told) + 2 < sizeof(told));
    strcat(told, ")");
    depth--;
}

static bool at_once(void *context)
{
    int *asked = context;
    return (*asked)++ > 0;
}

static void open_fixture(struct step_fixture *f, struct step *step, struct row *row,
                         const struct backend *backend)
{
    static const char *const sets[] = {"drafter.block_size=4"};
    const struct step_fixture_options options = {.seed = 3, .sets = sets, .set_count = 1};
    static const int32_t lengths[] = {40};
    struct error err = {""};
    step_fixture_init(f, &options);
    f->execution.group_rows = 8;   // two blocks
    f->execution.chunk_rows = 128; // all slots of a group
    struct step_setup setup = step_fixture_setup(f);
    setup.backend = backend;
    assert_int_equal(step_open(step, &setup, &err), 0);
    step_load(step, &f->state);
    step_fixture_row(f, row, lengths, 1, 5);
    told[0] = '\0';
    depth = 0;
}

static void ranges_name_the_parts(void **state)
{
    (void)state;
    static const int32_t anchors[] = {3, 9, 20};
    struct backend backend = *backend_cpu();
    struct step_fixture f;
    struct step step;
    struct row row;
    struct step_outcome outcome;
    backend.range_push = push;
    backend.range_pop = pop;
    open_fixture(&f, &step, &row, &backend);
    step_begin(&step);
    assert_int_equal(step_row_anchors(&step, &row, anchors, 3), 0);
    step_apply(&step, 1e-2, 1, &outcome);
    assert_true(outcome.applied);
    assert_string_equal(told, "context()group(forward()loss(chunk())backward())"
                              "group(forward()loss(chunk())backward())update()");
    assert_int_equal(depth, 0);
    row_close(&row, NULL);
    step_close(&step);
    step_fixture_release(&f);
}

static void a_step_that_is_given_up_leaves_none_open(void **state)
{
    (void)state;
    static const int32_t anchors[] = {3, 9, 20};
    struct backend backend = *backend_cpu();
    struct step_fixture f;
    struct step step;
    struct row row;
    int asked = 0;
    backend.range_push = push;
    backend.range_pop = pop;
    open_fixture(&f, &step, &row, &backend);
    step.stop = at_once;
    step.stop_context = &asked;
    step_begin(&step);
    assert_int_equal(step_row_anchors(&step, &row, anchors, 3), 1);
    assert_string_equal(told, "context()group(forward()loss(chunk())backward())");
    assert_int_equal(depth, 0);
    row_close(&row, NULL);
    step_close(&step);
    step_fixture_release(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranges_name_the_parts),
        cmocka_unit_test(a_step_that_is_given_up_leaves_none_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
