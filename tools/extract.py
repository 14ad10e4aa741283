#!/usr/bin/env python3
"""Runs a target model over documents and writes feature shards for dtrain.

    extract.py --model DIR --out FOLDER prompts.jsonl ...
    extract.py --gguf FILE.gguf --out FOLDER prompts.jsonl ...

Input lines (JSONL): {"messages": [...]} ending with the assistant (a conversation), or with the user
(a prompt, which the target answers); {"turns": [...]} (user messages, answered one after the other);
{"input_ids": [...], "loss_mask": [...]} (used as they are). "id" is optional.
Start the same command again to go on after a kill. See tools/README.md.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dtrain_tools.command import exit_status, layer_list, say  # noqa: E402
from dtrain_tools.documents import InputError, Template, keep_usable, read_sources, validation_keys  # noqa: E402
from dtrain_tools.target_directory import default_layer_ids  # noqa: E402

ANSWER_TOKENS = {"cpu": 65536, "cuda": 1048576}


def build_parser():
    parser = argparse.ArgumentParser(description="extract hidden states of a target model into feature shards",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("input", nargs="+", help="JSONL files")
    add("--out", required=True, help="folder for shards, target directory and manifest")
    add("--model", help="Hugging Face model directory")
    add("--gguf", metavar="FILE", help="GGUF file instead of --model (dequantised when loaded)")
    add("--name", help="target_model written in the shards; default: the folder's or file's name")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float32"],
        help="auto: fp32 on a CPU, the model's own on a GPU")
    add("--threads", type=int, help="CPU threads of torch")
    add("--layers", type=int, default=5, help="how many layers, evenly spaced by the usual formula")
    add("--layer-ids", type=layer_list, metavar="I,J,...",
        help="decoder layers whose outputs are kept, 0-based, ascending; instead of --layers")
    add("--limit", type=int, help="only the first N input lines")
    add("--split-val", type=float, default=0, metavar="X",
        help="prompts held out for val-*.h5: a share below 1, or a number")
    add("--max-tokens", type=int, help="longest document; longer ones are cut; default: the model's positions")
    add("--max-new-tokens", type=int, default=1024, help="longest answer")
    add("--temperature", type=float, default=0.0, help="of answers; 0 is greedy")
    add("--samples", type=int, default=1, help="answers to each prompt")
    add("--turns", default="all", choices=["all", "first"], help="which user messages of a prompt are answered")
    add("--thinking", choices=["on", "off"], help="enable_thinking of the chat template; default: not passed")
    add("--supervise", default="all", choices=["all", "last"], help="which answers of a conversation are supervised")
    add("--chat-template", metavar="FILE", help="Jinja template instead of the tokenizer's")
    add("--seed", type=int, default=0, help="of sampling and of the split")
    add("--batch-tokens", type=int, default=16384,
        help="padded tokens in a batch whose states are captured; halved when memory runs out")
    add("--answer-tokens", type=int, help="tokens of prompts and answers that are generated together; halved when "
        "memory runs out; default: 65536 on a CPU, 1048576 on a GPU")
    add("--teacher-rows", type=int, default=1024, help="tokens whose logits exist at the same time")
    add("--shard-bytes", type=float, default=2 * 2**30, help="about the size of a shard")
    return parser


def check_arguments(parser, args):
    if (args.model is None) == (args.gguf is None):
        parser.error("give either --model or --gguf")
    for name in ("layers", "max_new_tokens", "samples", "batch_tokens", "answer_tokens", "teacher_rows"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.samples > 1 and args.temperature <= 0:
        parser.error("--samples above 1 needs --temperature: greedy answers are all the same")
    if args.split_val < 0 or (args.split_val >= 1 and args.split_val != int(args.split_val)):
        parser.error("--split-val is a share below 1 or a whole number")


def settings_of(args, target, layer_ids):
    """What must not change when an extraction goes on."""
    from dtrain_tools.extraction import content_sha256
    kept = ("model", "gguf", "limit", "split_val", "max_new_tokens", "temperature", "samples", "turns", "thinking",
            "supervise", "seed", "shard_bytes")
    return {**{name: getattr(args, name) for name in kept}, "layer_ids": layer_ids, "max_tokens": args.max_tokens,
            "dtype": str(target.dtype), "input_sha256": content_sha256(args.input)}


def choose_layers(args, target):
    count = len(target.layers)
    if args.layer_ids is None:
        try:
            return default_layer_ids(count, args.layers)
        except ValueError as error:
            raise InputError(f"--layers: {error} (--layer-ids)") from error
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


def extract(args):
    sources = read_sources(args.input, args.limit)
    validation_keys([source.key for source in sources], args.split_val, args.seed)  # refused before the work
    say(f"{len(sources)} input lines; loading the target")
    import torch
    from dtrain_tools.answers import AnswerLog, Answerer, documents_of
    from dtrain_tools.budget import Budget
    from dtrain_tools.extraction import Extraction, check_padding, plan_shards, settle_folder
    from dtrain_tools.target_model import Capture, Target, load_tokenizer
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.model, args.gguf)
    target = Target(args.model, args.gguf, args.device, args.dtype)
    args.max_tokens = args.max_tokens or target.config.max_position_embeddings
    args.answer_tokens = args.answer_tokens or ANSWER_TOKENS.get(target.device.type, 65536)
    layer_ids = choose_layers(args, target)
    template = load_template(args, tokenizer, target)
    with_text = any(source.kind != "ids" for source in sources)
    if with_text and not template.text_template:
        raise InputError("the tokenizer has no chat template; give one with --chat-template, or input_ids")
    settle_folder(args.out, settings_of(args, target, layer_ids))
    target.write_target_directory(os.path.join(args.out, "target"))
    say(f"layers {layer_ids} of {len(target.layers)}, hidden size {target.hidden_size}, vocabulary "
        f"{target.vocab_size}, {target.dtype} on {target.device}")

    log = AnswerLog(os.path.join(args.out, "answers.jsonl"))
    Answerer(target, template, Budget(args.answer_tokens, say), log, args, say).run(sources)
    log.close()
    documents = documents_of(sources, template, log, args.samples)
    documents = keep_usable(documents, target.vocab_size, args.max_tokens, say)
    held_out = validation_keys([sources[d.source].key for d in documents], args.split_val, args.seed)
    per_token = 2 * (len(layer_ids) + 1) * target.hidden_size + 17
    shards = plan_shards(documents, held_out, lambda d: sources[d.source].key,
                         max(1, int(args.shard_bytes // per_token)))

    target.check_logits(documents[0].ids[:64])
    extraction = Extraction(target, args.out, layer_ids, shard_attributes(args, tokenizer, template, with_text), say)
    with Capture(target, layer_ids) as capture:
        tolerance = 2e-2 if target.dtype == torch.float32 else 0.5  # states are rounded to bf16: 2^-7 is one unit
        error = check_padding(capture, documents, args.teacher_rows, tolerance)
        say(f"a padded document's states equal the unpadded ones to {error:.1e}")
        extraction.run(shards, Budget(args.batch_tokens, say), capture, args.teacher_rows)
    finish_report(extraction, shards, args)


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
    return exit_status(extract, args)


if __name__ == "__main__":
    sys.exit(main())
