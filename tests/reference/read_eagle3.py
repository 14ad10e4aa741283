"""The EAGLE-3 drafters of read_exports.py: sizes and switches from config.json alone, weights from the tensors."""

import json
import os

import torch
from safetensors.torch import load_file

import against_speculators_eagle3
from eagle3_step import Eagle3Step
from trace_file import Eagle3Shape

SLIDING, FULL = "sliding_attention", "full_attention"
LIKE_SPECULATORS = {"mask_index": "input", "out_of_vocab": "kept", "normalize": "count", "ttt_decay_base": 0.9}
# drafter keys, tokens of the draft vocabulary (None: all), whether SpecForge's layout is exported, whether speculators can
# be asked (it measures windows from another place)
CASES = {
    "eagle3, yarn": (
        {"fc_norm": True, "norm_output": True, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_theta": 1e7},
        30, True, True,
    ),
    "eagle3, two layers, trained head": ({"layers": 2, "layer_types": [FULL, FULL], "lm_head": "trainable"}, None, True, True),
    "eagle3, every norm": (
        {"style": "qwen3", "norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "rope_scaling": "linear",
         "rope_factor": 2.0}, 30, False, True,
    ),
    "eagle3, windows": (
        {"style": "qwen3", "layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 20}, 41, False, False,
    ),
}  # fmt: skip


def read_export(folder, read_rope):
    """(shape, layer ids as outputs of layers, parameters by speculators' names, kept ids) of either layout."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    theirs = "speculators_model_type" in config
    layers = config["transformer_layer_config"] if theirs else config
    ids = config["eagle_aux_hidden_state_layer_ids"] if theirs else config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    held = {n: t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")}
    assert set(held.values()) == {torch.bfloat16}, held
    renamed = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    kept = None
    if "d2t" in renamed:
        kept = torch.arange(len(renamed["d2t"])) + renamed.pop("d2t")
        assert renamed.pop("t2d").nonzero().flatten().equal(kept) and len(kept) == config["draft_vocab_size"]
    for i in range(1, layers["num_hidden_layers"]):  # SGLang's name of the same tensor
        second = renamed.pop(f"layers.{i}.hidden_norm.weight", None)
        assert theirs == (second is None) and (theirs or second.equal(renamed[f"layers.{i}.input_layernorm.weight"]))
    shape = Eagle3Shape(
        layers=layers["num_hidden_layers"],
        ttt_steps=config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] if theirs else None,
        heads=layers["num_attention_heads"], kv_heads=layers["num_key_value_heads"], head_dim=layers["head_dim"],
        head_norms=layers["model_type"] == "qwen3", eps=layers["rms_norm_eps"],
        layer_types=layers.get("layer_types") or [FULL] * layers["num_hidden_layers"],
        sliding_window=layers.get("sliding_window"), trainable_head=True,
        **{n: bool(config.get(n)) for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        **read_rope(layers),
    )  # fmt: skip
    return shape, [i - 1 for i in ids] if theirs else ids, renamed, kept


def compare_step(report, name, folder, trace, target, read_rope):
    """The step with the export's own head as a trained one: its forward pass is the same."""
    shape, ids, tensors, kept = read_export(folder, read_rope)
    assert ids == trace.config["target"]["layer_ids"]
    steps = trace.config["drafter"]["ttt_steps"]
    assert shape.ttt_steps in (None, steps)
    shape.ttt_steps = steps  # SpecForge's layout does not say it
    tensors.pop("embed_tokens.weight", None)
    params, held = {n: t.double() for n, t in tensors.items()}, trace.group("param")
    assert set(params) == set(held) | {"lm_head.weight"}, set(params) ^ set(held)
    report.exact(f"{name}.weights", [torch.equal(held[n], params[n]) for n in held], [True] * len(held))
    step = Eagle3Step(trace.config, shape, target, trace.rows(), params, trace.metadata["last_hidden"], kept)
    report.exact(f"{name}.slots", [len(trace.get("slots.row"))], [len(step.reported)])
    report.number(f"{name}.loss", trace.scalar("loss"), step.total)
    report.tensor(f"{name}.student_lse", trace.get("slots.student_lse"), step.student_lse[step.reported])
    report.exact(f"{name}.argmax", trace.get("slots.student_argmax").tolist(), step.student_argmax[step.reported].tolist())


def compare_theirs(report, name, folder, trace, target):
    """Their own class, loaded by themselves."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).to(torch.float32)
    model.verifier_norm.variance_epsilon = target.norm_eps  # they take the drafter's
    assert model.target_layer_ids == [i + 1 for i in trace.config["target"]["layer_ids"]]
    loss, _, _, slots = against_speculators_eagle3.run_model(
        model, trace.config, trace.config["drafter"]["ttt_steps"], trace.rows(), False
    )
    report.number(f"{name}.their loss", trace.scalar("loss"), loss)
    report.exact(f"{name}.their slots", [len(trace.get("slots.row"))], [slots])
