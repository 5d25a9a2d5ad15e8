"""A Llama in plain numpy, float64, written from its published equations: what position settings ought to give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rotation = tuple[Array, float]  # angle per position and pair of a head [head / 2], and the factor on its result


def plain(head: int, base: float) -> Rotation:
    return base ** (-np.arange(0, head, 2) / head), 1.0


def linear(head: int, base: float, factor: float) -> Rotation:
    return plain(head, base)[0] / factor, 1.0


def llama3(head: int, base: float, factor: float, low: float, high: float, length: int) -> Rotation:
    angles = plain(head, base)[0]
    wavelengths = 2 * math.pi / angles
    smooth = (length / wavelengths - low) / (high - low)
    between = (1 - smooth) * angles / factor + smooth * angles
    return np.where(
        wavelengths < length / high, angles, np.where(wavelengths > length / low, angles / factor, between)
    ), 1.0


def yarn(head: int, base: float, factor: float, length: int, fast: float = 32.0, slow: float = 1.0) -> Rotation:
    def dimension(rotations: float) -> float:
        return head * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), head - 1)
    ramp = np.clip((np.arange(head // 2) - low) / max(high - low, 0.001), 0, 1)
    angles = plain(head, base)[0]
    return angles / factor * ramp + angles * (1 - ramp), 0.1 * math.log(factor) + 1


def logits(
    weights: Mapping[str, Array],
    tokens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head: int,
    eps: float,
    rope: Rotation,
) -> Array:
    """Logits [n_vocab] of the last of ``tokens``; ``weights`` by their Hugging Face names."""
    n = len(tokens)
    x = weights["model.embed_tokens.weight"][list(tokens)]
    angles = np.outer(np.arange(n), rope[0])
    cos, sin = (np.tile(wave(angles) * rope[1], 2) for wave in (np.cos, np.sin))
    mask = np.triu(np.full((n, n), -np.inf), 1)

    def normed(values: Array, name: str) -> Array:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + eps) * weights[name]

    def rotated(values: Array) -> Array:
        halves = np.concatenate([-values[..., head // 2 :], values[..., : head // 2]], -1)
        return values * cos + halves * sin

    for layer in range(sum(name.endswith("self_attn.q_proj.weight") for name in weights)):
        name = f"model.layers.{layer}"
        h = normed(x, f"{name}.input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{name}.self_attn.{kind}_proj.weight"].T).reshape(n, -1, head).swapaxes(0, 1)
            for kind in "qkv"
        )
        k, v = (np.repeat(values, heads // kv_heads, 0) for values in (rotated(k), v))
        scores = rotated(q) @ k.swapaxes(1, 2) / math.sqrt(head) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(n, -1)
        x = x + mixed @ weights[f"{name}.self_attn.o_proj.weight"].T
        h = normed(x, f"{name}.post_attention_layernorm.weight")
        gate = h @ weights[f"{name}.mlp.gate_proj.weight"].T
        up = h @ weights[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    return normed(x[-1], "model.norm.weight") @ weights["lm_head.weight"].T
