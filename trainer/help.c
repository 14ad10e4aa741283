// Owns the texts of --help.
#include "trainer/help.h"

#include <string.h>

struct help {
    const char *command, *usage, *text;
};

static const struct help helps[] = {
    {"train", "dtrain --config FILE [--set KEY=VALUE]... [--resume auto|none|DIR] [--replan]",
     "Trains a drafter. Continues from the newest complete checkpoint of run.dir by itself.\n"
     "  --config FILE      YAML; `dtrain config` lists every key\n"
     "  --set KEY=VALUE    overrides a key; the section may be left out where the key is unique\n"
     "  --resume auto      (default) the newest complete checkpoint, or the beginning\n"
     "  --resume none      the beginning; refused when run.dir holds checkpoints\n"
     "  --resume DIR       this checkpoint\n"
     "  --replan           continue although the machine or the execution differs\n"},
    {"eval",
     "dtrain eval --config FILE --checkpoint DIR [--served] [--rows N] [--blocks FILE] [--set ...]",
     "Acceptance of a checkpoint on the validation shards (data.val): accept_len_walk is the mean\n"
     "number of tokens a decoder would take per step.\n"
     "  --served           weights rounded to bf16, as exports hold them\n"
     "  --rows N           packed rows to score (default: all)\n"
     "  --blocks FILE      one JSON line a visited block: doc_id, anchor, accepted\n"},
    {"trace", "dtrain trace --config FILE --out FILE.safetensors [--checkpoint DIR] [--set ...]",
     "Runs one training step and writes everything needed to compute it again elsewhere.\n"
     "  --checkpoint DIR   the step that follows this checkpoint (default: the first step)\n"},
    {"plan",
     "dtrain plan --config FILE [--set ...] [--json] [--device-memory 96GiB] [--gpus N] [--fit "
     "[--vary KEYS]]",
     "Memory that a run takes on the device and on the host, by group of tensors, before anything "
     "is\n"
     "allocated; operations, bytes read and disk. Needs no GPU, no shards and no weights of the\n"
     "target. Exit status 1 when it does not fit.\n"
     "  --device-memory N  memory of one GPU, as 96GiB (default: that of the GPU here);\n"
     "                     memory.limit counts when it is less\n"
     "  --gpus N           judge N ranks, an outlook: training uses one GPU (default: 1)\n"
     "  --fit              the largest values of keys that fit\n"
     "  --vary KEYS        of which keys, as seq_len,layers (default: seq_len, layers, "
     "group_rows)\n"
     "  --json             everything as one JSON object, every tensor with its bytes\n"
     "  --target-config F  the target's config.json, where target.path is not there\n"
     "  --tflops N         rate for the least time of a step (default: 700, an H200)\n"},
    {"sweep",
     "dtrain sweep --config FILE --grid KEY=V1,V2,... [--grid ...] [--set ...] [--equal WHAT] "
     "[--parallel N] [--plan-only] | --show DIR",
     "Trains with every combination of the values and compares them. Each point is an ordinary run "
     "in a\n"
     "folder of its own below run.dir. All points are planned first; those that do not fit are "
     "left "
     "out.\n"
     "The same command goes on with a sweep that was interrupted. Exit status 1 when a point "
     "failed "
     "or\n"
     "does not fit. The table is printed, and is in run.dir as table.txt, table.csv and "
     "table.json.\n"
     "  --grid KEY=VALUES  values of a config key, as block_size=8,16; a list in brackets\n"
     "  --equal steps      (default) all points take the same number of steps\n"
     "  --equal anchors    the same number of anchors; block_rows: of anchors times block_size\n"
     "  --equal time=N     about N seconds of steps each, after their time has been measured\n"
     "  --equal none       what each point's config says\n"
     "  --parallel N       points at a time, GPUs or CPU threads divided between them (default: "
     "1)\n"
     "  --plan-only        print which points fit, start none\n"
     "  --device-memory N  as of plan\n"
     "  --show DIR         the table as it stands, of a sweep that may be running\n"},
    {"export",
     "dtrain export --checkpoint DIR --format zlab|specforge|speculators --out DIR [--target DIR] "
     "[--allow-unservable[=NAMES]]",
     "Writes a servable drafter (bf16 model.safetensors and config.json).\n"
     "  --format zlab      read by SGLang, vLLM and z-lab's code; specforge: the same layout\n"
     "  --format speculators  read by vLLM and speculators: holds the target's embedding and head\n"
     "  --target DIR       where the target is now (speculators; default: the run's target.path)\n"
     "  --allow-unservable write it although servers do not run it as trained; =NAMES: only as "
     "far\n"
     "                     as these go, of sliding_window_non_causal,window_origin,layer_types\n"},
    {"data check", "dtrain data check [--target DIR] [--no-verdicts] FILE...",
     "Every fault of feature shards by file, document and row; exit status 1 if there is any.\n"
     "Verdicts go to FILE.verdict.json, which training uses to leave bad documents out.\n"
     "  --target DIR       also recompute the teacher on a sample of positions\n"
     "  --no-verdicts      do not write verdict files\n"},
    {"data stats", "dtrain data stats FILE...",
     "Documents, tokens, supervised share, lengths and bytes of feature shards.\n"},
    {"data order", "dtrain data order --config FILE [--set ...] [--from-step N]",
     "The order in which training reads its documents: lines of serial number, epoch, step, "
     "doc_id\n"
     "and tokens, after lines that begin with # and say what an extractor needs to know.\n"
     "  --from-step N      begins with the first document of step N\n"},
    {"data manifest", "dtrain data manifest --out FILE SHARD...",
     "Writes the manifest of the documents of feature shards: everything but their features.\n"},
    {"config", "dtrain config [--markdown]",
     "Every config key: type, default, range, meaning, and whether it may change on resume.\n"},
};

static void print_overview(FILE *out)
{
    fprintf(out, "dtrain trains drafters for speculative decoding from hidden states.\n\n");
    for (size_t i = 0; i < sizeof(helps) / sizeof(helps[0]); i++)
        fprintf(out, "    %s\n", helps[i].usage);
    fprintf(out,
            "\n    dtrain COMMAND --help\n    dtrain --version\n\n"
            "Exit status: 0 done; 1 the run failed; 2 usage, config or data refused before the\n"
            "first step; 75 stopped by a signal with a checkpoint that resumes.\n\n");
}

void help_print(FILE *out, const char *command, bool overview)
{
    if (overview)
        print_overview(out);
    for (size_t i = 0; i < sizeof(helps) / sizeof(helps[0]); i++)
        if (strcmp(helps[i].command, command) == 0)
            fprintf(out, "%s%s\n\n%s", overview ? "" : "usage: ", helps[i].usage, helps[i].text);
}
