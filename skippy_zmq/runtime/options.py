"""Options of a stage: loading and context, under llama.cpp's command-line names, and scheduling.

One class is the single list: the stage's command line, its config file and the client's local stages all read it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from skippy_zmq.errors import OptionError
from skippy_zmq.runtime.cpu_cache import last_level_share
from skippy_zmq.runtime.recipes import PRESERVE, recipe_named
from skippy_zmq.wire.limits import MAX_BATCH_ROWS, MAX_LANES

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
CACHE_TYPES: tuple[str, ...] = get_args(CacheType)

_OWN_CORES_BUSY_POLL_SECONDS = 0.25  # a round of a ring across a continent


def available_cores() -> int:
    """Cores this process may use (its affinity, not the machine's count)."""
    return len(os.sched_getaffinity(0))


def has_own_cores(threads: int) -> bool:
    """Whether this process is pinned to as many cores as it has threads: they are then meant for it alone."""
    return available_cores() <= threads and available_cores() < (os.cpu_count() or 1)


class StageOptions(BaseModel):
    """What can be set about how a stage loads and runs its layers; the config file's keys are its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    ctx_size: int = Field(
        4096, ge=0, le=2**30, description="tokens a lane can hold; 0: what the model was trained with"
    )
    lanes: int = Field(4, ge=1, le=MAX_LANES, description="sessions that can run at once (llama.cpp: --parallel)")
    batch_size: int = Field(2048, ge=1, le=1 << 20, description="most rows of one batch")
    ubatch_size: int = Field(
        512, ge=1, le=MAX_BATCH_ROWS, description="most rows computed at once; also the largest prefill chunk"
    )
    threads: int = Field(
        default_factory=available_cores, ge=1, le=1024, description="threads for single rows (default: all cores)"
    )
    threads_batch: int | None = Field(
        None, ge=1, le=1024, description="threads for batches of more rows (default: as --threads)"
    )
    cache_type_k: CacheType = Field("f16", description="type of the K cache")
    cache_type_v: CacheType = Field("f16", description="type of the V cache")
    flash_attn: Literal["on", "off", "auto"] = Field(
        "on", description="flash attention; without it the bits of a session depend on its neighbours more often"
    )
    reproducible: bool = Field(
        False,
        description="keep a session's bits independent of what else runs, at some cost: a lone row gets one thread, "
        "batches stay within the sizes that are bit for bit alike",
    )
    swa_full: bool = Field(
        True, description="full-size cache for sliding-window layers; without it lanes cannot be trimmed"
    )
    kv_offload: bool = Field(True, description="keep KV caches where their layers are")
    op_offload: bool = Field(True, description="let a GPU run large operations on weights in host memory")
    n_gpu_layers: int = Field(
        -1, ge=-1, description="this stage's layers on GPUs, from its last one; -1: all, if any GPU"
    )
    device: tuple[str, ...] = Field((), description="GPUs to use, comma-separated; none: CPU only (default: all GPUs)")
    main_gpu: int = Field(0, ge=0, description="the GPU that --split-mode none uses")
    split_mode: Literal["none", "layer", "row", "tensor"] = Field("layer", description="how layers spread over GPUs")
    tensor_split: tuple[float, ...] = Field(
        (), description="share of each GPU, comma-separated (default: by free memory)"
    )
    quant: str = Field(
        "preserve", description="types of a checkpoint's weights: preserve, or a recipe of llama-quantize like Q4_K_M"
    )
    quant_strict: bool = Field(
        False, description="refuse a recipe where rows of a tensor do not fit its type, instead of taking another type"
    )
    imatrix: str = Field(
        "", description="importance matrix for --quant; a relative path is relative to the checkpoint's folder"
    )
    weights_cache: str | None = Field(
        None,
        description="folder that keeps the tensors this stage makes of a checkpoint; the next start maps them, for "
        "example --quant Q4_K_M --weights-cache /var/cache/skippy (default: none)",
    )
    weights_cache_bytes: int = Field(
        128 << 30,
        ge=0,
        le=1 << 60,
        description="most bytes in that folder: what was not used for longest goes; K, M, G, T allowed (default: 128G)",
    )
    mmap: bool = Field(True, description="use weights where the file is mapped instead of copying them")
    mlock: bool = Field(False, description="copy this stage's weights and keep the copy from being swapped out")
    direct_io: bool = Field(False, description="read weights past the page cache; only with all layers in one stage")
    repack: bool = Field(True, description="let llama.cpp rearrange weights for the CPU")
    check_tensors: bool = Field(False, description="look for invalid values in this stage's weights while loading")
    host_buffer: bool = Field(True, description="pinned host buffers for weights that stay on the CPU beside a GPU")
    chunk_policy: Literal["adaptive", "fixed", "schedule"] = Field(
        "adaptive",
        description="sizes of prefill chunks: by time, all the same, or one after the other (default: adaptive, or "
        "what --chunk-sizes implies)",
    )
    chunk_sizes: tuple[int, ...] = Field(
        (), description="rows per prefill chunk: one size for fixed (default: 128), some for schedule (128,256,512)"
    )
    chunk_target_ms: int = Field(
        100, ge=1, le=60_000, description="adaptive chunks: time at the slowest stage; running streams wait as long"
    )
    groups: int | None = Field(
        None, ge=1, le=MAX_LANES, description="decode steps under way at once (default: as many as keep stages busy)"
    )
    queue: int = Field(256, ge=0, le=65_536, description="requests that may wait for a lane; more are told busy")
    queue_seconds: int = Field(
        600, ge=1, le=86_400, description="longest that a request waits for a lane before it is told busy"
    )
    in_flight_mib: int = Field(
        256, ge=1, le=65_536, description="most MiB of activations under way between stages at once"
    )
    kv_cache_bytes: int = Field(
        512 << 20,
        ge=0,
        le=1 << 50,
        description="memory for attention state of earlier prompts, and as much disk with --kv-cache-dir, per stage; "
        "K, M, G allowed; 0: keep none (default: 512M)",
    )
    kv_page_tokens: int = Field(
        64, ge=64, le=4096, multiple_of=64, description="tokens of a page of attention state, a multiple of 64"
    )
    kv_cache_dir: str | None = Field(None, description="folder that keeps pages over restarts (default: none)")
    recover_seconds: int = Field(
        60,
        ge=0,
        le=86_400,
        description="how long requests wait for a lost stage to come back before they fail; 0: they fail at once",
    )
    busy_poll_ms: int | None = Field(
        None,
        ge=0,
        le=1000,
        description="while sessions run, keep the core awake this long waiting for the next batch (default: 250 where "
        "the stage is pinned to a core per thread, else 0)",
    )

    warm_bytes: int | None = Field(
        None,
        ge=0,
        le=1 << 50,
        description="weights to keep in the processor's cache while --busy-poll-ms keeps the core awake (default: the "
        "share of the cache that falls to the stage's cores)",
    )

    @field_validator("kv_cache_bytes", "weights_cache_bytes", "warm_bytes", mode="before")
    @classmethod
    def _bytes(cls, value: object) -> object:
        if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(?:i?B)?", value.strip(), re.I)):
            return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")
        return value

    @field_validator("device", "tensor_split", mode="before")
    @classmethod
    def _comma_separated(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("chunk_sizes", mode="before")
    @classmethod
    def _whole_numbers(cls, value: object) -> object:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
            return tuple(int(part) if part.isdecimal() else part for part in value)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("quant")
    @classmethod
    def _known_recipe(cls, value: str) -> str:
        try:
            recipe = recipe_named(value)
        except OptionError as error:
            raise ValueError(str(error).removeprefix("quant: ").rpartition(", got ")[0]) from None
        return PRESERVE if recipe is None else recipe.name

    @field_validator("split_mode")
    @classmethod
    def _whole_layers(cls, value: str) -> str:
        if value in ("row", "tensor"):
            raise ValueError("parts of a layer cannot be spread over GPUs in a stage: wanted none or layer")
        return value

    def model_post_init(self, _context: Any) -> None:
        if self.mlock and self.direct_io:
            raise ValueError("mlock and direct_io exclude each other")
        if self.ubatch_size > self.batch_size:
            raise ValueError(f"ubatch_size {self.ubatch_size} is larger than batch_size {self.batch_size}")
        self._check_chunks()
        if self.reproducible:
            self._check_reproducible()
        # Without flash attention llama.cpp does not check that a block fits a head, and computes with what it has.
        for name, kind in (("K", self.cache_type_k), ("V", self.cache_type_v)):
            if kind not in ("f32", "f16", "bf16") and self.flash_attn != "on":
                raise ValueError(f"a {kind} {name} cache needs flash_attn on")

    @property
    def chunking(self) -> str:
        """The chunk policy: as given, or what the sizes imply."""
        if self.chunk_sizes and "chunk_policy" not in self.model_fields_set:
            return "fixed" if len(self.chunk_sizes) == 1 else "schedule"
        return self.chunk_policy

    @property
    def busy_poll_seconds(self) -> float:
        if self.busy_poll_ms is not None:
            return self.busy_poll_ms / 1000
        return _OWN_CORES_BUSY_POLL_SECONDS if has_own_cores(self.threads) else 0.0

    @property
    def warm_weights_bytes(self) -> int:
        """How many bytes of weights a waiting stage keeps in the cache; 0 where it does not poll."""
        if not self.busy_poll_seconds:
            return 0
        return last_level_share(os.sched_getaffinity(0)) if self.warm_bytes is None else self.warm_bytes

    def _check_chunks(self) -> None:
        if self.chunking == "adaptive" and self.chunk_sizes:
            raise ValueError("chunk_sizes are for chunk_policy fixed and schedule")
        if self.chunking == "fixed" and len(self.chunk_sizes) > 1:
            raise ValueError(f"chunk_policy fixed has one size, chunk_sizes names {len(self.chunk_sizes)}")
        for size in self.chunk_sizes:
            if not 1 <= size <= self.ubatch_size:
                raise ValueError(f"chunk_sizes: wanted 1 to {self.ubatch_size} (ubatch_size), got {size}")

    def _check_reproducible(self) -> None:
        if self.flash_attn != "on":
            raise ValueError(
                f"reproducible needs flash_attn on, got {self.flash_attn}: without it bits follow the batch"
            )
        if not self.swa_full:
            raise ValueError("reproducible needs swa_full: a rolling window loses cells, so bits follow the history")
        for size in self.chunk_sizes:
            if size % 64:
                raise ValueError(f"reproducible needs chunk_sizes that are multiples of 64, got {size}")

    @property
    def decode_threads(self) -> int:
        """Threads for a lone row; more than one would share its cells out, which a row beside others is spared."""
        return 1 if self.reproducible else self.threads

    @property
    def prefill_threads(self) -> int:
        return self.threads if self.threads_batch is None else self.threads_batch


def check_options(values: Mapping[str, Any], where: str) -> StageOptions:
    """Build options from ``values``; raise OptionError naming ``where`` and each wrong option."""
    try:
        return StageOptions.model_validate(dict(values), strict=None)
    except ValidationError as error:
        raise OptionError(f"{where}: {describe_problems(error)}") from None


def describe_problems(error: ValidationError) -> str:
    """One line for everything pydantic found, in our words."""
    problems = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"]))
        what = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            what = "no such option"
        shown = f" (got {item['input']!r})" if name and item["type"] != "extra_forbidden" else ""
        problems.append(f"{name}: {what}{shown}" if name else what)
    return "; ".join(problems)


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys of a ``.toml`` or ``.json`` config file; raise OptionError where it cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise OptionError(f"config file {path}: {error}") from None
    if not isinstance(values, dict):
        raise OptionError(f"config file {path}: wanted a table of options, got a {type(values).__name__}")
    return {key.replace("-", "_"): value for key, value in values.items()}


_ALIASES: dict[str, tuple[str, ...]] = {
    "ctx_size": ("-c",),
    "lanes": ("-np", "--parallel"),
    "batch_size": ("-b",),
    "ubatch_size": ("-ub",),
    "threads": ("-t",),
    "threads_batch": ("-tb",),
    "cache_type_k": ("-ctk",),
    "cache_type_v": ("-ctv",),
    "flash_attn": ("-fa",),
    "n_gpu_layers": ("-ngl", "--gpu-layers"),
    "device": ("-dev",),
    "main_gpu": ("-mg",),
    "split_mode": ("-sm",),
    "tensor_split": ("-ts",),
    "host_buffer": ("--host",),
}


_METAVARS = {
    "quant": "RECIPE",
    "imatrix": "FILE",
    "kv_cache_bytes": "SIZE",
    "warm_bytes": "SIZE",
    "kv_cache_dir": "DIR",
    "weights_cache": "DIR",
    "weights_cache_bytes": "SIZE",
}
_SCHEDULING = frozenset(
    {
        "chunk_policy",
        "chunk_sizes",
        "chunk_target_ms",
        "groups",
        "queue",
        "queue_seconds",
        "in_flight_mib",
        "recover_seconds",
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per option; a flag that is not given leaves the config file's value or the default."""
    loading = parser.add_argument_group("load and context options")
    scheduling = parser.add_argument_group("scheduling options (they matter at stage 0)")
    defaults = StageOptions()
    for name, field in StageOptions.model_fields.items():
        group = scheduling if name in _SCHEDULING else loading
        flags = [*_ALIASES.get(name, ()), "--" + name.replace("_", "-")]
        default = getattr(defaults, name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        text = field.description or ""
        if shown not in ("", None) and "default" not in text:
            shown = {True: "on", False: "off"}.get(shown, shown) if isinstance(shown, bool) else shown
            text += f" (default: {shown})"
        kind = field.annotation
        if name in _METAVARS:
            group.add_argument(*flags, default=None, metavar=_METAVARS[name], help=text, dest=name)
        elif kind is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text, dest=name)
        elif get_origin(kind) is Literal:
            choices = [c for c in get_args(kind) if c not in ("row", "tensor")]
            group.add_argument(*flags, choices=choices, default=None, help=text, dest=name)
        elif get_origin(kind) is tuple:
            group.add_argument(*flags, default=None, metavar="A,B", help=text, dest=name)
        else:
            group.add_argument(*flags, type=int, default=None, metavar="N", help=text, dest=name)


def from_arguments(arguments: argparse.Namespace, config: Mapping[str, Any] | None = None) -> StageOptions:
    """Command line over config file over defaults."""
    given = {n: v for n in StageOptions.model_fields if (v := getattr(arguments, n, None)) is not None}
    if "tensor_split" in given:
        given["tensor_split"] = _numbers(given["tensor_split"])
    known = {k: v for k, v in (config or {}).items() if k in StageOptions.model_fields}
    return check_options({**known, **given}, "options")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise OptionError(f"tensor_split {text!r}: wanted numbers like 3,1") from None


def to_arguments(options: StageOptions) -> Sequence[str]:
    """The command line that says the same; only what differs from the defaults."""
    arguments: list[str] = []
    for name in options.model_fields_set:
        value = getattr(options, name)
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, tuple):
            arguments += [flag, ",".join(map(str, value))] if value else []
        elif value is not None:
            arguments += [flag, str(value)]
    return arguments
