"""What the probes of servers share: a job list in, facts out.

A probe is a script that runs in its own process, with one server's packages on its path. It builds the
server's own draft model from an export, on a CPU and without running it, and reads off what it would
compute. Nothing here decides whether that is right: conform.py compares.

    python probe_SERVER.py JOBS.json OUT.json

JOBS: {"target": DIR, "exports": [{"folder", "layout", "kind", "block_size"}]}. OUT: {"server", "version", "results":
[{"facts"} or {"refused": text}]}, or {"missing": text} when the server's packages can not be loaded.
"""

import importlib.metadata
import json
import logging
import os
import sys
import warnings

POSITIONS = (0, 1, 2, 17, 500, 5000, 40000)  # where the rotary tables are compared, as far as they go


def read_config(folder):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        return json.load(file)


def read_weights(folder):
    from safetensors.torch import load_file
    return load_file(os.path.join(folder, "model.safetensors"))


def rotary_facts(rotary):
    """Of a server's rotary embedding: the table is made again in fp32, before it is rounded to the model's type."""
    table = rotary._compute_cos_sin_cache().float()
    rows = {str(p): table[p].tolist() for p in POSITIONS if p < table.shape[0]}
    return {"dim": int(rotary.rotary_dim), "theta": float(rotary.base), "halves": bool(rotary.is_neox_style),
            "rows": int(table.shape[0]), "table": rows}


def logits_fact(processor):
    """What is done to the head's logits; None: nothing. SGLang and vLLM name it differently."""
    scale = getattr(processor, "logit_scale", None) or getattr(processor, "scale", None) or 1.0
    cap = getattr(processor, "final_logit_softcapping", None) or getattr(processor, "soft_cap", None)
    done = ([f"times {scale:g}"] if scale != 1.0 else []) + ([f"capped at {cap:g}"] if cap else [])
    return " and ".join(done) or None


def spoil(model):
    """Fills all weights with NaN, so that those that no tensor of the file reaches can be told."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data.fill_(float("nan"))


def unreached(model):
    return [name for name, weight in model.named_parameters()
            if weight.is_floating_point() and bool(weight.isnan().any())]


def quiet():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def first_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    chosen = next((line for line in lines if line.startswith("Value error, ")), lines[0] if lines else "")
    chosen = chosen.removeprefix("Value error, ").split(" [type=")[0]
    return f"{type(error).__name__}: {chosen}" if chosen else type(error).__name__


def run(server, package, prepare, probe):
    """prepare(target) -> whatever probe(prepared, export) -> facts needs; it loads the server's packages."""
    jobs_path, out_path = sys.argv[1:3]
    quiet()
    with open(jobs_path, encoding="utf-8") as file:
        jobs = json.load(file)
    out = {"server": server}
    try:
        out["version"] = importlib.metadata.version(package)
        out["transformers"] = importlib.metadata.version("transformers")
        prepared = prepare(jobs["target"])
        out["results"] = [result(probe, prepared, export) for export in jobs["exports"]]
    except ImportError as error:  # the package itself, or one that it needs
        out["missing"] = f"{package}: {error}"
    with open(out_path, "w", encoding="utf-8") as file:
        json.dump(out, file)


def result(probe, prepared, export):
    try:
        return {"facts": probe(prepared, export)}
    except ImportError:
        raise
    except Exception as error:  # whatever else a server raises is its refusal
        return {"refused": first_line(error)}
