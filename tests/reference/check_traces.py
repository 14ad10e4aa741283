#!/usr/bin/env python3
"""Runs `dtrain trace` with many settings on made-up shards and recomputes every trace.

    check_traces.py DTRAIN [--work DIR] [--bf16] [--device auto|cpu|cuda] [--only CASE]

The settings are those of the golden cases, on larger rows packed by dtrain itself, with small anchor groups and
loss chunks so that several of each exist. Where speculators can do the same, it is asked too (when installed).
Closes with the line "N passed, N failed". Needs h5py besides what recompute_step.py needs.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile

import h5py
import numpy as np
import torch
from safetensors.torch import save_file

from golden_cases import CASES
from make_golden import resolved, to_yaml

VOCAB, HIDDEN = 97, 32
SHARD_LAYERS = [1, 2, 3, 5, 6]
HERE = os.path.dirname(os.path.abspath(__file__))
BF16_TOLERANCE = 5e-2
# Three layers six times in a row: PyTorch's autocast is off by 0.15 there (bf16_error.py); in a norm of
# eight numbers under tv, whose gradient jumps, by 0.063.
BF16_TOLERANCES = {"eagle3_three_layers": 0.2, "markov_from_anchor": 0.1}

# What speculators can follow, beside the golden cases.
LIKE_SPECULATORS = {"slot_mask": "each", "normalize": "count"}
LIKE_SPECULATORS_EAGLE3 = {"mask_index": "input", "out_of_vocab": "kept", "ttt_decay_base": 0.9, "normalize": "count"}
EXTRA = {
    "like_speculators": {"config": {"loss": {"kl": 1.0, **LIKE_SPECULATORS}}, "last_hidden": "pre_norm"},
    "like_speculators_sliding": {
        "config": {
            "loss": {"ce_teacher": 0.1, "tv": 0.9, **LIKE_SPECULATORS},
            "drafter": {
                "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "window_origin": "anchor",
            },
        },
        "last_hidden": "pre_norm",
    },
    "like_speculators_dpace": {
        "config": {
            "loss": {"ce_teacher": 1.0, "slot_weight": "dpace", **LIKE_SPECULATORS},
            "drafter": {"predict_from_anchor": True},
        },
    },
    "like_speculators_markov": {
        "config": {
            "loss": {"ce_teacher": 0.1, "tv": 0.9, **LIKE_SPECULATORS},
            "drafter": {"predict_from_anchor": True, "markov_rank": 16},
        },
        "last_hidden": "pre_norm", "untied": True,
    },
    "like_speculators_eagle3": {
        "config": {
            "loss": {"kl": 1.0, **LIKE_SPECULATORS_EAGLE3},
            "drafter": {"kind": "eagle3", "norm_before_residual": True, "fc_norm": True, "norm_output": True},
        },
        "last_hidden": "pre_norm",
    },
    "like_speculators_eagle3_vocabulary": {
        "config": {
            "loss": {"ce_teacher": 0.1, "tv": 0.9, **LIKE_SPECULATORS_EAGLE3},
            "drafter": {
                "kind": "eagle3", "style": "qwen3", "layers": 2, "layer_types": ["full_attention"] * 2, "norm_before_fc": True,
            },
        },
        "last_hidden": "pre_norm", "untied": True, "draft_vocab": 30,
    },
}  # fmt: skip


def write_target(folder, untied):
    rng = np.random.default_rng(11)
    os.makedirs(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 40, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
        "tie_word_embeddings": not untied,
    }  # fmt: skip
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)

    def tensor(shape, std, mean=0.0):
        return torch.from_numpy(mean + std * rng.standard_normal(shape)).to(torch.bfloat16)

    tensors = {"embed_tokens.weight": tensor((VOCAB, HIDDEN), 0.5), "norm.weight": tensor(HIDDEN, 0.2, 1.0)}
    if untied:
        tensors["lm_head.weight"] = tensor((VOCAB, HIDDEN), 0.5)
    save_file(tensors, os.path.join(folder, "head.safetensors"))


def random_documents(rng):
    """Documents of 1 to 40 tokens, with prompts and gaps in the supervised parts: lengths, mask."""
    lengths = rng.integers(3, 41, 14).tolist() + [1, 2]
    mask = (rng.random(sum(lengths)) < 0.85).astype(np.uint8)
    for start in np.cumsum([0] + lengths)[:-1]:
        mask[start : start + 2] = 0
    return lengths, mask


def write_shard(path, last_hidden, documents=random_documents):
    rng = np.random.default_rng(12)
    lengths, mask = documents(rng)
    N, P = sum(lengths), len(SHARD_LAYERS) + 1
    offsets = np.cumsum([0] + lengths).astype(np.int64)
    planes = torch.from_numpy(rng.standard_normal((N, P, HIDDEN))).to(torch.bfloat16)
    with h5py.File(path, "w") as file:
        file.attrs.update(
            {
                "format": "dtrain-features", "format_version": 1, "target_model": "made-up",
                "target_layer_ids": np.array(SHARD_LAYERS, np.int32), "hidden_size": HIDDEN, "vocab_size": VOCAB,
                "dtype": "bfloat16", "last_hidden": last_hidden,
            }
        )  # fmt: skip
        file["doc_offsets"] = offsets
        file["input_ids"] = rng.integers(0, VOCAB, N).astype(np.int32)
        file["loss_mask"] = mask
        file["hidden_states"] = planes.view(torch.int16).numpy().view(np.uint16)
        file["doc_id"] = np.arange(100, 100 + len(lengths)).astype(np.uint64)


def write_config(path, case, compute, device):
    """The case's settings on these shards; sizes come from the target, by default, in half of the cases."""
    config = resolved(copy.deepcopy(case["config"]))
    eagle3 = config["drafter"]["kind"] == "eagle3"
    config["run"].update({"compute": compute, "device": device})
    kind = "untied" if case.get("untied") else "tied"
    config["target"]["path"] = f"target-{kind}"
    config["data"].update({"seq_len": 64, "rows_per_step": 3})
    config["data"]["train"] = [shard_of(case)]
    config["drafter"].update({"init_std": 0.15, "intermediate_size": 24} | ({} if eagle3 else {"mask_token_id": 90}))
    if "draft_vocab" in case:
        config["drafter"]["draft_vocab"] = vocabulary_of(case)
    if case.get("untied"):
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta"):
            del config["drafter"][key]
    config["memory"] = {"group_rows": 64, "chunk_rows": 16}
    with open(path, "w") as file:
        file.write(to_yaml(config))


def shard_of(case):
    return f"{case.get('last_hidden', 'post_norm')}.h5"


def vocabulary_of(case):
    return f"{case.get('last_hidden', 'post_norm')}-{case['draft_vocab']}.safetensors"


def run(command):
    """Exit status and output; what went to stderr first."""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr + done.stdout


def speculators_script(case):
    """The program that asks speculators, or None."""
    eagle3 = case["config"].get("drafter", {}).get("kind") == "eagle3"
    wanted = LIKE_SPECULATORS_EAGLE3 if eagle3 else LIKE_SPECULATORS
    if any(case["config"]["loss"].get(k) != v for k, v in wanted.items()):
        return None
    return "against_speculators_eagle3.py" if eagle3 else "against_speculators.py"


def check(name, case, arguments, folder):
    """Faults of one case: a list of texts."""
    compute = "bf16" if arguments.bf16 else "fp32"
    config, trace = os.path.join(folder, f"{name}.yaml"), os.path.join(folder, f"{name}.safetensors")
    target = os.path.join(folder, "target-untied" if case.get("untied") else "target-tied")
    if "draft_vocab" in case:
        vocabulary = ["--size", str(case["draft_vocab"]), "--out", os.path.join(folder, vocabulary_of(case))]
        status, output = run([arguments.dtrain, "vocab", *vocabulary, os.path.join(folder, shard_of(case))])
        if status != 0:
            return [f"dtrain vocab: status {status}\n{output}"]
    write_config(config, case, compute, arguments.device)
    status, output = run([arguments.dtrain, "trace", "--config", config, "--out", trace])
    if status != 0:
        return [f"dtrain trace: status {status}\n{output}"]
    tolerance = ["--tol", str(BF16_TOLERANCES.get(name, BF16_TOLERANCE))] if arguments.bf16 else []
    faults = []
    programs = ["recompute_step.py"]
    if speculators_script(case) and not arguments.bf16:
        programs.append(speculators_script(case))
    for program in programs:
        status, output = run([sys.executable, os.path.join(HERE, program), trace, "--target", target, *tolerance])
        if status != 0:
            faults.append(f"{program}: status {status}\n{output}")
        else:
            print(f"ok    {name}: {program}: {output.splitlines()[-1]}, {worst(output)}")
    return faults


def worst(output):
    """The largest error in a table of comparisons."""
    errors = [(float(line[60:70]), line[6:58].strip()) for line in output.splitlines() if line.startswith("ok  ")]
    return "largest error {:.1e} ({})".format(*max(errors)) if errors else "nothing compared"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dtrain", help="the binary")
    parser.add_argument("--work", help="folder for shards, configs and traces; default: a temporary one")
    parser.add_argument("--bf16", action="store_true", help="run.compute bf16, with a tolerance to match")
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--only", help="one case")
    arguments = parser.parse_args()
    arguments.dtrain = os.path.abspath(arguments.dtrain)
    folder = tempfile.mkdtemp(dir=arguments.work)
    write_target(os.path.join(folder, "target-tied"), False)
    write_target(os.path.join(folder, "target-untied"), True)
    for last_hidden in ("pre_norm", "post_norm"):
        write_shard(os.path.join(folder, last_hidden + ".h5"), last_hidden)
    cases = {n: c for n, c in {**CASES, **EXTRA}.items() if not n.endswith("nothing_supervised") and arguments.only in (None, n)}
    failed = 0
    for name, case in cases.items():
        faults = check(name, case, arguments, folder)
        failed += bool(faults)
        for fault in faults:
            print(f"FAIL  {name}: {fault}")
    print(f"{len(cases) - failed} passed, {failed} failed (files in {folder})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
