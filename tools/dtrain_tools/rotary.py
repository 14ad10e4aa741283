"""Inverse frequencies of a drafter's rotary embedding: plain, linear and YaRN, in fp64."""

import math

from dtrain_tools.documents import InputError


def rope_frequencies(settings):
    """-> inverse frequencies [head_dim/2], and the factor on cos and sin."""
    dim, theta = settings["head_dim"], settings["rope_theta"]
    plain = [theta ** (-pair / dim) for pair in range(0, dim, 2)]
    scaling = settings.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type", "default")), float(scaling.get("factor", 1.0))
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return [value / factor for value in plain], 1.0
    if kind != "yarn":
        raise InputError(f"rope_scaling: {kind!r} is not known here")
    original = scaling["original_max_position_embeddings"]

    def pair_of(turns):  # which pair turns that often over the original positions
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), dim - 1)
    shares = [min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0) for pair in range(dim // 2)]
    mixed = [value / factor * share + value * (1 - share) for value, share in zip(plain, shares)]
    return mixed, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rope_row(settings, position):
    """cos and sin of one position, side by side [head_dim]."""
    frequencies, factor = rope_frequencies(settings)
    return [turn(position * value) * factor for turn in (math.cos, math.sin) for value in frequencies]
