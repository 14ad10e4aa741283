// Configs that load: presets, --set, paths and patterns, what is written and read back, resume.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "configs/config_path.h"
#include "configs/config_table.h"
#include "configs/config_value.h"
#include "tests/support/config_files.h"

#define GOOD                                                                                       \
    "run: {dir: r}\n"                                                                              \
    "target: {path: t}\n"                                                                          \
    "drafter: {mask_token_id: 5}\n"                                                                \
    "loss: {kl: 1}\n"

static void load(struct config *config, const char *file, const char *const *sets, size_t n)
{
    struct error err = {{0}};
    config_init(config);
    if (config_load(config, file, sets, n, &err) != 0)
        fail_msg("%s", err.text);
    assert_string_equal(err.text, ""); // untouched on success
}

static void load_preset(struct config *config, const char *name)
{
    char *file = memory_format(DTRAIN_SOURCE_DIR "/configs/%s", name);
    load(config, file, NULL, 0);
    free(file);
}

static void assert_ends_with(const char *text, const char *end)
{
    assert_non_null(text);
    assert_true(text[0] == '/');
    assert_true(strlen(text) > strlen(end));
    assert_string_equal(text + strlen(text) - strlen(end), end);
}

static void preset_v4(void **state)
{
    (void)state;
    struct config c;
    load_preset(&c, "v4.yaml");
    assert_ends_with(c.run.dir, "/configs/runs/v4");
    assert_true(c.run.seed == 42 && c.run.epochs == 6 && c.run.max_steps == 0);
    assert_true(c.run.device == DEVICE_AUTO && c.run.compute == COMPUTE_BF16);
    assert_ends_with(c.target.path, "/configs/targets/qwen3.6-27b");
    static const int64_t ids[] = {1, 16, 31, 46, 61};
    assert_int_equal(c.target.layer_ids.count, 5);
    assert_memory_equal(c.target.layer_ids.items, ids, sizeof(ids));
    assert_int_equal(c.data.train.count, 1);
    assert_ends_with(c.data.train.items[0], "/configs/shards/train-*.h5");
    assert_ends_with(c.data.val.items[0], "/configs/shards/val-*.h5");
    assert_true(c.data.seq_len == 8192 && c.data.rows_per_step == 8);
    assert_true(c.data.on_bad_sample == BAD_SAMPLE_FAIL && c.data.noise_std == 0.0);
    assert_true(c.validation.every == 500 && c.validation.rows == 32);
    assert_true(c.drafter.kind == DRAFTER_DFLASH && c.drafter.layers == 5);
    assert_true(c.drafter.block_size == 16 && c.drafter.mask_token_id == 248070);
    assert_false(c.drafter.predict_from_anchor);
    assert_true(c.drafter.num_attention_heads == 32 && c.drafter.num_key_value_heads == 8);
    assert_true(c.drafter.head_dim == 128 && c.drafter.intermediate_size == 17408);
    assert_true(c.drafter.rope_theta == 1e7 && c.drafter.sliding_window == 2048);
    assert_int_equal(c.drafter.layer_types.count, 5);
    for (size_t i = 0; i < 5; i++)
        assert_string_equal(c.drafter.layer_types.items[i],
                            i < 4 ? "sliding_attention" : "full_attention");
    assert_true(c.anchors.max_anchors == 1024 && c.anchors.per == ANCHORS_PER_ROW &&
                c.anchors.tail == TAIL_MASK);
    assert_true(c.loss.kl == 1.0 && c.loss.tv == 0.0 && c.loss.slot_decay_gamma == 7.0);
    assert_true(c.loss.slot_weight == SLOT_WEIGHT_EXP && c.loss.slot_mask == SLOT_MASK_PREFIX &&
                c.loss.normalize == NORMALIZE_WEIGHTED);
    assert_true(c.optimizer.lr == 6e-4 && c.optimizer.weight_decay == 0.0 &&
                c.optimizer.grad_clip == 1.0);
    assert_true(c.optimizer.betas.count == 2 && c.optimizer.betas.items[0] == 0.9 &&
                c.optimizer.betas.items[1] == 0.999);
    assert_true(c.schedule.kind == SCHEDULE_COSINE && c.schedule.warmup_ratio == 0.04 &&
                c.schedule.warmup_steps == CONFIG_UNSET);
    assert_true(c.checkpoint.every == 500 && c.checkpoint.keep == 3 && c.log.every == 10);
    // Not in the file.
    assert_true(isnan(c.drafter.rms_norm_eps) && c.data.check_crc && !c.drafter.init_from);
    struct error text = {{0}};
    assert_int_equal(config_warnings(&c, &text), 0);
    config_release(&c);
}

static void preset_eagle3(void **state)
{
    (void)state;
    struct config c;
    load_preset(&c, "eagle3-qwen3-8b.yaml");
    assert_ends_with(c.run.dir, "/configs/runs/eagle3");
    assert_true(c.run.epochs == 5 && c.data.seq_len == 8192 && c.data.rows_per_step == 8);
    static const int64_t ids[] = {1, 17, 32};
    assert_int_equal(c.target.layer_ids.count, 3);
    assert_memory_equal(c.target.layer_ids.items, ids, sizeof(ids));
    assert_true(c.drafter.kind == DRAFTER_EAGLE3 && c.drafter.style == STYLE_LLAMA);
    assert_true(c.drafter.layers == 1 && c.drafter.ttt_steps == 7);
    assert_ends_with(c.drafter.draft_vocab, "/configs/vocab-32000.safetensors");
    assert_true(c.drafter.lm_head == HEAD_FROZEN && c.drafter.fc_norm && c.drafter.norm_output);
    assert_false(c.drafter.norm_before_residual || c.drafter.norm_before_fc);
    assert_true(c.loss.kl == 1.0 && c.loss.ttt_decay_base == 0.8);
    assert_true(c.loss.mask_index == MASK_INDEX_SERVED &&
                c.loss.out_of_vocab == OUT_OF_VOCAB_MASKED);
    assert_true(c.optimizer.lr == 1e-4 && c.optimizer.grad_clip == 0.5 &&
                c.schedule.warmup_ratio == 0.015);
    struct error text = {{0}};
    assert_int_equal(config_warnings(&c, &text), 0);
    config_release(&c);
}

static void block_and_flow_are_the_same(void **state)
{
    (void)state;
    struct config_folder folder;
    config_folder_open(&folder);
    char *flow = config_folder_write(&folder, "flow.yaml", GOOD "optimizer: {betas: [0.8, 0.9]}\n");
    char *block = config_folder_write(&folder, "block.yaml",
                                      "# all keys of data are commented out\ndata:\n"
                                      "optimizer:\n  betas:\n    - 0.8\n    - 0.9\n"
                                      "loss:\n  'kl': 1\ntarget:\n  path: \"t\"\n"
                                      "run:\n  dir: r\ndrafter:\n  mask_token_id: 5\n");
    struct config a, b;
    load(&a, flow, NULL, 0);
    load(&b, block, NULL, 0);
    char *ja = config_to_json(&a), *jb = config_to_json(&b);
    assert_string_equal(ja, jb);
    assert_true(a.lines.optimizer.betas == 5 && b.lines.optimizer.betas == 4);
    free(ja);
    free(jb);
    config_release(&a);
    config_release(&b);
    config_folder_close(&folder);
    free(flow);
    free(block);
}

struct real_case {
    const char *text;
    double value;
};

static void reals_as_written(void **state)
{
    (void)state;
    static const struct real_case cases[] = {{"6.0e-4", 6e-4}, {"6", 6.0},     {".5", 0.5},
                                             {"5.", 5.0},      {"1E-3", 1e-3}, {"+0.25", 0.25},
                                             {"1e+1", 10.0},   {"0.1", 0.1}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct config c;
        char *lr = memory_format("lr=%s", cases[i].text);
        const char *sets[] = {"run.dir=r", "target.path=t", "mask_token_id=5", "loss.kl=1", lr};
        load(&c, NULL, sets, 5);
        assert_memory_equal(&c.optimizer.lr, &cases[i].value, sizeof(double));
        config_release(&c);
        free(lr);
    }
}

static void set_over_the_file(void **state)
{
    (void)state;
    struct config_folder folder;
    config_folder_open(&folder);
    char *file = config_folder_write(&folder, "a.yaml", GOOD "data: {seq_len: 64}\n");
    const char *sets[] = {"seq_len=32",
                          "data.seq_len= 16 ",
                          "layer_ids=[1, 2,3]",
                          "train=a.h5, 'b,c.h5',\"d.h5\"",
                          "val=[shards/[xy]*.h5]",
                          "run.dir=../out=1",
                          "compute=fp32",
                          "check_crc=false",
                          "betas=0.5,0.25",
                          "target.name='two words'",
                          "draft_tokens=[]"};
    struct config c;
    load(&c, file, sets, sizeof(sets) / sizeof(sets[0]));
    assert_true(c.data.seq_len == 16 && c.lines.data.seq_len == CONFIG_LINE_SET);
    assert_true(c.target.layer_ids.count == 3 && c.target.layer_ids.items[2] == 3);
    static const char *const train[] = {"a.h5", "b,c.h5", "d.h5"};
    assert_int_equal(c.data.train.count, 3);
    for (size_t i = 0; i < 3; i++) {
        char *path = config_folder_path(&folder, train[i]);
        assert_string_equal(c.data.train.items[i], path);
        free(path);
    }
    assert_int_equal(c.data.val.count, 1);
    assert_ends_with(c.data.val.items[0], "/shards/[xy]*.h5");
    assert_string_equal(config_path_base(c.run.dir), "out=1");
    assert_int_equal(strlen(c.run.dir), (size_t)(strrchr(folder.path, '/') - folder.path) + 6);
    assert_true(c.run.compute == COMPUTE_FP32 && !c.data.check_crc);
    assert_true(c.optimizer.betas.count == 2 && c.optimizer.betas.items[1] == 0.25);
    assert_string_equal(c.target.name, "two words");
    assert_int_equal(c.validation.draft_tokens.count, 0);
    config_release(&c);
    config_folder_close(&folder);
    free(file);
}

static void paths_resolve(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"/a/b", "x", "/a/b/x"},
        {"/a/b", "/x/y", "/x/y"},
        {"/a/b", "./x", "/a/b/x"},
        {"/a/b", "../x", "/a/x"},
        {"/a/b", "../../x", "/x"},
        {"/a/b", "../../../x", "/x"},
        {"/a/b", ".//../x/../y", "/a/x/../y"},
        {"/a/b", "..", "/a"},
        {"/a/b", ".", "/a/b"},
        {"/a/b", "..x", "/a/b/..x"},
        {"/a/b", ".x", "/a/b/.x"},
        {"/", "x", "/x"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *path = config_path_resolve(cases[i][0], cases[i][1]);
        assert_string_equal(path, cases[i][2]);
        free(path);
    }
}

// A valid value of a key that is not its default, as the text of a --set.
static char *other_value(const struct config_key *key)
{
    switch (key->type) {
    case CONFIG_TYPE_INT:
        return memory_format(
            "%lld", (long long)(key->max_int == key->default_int ? key->min_int : key->max_int));
    case CONFIG_TYPE_REAL:
        return memory_format("%.17g", key->min_real + (key->max_real - key->min_real) / 3.0);
    case CONFIG_TYPE_FLAG:
        return memory_strdup(key->default_int ? "false" : "true");
    case CONFIG_TYPE_CHOICE: {
        int last = 0;
        while (config_choice_at(key, last + 1))
            last++;
        return memory_strdup(config_choice_at(key, last));
    }
    case CONFIG_TYPE_INTS:
        return memory_format("%lld,%lld", (long long)key->min_int, (long long)key->max_int);
    case CONFIG_TYPE_REALS:
        return memory_format("0.1,%.17g", key->max_real / 3.0);
    default:
        return memory_strdup("'a \"b\", c\\d: #\tx\x01 f\xc3\xa9'");
    }
}

// Writes c, reads it back and compares every key. Rules between keys may refuse both; values count.
static void check_round_trip(const struct config *c, const struct config_folder *folder)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    assert_non_null(out);
    config_write_yaml(c, out);
    fclose(out);
    char *file = config_folder_write(folder, "elsewhere/again.yaml", text);
    struct config back;
    struct error err = {{0}};
    config_init(&back);
    config_load(&back, file, NULL, 0, &err);
    for (size_t s = 0; s < CONFIG_SECTION_COUNT; s++)
        for (size_t k = 0; k < config_sections[s].count; k++) {
            const struct config_key *key = &config_sections[s].keys()[k];
            if (!config_value_equal(c, &back, key))
                fail_msg("%s.%s differs in\n%s", key->section, key->name, text);
        }
    char *before = config_to_json(c), *after = config_to_json(&back);
    assert_string_equal(before, after);
    free(before);
    free(after);
    config_release(&back);
    free(file);
    free(text);
}

static void every_key_round_trips(void **state)
{
    (void)state;
    struct config_folder folder;
    config_folder_open(&folder);
    char *file = config_folder_write(&folder, "a.yaml", GOOD);
    struct config defaults, all;
    struct error err = {{0}};
    config_init(&defaults);
    char *sets[CONFIG_KEY_COUNT];
    size_t n = 0;
    for (size_t s = 0; s < CONFIG_SECTION_COUNT; s++)
        for (size_t k = 0; k < config_sections[s].count; k++) {
            const struct config_key *key = &config_sections[s].keys()[k];
            char *value = other_value(key);
            sets[n++] = memory_format("%s.%s=%s", key->section, key->name, value);
            free(value);
        }
    assert_int_equal(n, CONFIG_KEY_COUNT);
    config_init(&all);
    config_load(&all, file, (const char *const *)sets, n, &err);
    for (size_t s = 0; s < CONFIG_SECTION_COUNT; s++)
        for (size_t k = 0; k < config_sections[s].count; k++) {
            const struct config_key *key = &config_sections[s].keys()[k];
            if (key->type == CONFIG_TYPE_CHOICE && !config_choice_at(key, 1))
                continue; // one choice: nothing else to set
            if (config_value_equal(&all, &defaults, key))
                fail_msg("%s.%s was not set: %s", key->section, key->name, err.text);
        }
    check_round_trip(&all, &folder);
    config_release(&all);
    config_release(&defaults);
    for (size_t i = 0; i < n; i++)
        free(sets[i]);
    config_folder_close(&folder);
    free(file);
}

static void presets_round_trip(void **state)
{
    (void)state;
    static const char *const presets[] = {"v4.yaml", "dflash-qwen3-8b.yaml",
                                          "eagle3-qwen3-8b.yaml"};
    struct config_folder folder;
    config_folder_open(&folder);
    for (size_t i = 0; i < sizeof(presets) / sizeof(*presets); i++) {
        struct config c;
        struct error err = {{0}};
        load_preset(&c, presets[i]);
        check_round_trip(&c, &folder);
        // What is written is itself a config that loads.
        char *file = config_folder_path(&folder, "elsewhere/again.yaml");
        struct config again;
        load(&again, file, NULL, 0);
        assert_int_equal(config_compare_for_resume(&c, &again, &err), 0);
        config_release(&again);
        config_release(&c);
        free(file);
    }
    config_folder_close(&folder);
}

static void json_holds_sections_and_nulls(void **state)
{
    (void)state;
    struct config c;
    load_preset(&c, "v4.yaml");
    char *json = config_to_json(&c);
    assert_non_null(strstr(json, "\"target\": {\"path\": \"/"));
    assert_non_null(strstr(json, "\"layer_ids\": [1, 16, 31, 46, 61], \"name\": null}"));
    assert_non_null(strstr(json, "\"rms_norm_eps\": null, \"rope_theta\": 10000000, "
                                 "\"rope_scaling\": \"none\", "));
    assert_non_null(strstr(json, "\"log\": {\"every\": 10, \"level\": \"info\", "
                                 "\"tensorboard\": true, \"peak_tflops\": 0}}"));
    free(json);
    config_release(&c);
}

static void write_empty(const struct config_folder *folder, const char *name)
{
    free(config_folder_write(folder, name, ""));
}

static void patterns_expand_sorted(void **state)
{
    (void)state;
    struct config_folder folder;
    config_folder_open(&folder);
    static const char *const files[] = {"s/train-10.h5", "s/train-02.h5", "s/a[1].h5",
                                        "s/val.h5",      "z.h5",          "t/config.json"};
    for (size_t i = 0; i < 6; i++)
        write_empty(&folder, files[i]);
    char *file = config_folder_write(
        &folder, "a.yaml",
        GOOD "data:\n  train: [z.h5, s/train-*.h5, 's/a[1].h5']\n  val: [s/val.h5]\n");
    struct config c;
    struct error err = {{0}};
    load(&c, file, NULL, 0);
    assert_int_equal(config_check_files(&c, &err), 0);
    assert_int_equal(c.data.train.count, 3); // as written
    assert_int_equal(config_expand_files(&c, &err), 0);
    static const char *const sorted[] = {"s/a[1].h5", "s/train-02.h5", "s/train-10.h5", "z.h5"};
    assert_int_equal(c.data.train.count, 4);
    for (size_t i = 0; i < 4; i++) {
        char *path = config_folder_path(&folder, sorted[i]);
        assert_string_equal(c.data.train.items[i], path);
        free(path);
    }
    assert_int_equal(c.data.val.count, 1);
    assert_int_equal(config_expand_files(&c, &err), 0); // once more changes nothing
    assert_int_equal(c.data.train.count, 4);
    config_release(&c);
    config_folder_close(&folder);
    free(file);
}

static void missing_and_repeated_files(void **state)
{
    (void)state;
    struct config_folder folder;
    config_folder_open(&folder);
    write_empty(&folder, "s/a.h5");
    write_empty(&folder, "s/b.h5");
    char *target = config_folder_path(&folder, "s/a.h5"),
         *link = config_folder_path(&folder, "l.h5");
    assert_int_equal(symlink(target, link), 0);
    char *file =
        config_folder_write(&folder, "a.yaml",
                            GOOD "data:\n  train:\n    - s/*.h5\n    - s/b.h5\n    - l.h5\n"
                                 "    - no/*.h5\n    - no.h5\n  val: [s]\n");
    struct config c;
    struct error err = {{0}};
    load(&c, file, NULL, 0);
    assert_int_equal(config_expand_files(&c, &err), -1);
    char *want = memory_format("%s:6: data.train: no file matches %s/no/*.h5\n"
                               "%s:6: data.train: %s/no.h5: No such file or directory\n",
                               file, folder.path, file, folder.path);
    assert_memory_equal(err.text, want, strlen(want));
    free(want);
    // The two repeats come in the order of inodes.
    want = memory_format("%s:6: data.train: %s and %s are the same file\n", file, link, target);
    assert_non_null(strstr(err.text, want));
    free(want);
    want = memory_format("%s:6: data.train: %s/s/b.h5 is listed twice\n", file, folder.path);
    assert_non_null(strstr(err.text, want));
    free(want);
    want = memory_format("%s:12: data.val: %s/s is a folder; ", file, folder.path);
    assert_non_null(strstr(err.text, want));
    free(want);
    assert_int_equal(c.data.train.count, 5); // unchanged
    memset(&err, 0, sizeof(err));
    assert_int_equal(config_check_files(&c, &err), -1);
    want = memory_format("%s:2: target.path: %s/t: No such file or directory\n", file, folder.path);
    assert_memory_equal(err.text, want, strlen(want));
    free(want);
    config_release(&c);
    config_folder_close(&folder);
    free(target);
    free(link);
    free(file);
}

static void resume_compares_what_must_stay(void **state)
{
    (void)state;
    struct config_folder here, there;
    config_folder_open(&here);
    config_folder_open(&there);
    const char *text = GOOD "data: {train: [s/a.h5, s/b.h5]}\noptimizer:\n  lr: 1e-3\n";
    char *before_file = config_folder_write(&here, "a.yaml", text);
    char *now_file = config_folder_write(&there, "a.yaml", text);
    struct config before, now;
    struct error err = {{0}};
    const char *const allowed[] = {"run.dir=elsewhere", "checkpoint.every=7", "target.path=moved",
                                   "log.level=debug", "epochs=9"};
    load(&before, before_file, NULL, 0);
    load(&now, now_file, allowed, 5);
    assert_int_equal(config_compare_for_resume(&before, &now, &err), 0);
    assert_string_equal(err.text, "");
    config_release(&now);
    const char *const refused[] = {"train=[s/a.h5, s/c.h5]", "optimizer.betas=[0.9, 0.99]",
                                   "slot_weight=uniform"};
    load(&now, now_file, refused, 3);
    now.optimizer.lr = 2e-3;
    assert_int_equal(config_compare_for_resume(&before, &now, &err), -1);
    char *want = memory_format("--set data.train: must stay the same on resume: it was "
                               "[%s/s/a.h5, %s/s/b.h5] and is [",
                               here.path, here.path);
    assert_memory_equal(err.text, want, strlen(want));
    assert_non_null(strstr(err.text, "--set loss.slot_weight: must stay the same on resume: it was "
                                     "exp and is uniform\n"));
    assert_non_null(strstr(err.text, "a.yaml:7: optimizer.lr: must stay the same on resume: it was "
                                     "0.001 and is 0.002\n"));
    assert_non_null(strstr(err.text, "--set optimizer.betas: must stay the same on resume: it was "
                                     "[0.9, 0.999] and is [0.9, 0.99]"));
    free(want);
    config_release(&before);
    config_release(&now);
    config_folder_close(&here);
    config_folder_close(&there);
    free(before_file);
    free(now_file);
}

static void warnings_name_idle_keys(void **state)
{
    (void)state;
    struct config_folder folder;
    config_folder_open(&folder);
    char *file = config_folder_write(
        &folder, "a.yaml",
        GOOD "data: {noise_kind: uniform, train: [a.h5]}\nschedule: {decay_ratio: 0.2}\n");
    const char *const sets[] = {"ttt_steps=3", "predict_from_anchor=true", "gpus=2", "device=cpu",
                                "spool_wait=5"};
    struct config c;
    struct error text = {{0}};
    load(&c, file, sets, 5);
    assert_int_equal(config_warnings(&c, &text), 6);
    char *want = memory_format(
        "--set drafter.ttt_steps: has no effect with drafter.kind dflash\n"
        "%s:5: data.noise_kind: has no effect with data.noise_std 0\n"
        "--set data.spool_wait: has no effect without data.spool\n"
        "%s:6: schedule.decay_ratio: has no effect without schedule.kind wsd\n"
        "--set drafter.predict_from_anchor: no server runs dflash drafters of this layout; every "
        "export of it is refused\n"
        "--set parallel.gpus: has no effect with run.device cpu; mpirun starts ranks on CPUs",
        file, file);
    assert_string_equal(text.text, want);
    config_release(&c);
    config_folder_close(&folder);
    free(want);
    free(file);
}

// By a pattern and by another name, too.
static void shared_files_are_told(void **state)
{
    (void)state;
    struct config_folder folder;
    config_folder_open(&folder);
    write_empty(&folder, "s/a.h5");
    write_empty(&folder, "s/b.h5");
    char *link = config_folder_path(&folder, "v.h5"), *to = config_folder_path(&folder, "s/b.h5");
    assert_int_equal(symlink(to, link), 0);
    char *file =
        config_folder_write(&folder, "a.yaml", GOOD "data:\n  train: [s/*.h5]\n  val: [v.h5]\n");
    const char *const sets[] = {"data.train=s/a.h5"};
    struct config c;
    struct error err = {{0}}, text = {{0}};
    load(&c, file, NULL, 0);
    assert_int_equal(config_expand_files(&c, &err), 0);
    assert_int_equal(config_shared_files(&c, &text), 1);
    char *want = memory_format(
        "%s:7: data.val: %s is also in data.train: validation is not held out", file, link);
    assert_string_equal(text.text, want);
    config_release(&c);
    load(&c, file, sets, 1);
    assert_int_equal(config_expand_files(&c, &err), 0);
    assert_int_equal(config_shared_files(&c, &text), 0);
    config_release(&c);
    unlink(link);
    config_folder_close(&folder);
    free(want);
    free(file);
    free(to);
    free(link);
}

// How many warnings a config without faults gets with these four sets.
static int warnings_with(const char *const sets[4], struct error *text)
{
    struct config_folder folder;
    struct config c;
    config_folder_open(&folder);
    char *file = config_folder_write(&folder, "a.yaml", GOOD);
    load(&c, file, sets, 4);
    int count = config_warnings(&c, text);
    config_release(&c);
    config_folder_close(&folder);
    free(file);
    return count;
}

// A mode whose every choice is made by another key.
static void a_mode_without_effect_is_named(void **state)
{
    (void)state;
    static const struct {
        const char *sets[4];
        bool idle;
    } cases[] = {{{"mode=low", "recompute=cheap", "chunk_rows=64", "device=cuda"}, true},
                 {{"mode=low", "recompute=cheap", "chunk_rows=64", "device=cpu"}, true},
                 {{"mode=low", "recompute=cheap", "chunk_rows=0", "device=cpu"}, true},
                 {{"mode=low", "recompute=cheap", "chunk_rows=0", "device=auto"}, false},
                 {{"mode=low", "recompute=auto", "chunk_rows=64", "device=cpu"}, false}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct error text = {{0}};
        assert_int_equal(warnings_with(cases[i].sets, &text), cases[i].idle);
        assert_true((strstr(text.text, "memory.mode: has no effect") != NULL) == cases[i].idle);
    }
}

// A Markov head makes of one layout that no server runs another one that some do, and the other way about.
static void what_no_layout_holds_is_said(void **state)
{
    (void)state;
    static const struct {
        const char *sets[4], *says; // NULL: nothing
    } cases[] = {
        {{"markov_rank=4", "predict_from_anchor=true", "device=cpu", "device=cpu"}, NULL},
        {{"markov_rank=0", "predict_from_anchor=true", "device=cpu", "device=cpu"},
         "predict_from_anchor: no server runs"},
        {{"markov_rank=4", "layers=1", "layer_types=[sliding_attention]", "sliding_window=8"},
         "markov_rank: no layout holds it in a drafter with sliding layers"},
        {{"markov_rank=4", "drafter.kind=eagle3", "device=cpu", "device=cpu"},
         "markov_rank: no layout holds it in an eagle3 drafter"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct error text = {{0}};
        warnings_with(cases[i].sets, &text);
        assert_true((strstr(text.text, "every export of it is refused") != NULL) ==
                    (cases[i].says != NULL));
        assert_true(cases[i].says == NULL || strstr(text.text, cases[i].says) != NULL);
    }
}

static void widths_that_are_slow_on_a_gpu_are_said(void **state)
{
    (void)state;
    static const struct {
        const char *sets[4];
        bool says;
    } cases[] = {{{"markov_rank=27", "device=auto", "predict_from_anchor=true", "epochs=1"}, true},
                 {{"markov_rank=24", "device=auto", "predict_from_anchor=true", "epochs=1"}, false},
                 {{"markov_rank=0", "device=auto", "epochs=1", "epochs=1"}, false},
                 {{"markov_rank=27", "device=cpu", "predict_from_anchor=true", "epochs=1"}, false}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct error text = {{0}};
        assert_int_equal(warnings_with(cases[i].sets, &text), cases[i].says);
        assert_true((strstr(text.text, "27 is no multiple of 8") != NULL) == cases[i].says);
        assert_true((strstr(text.text, "the next multiple is 32") != NULL) == cases[i].says);
    }
}

static void choices_are_in_the_order_of_the_enums(void **state)
{
    (void)state;
    assert_string_equal(config_choice_name("run", "device", DEVICE_CPU), "cpu");
    assert_string_equal(config_choice_name("run", "compute", COMPUTE_FP32), "fp32");
    assert_string_equal(config_choice_name("data", "on_bad_sample", BAD_SAMPLE_SKIP), "skip");
    assert_string_equal(config_choice_name("data", "noise_kind", NOISE_UNIFORM), "uniform");
    assert_string_equal(config_choice_name("drafter", "kind", DRAFTER_EAGLE3), "eagle3");
    assert_string_equal(config_choice_name("drafter", "style", STYLE_LLAMA), "llama");
    assert_string_equal(config_choice_name("drafter", "rope_scaling", ROPE_SCALING_YARN), "yarn");
    assert_string_equal(config_choice_name("drafter", "window_origin", WINDOW_FROM_ANCHOR),
                        "anchor");
    assert_string_equal(config_choice_name("drafter", "lm_head", HEAD_TRAINABLE), "trainable");
    assert_string_equal(config_choice_name("anchors", "per", ANCHORS_PER_DOCUMENT), "document");
    assert_string_equal(config_choice_name("anchors", "tail", TAIL_WHOLE), "whole");
    assert_string_equal(config_choice_name("loss", "slot_weight", SLOT_WEIGHT_DPACE), "dpace");
    assert_string_equal(config_choice_name("loss", "slot_weight", SLOT_WEIGHT_UNIFORM), "uniform");
    assert_string_equal(config_choice_name("loss", "slot_mask", SLOT_MASK_EACH), "each");
    assert_string_equal(config_choice_name("loss", "normalize", NORMALIZE_COUNT), "count");
    assert_string_equal(config_choice_name("loss", "mask_index", MASK_INDEX_LABEL), "label");
    assert_string_equal(config_choice_name("loss", "mask_index", MASK_INDEX_FEATURE), "feature");
    assert_string_equal(config_choice_name("loss", "out_of_vocab", OUT_OF_VOCAB_KEPT), "kept");
    assert_string_equal(config_choice_name("schedule", "kind", SCHEDULE_LINEAR), "linear");
    assert_string_equal(config_choice_name("schedule", "kind", SCHEDULE_WSD), "wsd");
    assert_string_equal(config_choice_name("schedule", "kind", SCHEDULE_CONSTANT), "constant");
    assert_string_equal(config_choice_name("memory", "recompute", RECOMPUTE_CHEAP), "cheap");
    assert_string_equal(config_choice_name("memory", "recompute", RECOMPUTE_LAYER), "layer");
    assert_string_equal(config_choice_name("memory", "logits", LOGITS_BF16), "bf16");
}

// Every key is in both texts, with its section before it.
static void descriptions_hold_every_key(void **state)
{
    (void)state;
    typedef void writer(FILE *);
    static writer *const writers[] = {config_describe, config_write_markdown};
    static const char *const sections[] = {"%s: %s\n", "## %s\n\n%s\n"};
    static const char *const keys[] = {"  %s: ", "| `%s` | "};
    for (size_t w = 0; w < 2; w++) {
        char *text = NULL, name[256];
        size_t size;
        FILE *out = open_memstream(&text, &size);
        assert_non_null(out);
        writers[w](out);
        fclose(out);
        char *at = text;
        for (size_t s = 0; s < CONFIG_SECTION_COUNT; s++) {
            snprintf(name, sizeof(name), w == 0 ? sections[0] : sections[1],
                     config_sections[s].name, config_sections[s].help);
            at = strstr(at, name);
            assert_non_null(at);
            for (size_t k = 0; k < config_sections[s].count; k++) {
                snprintf(name, sizeof(name), keys[w], config_sections[s].keys()[k].name);
                at = strstr(at, name);
                if (!at)
                    fail_msg("%s is missing", name);
                at++;
            }
        }
        free(text);
    }
}

// docs/config.md is what the table gives now.
static void the_page_is_fresh(void **state)
{
    (void)state;
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    assert_non_null(out);
    config_write_markdown(out);
    fclose(out);
    char *page = memory_alloc(size + 2, 1);
    FILE *file = fopen(DTRAIN_SOURCE_DIR "/docs/config.md", "rb");
    assert_non_null(file);
    size_t got = fread(page, 1, size + 1, file);
    fclose(file);
    assert_int_equal(got, size);
    assert_string_equal(page, text);
    free(page);
    free(text);
}

static void whole_numbers_by_name(void **state)
{
    (void)state;
    struct config c;
    struct config_int_key key;
    struct error err = {{0}};
    config_init(&c);
    assert_int_equal(config_find_int(&c, "seq_len", &key, &err), 0);
    assert_string_equal(key.name, "data.seq_len");
    assert_ptr_equal(key.value, &c.data.seq_len);
    assert_int_equal(key.minimum, 2);
    assert_int_equal(key.maximum, 16777216);
    assert_int_equal(config_find_int(&c, "checkpoint.every", &key, &err), 0);
    assert_ptr_equal(key.value, &c.checkpoint.every);
    static const char *const wrong[][2] = {{"every", "more than one section"},
                                           {"data.every", "unknown key; did you mean"},
                                           {"dta.seq_len", "unknown section"},
                                           {"run.dir", "not a key of whole numbers"},
                                           {"loss.kl", "not a key of whole numbers"}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        assert_int_equal(config_find_int(&c, wrong[i][0], &key, &err), -1);
        if (strstr(err.text, wrong[i][1]) == NULL)
            fail_msg("expected '%s' in: %s", wrong[i][1], err.text);
    }
    config_release(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(preset_v4),
        cmocka_unit_test(preset_eagle3),
        cmocka_unit_test(block_and_flow_are_the_same),
        cmocka_unit_test(reals_as_written),
        cmocka_unit_test(set_over_the_file),
        cmocka_unit_test(paths_resolve),
        cmocka_unit_test(every_key_round_trips),
        cmocka_unit_test(presets_round_trip),
        cmocka_unit_test(json_holds_sections_and_nulls),
        cmocka_unit_test(patterns_expand_sorted),
        cmocka_unit_test(whole_numbers_by_name),
        cmocka_unit_test(missing_and_repeated_files),
        cmocka_unit_test(resume_compares_what_must_stay),
        cmocka_unit_test(warnings_name_idle_keys),
        cmocka_unit_test(shared_files_are_told),
        cmocka_unit_test(what_no_layout_holds_is_said),
        cmocka_unit_test(widths_that_are_slow_on_a_gpu_are_said),
        cmocka_unit_test(a_mode_without_effect_is_named),
        cmocka_unit_test(choices_are_in_the_order_of_the_enums),
        cmocka_unit_test(descriptions_hold_every_key),
        cmocka_unit_test(the_page_is_fresh),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
