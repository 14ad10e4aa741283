#!/usr/bin/env python3
"""The same optimizer step in the published `speculators` package and in dtrain, on one GPU in one run.

    python3 benchmarks/against_speculators.py --dtrain build/dtrain [--anchors 512,1024,2048,3072] [--ours steps.json]

Needs torch, transformers, triton and speculators (collect_peer.py brings the last to a machine without a network).
The peer is speculators' own DFlash draft model, mask, attention, fused loss and metrics, unchanged, driven as its
trainer does: fp32 parameters under bf16 autocast, what it compiles compiled, gradients clipped, AdamW. Where a choice
was open, the one that is better for the peer was taken: frozen embedding and heads in bf16 (its trainer leaves
them in fp32), AdamW's fused implementation, the row already on the GPU. Both train the same row on the same head: every
anchor valid, every token supervised. The two alternate, one number of anchors at a time, unless --ours has results of
step.py from just before; each starts from its own weights.
What inductor and triton compile is kept in /tmp/dtrain-peer-cache: with --steps 1 and no --dtrain, only that is done.
"""
import argparse
import faulthandler
import gc
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/tmp/dtrain-peer-cache")
os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/dtrain-peer-cache/triton")

import h5py
import torch
from safetensors import safe_open

import made_up
import step

DEVICE = made_up.DEVICE
GAMMA, RATE = 7.0, 1e-5
SAME_LOSS = ["--set", "loss.normalize=count", "--set", "loss.slot_mask=each"]


def frozen_weights(target):
    with safe_open(target / "head.safetensors", "pt", device=DEVICE) as file:
        return {name: file.get_tensor(name) for name in ("embed_tokens.weight", "lm_head.weight", "norm.weight")}


def peer_model(model, target):
    """Their draft model: trainable parameters in fp32 as they initialise them, frozen ones in bf16."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=model["vocab"], hidden_size=model["hidden"], intermediate_size=model["intermediate"],
        num_hidden_layers=made_up.DRAFTER_LAYERS, num_attention_heads=model["heads"],
        num_key_value_heads=model["kv_heads"], head_dim=model["head_dim"], rms_norm_eps=1e-6,
        max_position_embeddings=40960, rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        layer_types=["full_attention"] * made_up.DRAFTER_LAYERS, attention_bias=False,
        attention_dropout=0.0, pad_token_id=None)
    # Their default; it has no backward pass on a CPU, where only this script is tried out.
    layers._attn_implementation = "simple_flex_attention" if DEVICE == "cuda" else "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=model["vocab"], block_size=made_up.BLOCK,
        target_hidden_size=model["hidden"], mask_token_id=0,
        aux_hidden_state_layer_ids=[layer + 1 for layer in model["layer_ids"]])
    with torch.device(DEVICE):
        draft = DFlashDraftModel(config)
    weights = frozen_weights(target)
    for module, name in ((draft.embed_tokens, "embed_tokens.weight"), (draft.lm_head, "lm_head.weight"),
                         (draft.verifier_lm_head, "lm_head.weight"), (draft.verifier_norm, "norm.weight")):
        own = weights[name].clone() if module is draft.verifier_lm_head else weights[name]
        module.weight = torch.nn.Parameter(own, requires_grad=False)
    return draft.train()


def leave_loss_uncompiled():
    """torch before 2.12 cannot trace their loss, whose two kernels prune one list of tiles (ListVariable is already tracked
    for mutation). Its kernels and their tuning are the same outside of a compiled graph."""
    from speculators.models.dflash import core

    core.compute_metrics = torch.compiler.disable(core.compute_metrics)


def peer_batch(shard, tokens):
    """The first row of the shard, as their data loader hands it over."""
    with h5py.File(shard) as file:
        offsets = [int(at) for at in file["doc_offsets"][:] if at <= tokens]
        bits = torch.from_numpy(file["hidden_states"][:tokens].view("int16")).to(DEVICE)
        ids = torch.from_numpy(file["input_ids"][:tokens]).long()
        mask = torch.from_numpy(file["loss_mask"][:tokens])
    states, lengths = bits.view(torch.bfloat16), [b - a for a, b in zip(offsets, offsets[1:])]
    assert sum(lengths) == tokens
    batch = {
        "hidden_states": states[:, :-1].flatten(1).contiguous(),
        "verifier_last_hidden_states": states[:, -1].contiguous(),
        "input_ids": ids, "loss_mask": mask,
        "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
    }
    return {name: tensor[None].to(DEVICE) for name, tensor in batch.items()}


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peer_step(draft, optimizer, batch, options):
    """As their trainer's loop has it."""
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        _, loss, metrics = draft(**batch, **options)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    return loss, metrics


def peer_seconds(draft, optimizer, batch, anchors, steps):
    """Seconds of each step, the first loss, and the share of slots that were scored."""
    from speculators.losses import resolve_loss_config

    options = dict(loss_config=resolve_loss_config("kl_div", "fused" if DEVICE == "cuda" else "eager"),
                   gamma=GAMMA, max_anchors=anchors)
    seconds, first, scored = [], None, None
    for number in range(min(steps, max(4, 8192 // anchors))):
        synchronize()
        begin = time.perf_counter()
        loss, metrics = peer_step(draft, optimizer, batch, options)
        synchronize()
        seconds.append(time.perf_counter() - begin)
        if number == 0:
            print(f"{anchors} anchors: first step, with compilation, {seconds[0]:.1f} s", flush=True)
            first, scored = float(loss.detach()), float(metrics["full_acc_total"]) / (anchors * made_up.BLOCK)
    return seconds, first, scored


def run_peer(draft, optimizer, batch, anchors, steps, base):
    """One row of the table; its steps, or what stopped it. `base`: bytes in use before the peer began."""
    torch.compiler.reset()  # every number of anchors is compiled for itself, as in a run of its own
    optimizer.zero_grad()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    memory, result = step.DeviceMemory(), dict(anchors=anchors)
    begin = time.perf_counter()
    try:
        seconds, result["loss"], result["scored"] = peer_seconds(draft, optimizer, batch, anchors, steps)
        result.update(milliseconds=1e3 * statistics.median(seconds[step.warm_up(len(seconds)):]), seconds=seconds)
    except torch.OutOfMemoryError as error:
        result["failed"] = "out of memory: " + " ".join(str(error).split()[:40])
    except Exception as error:  # the table has a row for it; what comes behind still runs
        result["failed"] = f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"
    memory.close()
    result["wall"] = time.perf_counter() - begin
    if DEVICE == "cuda":
        result["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["used_gib"] = (memory.base - base + memory.peak) / 2**30 if memory.nvml else None
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
    return result


def run_ours(arguments, folder, target, shard, anchors):
    name = f"{arguments.model}-{anchors}"
    config, run = step.write_config(folder, name, target, shard, anchors, arguments.tokens, DEVICE, [])
    steps, startup, memory = step.run_steps([arguments.dtrain, "--config", str(config), *SAME_LOSS], run,
                                            arguments.steps, arguments.limit)
    if not steps:
        return dict(anchors=anchors, failed=step.last_lines(run))
    plan = step.planned_gib(arguments.dtrain, config)
    return dict(step.summarise(name, steps, startup, memory, plan, arguments.tokens), count=anchors)


def print_line(anchors, peer, ours):
    def number(result, key, form):
        return form.format(result[key]) if result and result.get(key) is not None else "-"

    line = (f"{anchors:6d} | speculators {number(peer, 'milliseconds', '{:7.1f}')} ms, allocated "
            f"{number(peer, 'allocated_gib', '{:.1f}')} GiB, used {number(peer, 'used_gib', '{:.1f}')} GiB")
    if ours:
        line += (f" | dtrain {number(ours, 'milliseconds', '{:7.1f}')} ms, used "
                 f"{number(ours, 'peak_gib', '{:.1f}')} GiB")
        if "milliseconds" in peer and "milliseconds" in ours:
            line += (f" | time {ours['milliseconds'] / peer['milliseconds']:.3f} of the peer's, "
                     f"{ours['milliseconds'] / ours['floor']:.2f} of the floor, first loss "
                     f"{peer['loss']:.4f} and {ours['loss'][0]:.4f}, scored {peer['scored']:.4f}")
    for who, result in (("speculators", peer), ("dtrain", ours)):
        if result and "failed" in result:
            line += f" | {who}: {result['failed']}"
    print(line + f" | {peer['wall']:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", help="runs it too, in turn with the peer")
    parser.add_argument("--ours", help="results of step.py --json from the same machine; what is there is not run again")
    parser.add_argument("--model", default="v4", choices=list(made_up.MODELS))
    parser.add_argument("--anchors", default="512,1024,3072,2048")
    parser.add_argument("--tokens", type=int, default=step.TOKENS)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--folder", default="/dev/shm/dtrain-step")
    parser.add_argument("--limit", type=float, default=90)
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--stacks", type=float, help="print where it is after every so many seconds")
    arguments = parser.parse_args()
    if arguments.stacks:
        faulthandler.dump_traceback_later(arguments.stacks, repeat=True)
    arguments.dtrain = arguments.dtrain and os.path.abspath(arguments.dtrain)
    folder = pathlib.Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    target, shard = step.prepare(folder, arguments.model, [], arguments.tokens)
    before, begin = step.DeviceMemory(), time.perf_counter()
    base = before.base if before.nvml else 0
    before.close()
    draft = peer_model(made_up.MODELS[arguments.model], target)
    if DEVICE == "cuda" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        leave_loss_uncompiled()
    trainable = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=RATE, weight_decay=0.0, fused=True)
    batch = peer_batch(shard, arguments.tokens)
    print(f"torch {torch.__version__}, {sum(p.numel() for p in trainable) / 1e9:.3f} G trainable parameters, "
          f"ready after {time.perf_counter() - begin:.1f} s", flush=True)
    results = []
    earlier = json.loads(pathlib.Path(arguments.ours).read_text()) if arguments.ours else []
    earlier = {result["setting"]: result for result in earlier}
    for anchors in (int(word) for word in arguments.anchors.split(",")):
        peer = run_peer(draft, optimizer, batch, anchors, arguments.steps, base)
        ours = earlier.get(f"{arguments.model}-{anchors}")
        if ours is None and arguments.dtrain:
            ours = run_ours(arguments, folder, target, shard, anchors)
        print_line(anchors, peer, ours)
        results.append(dict(speculators=peer, dtrain=ours))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
