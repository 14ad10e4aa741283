"""What states from elsewhere are, found from the states: which norm, which layers. numpy; layers need torch.

A foreign file says neither. What the user declared is compared with the target's weights (the norm) and
with a run of the target itself (the layers); what does not fit is refused with what was found instead.
"""

import numpy as np

from dtrain_tools.documents import InputError
from dtrain_tools.tensor_file import bf16_to_float

UNIT_TOLERANCE = 0.05   # of the root mean square of a normed state divided by the norm's weight
MATCH_TOLERANCE = 0.25  # of a plane's relative difference; bf16 engines and fp8 dumps differ by a few percent
TWICE_DIFFERS = 0.02    # a norm whose weights are all about the same gives the same twice
PROBE_TOKENS = 256      # of a long document that the target is run on: states do not depend on what follows
PROBES = 3              # such documents
SPREAD_TOKENS = 64      # of each of the others that it is run on
SPREAD = 64             # such documents
LEAST_TOKENS = 16       # of them: the first token of a text may be nearly the same in all layers


def choose_probes(documents):
    """-> the longest documents, and others spread evenly over the dump."""
    order = sorted(range(len(documents)), key=lambda n: -documents[n].tokens)
    rest = [n for n in sorted(order[PROBES:]) if documents[n].tokens >= LEAST_TOKENS]
    count = min(SPREAD, len(rest))
    spread = [rest[n * (len(rest) - 1) // max(count - 1, 1)] for n in range(count)]
    return [documents[n] for n in order[:PROBES]], [documents[n] for n in spread]


def looks_normed(states, norm):
    """Whether float states [n, H] come out of an RMS norm with this weight, as w or as 1 + w."""
    for weight in (norm, 1 + norm):
        used = np.abs(weight) > 1e-6
        size = np.sqrt(np.mean((states[:, used] / weight[used]) ** 2, axis=1))
        if np.median(np.abs(size - 1)) <= UNIT_TOLERANCE:
            return True
    return False


def check_norm(path, bits, last_hidden, norm):
    """Refuses a last plane of another kind than declared. bits: uint16 [n, P, H]."""
    if last_hidden == "absent":
        return
    normed = looks_normed(bf16_to_float(bits[:, -1]), norm)
    if normed and last_hidden == "pre_norm":
        raise InputError(f"{path}: hidden_states: the last plane is behind the target's final norm already; "
                         "--last-hidden post_norm")
    if not normed and last_hidden == "post_norm":
        raise InputError(f"{path}: hidden_states: the last plane is not behind this target's final norm; "
                         "--last-hidden pre_norm, or another --target")


def relative_difference(a, b):
    """Median over tokens of |a - b| / |b|, of float [n, H]."""
    return float(np.median(np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)))


def target_states(model, ids):
    """Runs the target. -> {name: float [n, H]}; names: -1 the embedding, i the output of layer i, "post_norm",
    and that through the final norm again, "twice", where it differs."""
    import torch

    from dtrain_tools.target_model import Capture
    layers = range(len(model.layers))
    with Capture(model, list(layers)) as capture:
        bits = capture.run([ids.tolist()], len(ids))[0][0]
    states = {layer: bf16_to_float(bits[:, layer]) for layer in layers}
    with torch.inference_mode():
        row = torch.tensor(ids, device=model.device)
        states[-1] = model.embedding(row).float().cpu().numpy()
        last = torch.tensor(bf16_to_float(bits[:, -1]), device=model.device, dtype=model.dtype)
        states["post_norm"] = model.norm(last).float().cpu().numpy()
        twice = model.norm(model.norm(last)).float().cpu().numpy()
        if relative_difference(twice, states["post_norm"]) > TWICE_DIFFERS:
            states["twice"] = twice
    return states


def check_layers(path, bits, layer_ids, last_hidden, states):
    """Refuses planes that are not what was declared. states: of target_states, for the same tokens.

    -> the largest relative difference of a plane from the target's own.
    """
    declared = list(layer_ids)
    if last_hidden != "absent":
        declared.append(max(name for name in states if isinstance(name, int)) if last_hidden == "pre_norm"
                        else "post_norm")
    found, worst = [], 0.0
    for plane, name in enumerate(declared):
        values = bf16_to_float(bits[:, plane])
        differences = {other: relative_difference(values, states[other]) for other in states}
        best = min(differences, key=differences.get)
        if not differences[best] <= MATCH_TOLERANCE:
            raise InputError(f"{path}: hidden_states: plane {plane} is no layer of this model (the nearest, "
                             f"{_call(best)}, differs by {differences[best]:.2f} of its size): other weights, shifted "
                             "tokens or damage")
        found.append(best)
        worst = max(worst, differences[best])
    _refuse_other_layers(path, declared, found)
    return worst


def _call(name):
    return {-1: "the embedding", "post_norm": "the final norm's output",
            "twice": "the final norm's output, normed again"}.get(name, f"the output of layer {name}")


def _refuse_other_layers(path, declared, found):
    wrong = [plane for plane, name in enumerate(declared) if found[plane] != name]
    if not wrong:
        return
    plane = wrong[0]
    shifts = {found[p] - declared[p] for p in wrong if isinstance(found[p], int) and isinstance(declared[p], int)}
    hint = "; every wrong plane is off by one: the ids are in the other --numbering" if shifts in ({1}, {-1}) else ""
    raise InputError(f"{path}: hidden_states: plane {plane} was declared to be {_call(declared[plane])}, but is "
                     f"{_call(found[plane])}{hint}")
