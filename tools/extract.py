#!/usr/bin/env python3
"""Runs a target model over documents and writes feature shards for dtrain.

    extract.py --model DIR --out OUT prompts.jsonl ...
    extract.py --gguf FILE.gguf --out OUT prompts.jsonl ...

Input lines (JSONL): {"messages": [...]} ending with the assistant (a conversation), or with the user
(a prompt, which the target answers); {"turns": [...]} (user messages, answered one after the other);
{"input_ids": [...], "loss_mask": [...]} (used as they are). "id" is optional.
Start the same command again to go on after a kill, or several times at once, on several GPUs or machines that share
the folder: each takes other pieces of the work. See tools/README.md.

    extract.py --model DIR --out OUT --manifest-only prompts.jsonl ...
    extract.py --model DIR --spool SPOOL --config train.yaml

The first writes the documents without their features, the second feeds these to a run of dtrain while it trains.
"""

import argparse
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dtrain_tools.command import Help, check_cutting, exit_status, layer_list, say  # noqa: E402
from dtrain_tools.documents import InputError, Template, keep_usable, read_sources, validation_keys  # noqa: E402
from dtrain_tools.memory import byte_size, parse_limits  # noqa: E402
from dtrain_tools.target_directory import default_layer_ids  # noqa: E402

ANSWER_TOKENS = {"cpu": 65536, "cuda": 1048576}
LONGEST_LOOKED_AT = 64  # texts whose tokens are counted before the start, of the longest by characters
TEMPLATE_TOKENS = 64    # that a chat template adds to a turn, at most


def build_parser():
    parser = argparse.ArgumentParser(description="extract hidden states of a target model into feature shards",
                                     formatter_class=Help)
    add = parser.add_argument
    add("input", nargs="*", metavar="FILE", help="JSONL files")
    add("--out", metavar="DIR", help="folder for shards, target directory and manifest")
    add("--model", metavar="DIR", help="Hugging Face model directory")
    add("--gguf", metavar="FILE", help="GGUF file instead of --model (dequantised when loaded)")
    add("--name", metavar="NAME", help="target_model written in the shards; default: the folder's or file's name")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float32"],
        help="auto: fp32 on a CPU, the model's own on a GPU")
    add("--device-map", metavar="HOW", help="spread the model over all GPUs, the rest over CPU and --offload: auto, "
        "balanced, sequential (needs accelerate); instead of --device")
    add("--max-memory", metavar="DEVICE=SIZE,...", help="of --device-map, for example 0=70GiB,1=70GiB,cpu=200GiB; "
        "default: what is free")
    add("--offload", metavar="DIR", help="of --device-map: for weights that fit nowhere else")
    add("--threads", type=int, metavar="N", help="CPU threads of torch")
    add("--layers", type=int, default=5, metavar="N", help="how many layers, evenly spaced by the usual formula")
    add("--planes", default="bfloat16", choices=["bfloat16", "float8"],
        help="of the layers in shards; float8: e4m3 codes with a scale for each token and layer, 58 %% of the bytes with 5 "
             "layers; the last hidden state stays bfloat16")
    add("--layer-ids", type=layer_list, metavar="I,J,...",
        help="decoder layers whose outputs are kept, 0-based, ascending; instead of --layers")
    add("--limit", type=int, metavar="N", help="only the first N input lines")
    add("--split-val", type=float, default=0, metavar="X",
        help="prompts held out for val-*.h5: a share below 1, or a number")
    add("--max-tokens", type=int, metavar="N", help="longest document; longer ones are cut; default: the model's positions, "
                                                     "or fewer where states would depend on their batch")
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="longest answer")
    add("--temperature", type=float, default=0.0, metavar="T", help="of answers; 0 is greedy")
    add("--samples", type=int, default=1, metavar="N", help="answers to each prompt")
    add("--turns", default="all", choices=["all", "first"], help="which user messages of a prompt are answered")
    add("--thinking", choices=["on", "off"], help="enable_thinking of the chat template; default: not passed")
    add("--supervise", default="all", choices=["all", "last"], help="which answers of a conversation are supervised")
    add("--chat-template", metavar="FILE", help="Jinja template instead of the tokenizer's")
    add("--seed", type=int, default=0, metavar="N", help="of sampling and of the split")
    add("--batch-tokens", type=int, default=16384, metavar="N",
        help="padded tokens in a batch whose states are captured; halved when memory runs out")
    add("--answer-tokens", type=int, metavar="N",
        help="tokens of prompts and answers that are generated together; halved when memory runs out; default: 65536 on a "
             "CPU, 1048576 on a GPU")
    add("--claim-prompts", type=int, default=4096, metavar="N", help="prompts that one of several workers answers at a time")
    add("--teacher-rows", type=int, default=1024, metavar="N", help="tokens whose logits exist at the same time")
    add("--shard-bytes", type=byte_size, default="2GiB", metavar="BYTES", help="about the size of a shard")
    add("--manifest-only", action="store_true",
        help="write manifest.h5 instead of the training shards; validation shards are written")
    add("--spool", metavar="DIR", help="feed the run of --config through this folder; takes no input files")
    add("--config", metavar="FILE", help="the run's config, for --spool")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="as for dtrain, with --config")
    add("--dtrain", default="dtrain", metavar="FILE", help="the program, which says the order of documents")
    add("--spool-wait", type=float, default=3600, metavar="SECONDS",
        help="without progress of the run after which --spool ends; 0: never")
    return parser


def check_arguments(parser, args):
    if (args.model is None) == (args.gguf is None):
        parser.error("give either --model or --gguf")
    if args.spool is None and (args.out is None or not args.input):
        parser.error("give --out and input files, or --spool and --config")
    if args.spool is not None and (args.config is None or args.input or args.out):
        parser.error("--spool needs --config, and takes neither input files nor --out")
    for name in ("layers", "max_new_tokens", "samples", "batch_tokens", "answer_tokens", "teacher_rows",
                 "claim_prompts", "max_tokens", "limit", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if (args.max_memory or args.offload) and not args.device_map:
        parser.error("--max-memory and --offload are of --device-map")
    try:
        args.max_memory = parse_limits(args.max_memory) if args.max_memory else None
    except ValueError as error:
        parser.error(f"--max-memory {error}")
    if args.samples > 1 and args.temperature <= 0:
        parser.error("--samples above 1 needs --temperature: greedy answers are all the same")
    if not (args.temperature >= 0 and math.isfinite(args.temperature)):
        parser.error("--temperature must be a number from 0 on")
    check_cutting(parser, args)


def settings_of(args, target, layer_ids):
    """What must not change when an extraction goes on."""
    from dtrain_tools.extraction import content_sha256
    kept = ("model", "gguf", "limit", "split_val", "max_new_tokens", "temperature", "samples", "turns", "thinking",
            "supervise", "seed", "shard_bytes", "planes", "claim_prompts")
    return {**{name: getattr(args, name) for name in kept}, "layer_ids": layer_ids, "max_tokens": args.max_tokens,
            "dtype": str(target.dtype), "input_sha256": content_sha256(args.input)}


def choose_layers(args, target):
    count = len(target.layers)
    if args.layer_ids is None:
        try:
            return default_layer_ids(count, args.layers)
        except ValueError as error:
            raise InputError(f"--layers: {error} (--layer-ids)") from error
    if args.layer_ids[-1] == count - 1:
        raise InputError(f"--layer-ids {args.layer_ids}: the output of the last layer, {count - 1}, is the last hidden state, "
                         "which is kept anyway; leave it out")
    if sorted(set(args.layer_ids)) != args.layer_ids or not 0 <= args.layer_ids[0] <= args.layer_ids[-1] < count:
        raise InputError(f"--layer-ids {args.layer_ids}: must ascend within 0..{count - 1}")
    return args.layer_ids


def load_template(args, tokenizer, target):
    if args.chat_template:
        try:
            with open(args.chat_template, encoding="utf-8") as file:
                tokenizer.chat_template = file.read()
        except OSError as error:
            raise InputError(f"--chat-template {args.chat_template}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"--chat-template {args.chat_template}: not UTF-8 text") from error
    thinking = None if args.thinking is None else args.thinking == "on"
    return Template(tokenizer, target.end_ids(tokenizer), thinking, args.supervise)


def shard_attributes(args, tokenizer, template, with_text):
    from dtrain_tools.target_model import tokenizer_sha256
    name = args.name or os.path.basename(os.path.abspath(args.gguf or args.model))
    attributes = {"target_model": name, "created_by": "dtrain tools/extract.py",
                  "dataset": " ".join(os.path.basename(path) for path in args.input),
                  "tokenizer_sha256": tokenizer_sha256(tokenizer)}
    if with_text:
        attributes["chat_template_sha256"] = template.sha256()
        attributes["enable_thinking"] = {None: "unset", "on": "true", "off": "false"}[args.thinking]
    return attributes


def spread_of(args):
    """-> options of Target for a model on several devices, or None."""
    if not args.device_map:
        return None
    spread = {"device_map": args.device_map, "max_memory": args.max_memory, "offload_folder": args.offload}
    return {name: value for name, value in spread.items() if value is not None}


def longest_texts(args, sources, tokenizer):
    """-> tokens of the longest document that is kept, of the longest that is answered (0: none), at most."""
    kept = max((len(source.ids) for source in sources if source.kind == "ids"), default=0)
    asked = sorted((source for source in sources if source.kind != "ids"), key=text_length)[-LONGEST_LOOKED_AT:]
    answered = 0
    for source in asked:
        tokens = len(tokenizer("".join(texts_of(source)), add_special_tokens=False)["input_ids"])
        turns = 1 if args.turns == "first" else len(source.turns or [])
        if source.kind == "prompt":
            answered = max(answered, tokens + turns * (args.max_new_tokens + TEMPLATE_TOKENS))
        kept = max(kept, tokens)
    return min(max(kept, answered), args.max_tokens), min(answered, args.max_tokens)


def texts_of(source):
    return [str(text) for text in [*(message["content"] for message in source.messages or []), *(source.turns or [])]]


def text_length(source):
    return sum(map(len, texts_of(source)))


def settle_longest(args, config):
    """--max-tokens: where it is not given, as many as the model has positions, and as states do not depend on their batch."""
    from dtrain_tools.target_model import batch_limit
    limit, kind = batch_limit(config)
    if args.max_tokens is None:
        args.max_tokens = min(filter(None, (limit, getattr(config, "max_position_embeddings", None))), default=None)
    if args.max_tokens is None:
        raise InputError("--max-tokens is needed: config.json has no max_position_embeddings")
    if limit and args.max_tokens > limit:
        raise InputError(f"--max-tokens {args.max_tokens}: beyond {limit} tokens this model's rotary embedding ({kind}) "
                         "depends on the longest text of a batch, and so would the states; at most that many")


def tell_memory(args, sources, tokenizer):
    """The sum, before anything is loaded; refuses weights that do not fit."""
    from dtrain_tools import memory
    from dtrain_tools.target_model import element_bytes, load_config, pick_device, split_model_path
    folder, extra = split_model_path(args.model, args.gguf)
    whole = load_config(folder, **extra)
    config = whole.get_text_config()
    device = pick_device(args.device)
    stored, loaded = element_bytes(whole, args.dtype, device)
    settle_longest(args, config)
    args.answer_tokens = args.answer_tokens or ANSWER_TOKENS.get(device.type, 65536)
    longest, answered = longest_texts(args, sources, tokenizer)
    weights = memory.weight_bytes(folder, args.gguf, stored, loaded)
    layers = len(args.layer_ids) if args.layer_ids else args.layers
    parts = memory.extraction_parts(config, layers, args, weights, longest, answered, loaded)
    free = memory.spread_bytes(args.max_memory) if args.device_map else memory.device_bytes(device)
    say(f"memory on {'all devices' if args.device_map else device}:")
    memory.tell(parts, free, say)
    if weights is not None and weights > free and not args.device_map:
        raise InputError(f"{folder}: {weights / 1e9:.2f} GB of weights do not fit on {device}; --device-map auto spreads "
                         "them over several")
    if memory.needed(parts) > free:
        say("  that may not fit: batches are halved when memory runs out; smaller --batch-tokens or --answer-tokens "
            "avoid it")


def answer(args, sources, target, template, claims):
    """-> the answers of all prompts, by this worker and others."""
    from dtrain_tools.answer_parts import AnswerParts
    from dtrain_tools.answers import Answerer
    from dtrain_tools.budget import Budget
    parts, budget = AnswerParts(args.out, sources, args.claim_prompts), Budget(args.answer_tokens, say)

    def answer_part(name, _dead):
        log = parts.open_log(name)
        try:
            Answerer(target, template, budget, log, args, say).run(parts.parts[name])
        finally:
            log.close()
        claims.mark_done(name)
        say(f"{name}: done, {sum(map(claims.is_done, parts.parts))} of {len(parts.parts)} parts are")
    claims.share(parts.parts, claims.is_done, answer_part)
    if parts.parts:
        parts.merge(claims.token)
    return parts


def write_target_once(args, target, claims):
    def write(name, _dead):
        target.write_target_directory(os.path.join(args.out, "target"))
        claims.mark_done(name)
    claims.share(["target"], claims.is_done, write)


def extract(args):
    sources = read_sources(args.input, args.limit)
    validation_keys([source.key for source in sources], args.split_val, args.seed)  # refused before the work
    import torch
    from dtrain_tools.claims import Claims
    from dtrain_tools.extraction import settle_folder
    from dtrain_tools.target_model import Target, load_tokenizer
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.model, args.gguf)
    tell_memory(args, sources, tokenizer)
    say(f"{len(sources)} input lines; loading the target")
    target = Target(args.model, args.gguf, args.device, args.dtype, spread_of(args))
    layer_ids = choose_layers(args, target)
    template = load_template(args, tokenizer, target)
    with_text = any(source.kind != "ids" for source in sources)
    if with_text and not template.text_template:
        raise InputError("the tokenizer has no chat template; give one with --chat-template, or input_ids")
    settle_folder(args.out, settings_of(args, target, layer_ids))
    claims = Claims(os.path.join(args.out, "claims"), say)
    try:
        write_target_once(args, target, claims)
        say(f"layers {layer_ids} of {len(target.layers)}, hidden size {target.hidden_size}, vocabulary "
            f"{target.vocab_size}, {target.dtype} on {target.device}")
        if getattr(target.config, "final_logit_softcapping", None):
            say("final_logit_softcapping: this target caps its logits; training refuses such targets so far")
        attributes = shard_attributes(args, tokenizer, template, with_text)
        capture_all(args, sources, template, target, layer_ids, attributes, claims)
    finally:
        claims.close()


def capture_all(args, sources, template, target, layer_ids, attributes, claims):
    from dtrain_tools.answers import documents_of
    from dtrain_tools.budget import Budget
    from dtrain_tools.extraction import Extraction, check_padding, padding_tolerance, plan_shards
    from dtrain_tools.target_model import Capture
    log = answer(args, sources, target, template, claims)
    documents = documents_of(sources, template, log, args.samples)
    documents = keep_usable(documents, target.vocab_size, args.max_tokens, say)
    held_out = validation_keys([sources[d.source].key for d in documents], args.split_val, args.seed)
    extraction = Extraction(target, args.out, layer_ids, attributes, say, args.planes == "float8")
    shards = plan_shards(documents, held_out, lambda d: sources[d.source].key,
                         max(1, int(args.shard_bytes // (extraction.token_bytes + 17))))
    if args.manifest_only:
        shards = write_manifest(args, shards, extraction)
        if not shards:
            return

    target.check_logits(documents[0].ids[:64])
    target.check_states(documents[0].ids[:64], layer_ids)
    with Capture(target, layer_ids) as capture:
        error = check_padding(capture, documents, args.teacher_rows, padding_tolerance(target))
        say(f"a padded document's states equal the unpadded ones to {error:.1e}")
    with Capture(target, layer_ids, args.planes == "float8") as capture:
        extraction.run(shards, Budget(args.batch_tokens, say), capture, args.teacher_rows, claims)
    finish_report(extraction, shards, args)


def write_manifest(args, shards, extraction):
    """Of the training documents. -> the other shards."""
    from dtrain_tools.shards import write_manifest as write
    train = [shard for shard in shards if shard.name.startswith("train")]
    path = os.path.join(args.out, "manifest.h5")
    write(path, extraction.attributes, [d for shard in train for d in shard.documents],
          [i for shard in train for i in shard.ids], extraction.float8)
    say(f"{path}: {sum(len(s.documents) for s in train)} documents, {sum(s.tokens for s in train):,} tokens; their "
        "features come through a spool")
    return [shard for shard in shards if shard not in train]


def feed(args):
    from dtrain_tools.feeding import feed as run
    run(args, spread_of(args))


def finish_report(extraction, shards, args):
    tokens, count = sum(s.tokens for s in shards), sum(len(s.documents) for s in shards)
    supervised = sum(d.supervised for s in shards for d in s.documents)
    say(f"{args.out}: {count} documents in {len(shards)} shards, {tokens:,} tokens, "
        f"{100 * supervised / tokens:.1f} % supervised")
    if extraction.supervised:
        say(f"{100 * extraction.greedy_same / extraction.supervised:.2f} % of the supervised tokens captured now are "
            "the target's own top-1 (near 100 for greedy answers)")


def main():
    parser = build_parser()
    args = parser.parse_args()
    check_arguments(parser, args)
    return exit_status(extract if args.spool is None else feed, args)


if __name__ == "__main__":
    sys.exit(main())
