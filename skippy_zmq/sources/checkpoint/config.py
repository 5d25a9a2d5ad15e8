"""The settings in config.json: typed access with the defaults of a family, and what rules a checkpoint out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.json_file import read_object
from skippy_zmq.sources.gguf_hyperparameters import MAX_BLOCKS
from skippy_zmq.sources.gguf_values import shown
from skippy_zmq.sources.needed_files import CHECKPOINT_CONFIG

_UINT32_MAX = 2**32 - 1
_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-149, (2 - 2**-23) * 2.0**127  # of those that are not 0
_QUANTIZER_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the language model: those of ``text_config`` over those beside it over ``defaults``."""

    path: Path
    values: Mapping[str, Any]
    architecture: str
    defaults: Mapping[str, Any]

    def fail(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {key}: {problem}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        return Config(self.path, self.values, self.architecture, defaults)

    def get(self, key: str) -> Any:
        """The value of ``key``; None where it is absent or null and has no default."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def n_layers(self) -> int:
        """How many layers there are: tables are made of as many rows before a header is checked."""
        count = self.count("num_hidden_layers")
        if count > MAX_BLOCKS:
            raise self.fail("num_hidden_layers", f"wanted at most {MAX_BLOCKS}, got {count}")
        return count

    def count(self, key: str, low: int = 1) -> int:
        value = self.optional_count(key, low)
        if value is None:
            raise self.fail(key, "this setting is missing")
        return value

    def optional_count(self, key: str, low: int = 1) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _UINT32_MAX:
            raise self.fail(key, f"wanted a whole number from {low}, got {shown(str(value))}")
        return value

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise self.fail(key, "this setting is missing")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.get(key)
        return None if value is None else number(self, key, value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.fail(key, f"wanted true or false, got {shown(str(value))}")
        return bool(value)

    def list_of(self, key: str, kind: type, length: int) -> list[Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, kind) for item in value):
            raise self.fail(key, f"wanted {length} values, one for each layer")
        return value


def number(config: Config, key: str, value: object) -> float:
    """``value`` of setting ``key`` as a number that a float32 holds; raise ModelFileError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise config.fail(key, f"wanted a number, got {shown(str(value))}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if result != 0.0 and not _FLOAT32_MIN <= abs(result) <= _FLOAT32_MAX:
        raise config.fail(key, f"wanted a finite number of 32 bits, got {result:g}")
    return result


def read_config(folder: Path) -> Config:
    """Read config.json and refuse a checkpoint that is quantized already; raise ModelFileError."""
    path = folder / CHECKPOINT_CONFIG
    values = read_object(path)
    _refuse_quantized(path, values)
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelFileError(f"{path}: architectures: wanted a list with the name of the model class")
    nested = values.get("text_config")
    if nested is not None:
        if not isinstance(nested, dict):
            raise ModelFileError(f"{path}: text_config: wanted a JSON object")
        _refuse_quantized(path, nested)
        values = {**values, **{key: value for key, value in nested.items() if value is not None}}
    return Config(path, values, architectures[0], {})


def _refuse_quantized(path: Path, values: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config", "quantization"):
        block = values.get(key)
        if block is None:
            continue
        method = block.get("quant_method", block.get("quant_algo")) if isinstance(block, dict) else block
        raise ModelFileError(
            f"{path}: {key}: this checkpoint is quantized already, by method {shown(str(method))}; "
            "wanted one with F32, F16 or BF16 weights and no such block"
        )
    for name in _QUANTIZER_FILES:
        file = path.with_name(name)
        if file.exists():
            raise ModelFileError(
                f"{file}: this checkpoint is quantized already, by the method that this file describes; "
                "wanted one with F32, F16 or BF16 weights"
            )
