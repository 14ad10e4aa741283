// `dtrain vocab` (case C13): which tokens a map keeps, what is printed of it, shards and manifests, and what
// is refused.
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/memory.h"
#include "data/safetensors.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"

enum { VOCAB = 10, TOKENS = 10 };

static struct run_fixture fixture;

static int setup(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

// Two shards of V 10. Supervised are 2 five times, 7 three times, 3 and 0 once each.
static void write_shards(void)
{
    static const int32_t first[TOKENS] = {5, 5, 2, 2, 7, 3, 2, 9, 9, 9};
    static const int32_t second[TOKENS] = {5, 5, 7, 2, 7, 0, 2, 9, 9, 9};
    static const uint8_t mask[TOKENS] = {0, 0, 1, 1, 1, 1, 1, 0, 0, 0};
    static const int64_t length = TOKENS;
    static const uint64_t ids[] = {11, 12};
    struct fixture_options options = {.seed = 1,
                                      .target_model = "ten",
                                      .vocab_size = VOCAB,
                                      .documents = 1,
                                      .lengths = &length,
                                      .input_ids = first,
                                      .loss_mask = mask,
                                      .doc_ids = ids};
    fixture_shard(run_path(&fixture, "a.h5"), &options);
    options.input_ids = second;
    options.doc_ids = ids + 1;
    fixture_shard(run_path(&fixture, "b.h5"), &options);
}

static int make(const char *name, const char *size, const char *first, const char *second)
{
    return run_command(&fixture, name, false, "vocab", "--size", size, "--out",
                       run_path(&fixture, "%s.safetensors", name), run_path(&fixture, "%s", first),
                       second != NULL ? run_path(&fixture, "%s", second) : NULL, NULL);
}

static void must_hold(const char *name, const int64_t *offsets, int64_t count,
                      const uint8_t *members)
{
    struct safetensors file;
    struct error err = {""};
    if (safetensors_open(&file, run_path(&fixture, "%s.safetensors", name), &err) != 0)
        fail_msg("%s", err.text);
    const struct safetensors_entry *d2t = safetensors_find(&file, "d2t");
    const struct safetensors_entry *t2d = safetensors_find(&file, "t2d");
    assert_int_equal(d2t->shape[0], count);
    assert_int_equal(t2d->shape[0], VOCAB);
    assert_memory_equal(d2t->bytes, offsets, (size_t)count * sizeof(*offsets));
    assert_memory_equal(t2d->bytes, members, VOCAB);
    assert_string_equal(safetensors_metadata(&file, "target"), "ten");
    safetensors_close(&file);
}

static void the_most_frequent_tokens_are_kept(void **state)
{
    (void)state;
    static const int64_t four[] = {0, 1, 1, 4}, three[] = {0, 1, 5}, six[] = {0, 0, 0, 0, 0, 2};
    static const uint8_t of_four[VOCAB] = {1, 0, 1, 1, 0, 0, 0, 1, 0, 0};
    static const uint8_t of_three[VOCAB] = {1, 0, 1, 0, 0, 0, 0, 1, 0, 0};
    static const uint8_t of_six[VOCAB] = {1, 1, 1, 1, 1, 0, 0, 1, 0, 0};
    write_shards();
    assert_int_equal(make("four", "4", "a.h5", "b.h5"), 0);
    must_hold("four", four, 4, of_four);
    run_must_say(&fixture, "four", "ten, vocabulary of 10 tokens");
    run_must_say(&fixture, "four", "10 supervised tokens of 2 documents, 4 distinct ones");
    run_must_say(&fixture, "four", "4 tokens, 100.0000 % of the supervised ones");
    // 2, 2 + 7, all, of the halved and doubled sizes
    run_must_say(&fixture, "four", "         1   50.0000 %\n");
    run_must_say(&fixture, "four", "         2   80.0000 %\n");
    run_must_say(&fixture, "four", "         4  100.0000 %  written\n");
    run_must_say(&fixture, "four", "        10  100.0000 %\n");
    // Of 0 and 3, which are seen once each, the smaller.
    assert_int_equal(make("three", "3", "a.h5", "b.h5"), 0);
    must_hold("three", three, 3, of_three);
    run_must_say(&fixture, "three", "90.0000 %  written");
    // More than were seen: six distinct ids all the same.
    assert_int_equal(make("six", "6", "a.h5", "b.h5"), 0);
    must_hold("six", six, 6, of_six);
    run_must_say(&fixture, "six", "only 4 of them were seen");
}

static void must_be_the_same(const char *first, const char *second)
{
    const char *paths[] = {run_path(&fixture, "%s.safetensors", first),
                           run_path(&fixture, "%s.safetensors", second)};
    struct safetensors files[2];
    struct error err = {""};
    for (int i = 0; i < 2; i++)
        if (safetensors_open(&files[i], paths[i], &err) != 0)
            fail_msg("%s", err.text);
    assert_string_equal(safetensors_metadata(&files[0], "fingerprint"),
                        safetensors_metadata(&files[1], "fingerprint"));
    for (int i = 0; i < 2; i++)
        safetensors_close(&files[i]);
    char *bytes[] = {program_text(paths[0]), program_text(paths[1])};
    assert_string_equal(bytes[0], bytes[1]);
    free(bytes[0]);
    free(bytes[1]);
}

// Files count in the order of their names, as in a run; a manifest has the same documents.
static void shards_in_any_order_and_a_manifest_give_the_same_map(void **state)
{
    (void)state;
    write_shards();
    assert_int_equal(make("ab", "4", "a.h5", "b.h5"), 0);
    assert_int_equal(make("ba", "4", "b.h5", "a.h5"), 0);
    must_be_the_same("ab", "ba");
    assert_int_equal(run_command(&fixture, "manifest", false, "data", "manifest", "--out",
                                 run_path(&fixture, "m.h5"), run_path(&fixture, "a.h5"),
                                 run_path(&fixture, "b.h5"), NULL),
                     0);
    assert_int_equal(make("m", "4", "m.h5", NULL), 0);
    must_be_the_same("ab", "m");
}

// The same map stays as it is, down to its time; another one is not lost.
static void a_map_that_is_there_is_not_replaced(void **state)
{
    (void)state;
    struct stat first, again;
    const char *path = run_path(&fixture, "map.safetensors");
    write_shards();
    assert_int_equal(make("map", "4", "a.h5", "b.h5"), 0);
    run_must_say(&fixture, "map", "written        ");
    assert_int_equal(stat(path, &first), 0);
    assert_int_equal(make("map", "4", "a.h5", "b.h5"), 0);
    run_must_say(&fixture, "map", "there already  ");
    assert_int_equal(make("map", "3", "a.h5", "b.h5"), 2);
    run_must_say(&fixture, "map", "map.safetensors: exists already and is another map");
    assert_int_equal(make("map", "4", "a.h5", NULL), 2);
    assert_int_equal(stat(path, &again), 0);
    assert_int_equal(first.st_ino, again.st_ino);
    assert_int_equal(first.st_mtim.tv_sec, again.st_mtim.tv_sec);
    assert_int_equal(first.st_mtim.tv_nsec, again.st_mtim.tv_nsec);
    // Neither do files that are no maps, and nothing is left beside.
    struct error err = {""};
    assert_int_equal(files_write_text(run_path(&fixture, "text.safetensors"), "mine", &err), 0);
    assert_int_equal(make("text", "4", "a.h5", "b.h5"), 2);
    char *text = program_text(run_path(&fixture, "text.safetensors"));
    assert_string_equal(text, "mine");
    free(text);
    struct dirent **found = NULL;
    int count = scandir(fixture.folder, &found, NULL, alphasort), maps = 0;
    for (int i = 0; i < count; i++) {
        maps += strstr(found[i]->d_name, ".safetensors") != NULL;
        free(found[i]);
    }
    free(found);
    assert_int_equal(maps, 2);
}

static void what_can_not_be_counted_is_refused(void **state)
{
    (void)state;
    write_shards();
    assert_int_equal(make("large", "11", "a.h5", "b.h5"), 2);
    run_must_say(&fixture, "large", "--size: a draft vocabulary of 11 tokens: allowed are 1 to 10");
    assert_int_equal(make("none", "4", "none.h5", NULL), 2);
    run_must_say(&fixture, "none", "none.h5");
    // train.h5 of the fixture is of another target.
    assert_int_equal(make("mixed", "4", "a.h5", "train.h5"), 2);
    run_must_say(&fixture, "mixed", "train.h5");
    assert_int_equal(run_command(&fixture, "target", false, "vocab", "--size", "4", "--out",
                                 run_path(&fixture, "t.safetensors"), "--target",
                                 run_path(&fixture, "target"), run_path(&fixture, "a.h5"), NULL),
                     2);
    run_must_say(&fixture, "target", "a.h5: vocab_size 10, but the head of --target");
    assert_int_equal(run_command(&fixture, "fits", false, "vocab", "--size", "4", "--out",
                                 run_path(&fixture, "t.safetensors"), "--target",
                                 run_path(&fixture, "target"), run_path(&fixture, "train.h5"),
                                 NULL),
                     0);
}

// Documents are whole here: nothing is said of a length that they are cut to.
static void nothing_supervised_is_refused(void **state)
{
    (void)state;
    static const int64_t length = TOKENS;
    static const uint8_t mask[TOKENS];
    struct fixture_options options = {.seed = 1,
                                      .target_model = "ten",
                                      .vocab_size = VOCAB,
                                      .documents = 1,
                                      .lengths = &length,
                                      .loss_mask = mask};
    fixture_shard(run_path(&fixture, "a.h5"), &options);
    assert_int_equal(make("barren", "4", "a.h5", NULL), 2);
    run_must_say(&fixture, "barren", "1 have no token with loss_mask 1, 0 are bad");
}

// Validation shards counted, too: a run would refuse the map.
static void a_plan_warns_of_other_documents(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "drafter.kind=eagle3");
    assert_int_equal(make("all", "24", "train.h5", "val.h5"), 0);
    assert_int_equal(make("train", "24", "train.h5", NULL), 0);
    assert_int_equal(
        run_command(&fixture, "warned", true, "plan", "--set", "draft_vocab=all.safetensors", NULL),
        0);
    run_must_say(&fixture, "warned", "all.safetensors was made from ");
    run_must_say(&fixture, "warned", "documents, the shards of data.train have 40: a run will");
    assert_int_equal(
        run_command(&fixture, "good", true, "plan", "--set", "draft_vocab=train.safetensors", NULL),
        0);
    assert_false(run_says(&fixture, "good", "was made from"));
    assert_int_equal(run_train(&fixture, "run", "--set", "draft_vocab=all.safetensors", NULL), 2);
    run_must_say(&fixture, "run", "exactly those of data.train");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_most_frequent_tokens_are_kept),
        TEST(shards_in_any_order_and_a_manifest_give_the_same_map),
        TEST(a_map_that_is_there_is_not_replaced),
        TEST(what_can_not_be_counted_is_refused),
        TEST(nothing_supervised_is_refused),
        TEST(a_plan_warns_of_other_documents),
    };
    return cmocka_run_group_tests_name("run_vocab", tests, NULL, NULL);
}
