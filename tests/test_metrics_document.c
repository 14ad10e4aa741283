// docs/file-formats.md names every member that lines of metrics.jsonl have, and none that no line has.
#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "tests/support/program.h"
#include "tests/support/report_fixture.h"
#include "tests/support/shard_fixture.h"

enum { MOST_NAMES = 256, NAME_BYTES = 64 };

struct names {
    char items[MOST_NAMES][NAME_BYTES];
    int count;
};

static bool has(const struct names *names, const char *name)
{
    for (int i = 0; i < names->count; i++)
        if (strcmp(names->items[i], name) == 0)
            return true;
    return false;
}

static void add(struct names *names, const char *name, size_t length)
{
    char text[NAME_BYTES];
    assert_true(length > 0 && length < NAME_BYTES);
    memcpy(text, name, length);
    text[length] = '\0';
    if (has(names, text))
        return;
    assert_true(names->count < MOST_NAMES);
    memcpy(names->items[names->count++], text, length + 1);
}

// The names between backticks in the first column of the section's tables.
static void read_document(struct names *names)
{
    char *text = program_text(DTRAIN_SOURCE_DIR "/docs/file-formats.md"), *rest = NULL;
    char *section = strstr(text, "\n### metrics.jsonl\n");
    assert_non_null(section);
    section += strlen("\n### metrics.jsonl\n");
    char *end = strstr(section, "\n### ");
    assert_non_null(end);
    *end = '\0';
    for (char *line = strtok_r(section, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest)) {
        char *stop = line[0] == '|' ? strchr(line + 1, '|') : NULL;
        for (char *from = line;
             stop != NULL && (from = strchr(from, '`')) != NULL && from < stop;) {
            char *to = strchr(++from, '`');
            assert_non_null(to);
            add(names, from, (size_t)(to - from));
            from = to + 1;
        }
    }
    free(text);
}

// The number at the end of accept_len_walk_5 is N in the document.
static void add_member(struct names *names, const char *name)
{
    size_t length = strlen(name);
    const char *last = strrchr(name, '_');
    char text[NAME_BYTES];
    if (last == NULL || !isdigit((unsigned char)last[1])) {
        add(names, name, length);
        return;
    }
    snprintf(text, sizeof(text), "%.*s_N", (int)(last - name), name);
    add(names, text, strlen(text));
}

// A run that reports all there is to report.
static void write_lines(const char *folder)
{
    static const double weights[LOSS_TERM_COUNT] = {1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0};
    _Static_assert(LOSS_TERM_COUNT == 8, "every term has a weight above");
    struct metrics metrics = report_metrics();
    struct step_report step = report_step_of(&metrics, 1);
    struct walk walk = {.blocks = 1.0, .tokens = 2.0};
    int64_t drafts[] = {5};
    struct config_ints draft_tokens = {drafts, 1};
    struct validation_report validation = {.step = 1,
                                           .metrics = &metrics,
                                           .walk = &walk,
                                           .draft_tokens = &draft_tokens,
                                           .normalize = NORMALIZE_WEIGHTED,
                                           .block_size = 4};
    struct run_folder run;
    struct error err = {""};
    step.term_weights = weights;
    step.ranks = 2;
    step.ttt = step.draft_vocab = validation.ttt = validation.draft_vocab = true;
    step.spool = true;
    step.peak_flops = 1e15;
    if (run_folder_open(&run, folder, &err) != 0 ||
        run_folder_start(&run, NULL, false, &err) != 0 ||
        run_folder_step(&run, &step, 1000, &err) != 0 ||
        run_folder_validation(&run, &validation, &err) != 0)
        fail_msg("%s", err.text);
    run_folder_close(&run);
}

static void every_member_is_in_the_document_and_the_other_way_round(void **state)
{
    (void)state;
    static struct names told, written;
    char *folder = fixture_folder();
    const cJSON *line, *member;
    read_document(&told);
    write_lines(folder);
    cJSON *metrics = program_metrics(folder);
    assert_int_equal(cJSON_GetArraySize(metrics), 2);
    cJSON_ArrayForEach(line, metrics)
    {
        cJSON_ArrayForEach(member, line) add_member(&written, member->string);
    }
    for (int i = 0; i < written.count; i++)
        if (!has(&told, written.items[i]))
            fail_msg("docs/file-formats.md does not say what '%s' is", written.items[i]);
    for (int i = 0; i < told.count; i++)
        if (!has(&written, told.items[i]))
            fail_msg("docs/file-formats.md has '%s', which no line has", told.items[i]);
    cJSON_Delete(metrics);
    fixture_folder_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_member_is_in_the_document_and_the_other_way_round),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
