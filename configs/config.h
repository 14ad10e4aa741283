// The configuration of a run: one struct a section, made from configs/config_keys.h.
#ifndef CONFIGS_CONFIG_H
#define CONFIGS_CONFIG_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "configs/config_keys.h"

#define CONFIG_UNSET INT64_MIN

struct config_texts {
    char **items;
    size_t count;
};
struct config_ints {
    int64_t *items;
    size_t count;
};
struct config_reals {
    double *items;
    size_t count;
};

// Values of CHOICE keys, in the order of the table's "a\0b\0c".
enum { DEVICE_AUTO, DEVICE_CUDA, DEVICE_CPU };
enum { COMPUTE_BF16, COMPUTE_FP32 };
enum { BAD_SAMPLE_FAIL, BAD_SAMPLE_SKIP };
enum { NOISE_NORMAL, NOISE_UNIFORM };
enum { DRAFTER_DFLASH, DRAFTER_EAGLE3 };
enum { STYLE_QWEN3, STYLE_LLAMA };
enum { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_YARN };
enum { WINDOW_FROM_QUERY, WINDOW_FROM_ANCHOR };
enum { HEAD_FROZEN, HEAD_TRAINABLE };
enum { ANCHORS_PER_ROW, ANCHORS_PER_DOCUMENT };
enum { TAIL_MASK, TAIL_WHOLE };
enum { SLOT_WEIGHT_EXP, SLOT_WEIGHT_DPACE, SLOT_WEIGHT_UNIFORM };
enum { SLOT_MASK_PREFIX, SLOT_MASK_EACH };
enum { NORMALIZE_WEIGHTED, NORMALIZE_COUNT };
enum { MASK_INDEX_SERVED, MASK_INDEX_LABEL, MASK_INDEX_INPUT, MASK_INDEX_FEATURE };
enum { OUT_OF_VOCAB_MASKED, OUT_OF_VOCAB_KEPT };
enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON };
enum { MUON_SCALE_ADAMW_RMS, MUON_SCALE_ORIGINAL };
enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT };
enum { MEMORY_NORMAL, MEMORY_LOW };
enum { RECOMPUTE_AUTO, RECOMPUTE_NONE, RECOMPUTE_CHEAP, RECOMPUTE_LAYER };
enum { LOGITS_FP32, LOGITS_BF16 };
enum { KERNELS_AUTO, KERNELS_GENERIC };

#define CONFIG_FIELD_TEXT(name, def, resume, help)            char *name;
#define CONFIG_FIELD_INT(name, def, min, max, resume, help)   int64_t name;
#define CONFIG_FIELD_REAL(name, def, min, max, resume, help)  double name;
#define CONFIG_FIELD_FLAG(name, def, resume, help)            bool name;
#define CONFIG_FIELD_CHOICE(name, def, choices, resume, help) int name;
#define CONFIG_FIELD_TEXTS(name, resume, help)                struct config_texts name;
#define CONFIG_FIELD_INTS(name, min, max, resume, help)       struct config_ints name;
#define CONFIG_FIELD_REALS(name, def, min, max, resume, help) struct config_reals name;
#define CONFIG_STRUCT(section, LIST, help)                                                         \
    struct section##_config {                                                                      \
        LIST(CONFIG_FIELD_TEXT, CONFIG_FIELD_TEXT, CONFIG_FIELD_INT, CONFIG_FIELD_REAL,            \
             CONFIG_FIELD_FLAG, CONFIG_FIELD_CHOICE, CONFIG_FIELD_TEXTS, CONFIG_FIELD_TEXTS,       \
             CONFIG_FIELD_INTS, CONFIG_FIELD_REALS)                                                \
    };
CONFIG_SECTIONS(CONFIG_STRUCT)
#undef CONFIG_STRUCT

// Where each key was given, so that a fault found later still names its line: a line of the file,
// CONFIG_LINE_DEFAULT or CONFIG_LINE_SET.
enum { CONFIG_LINE_DEFAULT = 0, CONFIG_LINE_SET = -1 };
#define CONFIG_LINE(name, ...) int name;
#define CONFIG_LINES(section, LIST, help)                                                          \
    struct section##_lines {                                                                       \
        LIST(CONFIG_LINE, CONFIG_LINE, CONFIG_LINE, CONFIG_LINE, CONFIG_LINE, CONFIG_LINE,         \
             CONFIG_LINE, CONFIG_LINE, CONFIG_LINE, CONFIG_LINE)                                   \
    };
CONFIG_SECTIONS(CONFIG_LINES)
#undef CONFIG_LINES
#define CONFIG_LINES_MEMBER(section, LIST, help) struct section##_lines section;
struct config_lines {
    CONFIG_SECTIONS(CONFIG_LINES_MEMBER)
};
#undef CONFIG_LINES_MEMBER

#define CONFIG_MEMBER(section, LIST, help) struct section##_config section;
struct config {
    CONFIG_SECTIONS(CONFIG_MEMBER)
    struct config_lines lines;
    char *file;   // path of the YAML file as it was given; NULL: none
    char *folder; // absolute folder that relative paths are relative to; NULL: none yet
};
#undef CONFIG_MEMBER

// Defaults; free with config_release.
void config_init(struct config *config);
void config_release(struct config *config);

// Reads a YAML file (NULL: none) over the defaults of an initialised config, then each "key=value"
// of `sets` (a key may come without its section where that is unique; lists as [a, b] or a,b; of the
// same key set twice the last holds). Then checks what single keys can not say (config_validate).
// Paths become absolute: the file's folder (without a file, the current one) is what relative paths
// are relative to, those of `sets` too. No file but the YAML is looked at: see config_expand_files.
// On faults: -1, and one line each: "FILE:LINE: section.key: what; did you mean ...?" or
// "--set section.key: what". The config must be released either way.
int config_load(struct config *config, const char *file, const char *const *sets, size_t set_count,
                struct error *err);
// Rules between keys, every broken one a line. Called by config_load.
int config_validate(const struct config *config, struct error *err);
// Keys that were given and have no effect, or an effect that servers do not follow: one line each
// in `text`. Returns how many. Nothing here stops a run.
size_t config_warnings(const struct config *config, struct error *text);
// Those without effect alone, as told: why goes on behind "has no effect", as "with drafter.kind eagle3".
typedef void config_idle_fn(void *context, const char *section, const char *key, const char *why);
void config_idle_keys(const struct config *config, config_idle_fn *visit, void *context);

// Replaces the patterns of data.train and data.val by the files they stand for, sorted. A pattern
// without a match, a path without a file and the same file twice in a list are faults.
int config_expand_files(struct config *config, struct error *err);
// Files that are in data.train and in data.val, whatever they are called: one line each in `text`, as
// config_warnings has them. Returns how many. Call after config_expand_files.
size_t config_shared_files(const struct config *config, struct error *text);
// Checks that everything the config reads exists: target.path, the shards behind data.train and
// data.val (patterns or files), data.manifest, drafter.draft_vocab. Changes nothing. Not drafter.init_from, which a
// resumed run does not read.
int config_check_files(const struct config *config, struct error *err);

// Writes every key with its value as YAML that config_load reads back to the same values; keys that
// are not given and have no default become comments.
void config_write_yaml(const struct config *config, FILE *out);
// The same as one JSON object {"section": {"key": value}} in memory the caller frees; null: not given.
char *config_to_json(const struct config *config);
// Every key that must be the same on resume and is not: one line each in err, and -1. Paths are
// compared by their last component, so that a run may move to another disk; that the data are the
// same is for the data's fingerprint to say. Compare after config_expand_files.
int config_compare_for_resume(const struct config *before, const struct config *now,
                              struct error *err);
// The same for section drafter alone: what weights that were trained with `before` are good for.
int config_compare_drafter(const struct config *before, const struct config *now,
                           struct error *err);

// Puts "FILE:LINE: " or "--set " before the lines of an error that begin with "section.key: ", for faults that show
// when other files are read. Always returns -1.
int config_name_places(const struct config *config, struct error *err);

// Bytes of memory.limit; 0: it is not given.
uint64_t config_memory_limit(const struct config *config);
// data.spool_bytes.
uint64_t config_spool_bytes(const struct config *config);

// Text of a CHOICE key's value, e.g. config_choice_name("loss", "slot_weight", SLOT_WEIGHT_EXP).
const char *config_choice_name(const char *section, const char *key, int value);

// A key of whole numbers by its name; the section may be left out where the name is unique.
struct config_int_key {
    char name[64];  // "section.key"
    int64_t *value; // in the config; may be set, within the range
    int64_t minimum, maximum;
};
int config_find_int(struct config *config, const char *name, struct config_int_key *key,
                    struct error *err);
// "section.key" of any key, which may be given without its section where that is unique.
enum { CONFIG_NAME_BYTES = 64 };
int config_find_name(const char *name, char full[CONFIG_NAME_BYTES], struct error *err);
// The part of "section.key" that is enough to name it: "key", or all of it.
const char *config_short_name(const char *full);

// What people are told of a key. Texts hold during the visit.
struct config_key_words {
    const char *section, *section_help, *name, *type, *help;
    const char *initial; // the default, "" without one
    const char *allowed; // "" without a range
    const char *choices; // words one after another, each with its NUL, "" ends; NULL: any
    bool path, fixed;    // fixed: on resume
    bool unique;         // needs no section
};
typedef void config_key_visit_fn(void *context, const struct config_key_words *key);
// Every key, section by section.
void config_visit_keys(config_key_visit_fn *function, void *context);

// `dtrain config`: every key with type, default, range, meaning and whether it may change on resume.
void config_describe(FILE *out);
// docs/config.md.
void config_write_markdown(FILE *out);

#endif
