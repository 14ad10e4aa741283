// Faults of configs: every kind of bad file or --set is refused with its place, key and advice, and
// nothing else is reported beside it.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "configs/config_table.h"
#include "tests/support/config_files.h"

// Four good lines that most cases are appended to: their own text starts on line 5.
#define BASE                                                                                       \
    "run: {dir: r}\n"                                                                              \
    "target: {path: t}\n"                                                                          \
    "drafter: {mask_token_id: 5, layers: 2}\n"                                                     \
    "loss: {kl: 1}\n"
// The same without the drafter, for cases about it: they start on line 4.
#define NO_DRAFTER                                                                                 \
    "run: {dir: r}\n"                                                                              \
    "target: {path: t}\n"                                                                          \
    "loss: {kl: 1}\n"

enum { MAX_LINES = 6 };

struct fault_case {
    const char *name;
    const char *yaml;
    const char *set;              // one --set; NULL: none
    const char *lines[MAX_LINES]; // "LINE: key: text" after "FILE:", or one that starts with "--"
};

static const struct fault_case cases[] = {
    // Unknown names.
    {"unknown key",
     NO_DRAFTER "drafter:\n  mask_token_id: 5\n  blok_size: 8\n",
     NULL,
     {"6: drafter.blok_size: unknown key; did you mean block_size?"}},
    {"key of another section",
     BASE "data:\n  max_anchors: 8\n",
     NULL,
     {"6: data.max_anchors: unknown key; did you mean anchors.max_anchors?"}},
    {"far from any key",
     BASE "data:\n  q9: 8\n",
     NULL,
     {"6: data.q9: unknown key; `dtrain config` lists every key"}},
    {"unknown section",
     BASE "optimiser: {lr: 1.0}\n",
     NULL,
     {"5: optimiser: unknown section; did you mean optimizer?"}},
    {"key without its section",
     BASE "max_anchors: 4\n",
     NULL,
     {"5: max_anchors: unknown section; did you mean anchors.max_anchors?"}},
    // Given twice.
    {"duplicate key",
     BASE "data:\n  seq_len: 64\n  readers: 1\n  seq_len: 64\n",
     NULL,
     {"8: data.seq_len: given twice; the first is on line 6"}},
    {"duplicate key in flow style",
     BASE "data: {seq_len: 64, seq_len: 32}\n",
     NULL,
     {"5: data.seq_len: given twice; the first is on line 5"}},
    {"duplicate section",
     BASE "loss: {tv: 1}\n",
     NULL,
     {"5: loss: section given twice; the first is on line 4"}},
    // Wrong types.
    {"text for integer",
     BASE "data: {seq_len: long}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got long"}},
    {"fraction for integer",
     BASE "data: {seq_len: 1.5}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got 1.5"}},
    {"exponent for integer",
     BASE "data: {seq_len: 1e3}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got 1e3"}},
    {"underscore in integer",
     BASE "data: {seq_len: 1_000}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got 1_000"}},
    {"hexadecimal",
     BASE "data: {seq_len: 0x40}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got 0x40"}},
    {"leading zero",
     BASE "data: {seq_len: 010}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got 010"}},
    {"quoted integer",
     BASE "data: {seq_len: \"64\"}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got the text \"64\"; leave out the quotes"}},
    {"list for integer",
     BASE "data: {seq_len: [64]}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got a list"}},
    {"map for integer",
     BASE "data: {seq_len: {a: 1}}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got a map"}},
    {"nan", BASE "optimizer: {lr: nan}\n", NULL, {"5: optimizer.lr: expected a number, got nan"}},
    {"YAML's nan",
     BASE "optimizer: {lr: .nan}\n",
     NULL,
     {"5: optimizer.lr: expected a number, got .nan"}},
    {"inf",
     BASE "optimizer: {grad_clip: inf}\n",
     NULL,
     {"5: optimizer.grad_clip: expected a number, got inf"}},
    {"overflow to inf",
     BASE "optimizer: {grad_clip: 1e999}\n",
     NULL,
     {"5: optimizer.grad_clip: 1e999 is out of range; allowed: 0 to 1000000000"}},
    {"yes is no flag",
     BASE "data: {check_crc: yes}\n",
     NULL,
     {"5: data.check_crc: expected true or false, got yes"}},
    {"True is no flag",
     BASE "data: {check_crc: True}\n",
     NULL,
     {"5: data.check_crc: expected true or false, got True"}},
    {"scalar for list",
     BASE "data: {train: a.h5}\n",
     NULL,
     {"5: data.train: expected a list such as [a, b], got a.h5"}},
    {"bad items on their own lines",
     BASE "target_: {}\ndata:\n  train: [a]\noptimizer:\n  betas:\n    - x\n    - 2\n",
     NULL,
     {"5: target_: unknown section; did you mean target?",
      "10: optimizer.betas: expected a number, got x",
      "11: optimizer.betas: 2 is out of range; allowed: 0 to 0.999999"}},
    {"list for text",
     "run: {dir: [r]}\ntarget: {path: t}\n"
     "drafter: {mask_token_id: 5}\nloss: {kl: 1}\n",
     NULL,
     {"1: run.dir: expected a path, got a list"}},
    {"section is a word",
     BASE "data: shards\n",
     NULL,
     {"5: data: expected keys with values, got shards"}},
    {"section is a list",
     BASE "data: [a]\n",
     NULL,
     {"5: data: expected keys with values, got a list"}},
    {"file is a list",
     "- run\n- loss\n",
     NULL,
     {"1: expected sections such as `run:`, got a list"}},
    // Nothing where something must be.
    {"no value",
     BASE "data:\n  seq_len:\n",
     NULL,
     {"6: data.seq_len: has no value; expected an integer, or leave the key out"}},
    {"null",
     BASE "data: {seq_len: null}\n",
     NULL,
     {"5: data.seq_len: has no value; expected an integer, or leave the key out"}},
    {"empty required path",
     "run: {dir: ''}\ntarget: {path: t}\n"
     "drafter: {mask_token_id: 5}\nloss: {kl: 1}\n",
     NULL,
     {"1: run.dir: has no value; expected a path, or leave the key out"}},
    {"required keys missing",
     "drafter: {mask_token_id: 5}\n",
     NULL,
     {" run.dir: required key is missing", " target.path: required key is missing",
      " loss: no term is positive; give at least one of kl, reverse_kl, js, ce_teacher, ce_data, "
      "tv, nla, lk"}},
    // Ranges and choices.
    {"below",
     BASE "data: {seq_len: 1}\n",
     NULL,
     {"5: data.seq_len: 1 is out of range; allowed: 2 to 16777216"}},
    {"above",
     NO_DRAFTER "drafter: {mask_token_id: 5, block_size: 65}\n",
     NULL,
     {"4: drafter.block_size: 65 is out of range; allowed: 2 to 64"}},
    {"beyond 64 bits",
     BASE "checkpoint: {every: 9223372036854775808}\n",
     NULL,
     {"5: checkpoint.every: 9223372036854775808 is out of range; allowed: at least 0"}},
    {"negative weight",
     "run: {dir: r}\ntarget: {path: t}\n"
     "drafter: {mask_token_id: 5}\nloss: {kl: -1.0}\n",
     NULL,
     {"4: loss.kl: -1.0 is out of range; allowed: 0 to 1000000"}},
    {"choice",
     BASE "schedule:\n  kind: cosin\n",
     NULL,
     {"6: schedule.kind: cosin is not a choice; allowed: cosine, linear, wsd, constant; did you "
      "mean "
      "cosine?"}},
    {"a GPU is called cuda",
     "run: {dir: r, device: gpu}\ntarget: {path: t}\ndrafter: {mask_token_id: 5}\nloss: {kl: 1}\n",
     NULL,
     {"1: run.device: gpu is not a choice; allowed: auto, cuda, cpu; did you mean cuda?"}},
    {"all faults at once",
     NO_DRAFTER "drafter:\n  kind: eagle\n  layers: 0\n  layer: 2\n",
     NULL,
     {"5: drafter.kind: eagle is not a choice; allowed: dflash, eagle3; did you mean eagle3?",
      "6: drafter.layers: 0 is out of range; allowed: 1 to 256",
      "7: drafter.layer: unknown key; did you mean layers?"}},
    // YAML itself.
    {"syntax",
     BASE "data:\n  seq_len: 64\n train: x\n",
     NULL,
     {"7: not valid YAML: this line is indented by 1, line 6 by 2; what belongs together begins in "
      "one column (did not find expected key, while parsing a block mapping)"}},
    {"indented less than a list",
     BASE "data:\n  train:\n    - a\n\n    # b\n   - c\n",
     NULL,
     {"10: not valid YAML: this line is indented by 3, line 7 by 4; what belongs together begins "
      "in "
      "one column (did not find expected key, while parsing a block mapping)"}},
    {"indented more than a key with a value",
     BASE "data:\n  readers: 2\n\n   seq_len: 64\n",
     NULL,
     {"8: not valid YAML: this line is indented by 3, line 6 by 2; nothing can be below a key that "
      "has a value (mapping values are not allowed in this context)"}},
    {"a list among keys",
     BASE "data:\n  readers: 2\n  - a\n",
     NULL,
     {"7: not valid YAML: did not find expected key, while parsing a block mapping"}},
    {"the first section is indented",
     "# of a run\n\n run: {dir: r}\ntarget: {path: t}\n",
     NULL,
     {"4: not valid YAML: this line is indented by 0, line 3 by 1; sections begin in one column, "
      "the "
      "first (did not find expected <document start>)"}},
    {"a key behind its section",
     BASE "data: seq_len: 64\n",
     NULL,
     {"5: not valid YAML: a section's keys stand in lines of their own, and a value that holds a "
      "colon with a space stands in quotes (mapping values are not allowed in this context)"}},
    {"a colon in a value",
     BASE "data:\n  manifest: a: b\n",
     NULL,
     {"6: not valid YAML: a section's keys stand in lines of their own, and a value that holds a "
      "colon with a space stands in quotes (mapping values are not allowed in this context)"}},
    {"open bracket",
     BASE "data: {seq_len: 64,\n  train: [a, b\n",
     NULL,
     {"7: not valid YAML: the [ of line 6 is not closed, or a comma is missing; in a list, a "
      "text with brackets stands in quotes (did not find "
      "expected ',' or ']', while parsing a flow sequence)"}},
    {"open brace",
     BASE "data: {seq_len: 64\nlog: {every: 1}\n",
     NULL,
     {"6: not valid YAML: the { of line 5 is not closed, or a comma is missing (did not find "
      "expected ',' or '}', while parsing a flow mapping)"}},
    {"open quotes",
     BASE "data:\n  manifest: \"a\n  seq_len: 64\n",
     NULL,
     {"8: not valid YAML: the quotes that line 6 opens are not closed (found unexpected end of "
      "stream, while scanning a quoted scalar)"}},
    {"tab",
     BASE "data:\n\tseq_len: 64\n",
     NULL,
     {"6: not valid YAML: a tab at the start of a line; YAML indents by spaces"}},
    {"tab behind spaces",
     BASE "data:\n  \tseq_len: 64\n",
     NULL,
     {"6: not valid YAML: a tab at the start of a line; YAML indents by spaces"}},
    {"no token, and no tab",
     BASE "data:\n  seq_len: @64\n",
     NULL,
     {"6: not valid YAML: a value that begins with @ stands in quotes (found character that cannot "
      "start any token, while scanning for the next token)"}},
    {"no blank behind the colon",
     BASE "data:\n  readers: 2\n  seq_len:64\n  check_crc: true\n",
     NULL,
     {"7: not valid YAML: seq_len:64 needs a space after the colon"}},
    {"a word without a colon",
     BASE "data:\n  readers: 2\n  seq_len\n  check_crc: true\n",
     NULL,
     {"8: not valid YAML: line 7 needs a key, a colon and a space (could not find expected ':', "
      "while scanning a simple key)"}},
    {"control character",
     BASE "data:\n  train: [\x01]\n",
     NULL,
     {"6: not valid YAML: control characters are not allowed"}},
    {"NUL", BASE "data:\n  train: [\"a\\0b\"]\n", NULL, {"6: a value with a NUL character in it"}},
    {"line break in a value",
     BASE "data: {seq_len: \"6\\n4\"}\n",
     NULL,
     {"5: data.seq_len: expected an integer, got the text \"6 4\"; leave out the quotes"}},
    {"anchor",
     BASE "data:\n  train: &shards [a]\n",
     NULL,
     {"6: anchor &shards: anchors and aliases are not accepted; write the value out"}},
    {"alias",
     BASE "data:\n  train: *shards\n",
     NULL,
     {"6: alias *shards: anchors and aliases are not accepted; write the value out"}},
    {"tag",
     BASE "data: {seq_len: !!int 64}\n",
     NULL,
     {"5: tag tag:yaml.org,2002:int: tags are not accepted"}},
    {"two documents",
     BASE "---\nrun: {seed: 1}\n",
     NULL,
     {"5: a second YAML document starts here; a config is one"}},
    {"nested deeply",
     BASE "data: [[[[[[[[[[a]]]]]]]]]]\n",
     NULL,
     {"5: nested more than 8 levels deep"}},
    // Rules between keys.
    {"no positive loss",
     "run: {dir: r}\ntarget: {path: t}\ndrafter: {mask_token_id: 5}\n"
     "loss:\n  tv: 0\n",
     NULL,
     {"5: loss: no term is positive; "}},
    {"layer types too few",
     NO_DRAFTER "drafter:\n  mask_token_id: 5\n  layers: 2\n"
                "  layer_types: [full_attention]\n",
     NULL,
     {"7: drafter.layer_types: has 1 entries for drafter.layers 2"}},
    {"layer type unknown",
     NO_DRAFTER "drafter:\n  mask_token_id: 5\n  layers: 1\n"
                "  layer_types: [ful_attention]\n",
     NULL,
     {"7: drafter.layer_types: ful_attention is not a choice; allowed: full_attention, "
      "sliding_attention; did you mean full_attention?"}},
    {"sliding without window",
     NO_DRAFTER "drafter:\n  mask_token_id: 5\n  layers: 1\n"
                "  layer_types: [sliding_attention]\n",
     NULL,
     {" drafter.sliding_window: required, because drafter.layer_types has sliding_attention"}},
    {"non-causal without sliding",
     NO_DRAFTER "drafter:\n  mask_token_id: 5\n  sliding_window_non_causal: true\n",
     NULL,
     {"6: drafter.sliding_window_non_causal: no layer of drafter.layer_types is "
      "sliding_attention"}},
    {"origin without sliding",
     NO_DRAFTER "drafter:\n  mask_token_id: 5\n  window_origin: anchor\n",
     NULL,
     {"6: drafter.window_origin: no layer of drafter.layer_types is sliding_attention"}},
    {"heads",
     NO_DRAFTER "drafter:\n  mask_token_id: 5\n  num_attention_heads: 6\n"
                "  num_key_value_heads: 4\n",
     NULL,
     {"7: drafter.num_key_value_heads: 4 does not divide drafter.num_attention_heads 6"}},
    {"odd head",
     NO_DRAFTER "drafter: {mask_token_id: 5, head_dim: 63}\n",
     NULL,
     {"4: drafter.head_dim: 63 is odd; "}},
    {"dflash without mask token",
     NO_DRAFTER "drafter: {layers: 2}\n",
     NULL,
     {" drafter.mask_token_id: required for dflash: "}},
    {"llama dflash",
     NO_DRAFTER "drafter: {mask_token_id: 5, style: llama}\n",
     NULL,
     {"4: drafter.style: dflash is qwen3; llama is a style of eagle3"}},
    {"eagle3 keys with dflash",
     NO_DRAFTER
     "drafter:\n  mask_token_id: 5\n  draft_vocab: v\n  lm_head: trainable\n  fc_norm: true\n"
     "  norm_before_fc: true\n  norm_before_residual: true\n  norm_output: true\n",
     NULL,
     {"6: drafter.draft_vocab: only eagle3 has it; drafter.kind is dflash",
      "7: drafter.lm_head: only eagle3 trains its head; drafter.kind is dflash",
      "10: drafter.norm_before_residual: only eagle3 has it; drafter.kind is dflash",
      "9: drafter.norm_before_fc: only eagle3 has it; drafter.kind is dflash",
      "8: drafter.fc_norm: only eagle3 has it; drafter.kind is dflash",
      "11: drafter.norm_output: only eagle3 has it; drafter.kind is dflash"}},
    {"dflash keys with eagle3",
     NO_DRAFTER "drafter:\n  kind: eagle3\n  predict_from_anchor: true\n",
     NULL,
     {"6: drafter.predict_from_anchor: only dflash has it; drafter.kind is eagle3"}},
    {"dpace with eagle3",
     "run: {dir: r}\ntarget: {path: t}\ndrafter: {kind: eagle3}\n"
     "loss: {kl: 1, slot_weight: dpace}\n",
     NULL,
     {"4: loss.slot_weight: dpace weighs the slots of dflash blocks; "}},
    {"dpace with a Markov head",
     "run: {dir: r}\ntarget: {path: t}\ndrafter: {mask_token_id: 5, markov_rank: 8}\n"
     "loss: {kl: 1, slot_weight: dpace}\n",
     NULL,
     {"3: drafter.markov_rank: can not be trained with loss.slot_weight dpace: "}},
    {"rope without factor",
     NO_DRAFTER "drafter:\n  mask_token_id: 5\n  rope_scaling: yarn\n  rope_factor: 1.0\n",
     NULL,
     {"7: drafter.rope_factor: must be above 1 with drafter.rope_scaling yarn"}},
    {"algorithms below some folder",
     NO_DRAFTER "drafter: {mask_token_id: 5}\nkernels: {algorithms: kept}\n",
     NULL,
     {"5: kernels.algorithms: kept is neither none nor an absolute path"}},
    {"factor without rope scaling",
     NO_DRAFTER "drafter: {mask_token_id: 5, rope_factor: 2}\n",
     NULL,
     {"4: drafter.rope_factor: needs drafter.rope_scaling linear or yarn"}},
    {"layer ids repeat",
     "run: {dir: r}\ntarget: {path: t, layer_ids: [1, 8, 8, 22]}\n"
     "drafter: {mask_token_id: 5}\nloss: {kl: 1}\n",
     NULL,
     {"2: target.layer_ids: must ascend without repeats, but 8 follows 8"}},
    {"layer ids fall",
     "run: {dir: r}\ntarget: {path: t, layer_ids: [8, 1]}\n"
     "drafter: {mask_token_id: 5}\nloss: {kl: 1}\n",
     NULL,
     {"2: target.layer_ids: must ascend without repeats, but 1 follows 8"}},
    {"layer id negative",
     "run: {dir: r}\ntarget: {path: t, layer_ids: [-1, 1]}\n"
     "drafter: {mask_token_id: 5}\nloss: {kl: 1}\n",
     NULL,
     {"2: target.layer_ids: -1 is out of range; allowed: 0 to 100000"}},
    {"manifest", BASE "data: {manifest: m}\n", NULL, {"5: data.manifest: needs data.spool, "}},
    {"manifest-train",
     BASE "data: {manifest: m, spool: s, train: [t.h5]}\n",
     NULL,
     {"5: data.manifest: given together with data.train; keep one, both say "
      "what to read"}},
    {"spool", BASE "data: {spool: s}\n", NULL, {"5: data.spool: needs data.manifest, "}},
    {"spool-bytes",
     BASE "data: {spool_bytes: 64}\n",
     NULL,
     {"5: data.spool_bytes: 64 is no number of bytes with a unit; say 64GiB or 512MiB"}},
    {"validation without shards",
     BASE "validation: {every: 5}\n",
     NULL,
     {"5: validation.every: needs shards to validate on; give data.val or set it to 0"}},
    {"patience without every",
     BASE "validation: {patience: 5}\n",
     NULL,
     {"5: validation.patience: counts validations during training, but validation.every is 0"}},
    {"more drafts than the block",
     NO_DRAFTER "drafter: {mask_token_id: 5, block_size: 8}\nvalidation: {draft_tokens: [3, 8]}\n",
     NULL,
     {"5: validation.draft_tokens: 8 is more than the 7 drafts that a block of drafter.block_size "
      "gives"}},
    {"more drafts than ttt_steps",
     NO_DRAFTER "drafter: {kind: eagle3, ttt_steps: 3}\nvalidation: {draft_tokens: [4]}\n",
     NULL,
     {"5: validation.draft_tokens: 4 is more than the 3 drafts that drafter.ttt_steps gives"}},
    {"whole block longer than row",
     NO_DRAFTER
     "drafter: {mask_token_id: 5, block_size: 16}\ndata: {seq_len: 15}\nanchors: {tail: whole}\n",
     NULL,
     {"6: anchors.tail: whole: no block of 16 slots fits data.seq_len 15"}},
    {"betas",
     BASE "optimizer: {betas: [0.9]}\n",
     NULL,
     {"5: optimizer.betas: needs 2 values, has 1"}},
    {"two warm-ups",
     BASE "schedule:\n  warmup_ratio: 0.1\n  warmup_steps: 10\n",
     NULL,
     {"7: schedule.warmup_steps: given together with schedule.warmup_ratio; keep one"}},
    {"warm-up longer than run",
     "run: {dir: r, max_steps: 9}\ntarget: {path: t}\n"
     "drafter: {mask_token_id: 5}\nloss: {kl: 1}\n"
     "schedule: {warmup_steps: 10}\n",
     NULL,
     {"5: schedule.warmup_steps: 10 is more than run.max_steps 9"}},
    {"wsd over-full",
     BASE "schedule: {kind: wsd, warmup_ratio: 0.6, decay_ratio: 0.5}\n",
     NULL,
     {"5: schedule.decay_ratio: warm-up (0.6 of all steps) and fall (0.5) together are more than "
      "the run"}},
    {"wsd without a fall",
     BASE "schedule: {kind: wsd, decay_ratio: 0}\n",
     NULL,
     {"5: schedule.decay_ratio: wsd without a fall is schedule.kind constant"}},
    // --set.
    {"set: no value", BASE, "seq_len", {"--set seq_len: expected key=value"}},
    {"set: unknown",
     BASE,
     "max_anchor=4",
     {"--set max_anchor: unknown key; did you mean anchors.max_anchors?"}},
    {"set: unknown in section",
     BASE,
     "drafter.blocksize=4",
     {"--set drafter.blocksize: unknown key; did you mean block_size?"}},
    {"set: unknown section",
     BASE,
     "draft.block_size=4",
     {"--set draft.block_size: unknown section draft; did you mean drafter?"}},
    {"set: ambiguous",
     BASE,
     "every=4",
     {"--set every: more than one section has it: validation.every, checkpoint.every, log.every"}},
    {"set: type", BASE, "seq_len=x", {"--set data.seq_len: expected an integer, got x"}},
    {"set: range",
     BASE,
     "data.seq_len=1",
     {"--set data.seq_len: 1 is out of range; allowed: 2 to 16777216"}},
    {"set: empty",
     BASE,
     "run.dir=",
     {"--set run.dir: has no value; expected a path, or leave the key out"}},
    {"set: empty item",
     BASE,
     "layer_ids=1,,2",
     {"--set target.layer_ids: has no value; expected an integer, or leave the key out"}},
    {"set: contradiction",
     BASE,
     "optimizer.betas=0.9",
     {"--set optimizer.betas: needs 2 values, has 1"}},
};

// Takes the next line off *text.
static char *next_line(char **text)
{
    char *line = *text, *end = strchr(line, '\n');
    *text = end ? end + 1 : line + strlen(line);
    if (end)
        *end = '\0';
    return line;
}

static void check_case(void **state)
{
    const struct fault_case *row = *state;
    struct config_folder folder;
    config_folder_open(&folder);
    char *file = config_folder_write(&folder, "bad.yaml", row->yaml);
    struct config config;
    struct error err = {{0}};
    config_init(&config);
    int status = config_load(&config, file, &row->set, row->set ? 1 : 0, &err);
    config_release(&config);
    config_folder_close(&folder);
    print_message("%s\n", err.text);
    char *rest = err.text;
    for (size_t i = 0; i < MAX_LINES && row->lines[i]; i++) {
        char *want = row->lines[i][0] == '-' ? memory_strdup(row->lines[i])
                                             : memory_format("%s:%s", file, row->lines[i]);
        char *line = next_line(&rest);
        // Expectations that end in a blank give the start of the line only.
        size_t n = strlen(want) + (want[strlen(want) - 1] != ' ');
        if (strncmp(line, want, n) != 0)
            fail_msg("want %s\n got %s", want, line);
        free(want);
    }
    assert_string_equal(rest, "");
    assert_int_equal(status, -1);
    free(file);
}

// What the table says about single keys holds for each of them.
static void check_set_refused(const struct config_key *key, const char *value)
{
    struct config config;
    struct error err = {{0}};
    config_init(&config);
    char *set = memory_format("%s.%s=%s", key->section, key->name, value);
    char *prefix = memory_format("--set %s.%s: ", key->section, key->name);
    assert_int_equal(config_load(&config, NULL, (const char *const *)&set, 1, &err), -1);
    if (strncmp(err.text, prefix, strlen(prefix)) != 0)
        fail_msg("%s: got %s", set, err.text);
    config_release(&config);
    free(prefix);
    free(set);
}

static void every_key_refuses_what_it_must(void **state)
{
    (void)state;
    for (size_t s = 0; s < CONFIG_SECTION_COUNT; s++) {
        for (size_t k = 0; k < config_sections[s].count; k++) {
            const struct config_key *key = &config_sections[s].keys()[k];
            char text[64];
            bool ints = key->type == CONFIG_TYPE_INT || key->type == CONFIG_TYPE_INTS;
            bool reals = key->type == CONFIG_TYPE_REAL || key->type == CONFIG_TYPE_REALS;
            snprintf(text, sizeof(text), "%lld",
                     (long long)(ints ? key->min_int : (int64_t)floor(key->min_real)) - 1);
            if (ints || reals)
                check_set_refused(key, text);
            snprintf(text, sizeof(text), "%.17g", key->max_real * 1.0001);
            if (reals)
                check_set_refused(key, text);
            snprintf(text, sizeof(text), "%llu", (unsigned long long)key->max_int + 1);
            if (ints)
                check_set_refused(key, text);
            if (ints || reals || key->type == CONFIG_TYPE_FLAG || key->type == CONFIG_TYPE_CHOICE)
                check_set_refused(key, "nan");
            if (key->type == CONFIG_TYPE_TEXT || key->type == CONFIG_TYPE_PATH)
                check_set_refused(key, "");
        }
    }
}

static void missing_file(void **state)
{
    (void)state;
    struct config config;
    struct error err = {{0}};
    config_init(&config);
    assert_int_equal(config_load(&config, "/nowhere/at/all.yaml", NULL, 0, &err), -1);
    assert_string_equal(err.text, "/nowhere/at/all.yaml: its folder can not be read: "
                                  "No such file or directory");
    assert_int_equal(config_load(&config, "/nowhere.yaml", NULL, 0, &err), -1);
    assert_string_equal(err.text, "/nowhere.yaml: can not be read: No such file or directory");
    assert_int_equal(config_load(&config, "/tmp", NULL, 0, &err), -1);
    assert_string_equal(err.text, "/tmp: can not be read: Is a directory");
    config_release(&config);
}

// More faults than the text has room for are counted, not lost.
static void too_many_faults(void **state)
{
    (void)state;
    enum { FAULTS = 500 };
    struct config_folder folder;
    config_folder_open(&folder);
    char *text = memory_strdup("data:\n");
    for (int i = 0; i < FAULTS; i++) {
        char *longer = memory_format("%s  k%d: 1\n", text, i);
        free(text);
        text = longer;
    }
    char *file = config_folder_write(&folder, "many.yaml", text);
    struct config config;
    struct error err = {{0}};
    config_init(&config);
    assert_int_equal(config_load(&config, file, NULL, 0, &err), -1);
    size_t shown = 0;
    char *rest = err.text, *last = rest;
    while (*rest != '\0') {
        last = next_line(&rest);
        shown++;
    }
    size_t more = 0;
    assert_int_equal(sscanf(last, "... and %zu more", &more), 1);
    assert_int_equal(shown - 1 + more,
                     FAULTS + 4); // 4: run.dir, target.path, a loss term, mask_token_id
    config_release(&config);
    config_folder_close(&folder);
    free(file);
    free(text);
}

int main(void)
{
    enum { CASES = sizeof(cases) / sizeof(cases[0]), OTHERS = 3 };
    struct CMUnitTest tests[CASES + OTHERS] = {
        cmocka_unit_test(every_key_refuses_what_it_must),
        cmocka_unit_test(missing_file),
        cmocka_unit_test(too_many_faults),
    };
    for (size_t i = 0; i < CASES; i++)
        tests[OTHERS + i] = (struct CMUnitTest){.name = cases[i].name,
                                                .test_func = check_case,
                                                .initial_state = (void *)(uintptr_t)&cases[i]};
    return cmocka_run_group_tests_name("config_faults", tests, NULL, NULL);
}
