#!/usr/bin/env python3
"""The same EAGLE-3 step in the published `speculators` package and in dtrain's bench_step, on one GPU in one run.

    python3 benchmarks/against_speculators_eagle3.py --bench build/benchmarks/bench_step [--sizes 8192x3,8192x7,32768x7]

Sizes are tokens of a row x ttt_steps; marks behind one: -full has no draft vocabulary (otherwise --draft-vocab tokens
of it). Needs what against_speculators.py needs, and drives the peer as that does: fp32 parameters under bf16 autocast,
gradients clipped, AdamW, fused loss, flex attention, fixed shapes. Its decoder layer, norms and the making of its mask are
compiled; --whole compiles its forward pass as it does itself, which torch before 2.12 can not trace. Both have
one Llama layer of Qwen3-8B's sizes (--model), fc_norm and norm_output, a row of four documents with every token supervised,
and score the same positions (loss.mask_index input, loss.out_of_vocab kept). dtrain runs each size three times: as it is, its
logits in fp32; with memory.logits bf16, which is what the package's are under autocast; with memory.mode low. Both measure
acceptance over the draft vocabulary alone (loss.full_vocab_metrics false); --full-metrics lets dtrain measure it over the
whole vocabulary, as it does unless it is told otherwise. Steps are timed for two seconds behind the first ones on both sides.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import time

from against_speculators import attempt, clear, one_row, say, synchronize  # first: it sets the compiler's environment

import numpy as np
import torch

import made_up
import step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATE, WARM_UP, LEAST_STEPS = 1e-5, 3, 5
ENOUGH_SECONDS = 2.0  # of steps behind the first ones, as in bench_step: a GPU at its limit of power slows down in its first second
FEATURES = 3
SAME = ["loss.kl=1.0", "loss.mask_index=input", "loss.out_of_vocab=kept", "loss.full_vocab_metrics=false",
        "loss.normalize=count", "loss.ttt_decay_base=1.0", "drafter.fc_norm=true", "drafter.norm_output=true",
        "optimizer.grad_clip=1.0"]
VARIANTS = {"dtrain": [], "bf16": ["memory.logits=bf16"], "low": ["memory.mode=low"]}
LINE = re.compile(r": +([0-9.]+) ms,.*in use (-?[0-9.]+) more than before; loss ([0-9.]+)")


# ---- the peer ----------------------------------------------------------------------------------------


def layer_config(model):
    from transformers import LlamaConfig

    layers = LlamaConfig(
        vocab_size=model["vocab"], hidden_size=model["hidden"], intermediate_size=model["intermediate"],
        num_hidden_layers=1, num_attention_heads=model["heads"], num_key_value_heads=model["kv_heads"],
        head_dim=model["head_dim"], rms_norm_eps=1e-6, max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, attention_bias=False, attention_dropout=0.0,
        pad_token_id=None)
    layers._attn_implementation = "simple_flex_attention" if DEVICE == "cuda" else "eager"
    return layers


def peer_model(model, draft_vocab):
    """Their draft model: trainable parameters in fp32 as they initialise them, frozen ones in bf16."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(model), draft_vocab_size=draft_vocab, target_hidden_size=model["hidden"],
        eagle_aux_hidden_state_layer_ids=list(range(2, 2 + FEATURES)), fc_norm=True, norm_output=True)
    with torch.device(DEVICE):
        draft = Eagle3DraftModel(config)

    def matrix(rows):
        values = torch.randn(rows, model["hidden"], dtype=torch.bfloat16, device=DEVICE).mul_(0.02)
        return torch.nn.Parameter(values, requires_grad=False)

    draft.embed_tokens.weight, draft.lm_head.weight = matrix(model["vocab"]), matrix(draft_vocab)
    draft.verifier_lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.clone(), requires_grad=False)
    ones = torch.ones(model["hidden"], dtype=torch.bfloat16, device=DEVICE)
    draft.verifier_norm.weight = torch.nn.Parameter(ones, requires_grad=False)
    return draft.train()


def compile_parts(draft, backend):
    """The layer, norms and the mask instead of the whole forward pass."""
    torch._dynamo.config.recompile_limit = 64
    compiled = type(draft).forward
    type(draft).forward = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    for part in [*draft.layers, draft.norm, draft.verifier_norm, *draft.fc_norm]:
        part.compile(backend=backend, dynamic=False)
    draft._create_mask_fn = torch.compile(draft._create_mask_fn, backend=backend, dynamic=False)


def peer_batch(model, tokens):
    """A packed row as their data loader hands it over: every document shifted against its features, filled up at the end."""
    masks, owners = one_row(made_up.even_documents(tokens), tokens)
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    positions = np.arange(tokens) - starts[owners]
    states = torch.randn(tokens, FEATURES + 1, model["hidden"], dtype=torch.bfloat16, device=DEVICE)
    ids = torch.randint(3, model["vocab"], (tokens,), device=DEVICE)
    feature = torch.tensor(np.flatnonzero(np.roll(positions, -1) != 0), device=DEVICE)  # all but a document's last
    batch = {
        "hidden_states": states[feature, :FEATURES].flatten(1).contiguous(),
        "verifier_last_hidden_states": states[feature + 1, FEATURES].contiguous(),
        "input_ids": ids[feature + 1],
        "loss_mask": torch.tensor(masks, device=DEVICE)[feature + 1].bool(),
        "document_ids": torch.tensor(owners, device=DEVICE)[feature],
        "position_ids": torch.tensor(positions, device=DEVICE)[feature + 1],
    }
    return {name: filled_up(tensor, tokens, -1 if name == "document_ids" else 0)[None] for name, tensor in batch.items()}


def filled_up(tensor, rows, value):
    rest = tensor.new_full((rows - tensor.shape[0], *tensor.shape[1:]), value)
    return torch.cat([tensor, rest])


class Peer:
    """Model, optimizer and row, and a step as their trainer's loop has it."""

    def __init__(self, model, draft_vocab, tokens, backend, whole):
        from speculators.losses import resolve_loss_config

        self.draft = peer_model(model, draft_vocab)
        if not whole:
            compile_parts(self.draft, backend)
        self.trainable = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=RATE, weight_decay=0.0, fused=True)
        self.batch = peer_batch(model, tokens)
        self.loss = resolve_loss_config("kl_div", "fused" if DEVICE == "cuda" else "eager")

    def step(self, steps):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            _, loss, metrics = self.draft(**self.batch, loss_config=self.loss, ttt_steps=steps)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step()
        return loss, metrics


def run_peer(model, draft_vocab, tokens, steps, arguments):
    """Milliseconds and memory, or what stopped it. Used is what the whole device has in use at most."""
    result, seconds = {}, []
    memory = step.DeviceMemory()

    def measure():
        peer = Peer(model, draft_vocab, tokens, arguments.backend, arguments.whole)
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        while len(seconds) < WARM_UP + LEAST_STEPS or sum(seconds[WARM_UP:]) < ENOUGH_SECONDS:
            synchronize()
            begin = time.perf_counter()
            loss, metrics = peer.step(steps)
            synchronize()
            seconds.append(time.perf_counter() - begin)
            if len(seconds) == 1:
                result["loss"] = float(loss.detach()) / steps
                result["scored"] = sum(float(metrics[f"full_acc_{i}_total"]) for i in range(steps))
        result["milliseconds"] = 1e3 * statistics.median(seconds[WARM_UP:])
        if DEVICE == "cuda":
            result["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        clear(peer)

    attempt(result, measure)
    memory.close()
    result.update(first_step=seconds[0] if seconds else None, seconds=seconds)
    if DEVICE == "cuda":
        result["used_gib"] = memory.peak / 2**30 if memory.nvml else None
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return result


# ---- dtrain ------------------------------------------------------------------------------------------


def run_ours(arguments, draft_vocab, tokens, steps, variant):
    device = "cuda" if DEVICE == "cuda" else "cpu"
    sets = [*SAME, f"data.seq_len={tokens}", f"drafter.ttt_steps={steps}", *VARIANTS[variant]]
    if arguments.full_metrics:
        sets.append("loss.full_vocab_metrics=true")
    command = [arguments.bench, device, arguments.bench_model, "all", *sets]
    if draft_vocab:
        command.insert(4, f"draft_vocab={draft_vocab}")
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit)
    except subprocess.TimeoutExpired:
        return dict(failed=f"not done after {arguments.limit:.0f} s")
    found = LINE.search(done.stdout)
    if done.returncode != 0 or found is None:
        return dict(failed=" / ".join((done.stdout + done.stderr).strip().split("\n")[-3:])[:300])
    return dict(milliseconds=float(found[1]), used_gib=float(found[2]), loss=float(found[3]), output=done.stdout,
                seconds=time.perf_counter() - begin)


# ---- the table ---------------------------------------------------------------------------------------


def number(result, key, form):
    return form.format(result[key]) if result.get(key) is not None else "-"


def row_of(size, peer, ours):
    cells = [f"{size:>16}"]
    for result in (peer, *ours.values()):
        cells.append(f"{number(result, 'milliseconds', '{:9.1f}'):>9} ms {number(result, 'used_gib', '{:6.1f}'):>6} GiB")
    for result in ours.values():
        both = "milliseconds" in peer and "milliseconds" in result
        cells.append(f"{peer['milliseconds'] / result['milliseconds']:6.3f}" if both else "     -")
    failed = [f"{who}: {r['failed']}" for who, r in (("peer", peer), *ours.items()) if "failed" in r]
    return " | ".join(cells + failed)


def parse_size(word):
    size, *marks = word.split("-")
    tokens, _, steps = size.partition("x")
    if not (tokens.isdigit() and steps.isdigit() and set(marks) <= {"full"}):
        raise SystemExit(f"size {word}: TOKENSxSTEPS[-full] expected")
    return int(tokens), int(steps), "full" in marks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", help="dtrain's bench_step, run in turn with the peer; left out, only the peer")
    parser.add_argument("--bench-model", default="eagle3-qwen3-8b", help="bench_step's name of the sizes")
    parser.add_argument("--model", default="qwen3-8b", choices=list(made_up.MODELS))
    parser.add_argument("--sizes", default="8192x3,8192x7,32768x7,8192x3-full")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--full-metrics", action="store_true", help="dtrain's acceptance is of the whole vocabulary")
    parser.add_argument("--whole", action="store_true", help="the peer's whole forward pass is compiled")
    parser.add_argument("--seconds", type=float, default=1e9, help="no size begins later than this after the first")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one run of bench_step may take")
    parser.add_argument("--json", help="file for all results")
    arguments = parser.parse_args()
    if arguments.bench:
        arguments.bench = os.path.abspath(arguments.bench)
    model, results, begin = made_up.MODELS[arguments.model], [], time.perf_counter()
    say(f"torch {torch.__version__}, {arguments.model}, draft vocabulary {arguments.draft_vocab}")
    table = [f"{'tokens x steps':>16} | {'speculators':>23} | {'dtrain':>23} | {'dtrain, bf16 logits':>23} | {'dtrain, low memory':>23} | faster |   bf16 |    low"]
    for word in arguments.sizes.split(","):
        tokens, steps, full = parse_size(word)
        if time.perf_counter() - begin > arguments.seconds:
            say(f"{word}: not run, {arguments.seconds:.0f} s are over")
            continue
        draft = 0 if full else min(arguments.draft_vocab, model["vocab"])
        ours = {variant: dict(failed="not asked for") for variant in VARIANTS}
        if arguments.bench:  # before the peer, whose process keeps its context on the GPU
            ours = {variant: run_ours(arguments, draft, tokens, steps, variant) for variant in VARIANTS}
        peer = run_peer(model, draft or model["vocab"], tokens, steps, arguments)
        results.append(dict(size=word, speculators=peer, **ours))
        table.append(row_of(word, peer, ours))
        say(table[-1])
        say(f"    peer's first step (compilation) {number(peer, 'first_step', '{:.1f}')} s, slots {number(peer, 'scored', '{:.0f}')}")
        if arguments.json:
            pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))
    print("\n".join(table))
    faults = [r["speculators"]["failed"] for r in results if r["speculators"].get("failed")]
    return 0 if all(f.startswith("out of memory") for f in faults) else 1


if __name__ == "__main__":
    raise SystemExit(main())
