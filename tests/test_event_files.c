// Event files: records that TensorBoard's rules accept, read here by a reader of its own; what is cut when a
// run resumes, and that a record which does not fit is taken back.
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/crc32c.h"
#include "tests/support/report_fixture.h"
#include "tests/support/shard_fixture.h"
#include "trainer/files.h"

static char *folder; // of one test

static int open_test(void **state)
{
    (void)state;
    folder = fixture_folder();
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    fixture_folder_remove(folder);
    return 0;
}

// ---- a run that reports --------------------------------------------------------------------------

static void open_run(struct run_folder *run, const struct counters *resumed)
{
    struct error err = {""};
    if (run_folder_open(run, folder, &err) != 0 || run_folder_start(run, resumed, true, &err) != 0)
        fail_msg("%s", err.text);
}

static void report_validation(struct run_folder *run, int64_t step)
{
    struct metrics metrics = report_metrics();
    struct walk walk = {.blocks = 4.0, .tokens = 13.0};
    struct config_ints none = {NULL, 0};
    struct validation_report report = {.step = step,
                                       .metrics = &metrics,
                                       .walk = &walk,
                                       .draft_tokens = &none,
                                       .normalize = NORMALIZE_WEIGHTED,
                                       .block_size = 4,
                                       .seconds = 1.5};
    struct error err = {""};
    if (run_folder_validation(run, &report, &err) != 0)
        fail_msg("%s", err.text);
}

// ---- a reader ------------------------------------------------------------------------------------

struct reader {
    const unsigned char *next, *end;
};

static uint64_t little_endian(struct reader *reader, int size)
{
    uint64_t value = 0;
    assert_true(reader->end - reader->next >= size);
    for (int i = 0; i < size; i++)
        value |= (uint64_t)reader->next[i] << (8 * i);
    reader->next += size;
    return value;
}

static uint64_t varint(struct reader *reader)
{
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        uint64_t byte = little_endian(reader, 1);
        value |= (byte & 0x7f) << shift;
        if (byte < 0x80)
            return value;
    }
}

// One field: its number, and its value as bits or as a part.
static int field(struct reader *reader, uint64_t *bits, struct reader *part)
{
    uint64_t key = varint(reader);
    *bits = 0;
    *part = (struct reader){reader->next, reader->next};
    switch (key & 7) {
    case 0:
        *bits = varint(reader);
        break;
    case 1:
        *bits = little_endian(reader, 8);
        break;
    case 5:
        *bits = little_endian(reader, 4);
        break;
    case 2: {
        uint64_t size = varint(reader);
        assert_true(size <= (uint64_t)(reader->end - reader->next));
        *part = (struct reader){reader->next, reader->next + size};
        reader->next += size;
        break;
    }
    default:
        fail_msg("wire type %d", (int)(key & 7));
    }
    return (int)(key >> 3);
}

// One scalar, or what else an event says.
struct event {
    double wall_time;
    int64_t step;
    char version[32], tag[64];
    float value;
    bool start;
};

struct events {
    struct event items[1024];
    int count;
};

static void copy_text(char *to, size_t size, const struct reader *part)
{
    size_t n = (size_t)(part->end - part->next);
    assert_true(n > 0 && n < size);
    memcpy(to, part->next, n);
    to[n] = '\0';
}

static void parse_value(struct event *event, struct reader value)
{
    uint64_t bits;
    struct reader part;
    while (value.next < value.end) {
        int number = field(&value, &bits, &part);
        assert_true(number == 1 || number == 2);
        uint32_t low = (uint32_t)bits;
        if (number == 1)
            copy_text(event->tag, sizeof(event->tag), &part);
        else
            memcpy(&event->value, &low, sizeof(event->value));
    }
}

static struct event *add_event(struct events *events, const struct event *event)
{
    assert_true(events->count < 1024);
    events->items[events->count] = *event;
    return &events->items[events->count++];
}

// A summary is an event for each of its values.
static void parse_event(struct events *events, struct reader reader)
{
    struct event event = {0};
    struct reader summary = {NULL, NULL}, part, inner;
    uint64_t bits;
    while (reader.next < reader.end) {
        switch (field(&reader, &bits, &part)) {
        case 1:
            memcpy(&event.wall_time, &bits, sizeof(bits));
            break;
        case 2:
            event.step = (int64_t)bits;
            break;
        case 3:
            copy_text(event.version, sizeof(event.version), &part);
            break;
        case 5:
            summary = part;
            break;
        case 7:
            event.start = field(&part, &bits, &inner) == 1 && bits == 1;
            break;
        default:
            fail_msg("unknown field of an event");
        }
    }
    if (summary.next == NULL)
        add_event(events, &event);
    while (summary.next < summary.end) {
        assert_int_equal(field(&summary, &bits, &part), 1);
        parse_value(add_event(events, &event), part);
    }
}

static uint32_t masked(const unsigned char *bytes, size_t size)
{
    uint32_t crc = crc32c(0, bytes, size);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

// The bytes of the event file that is `n`-th by name; NULL: there are fewer. The caller frees both.
static unsigned char *file_bytes(int n, size_t *size, char **path)
{
    char *events = fixture_path(folder, "events");
    struct dirent **found = NULL;
    int files = scandir(events, &found, NULL, alphasort), at = 0;
    unsigned char *bytes = NULL;
    for (int i = 0; i < files; i++) {
        if (strncmp(found[i]->d_name, "events.out.tfevents.", 20) == 0 && at++ == n) {
            *path = fixture_path(events, found[i]->d_name);
            FILE *in = fopen(*path, "rb");
            assert_non_null(in);
            bytes = malloc(1 << 20);
            assert_non_null(bytes);
            *size = fread(bytes, 1, 1 << 20, in);
            fclose(in);
        }
        free(found[i]);
    }
    free(found);
    free(events);
    return bytes;
}

// Adds all events of the n-th file; false: there are fewer files.
static bool read_file(struct events *events, int n)
{
    size_t size = 0;
    char *path = NULL;
    unsigned char *bytes = file_bytes(n, &size, &path);
    if (bytes == NULL)
        return false;
    struct reader reader = {bytes, bytes + size};
    while (reader.next < reader.end) {
        const unsigned char *head = reader.next;
        uint64_t length = little_endian(&reader, 8);
        assert_int_equal(little_endian(&reader, 4), masked(head, 8));
        const unsigned char *body = reader.next;
        assert_true(length <= (uint64_t)(reader.end - body));
        reader.next += length;
        assert_int_equal(little_endian(&reader, 4), masked(body, (size_t)length));
        parse_event(events, (struct reader){body, body + length});
    }
    free(path);
    free(bytes);
    return true;
}

// Of all files.
static void read_events(struct events *events)
{
    events->count = 0;
    for (int n = 0; read_file(events, n); n++)
        ;
}

static const struct event *find_event(const struct events *events, const char *tag)
{
    for (int i = 0; i < events->count; i++)
        if (strcmp(events->items[i].tag, tag) == 0)
            return &events->items[i];
    fail_msg("no event %s", tag);
    return NULL;
}

static void assert_steps(const struct events *events, const char *tag, const int *steps, int count)
{
    int at = 0;
    for (int i = 0; i < events->count; i++)
        if (strcmp(events->items[i].tag, tag) == 0) {
            assert_true(at < count);
            assert_int_equal(events->items[i].step, steps[at++]);
        }
    assert_int_equal(at, count);
}

// ---- tests ---------------------------------------------------------------------------------------

static struct events events; // of one test

static void events_are_records_that_readers_accept(void **state)
{
    (void)state;
    struct run_folder run;
    open_run(&run, NULL);
    report_write_step(&run, 300);
    run_folder_close(&run);
    read_events(&events);
    assert_string_equal(events.items[0].version, "brain.Event:2");
    assert_true(events.items[0].wall_time > 1.5e9);
    assert_true(events.items[1].start && events.items[1].step == 0);
    const struct event *loss = find_event(&events, "train/loss");
    assert_int_equal(loss->step, 300);
    assert_true(loss->wall_time > 1.5e9);
    assert_true(loss->value == 1.5f);
    assert_true(find_event(&events, "train/accept_len")->value == 2.5f);
    assert_true(find_event(&events, "train/eal_marginal")->value == 1.125f);
    assert_true(find_event(&events, "train/lr")->value == 1e-4f);
    assert_true(find_event(&events, "train/clip_factor")->value == 1.0f);
    assert_true(find_event(&events, "train/loss_tv")->value == 0.25f);
    assert_true(find_event(&events, "acc/slot_01")->value == 0.75f);
    assert_true(find_event(&events, "acc/slot_02")->value == 0.5f);
    assert_true(find_event(&events, "speed/tokens_per_second")->value == 2.5e9f);
    assert_true(find_event(&events, "speed/block_rows_per_second")->value == 8.0f);
    assert_true(find_event(&events, "speed/wait_share")->value == 0.3125f);
    assert_true(find_event(&events, "speed/memory_bytes")->value == 3e9f);
    assert_true(find_event(&events, "time/wait_seconds")->value == 0.5f);
    for (int i = 0; i < events.count; i++) // nothing was scored in these slots
        assert_true(strcmp(events.items[i].tag, "acc/slot_00") != 0 &&
                    strcmp(events.items[i].tag, "acc/slot_03") != 0);
}

// The first twelve bytes of every event file that TensorFlow writes: 24 bytes follow, and their checksum.
static void the_first_record_begins_as_tensorflows(void **state)
{
    (void)state;
    static const unsigned char head[] = {24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22};
    struct run_folder run;
    size_t size = 0;
    char *path = NULL;
    open_run(&run, NULL);
    run_folder_close(&run);
    unsigned char *bytes = file_bytes(0, &size, &path);
    assert_non_null(bytes);
    assert_memory_equal(bytes, head, sizeof(head));
    free(bytes);
    free(path);
}

static void a_resume_cuts_what_it_takes_again(void **state)
{
    (void)state;
    static const int steps[] = {1, 2, 3, 4}, scored[] = {0, 3};
    struct run_folder run;
    open_run(&run, NULL);
    report_validation(&run, 0);
    for (int64_t step = 1; step <= 5; step++)
        report_write_step(&run, step);
    run_folder_close(&run);
    open_run(&run, &(struct counters){.step = 3});
    report_validation(&run, 3);
    report_write_step(&run, 4);
    run_folder_close(&run);
    open_run(&run, &(struct counters){.step = 2}); // further back, over both files
    report_write_step(&run, 3);
    run_folder_close(&run);
    // The validation at step 3 was not behind this one's checkpoint either.
    open_run(&run, &(struct counters){.step = 3});
    report_validation(&run, 3);
    report_write_step(&run, 4);
    run_folder_close(&run);
    read_events(&events);
    assert_steps(&events, "train/loss", steps, 4);
    assert_steps(&events, "val/accept_len_walk", scored, 2);
    // Readers that have read what is cut are told.
    assert_true(events.items[events.count - 1].step == 4);
    int starts = 0;
    for (int i = 0; i < events.count; i++)
        starts += events.items[i].start;
    assert_int_equal(starts, 4);
}

static void a_validation_of_the_resumed_step_is_cut_when_it_comes_again(void **state)
{
    (void)state;
    static const int once[] = {3}, steps[] = {1, 2, 3};
    struct run_folder run;
    open_run(&run, NULL);
    for (int64_t step = 1; step <= 3; step++)
        report_write_step(&run, step);
    report_validation(&run, 3);
    run_folder_close(&run);
    open_run(&run, &(struct counters){.step = 3, .last_validation = 0});
    report_validation(&run, 3);
    run_folder_close(&run);
    open_run(&run, &(struct counters){.step = 3, .last_validation = 3});
    run_folder_close(&run);
    read_events(&events);
    assert_steps(&events, "val/loss", once, 1);
    assert_steps(&events, "train/loss", steps, 3);
}

static void half_a_record_is_cut(void **state)
{
    (void)state;
    static const int steps[] = {1, 2, 3};
    struct run_folder run;
    size_t size = 0;
    char *path = NULL;
    open_run(&run, NULL);
    for (int64_t step = 1; step <= 3; step++)
        report_write_step(&run, step);
    run_folder_close(&run);
    free(file_bytes(0, &size, &path));
    assert_int_equal(truncate(path, (off_t)size - 7), 0);
    free(path);
    open_run(&run, &(struct counters){.step = 2});
    report_write_step(&run, 3);
    run_folder_close(&run);
    read_events(&events);
    assert_steps(&events, "train/loss", steps, 3);
}

static void a_run_that_begins_again_has_nothing_behind_it(void **state)
{
    (void)state;
    static const int first[] = {1}, scored[] = {0};
    struct run_folder run;
    for (int i = 0; i < 2; i++) {
        open_run(&run, NULL);
        report_validation(&run, 0);
        report_write_step(&run, 1);
        run_folder_close(&run);
    }
    read_events(&events);
    assert_steps(&events, "train/loss", first, 1);
    assert_steps(&events, "val/loss", scored, 1);
}

static void a_record_that_does_not_fit_is_taken_back(void **state)
{
    (void)state;
    static const int steps[] = {1, 3};
    struct run_folder run;
    struct rlimit limit;
    size_t size = 0;
    char *path = NULL;
    open_run(&run, NULL);
    report_write_step(&run, 1);
    free(file_bytes(0, &size, &path));
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    struct rlimit lower = {size + 50, limit.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &lower), 0);
    event_file_begin(run.events, 2);
    for (int i = 0; i < 10; i++)
        event_file_scalar(run.events, "train/loss", 1.0);
    event_file_end(run.events);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    report_write_step(&run, 3);
    run_folder_close(&run);
    read_events(&events);
    assert_steps(&events, "train/loss", steps, 2);
    free(path);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(events_are_records_that_readers_accept),
        TEST(the_first_record_begins_as_tensorflows),
        TEST(a_resume_cuts_what_it_takes_again),
        TEST(a_validation_of_the_resumed_step_is_cut_when_it_comes_again),
        TEST(half_a_record_is_cut),
        TEST(a_run_that_begins_again_has_nothing_behind_it),
        TEST(a_record_that_does_not_fit_is_taken_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
