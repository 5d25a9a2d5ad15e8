"""Rotary position settings, in every spelling: what llama.cpp needs of them, and a refusal for all it cannot do.

Old configs have ``rope_theta``, ``rope_scaling`` and others beside each other, with the kind of scaling under ``type``;
newer ones put all into ``rope_parameters``, per kind of layer where layers differ. A setting that would be ignored
makes a model that talks nonsense after a few tokens, so an unknown one is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.config import Config, number
from skippy_zmq.sources.checkpoint.metadata import Metadata, f32, text, u32
from skippy_zmq.sources.gguf_values import shown

FULL, SLIDING = "full_attention", "sliding_attention"

_ORIGINAL = "original_max_position_embeddings"
_COMMON = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
# of each kind of scaling: the settings it needs, and those it may have
_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "attn_factor", "extrapolation_factor", "beta_fast", "beta_slow", "truncate", "finetuned"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "longrope": (
        ("short_factor", "long_factor", _ORIGINAL),
        ("factor", "attention_factor", "max_position_embeddings"),
    ),
}
_KIND_NAMES = {"su": "longrope", "none": "default"}


@dataclass(frozen=True, slots=True)
class Rope:
    """Settings of the layers with full attention, and of those with a sliding window where they are given apart."""

    config: Config
    key: str  # where they stand, for messages
    kind: str
    values: Mapping[str, Any]
    theta: float
    sliding_theta: float | None
    partial: float

    def value(self, name: str) -> float:
        result = number(self.config, f"{self.key}.{name}", self.values[name])
        if result <= 0.0:
            raise self.config.fail(f"{self.key}.{name}", f"wanted more than 0, got {result:g}")
        return result

    @property
    def original_length(self) -> int:
        length = self.value(_ORIGINAL)
        if length != int(length) or not 2 <= length < 2**31:
            raise self.config.fail(f"{self.key}.{_ORIGINAL}", f"wanted a whole number from 2, got {length:g}")
        return int(length)


def read_rope(config: Config, kinds: tuple[str, ...], *, per_layer_type: bool = False) -> Rope:
    """Settings in any spelling; ``kinds``: the kinds of scaling that the family's graph has. Raise ModelFileError."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    block = _block(config, key, config.get(key))
    if key == "rope_parameters" and config.get("rope_scaling") not in (None, config.get(key)):
        raise config.fail("rope_scaling", "differs from rope_parameters")
    sliding: dict[str, Any] = {}
    if FULL in block or SLIDING in block:
        unknown = sorted(set(block) - {FULL, SLIDING})
        if unknown or not per_layer_type:
            raise config.fail(f"{key}.{(unknown or [FULL])[0]}", "this setting is unknown for this model")
        sliding = _block(config, f"{key}.{SLIDING}", block.get(SLIDING))
        block = _block(config, f"{key}.{FULL}", block.get(FULL))
        key = f"{key}.{FULL}"
    if _ORIGINAL not in block and config.get(_ORIGINAL) is not None:
        block = {**block, _ORIGINAL: config.get(_ORIGINAL)}
    kind = _kind(config, key, block)
    if kind not in kinds:
        raise config.fail(f"{key}.rope_type", f"wanted one of {', '.join(kinds)}, got {kind}")
    _check_settings(config, key, kind, block)
    rope = Rope(
        config=config,
        key=key,
        kind=kind,
        values=block,
        theta=_theta(config, key, block, "rope_theta"),
        sliding_theta=_sliding_theta(config, sliding) if per_layer_type else None,
        partial=_partial(config, key, block),
    )
    if kind == "yarn":
        _check_yarn(rope)
    return rope


def _block(config: Config, key: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise config.fail(key, "wanted a JSON object")
    return {name: setting for name, setting in value.items() if setting is not None}


def _kind(config: Config, key: str, block: Mapping[str, Any]) -> str:
    given = [name for name in (block.get("rope_type"), block.get("type")) if name is not None]
    name = given[0] if given else "default"
    if not isinstance(name, str):
        raise config.fail(f"{key}.rope_type", "wanted a name")
    if given[1:] not in ([], [name]):
        raise config.fail(f"{key}.rope_type", f"differs from type: got {shown(name)} and {shown(str(given[1]))}")
    name = _KIND_NAMES.get(name, name)
    if name not in _SETTINGS:
        raise config.fail(f"{key}.rope_type", f"unknown kind of scaling {shown(name)}")
    return name


def _check_settings(config: Config, key: str, kind: str, block: Mapping[str, Any]) -> None:
    needed, possible = _SETTINGS[kind]
    for name in needed:
        if name not in block:
            raise config.fail(f"{key}.{name}", f"this setting is missing, and {kind} scaling needs it")
    # the length before scaling says nothing without scaling, and is written all the same
    known = _COMMON.union(needed, possible, (_ORIGINAL,))
    for name in block:
        if name not in known:
            raise config.fail(f"{key}.{name}", f"this setting is unknown for {kind} scaling")


def _theta(config: Config, key: str, block: Mapping[str, Any], name: str) -> float:
    value = block.get("rope_theta")
    where = f"{key}.rope_theta"
    if value is not None and config.values.get(name) not in (None, value):
        raise config.fail(name, f"differs from {where}")
    if value is None:
        value, where = config.get(name), name
    theta = number(config, where, value)
    if theta <= 0.0:
        raise config.fail(where, f"wanted more than 0, got {theta:g}")
    return theta


def _sliding_theta(config: Config, block: Mapping[str, Any]) -> float:
    if _kind(config, SLIDING, block) != "default":
        raise config.fail(f"{SLIDING}.rope_type", "wanted default for layers with a sliding window")
    _check_settings(config, SLIDING, "default", block)
    if _partial(config, SLIDING, block) != 1.0:
        raise config.fail(f"{SLIDING}.partial_rotary_factor", "wanted 1")
    return _theta(config, SLIDING, block, "rope_local_base_freq")


def _partial(config: Config, key: str, block: Mapping[str, Any]) -> float:
    value = block.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    partial = 1.0 if value is None else number(config, f"{key}.partial_rotary_factor", value)
    if not 0.0 < partial <= 1.0:
        raise config.fail(f"{key}.partial_rotary_factor", f"wanted more than 0 and at most 1, got {partial:g}")
    return partial


def _check_yarn(rope: Rope) -> None:
    """Refuse what llama.cpp would not follow: in these models it computes with its own factor, betas and truncation."""
    usual = 0.1 * math.log(rope.value("factor")) + 1.0
    for name in ("attention_factor", "attn_factor"):
        if name in rope.values and abs(rope.value(name) - usual) > 1e-6:
            raise rope.config.fail(f"{rope.key}.{name}", f"wanted {usual:.6f}, which the factor gives")
    for name, wanted in (("truncate", True), ("extrapolation_factor", 1), ("beta_fast", 32), ("beta_slow", 1)):
        if rope.values.get(name, wanted) != wanted:
            raise rope.config.fail(f"{rope.key}.{name}", f"wanted {wanted}, got {shown(str(rope.values[name]))}")


def require_whole_heads(rope: Rope) -> None:
    """Raise ModelFileError unless all of a head is rotated."""
    if rope.partial != 1.0:
        raise rope.config.fail("partial_rotary_factor", f"wanted 1 for this model, got {rope.partial:g}")


def scaling_metadata(architecture: str, rope: Rope) -> Metadata:
    """The ``<architecture>.rope.scaling.*`` keys of linear and YaRN scaling."""
    prefix = f"{architecture}.rope.scaling"
    if rope.kind == "linear":
        return {f"{prefix}.type": text("linear"), f"{prefix}.factor": f32(rope.value("factor"))}
    if rope.kind != "yarn":
        return {}
    values: Metadata = {
        f"{prefix}.type": text("yarn"),
        f"{prefix}.factor": f32(rope.value("factor")),
        f"{prefix}.original_context_length": u32(rope.original_length),
    }
    for setting, key in (
        ("extrapolation_factor", "yarn_ext_factor"),
        ("attention_factor", "yarn_attn_factor"),
        ("attn_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if setting in rope.values:
            values.setdefault(f"{prefix}.{key}", f32(rope.value(setting)))
    return values


def llama3_factors(rope: Rope, head_length: int) -> npt.NDArray[np.float32]:
    """By what each frequency is divided: float32 [head_length / 2]. Source: the llama3 scaling of Llama 3.1."""
    factor, low, high = (rope.value(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise rope.config.fail(
            f"{rope.key}.low_freq_factor", f"wanted less than high_freq_factor {high:g}, got {low:g}"
        )
    one = np.float32(1.0)
    exponents = np.arange(0, head_length, 2, dtype=np.float32) / np.float32(head_length)
    frequencies = one / np.power(np.float64(np.float32(rope.theta)), exponents.astype(np.float64)).astype(np.float32)
    factors = []
    for frequency in frequencies:
        # written as the steps that float32 arithmetic takes elsewhere, so that the bits agree
        wavelength = (one / frequency) * np.float32(2 * math.pi)
        if wavelength < rope.original_length / high:
            factors.append(one)
        elif wavelength > rope.original_length / low:
            factors.append(np.float32(factor))
        else:
            ratio = (one / wavelength) * np.float32(rope.original_length)
            smooth = (ratio - np.float32(low)) / np.float32(high - low)
            factors.append(one / ((one - smooth) / np.float32(factor) + smooth))
    return np.array(factors, dtype=np.float32)


def long_factors(rope: Rope, length: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The long and the short factors of longrope scaling: float32 [length] each."""
    found = []
    for name in ("long_factor", "short_factor"):
        values = rope.values[name]
        if not isinstance(values, list) or len(values) != length:
            raise rope.config.fail(f"{rope.key}.{name}", f"wanted a list of {length} numbers")
        numbers = [number(rope.config, f"{rope.key}.{name}", value) for value in values]
        if min(numbers, default=1.0) <= 0.0:
            raise rope.config.fail(f"{rope.key}.{name}", f"wanted numbers above 0, got {min(numbers):g}")
        found.append(np.array(numbers, dtype=np.float32))
    return found[0], found[1]


def long_attention_factor(rope: Rope, context_length: int) -> float:
    """The attention factor of longrope scaling (the square root of 1 + ln(scale) / ln(original length))."""
    scale = context_length / rope.original_length
    usual = math.sqrt(1 + math.log(scale) / math.log(rope.original_length)) if scale > 1.0 else 1.0
    if "attention_factor" in rope.values and abs(rope.value("attention_factor") - usual) > 1e-6:
        raise rope.config.fail(f"{rope.key}.attention_factor", f"wanted {usual:.6f}, which the lengths give")
    return usual


def refuse_unknown(config: Config, names: tuple[str, ...]) -> None:
    """Raise ModelFileError for position settings of other kinds of models, which would be ignored here."""
    for name in names:
        value = config.get(name)
        if value not in (None, False):
            raise ModelFileError(
                f"{config.path}: {name}: this setting is unknown for this model, got {shown(str(value))}"
            )
