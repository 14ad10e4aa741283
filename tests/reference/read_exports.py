#!/usr/bin/env python3
"""Reads what `dtrain export` writes, from config.json and tensors alone, and recomputes dtrain's step with it.

    read_exports.py [DTRAIN] [--work DIR]        DTRAIN: the binary; default: the environment variable DTRAIN

For each case a drafter is trained for two steps on a made-up shard, exported in every layout that its servers run,
and traced from that export (drafter.init_from). Sizes, windows, layers and rotary embedding come from the export's
config.json only, weights from its tensors, and log-sum-exp, argmax and loss of blocks at the positions 0, 1, ...
and 5000, ... must be those of the trace to 1e-3. Where speculators is installed, its own class loads its layout and its loss
must be that of the trace. Closes with the line "N passed, N failed"; exit status 77: torch or h5py is missing.
"""

import argparse
import copy
import importlib.util
import json
import os
import shutil
import sys
import tempfile

try:
    import numpy as np
    import torch
    from safetensors.torch import load_file

    import against_speculators
    import check_traces
    import read_eagle3
    from dflash_step import Step
    from make_golden import resolved, to_yaml
    from recompute_step import Report
    from trace_file import Refused, Shape, Trace, read_target
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

TOLERANCE = 1e-3
TOKENS, FAR = 5040, 5000
SLIDING, FULL = "sliding_attention", "full_attention"
# drafter keys; the layouts that are exported; words of the export; whether speculators can be asked (its windows
# are measured from the anchor, which servers do not do).
CASES = {
    "yarn, theta 1e7": ({"rope_scaling": "yarn", "rope_factor": 4.0, "rope_theta": 1e7}, True, [], True),
    "linear, tied": ({"rope_scaling": "linear", "rope_factor": 2.0}, True, [], True),
    "sliding": ({"layer_types": [SLIDING, SLIDING], "sliding_window": 20}, True, [], False),
    "sliding, from the anchor": (
        {"layer_types": [SLIDING, SLIDING], "sliding_window": 20, "window_origin": "anchor"},
        True, ["--allow-unservable=window_origin"], True,
    ),
    "mixed": ({"layer_types": [SLIDING, FULL], "sliding_window": 20}, False, [], False),
    "Markov head": ({"markov_rank": 16}, True, [], True),
    "Markov head, from the anchor": ({"markov_rank": 8, "predict_from_anchor": True}, True, [], True),
}  # fmt: skip


def two_ends(_):
    """One document whose first tokens and those around position 5000 are supervised: lengths, mask."""
    mask = np.zeros(TOKENS, np.uint8)
    mask[0:9] = mask[FAR - 1 : FAR + 9] = 1
    return [TOKENS], mask


# ---- the exports -------------------------------------------------------------------------------------


def read_rope(layers):
    scaling = layers["rope_scaling"] or {"rope_type": "none"}
    assert layers["is_neox_style"] and set(scaling) <= {"rope_type", "factor", "original_max_position_embeddings"}
    return {
        "rope_theta": float(layers["rope_theta"]),
        "rope_scaling": scaling["rope_type"],
        "rope_factor": float(scaling.get("factor", 1.0)),
        "rope_original_positions": int(scaling.get("original_max_position_embeddings", 1)),
    }


def read_export(folder):
    """(shape, layer ids as outputs of layers, parameters) of either layout."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    theirs = "speculators_model_type" in config
    layers = config["transformer_layer_config"] if theirs else config
    block = config if theirs else config["dflash_config"]
    ids = [i - 1 for i in config["aux_hidden_state_layer_ids"]] if theirs else block["target_layer_ids"]
    if theirs:
        method = config["speculators_config"]["proposal_methods"][0]
        assert method["speculative_tokens"] == config["block_size"] - (not config["sample_from_anchor"])
        assert ("sliding_window_non_causal" in config) == (SLIDING in layers["layer_types"])
    shape = Shape(
        layers=layers["num_hidden_layers"], block_size=config["block_size"], mask_token_id=block["mask_token_id"],
        predict_from_anchor=config.get("sample_from_anchor", False), heads=layers["num_attention_heads"],
        kv_heads=layers["num_key_value_heads"], head_dim=layers["head_dim"], eps=layers["rms_norm_eps"],
        layer_types=layers["layer_types"], sliding_window=layers["sliding_window"],
        non_causal=config.get("sliding_window_non_causal", False), window_origin=config.get("window_origin", "query"),
        markov_rank=config.get("markov_rank", 0), **read_rope(layers),
    )  # fmt: skip
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    return shape, ids, tensors


def drafter_tensors(tensors, target):
    """The parameters alone; what the layout copies of the target is the target's."""
    copies = {"embed_tokens.weight": target.embed, "lm_head.weight": target.head}
    for name, tensor in copies.items():
        assert name not in tensors or torch.equal(tensors[name].double(), tensor.double())
    return {n: t.double() for n, t in tensors.items() if n not in copies}


# ---- comparisons -------------------------------------------------------------------------------------


def compare_step(report, name, folder, trace, target):
    shape, ids, tensors = read_export(folder)
    assert ids == trace.config["target"]["layer_ids"]
    rows = trace.rows()
    anchors = rows[0].anchors.tolist()
    assert {0, 1, FAR} <= set(anchors), anchors
    params = drafter_tensors(tensors, target)
    held = trace.group("param")
    assert set(held) == set(params)
    report.exact(f"{name}.weights", [torch.equal(held[n], params[n]) for n in held], [True] * len(held))
    step = Step(trace.config, shape, target, rows, params, trace.metadata["last_hidden"])
    report.number(f"{name}.loss", trace.scalar("loss"), step.total)
    report.tensor(f"{name}.student_lse", trace.get("slots.student_lse"), step.student_lse)
    report.exact(f"{name}.argmax", trace.get("slots.student_argmax").tolist(), step.student_argmax.tolist())


def load_theirs(folder, target):
    """Their own class, loaded by themselves."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    with open(os.path.join(folder, "config.json")) as file:
        markov = json.load(file)["speculators_model_type"] == "dspark"
    config = (DSparkSpeculatorConfig if markov else DFlashSpeculatorConfig).from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = (DSparkDraftModel if markov else DFlashDraftModel).from_pretrained(folder, config=config).to(torch.float32)
    model.verifier_norm.variance_epsilon = target.norm_eps  # they take the drafter's
    return model


def compare_theirs(report, name, folder, trace, target):
    shape, _, tensors = read_export(folder)
    params = {n: t.float() for n, t in drafter_tensors(tensors, target).items()}
    model = load_theirs(folder, target)
    assert model.target_layer_ids == [i + 1 for i in trace.config["target"]["layer_ids"]]
    loss, _, _, slots = against_speculators.run_theirs(
        trace.config, shape, target, trace.rows(), params, trace.metadata["last_hidden"], False, model=model
    )
    report.number(f"{name}.their loss", trace.scalar("loss"), loss)
    report.exact(f"{name}.their slots", [len(trace.get("slots.row"))], [slots])


# ---- one case ----------------------------------------------------------------------------------------


def write_config(path, folder, drafter, target):
    config = resolved({"loss": {"kl": 1.0, **check_traces.LIKE_SPECULATORS}, "drafter": copy.deepcopy(drafter)})
    config["run"].update({"dir": "run", "compute": "fp32", "max_steps": 2})
    config["target"].update({"path": target, "name": os.path.join(folder, target)})
    config["data"].update({"seq_len": TOKENS, "rows_per_step": 1, "train": ["ends.h5"]})
    config["drafter"].update({"init_std": 0.15, "mask_token_id": 90})
    config["anchors"]["max_anchors"] = 64
    config["run"]["epochs"] = 2
    with open(path, "w") as file:
        file.write(to_yaml(config))


def must_run(*command):
    status, output = check_traces.run(command)
    if status != 0:
        raise RuntimeError(f"{' '.join(command[1:])}: status {status}\n{output}")


def check(name, dtrain, folder, asks_theirs):
    """A report of one case."""
    drafter, with_theirs, words, comparable = CASES[name]
    target = "target-tied" if "tied" in name else "target-untied"
    place = tempfile.mkdtemp(dir=folder)
    config, report = os.path.join(folder, "case.yaml"), Report(TOLERANCE)
    write_config(config, folder, drafter, target)
    run, frozen = os.path.join(place, "run"), read_target(os.path.join(folder, target))
    must_run(dtrain, "--config", config, "--set", f"run.dir={run}")
    checkpoint = os.path.join(run, "checkpoints", "step-00000002")
    ours = [] if "markov_rank" in drafter else ["zlab", "specforge"]
    for layout in ours + ["speculators"] * with_theirs:
        out, path = os.path.join(place, layout), os.path.join(place, f"{layout}.safetensors")
        must_run(dtrain, "export", "--checkpoint", checkpoint, "--format", layout, "--out", out, *words)
        must_run(dtrain, "trace", "--config", config, "--set", f"drafter.init_from={out}", "--out", path)
        trace = Trace(path)
        compare_step(report, layout, out, trace, frozen)
        if layout == "speculators" and comparable and asks_theirs:
            compare_theirs(report, layout, out, trace, frozen)
    return report


def check_eagle3(name, dtrain, folder, asks_theirs):
    """A report of one case."""
    keys, size, specforge, comparable = read_eagle3.CASES[name]
    drafter = {"kind": "eagle3", "init_std": 0.15, **copy.deepcopy(keys)}
    place, report = tempfile.mkdtemp(dir=folder), Report(TOLERANCE)
    if size is not None:
        drafter["draft_vocab"] = os.path.join(place, "vocabulary.safetensors")
        must_run(dtrain, "vocab", "--size", str(size), "--out", drafter["draft_vocab"], os.path.join(folder, "few.h5"))
    target, run = os.path.join(folder, "target-untied"), os.path.join(place, "run")
    config = resolved({"loss": {"kl": 1.0, **read_eagle3.LIKE_SPECULATORS}, "drafter": drafter})
    config["run"].update({"dir": run, "compute": "fp32", "max_steps": 2, "epochs": 4})
    config["target"].update({"path": target, "name": target})
    config["data"].update({"seq_len": 256, "rows_per_step": 1, "train": ["few.h5"]})
    path, frozen = os.path.join(folder, "case.yaml"), read_target(target)
    with open(path, "w") as file:
        file.write(to_yaml(config))
    must_run(dtrain, "--config", path)
    for layout in ["specforge"] * specforge + ["speculators"]:
        out, traced = os.path.join(place, layout), os.path.join(place, f"{layout}.safetensors")
        must_run(dtrain, "export", "--checkpoint", os.path.join(run, "checkpoints", "step-00000002"), "--format", layout,
                 "--out", out)
        must_run(dtrain, "trace", "--config", path, "--set", f"drafter.init_from={out}", "--out", traced)
        trace = Trace(traced)
        read_eagle3.compare_step(report, layout, out, trace, frozen, read_rope)
        if layout == "speculators" and comparable and asks_theirs:
            read_eagle3.compare_theirs(report, layout, out, trace, frozen)
    return report


def has_speculators():
    found = importlib.util.find_spec("speculators") is not None
    if not found:
        print("skipped: speculators is not installed; its own class is not asked")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dtrain", nargs="?", default=os.environ.get("DTRAIN"), help="the binary")
    parser.add_argument("--work", help="folder for all files; default: a temporary one")
    parser.add_argument("--only", help="one case")
    arguments = parser.parse_args()
    if not arguments.dtrain:
        parser.error("name the binary")
    dtrain, asks_theirs = os.path.abspath(arguments.dtrain), has_speculators()
    folder = tempfile.mkdtemp(dir=arguments.work)
    for kind in ("tied", "untied"):
        target = os.path.join(folder, f"target-{kind}")
        check_traces.write_target(target, kind == "untied")
        # speculators reads the target again when it loads a drafter, from a file of this name.
        shutil.copy(os.path.join(target, "head.safetensors"), os.path.join(target, "model.safetensors"))
    check_traces.write_shard(os.path.join(folder, "ends.h5"), "pre_norm", two_ends)
    check_traces.write_shard(os.path.join(folder, "few.h5"), "pre_norm")
    failed = 0
    checks = {**dict.fromkeys(CASES, check), **dict.fromkeys(read_eagle3.CASES, check_eagle3)}
    names = [name for name in checks if arguments.only in (None, name)]
    for name in names:
        try:
            bad = checks[name](name, dtrain, folder, asks_theirs).print(True)
        except (AssertionError, RuntimeError, Refused) as fault:
            print(f"{type(fault).__name__}: {fault}")
            bad = True
        print(f"{'FAIL' if bad else 'ok':<5} {name}")
        failed += bool(bad)
    if failed == 0 and not arguments.work:
        shutil.rmtree(folder)
    print(f"{len(names) - failed} passed, {failed} failed" + (f" (files in {folder})" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
