// The comparison of a sweep's points from numbers that are made up: which are on the fronts, and the table on terminals
// of different widths.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "trainer/sweep.h"

enum { POINTS = 6 };

// Points of one key that are done, from their walk, seconds and memory.
static void make(struct sweep *sweep, const double numbers[][3], int count)
{
    struct error err = {""};
    char *text = memory_strdup("max_anchors=1");
    for (int i = 1; i < count; i++) {
        char *longer = memory_format("%s,%d", text, i + 1);
        free(text);
        text = longer;
    }
    const char *grid = text;
    *sweep = (struct sweep){.lock_fd = -1, .validates = true, .folder = memory_strdup("nowhere")};
    assert_int_equal(sweep_grid_parse(&sweep->grid, &grid, 1, &err), 0);
    free(text);
    sweep_points_open(sweep);
    for (int i = 0; i < count; i++) {
        struct sweep_point *point = &sweep->points[i];
        point->state = SWEEP_DONE;
        point->result.step = 100;
        point->result.best_walk = numbers[i][0];
        point->result.seconds = numbers[i][1];
        point->result.memory = numbers[i][2];
    }
    sweep_compare(sweep);
}

// Which points are on a front, as "1, 3, ...".
static void must_be_on(const struct sweep *sweep, bool memory, const char *expected)
{
    char text[64] = "";
    for (size_t i = 0; i < sweep->point_count; i++)
        if (memory ? sweep->points[i].front_memory : sweep->points[i].front_time)
            snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%zu",
                     text[0] != '\0' ? ", " : "", i + 1);
    assert_string_equal(text, expected);
}

static void fronts(void **state)
{
    (void)state;
    static const double numbers[POINTS][3] = {{1.0, 1.0, 100.0}, {2.0, 2.0, 200.0},
                                              {1.5, 3.0, 150.0}, {2.0, 2.0, 200.0},
                                              {1.0, 1.5, 100.5}, {1.9, 1.999, 199.0}};
    struct sweep sweep;
    make(&sweep, numbers, POINTS);
    must_be_on(&sweep, false, "1, 2, 4, 6"); // time as it was measured
    must_be_on(&sweep, true, "1, 2, 3, 4");  // the last one takes less by half a percent
    assert_ptr_equal(sweep_best(&sweep), &sweep.points[1]);
    sweep.points[1].state = SWEEP_RUNNING; // what has not ended is not compared
    sweep.points[3].state = SWEEP_FAILED;
    sweep_compare(&sweep);
    must_be_on(&sweep, true, "1, 3, 6");
    sweep_release(&sweep);
}

// What differs by noise is as good as equal, and many small differences are a large one.
static void memory_within_one_percent_is_equal(void **state)
{
    (void)state;
    static const double noise[4][3] = {
        {1.0, 1.0, 206.4}, {1.1, 1.0, 207.5}, {1.2, 1.0, 206.0}, {1.3, 1.0, 207.0}};
    static const double steps[POINTS][3] = {{1.0, 1.0, 100.0}, {1.1, 1.0, 100.6},
                                            {1.2, 1.0, 101.2}, {1.3, 1.0, 101.8},
                                            {1.4, 1.0, 102.4}, {1.5, 1.0, 103.0}};
    struct sweep sweep;
    make(&sweep, noise, 4);
    must_be_on(&sweep, true, "4");
    sweep_release(&sweep);
    make(&sweep, steps, POINTS);
    must_be_on(&sweep, true, "2, 4, 6");
    sweep_release(&sweep);
}

// ---- text ----------------------------------------------------------------------------------------

static char *print(const struct sweep *sweep, size_t most)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    assert_non_null(out);
    sweep_table_print(sweep, most, out);
    assert_int_equal(fclose(out), 0);
    return text;
}

// Of the lines of the table, without those below it.
static size_t widest(const char *text, int lines)
{
    size_t most = 0;
    for (; lines > 0; lines--) {
        size_t n = strcspn(text, "\n");
        most = n > most ? n : most;
        text += n + 1;
    }
    return most;
}

static void a_narrow_terminal_has_fewer_columns(void **state)
{
    (void)state;
    static const double numbers[2][3] = {{1.5, 100.0, 5e7}, {1.25, 50.0, 4e7}};
    static const char *const kept[] = {"max_anchors", "state", "best walk", "memory", "front"};
    struct sweep sweep;
    make(&sweep, numbers, 2);
    sweep.drafts.items = memory_alloc(2, sizeof(*sweep.drafts.items));
    sweep.drafts.items[0] = 1;
    sweep.drafts.items[1] = 3;
    sweep.drafts.count = 2;
    char *full = print(&sweep, 0);
    size_t width = widest(full, 3);
    assert_true(width > 120);
    assert_null(strstr(full, "left out"));
    char *same = print(&sweep, width);
    assert_string_equal(same, full);
    free(same);
    for (size_t most = 60; most < width; most += 7) {
        char *text = print(&sweep, most),
             *head = memory_format("%.*s", (int)strcspn(text, "\n"), text);
        assert_true(widest(text, 3) <= most);
        for (size_t k = 0; k < sizeof(kept) / sizeof(*kept); k++)
            assert_non_null(strstr(head, kept[k]));
        assert_non_null(strstr(text, "\nleft out on this narrow terminal: "));
        assert_null(strstr(head, "at step"));
        assert_non_null(strstr(text, "at step")); // in the line that names what is left out
        assert_true((strstr(head, "3 drafts") == NULL) == (strstr(text, ", 3 drafts") != NULL));
        free(head);
        free(text);
    }
    free(full);
    sweep_release(&sweep);
}

// A block of 8 and 7 steps of EAGLE-3 have 7 drafts each. Their rows are not the same work.
static void kinds_are_compared_by_drafts_and_tokens(void **state)
{
    (void)state;
    static const double numbers[2][3] = {{1.5, 100.0, 5e7}, {1.25, 50.0, 4e7}};
    static const char *const words = "Points have different numbers of drafts";
    struct sweep sweep;
    make(&sweep, numbers, 2);
    sweep.points[0].block_size = 8;
    sweep.points[1].block_size = 7;
    sweep.points[0].result.most_drafts = sweep.points[1].result.most_drafts = 7;
    char *text = print(&sweep, 0);
    assert_null(strstr(text, words));
    assert_non_null(strstr(text, "block rows/s"));
    free(text);
    sweep.points[1].result.most_drafts = 6;
    snprintf(sweep.grid.axes[0].key, sizeof(sweep.grid.axes[0].key), "drafter.kind");
    text = print(&sweep, 0);
    assert_non_null(strstr(text, words));
    assert_null(strstr(text, "block rows/s"));
    assert_non_null(strstr(text, "tokens/s"));
    free(text);
    sweep_release(&sweep);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fronts),
        cmocka_unit_test(memory_within_one_percent_is_equal),
        cmocka_unit_test(a_narrow_terminal_has_fewer_columns),
        cmocka_unit_test(kinds_are_compared_by_drafts_and_tokens),
    };
    return cmocka_run_group_tests_name("sweep_table", tests, NULL, NULL);
}
