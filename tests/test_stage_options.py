"""Every load and context option: settable on the command line and in a config file, and really passed on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import RawGguf, RawTensor
from hypothesis import assume, given
from hypothesis import strategies as st
from model_files import rewrite, tiny
from numpy.typing import NDArray

from skippy_zmq.errors import OptionError, UserError
from skippy_zmq.runtime.options import (
    CACHE_TYPES,
    StageOptions,
    add_arguments,
    check_options,
    from_arguments,
    read_config,
    to_arguments,
)
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import LayerRange

ARCH = Path(__file__).parent / "data" / "arch"
SMALL = StageOptions(ctx_size=256, lanes=2, batch_size=64, ubatch_size=32, threads=1)

# option: command line, config file value, what both mean; none is the default
SETTINGS: dict[str, tuple[list[str], Any, Any]] = {
    "ctx_size": (["-c", "512"], 512, 512),
    "lanes": (["--parallel", "3"], 3, 3),
    "batch_size": (["-b", "700"], 700, 700),
    "ubatch_size": (["-ub", "96"], 96, 96),
    "threads": (["-t", "3"], 3, 3),
    "threads_batch": (["-tb", "5"], 5, 5),
    "cache_type_k": (["-ctk", "q8_0"], "q8_0", "q8_0"),
    "cache_type_v": (["-ctv", "bf16"], "bf16", "bf16"),
    "flash_attn": (["-fa", "auto"], "auto", "auto"),
    "reproducible": (["--reproducible"], True, True),
    "swa_full": (["--no-swa-full"], False, False),
    "kv_offload": (["--no-kv-offload"], False, False),
    "op_offload": (["--no-op-offload"], False, False),
    "n_gpu_layers": (["-ngl", "7"], 7, 7),
    "device": (["-dev", "GPU0, GPU1"], ["GPU0", "GPU1"], ("GPU0", "GPU1")),
    "main_gpu": (["-mg", "1"], 1, 1),
    "split_mode": (["-sm", "none"], "none", "none"),
    "tensor_split": (["-ts", "3,1.5"], [3, 1.5], (3.0, 1.5)),
    "mmap": (["--no-mmap"], False, False),
    "mlock": (["--mlock"], True, True),
    "direct_io": (["--direct-io"], True, True),
    "repack": (["--no-repack"], False, False),
    "check_tensors": (["--check-tensors"], True, True),
    "host_buffer": (["--no-host-buffer"], False, False),
    "quant": (["--quant", "q4_k_m"], "Q4_K_M", "Q4_K_M"),
    "quant_strict": (["--quant-strict"], True, True),
    "imatrix": (["--imatrix", "im.dat"], "im.dat", "im.dat"),
    "weights_cache": (["--weights-cache", "kept"], "kept", "kept"),
    "weights_cache_bytes": (["--weights-cache-bytes", "2T"], "2 TiB", 2 << 40),
    "chunk_policy": (["--chunk-policy", "schedule"], "schedule", "schedule"),
    "chunk_sizes": (["--chunk-sizes", "64, 128"], [64, 128], (64, 128)),
    "chunk_target_ms": (["--chunk-target-ms", "50"], 50, 50),
    "groups": (["--groups", "3"], 3, 3),
    "queue": (["--queue", "0"], 0, 0),
    "queue_seconds": (["--queue-seconds", "30"], 30, 30),
    "in_flight_mib": (["--in-flight-mib", "64"], 64, 64),
    "busy_poll_ms": (["--busy-poll-ms", "20"], 20, 20),
    "warm_bytes": (["--warm-bytes", "64M"], "64 MiB", 64 << 20),
    "kv_cache_bytes": (["--kv-cache-bytes", "2G"], "2 GiB", 2 << 30),
    "kv_page_tokens": (["--kv-page-tokens", "128"], 128, 128),
    "kv_cache_dir": (["--kv-cache-dir", "pages"], "pages", "pages"),
    "recover_seconds": (["--recover-seconds", "5"], 5, 5),
}


def from_command_line(*arguments: str, config: dict[str, Any] | None = None) -> StageOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(arguments), config)


def toml(values: dict[str, Any]) -> str:
    return "".join(f"{key.replace('_', '-')} = {json.dumps(value)}\n" for key, value in values.items())


def test_every_option_is_tried_here() -> None:
    assert set(SETTINGS) == set(StageOptions.model_fields)
    assert all(getattr(StageOptions(threads=1), name) != wanted for name, (_, _, wanted) in SETTINGS.items())


@pytest.mark.parametrize("name", SETTINGS)
def test_command_line_and_config_file_say_the_same(tmp_path: Path, name: str) -> None:
    arguments, value, wanted = SETTINGS[name]
    (tmp_path / "c.toml").write_text(toml({name: value}))
    (tmp_path / "c.json").write_text(json.dumps({name: value}))
    options = [
        from_command_line(*arguments),
        from_command_line(config=read_config(tmp_path / "c.toml")),
        from_command_line(config=read_config(tmp_path / "c.json")),
        check_options({name: value}, "options"),
    ]
    assert [getattr(found, name) for found in options] == [wanted] * 4
    others = {other: getattr(StageOptions(), other) for other in SETTINGS if other != name}
    assert all({other: getattr(found, other) for other in others} == others for found in options)
    assert from_command_line(*to_arguments(options[0])) == options[0]


def test_the_command_line_goes_over_the_file() -> None:
    config = {"lanes": 3, "mmap": False, "cache_type_k": "f32", "device": ["none"]}
    options = from_command_line("--lanes", "5", "--mmap", "--cache-type-k", "q4_0", config=config)
    assert (options.lanes, options.mmap, options.cache_type_k, options.device) == (5, True, "q4_0", ("none",))
    types = {"quant": "Q8_0", "imatrix": "a.dat"}
    chosen = [from_command_line(*given, config=types) for given in ((), ("--quant", "iq2_xxs", "--imatrix", "b.dat"))]
    assert [(found.quant, found.imatrix) for found in chosen] == [("Q8_0", "a.dat"), ("IQ2_XXS", "b.dat")]
    assert (from_command_line().quant, from_command_line().imatrix) == ("preserve", "")


def test_a_wrong_recipe_is_named_once() -> None:
    with pytest.raises(OptionError, match=r"options: quant: wanted one of preserve, F32, .*, Q1_0 \(got 'Q8'\)$"):
        from_command_line("--quant", "Q8")


@pytest.mark.parametrize(
    ("values", "chunking"),
    [
        ({}, "adaptive"),
        ({"chunk_sizes": (64,)}, "fixed"),
        ({"chunk_sizes": (64, 128)}, "schedule"),
        ({"chunk_policy": "schedule", "chunk_sizes": (64,)}, "schedule"),
        ({"chunk_policy": "fixed"}, "fixed"),
    ],
)
def test_sizes_imply_how_prompts_are_cut(values: dict[str, Any], chunking: str) -> None:
    assert StageOptions(**values).chunking == chunking


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"chunk_policy": "adaptive", "chunk_sizes": [64]}, "chunk_sizes are for chunk_policy fixed and schedule"),
        ({"chunk_policy": "fixed", "chunk_sizes": [64, 128]}, "chunk_policy fixed has one size, chunk_sizes names 2"),
        ({"chunk_sizes": [0]}, r"chunk_sizes: wanted 1 to 512 \(ubatch_size\), got 0"),
        ({"chunk_sizes": "513"}, r"chunk_sizes: wanted 1 to 512 \(ubatch_size\), got 513"),
        ({"chunk_sizes": "64,x"}, r"chunk_sizes.* \(got 'x'\)"),
        ({"chunk_sizes": [96], "reproducible": True}, "multiples of 64, got 96"),
        ({"flash_attn": "off", "reproducible": True}, "reproducible needs flash_attn on, got off"),
        ({"swa_full": False, "reproducible": True}, "reproducible needs swa_full"),
    ],
)
def test_chunks_that_do_not_fit(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        check_options(values, "options")


def test_threads_for_prefill_follow_those_for_decode() -> None:
    assert StageOptions(threads=3).prefill_threads == 3
    assert StageOptions(threads=3, threads_batch=2).prefill_threads == 2


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"mmap": "false"}, "mmap: Input should be a valid boolean (got 'false')"),
        ({"mmap": 0}, "mmap: Input should be a valid boolean (got 0)"),
        ({"lanes": "4"}, "lanes: Input should be a valid integer (got '4')"),
        ({"lanes": 4.0}, "lanes: Input should be a valid integer"),
        ({"lanes": True}, "lanes: Input should be a valid integer (got True)"),
        ({"lanes": 0}, "lanes: Input should be greater than or equal to 1 (got 0)"),
        ({"ctx_size": -1}, "ctx_size: Input should be greater than or equal to 0"),
        ({"threads": None}, "threads: Input should be a valid integer"),
        ({"cache_type_k": "f8"}, "cache_type_k: Input should be 'f32', "),
        ({"flash_attn": True}, "flash_attn: Input should be 'on', 'off' or 'auto' (got True)"),
        ({"device": 3}, "device: Input should be a valid tuple (got 3)"),
        ({"device": [3]}, "device.0: Input should be a valid string (got 3)"),
        ({"tensor_split": ["a"]}, "tensor_split.0: Input should be a valid number"),
        ({"split_mode": "row"}, "split_mode: parts of a layer cannot be spread over GPUs in a stage"),
        ({"split_mode": "tensor"}, "split_mode: parts of a layer cannot be spread over GPUs in a stage"),
        ({"n_gpu_layers": -2}, "n_gpu_layers: Input should be greater than or equal to -1"),
        ({"lane": 4}, "lane: no such option"),
        ({"ubatch_size": 64, "batch_size": 32}, "ubatch_size 64 is larger than batch_size 32"),
        ({"mlock": True, "direct_io": True}, "mlock and direct_io exclude each other"),
        ({"cache_type_v": "q8_0", "flash_attn": "off"}, "a q8_0 V cache needs flash_attn"),
        ({"lanes": 0, "threads": 0}, "; threads: "),
    ],
)
def test_wrong_values(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(values, "config file c.toml")
    assert str(caught.value).startswith("config file c.toml: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("c.toml", "lanes = \n", "Invalid value"),
        ("c.json", "{", "Expecting property name"),
        ("c.json", "[1]", "wanted a table of options, got a list"),
        ("c.toml", b"\xff\xfe", "codec can't decode"),
        ("c.toml", None, "No such file"),
    ],
)
def test_unreadable_config_files(tmp_path: Path, name: str, content: str | bytes | None, complaint: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(OptionError, match=complaint) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_words_on_the_command_line() -> None:
    with pytest.raises(OptionError, match="tensor_split '1,x': wanted numbers"):
        from_command_line("--tensor-split", "1,x")
    with pytest.raises(OptionError, match="lanes: Input should be greater"):
        from_command_line("--lanes", "0")


_values = st.fixed_dictionaries(
    {},
    optional={
        "ctx_size": st.integers(0, 2**30),
        "lanes": st.integers(1, 256),
        "batch_size": st.integers(2048, 1 << 20),
        "ubatch_size": st.integers(1, 2048),
        "threads": st.integers(1, 1024),
        "threads_batch": st.none() | st.integers(1, 1024),
        "cache_type_k": st.sampled_from(CACHE_TYPES),
        "flash_attn": st.sampled_from(["on", "off", "auto"]),
        "n_gpu_layers": st.integers(-1, 100),
        "device": st.lists(st.sampled_from(["none", "CUDA0", "Vulkan1"]), max_size=3).map(tuple),
        "split_mode": st.sampled_from(["none", "layer"]),
        "tensor_split": st.lists(st.floats(0.015625, 100), max_size=3).map(tuple),
        "mmap": st.booleans(),
        "mlock": st.booleans(),
        "swa_full": st.booleans(),
        "host_buffer": st.booleans(),
    },
)


@given(_values)
def test_options_survive_their_command_line(values: dict[str, Any]) -> None:
    assume(values.get("cache_type_k", "f16") in ("f32", "f16", "bf16") or values.get("flash_attn", "on") == "on")
    options = check_options(values, "options")
    assert from_command_line(*to_arguments(options)) == options


# ---- what became of them in llama.cpp


def with_options(**values: Any) -> StageOptions:
    return SMALL.model_copy(update=values)


def logits(path: Path, options: StageOptions, n_rows: int = 8) -> NDArray[np.float32]:
    """Of the last of ``n_rows`` rows and of a decode step after them, by all layers in one stage."""
    source = open_model(path)
    stage = StageModel(source, LayerRange(0, source.n_layers), options)
    rows = []
    for position, count in ((0, n_rows), (n_rows, 1)):
        tokens = np.array([(11 * i + 3) % stage.n_vocab for i in range(position, position + count)], np.int32)
        stage.run([(0, position, count)], tokens, (count - 1,))
        rows.append(stage.logits(count - 1))
    return np.stack(rows)


def middle(path: Path, options: StageOptions) -> StageModel:
    return StageModel(open_model(path), LayerRange(1, 3), options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", heads=2, kv_heads=1, context=768)


def test_sizes_and_threads(path: Path) -> None:
    options = StageOptions(ctx_size=300, lanes=3, batch_size=100, ubatch_size=50, threads=2, threads_batch=3)
    context = middle(path, options).native_context
    assert (context.n_ctx, context.lanes, context.n_batch, context.n_ubatch) == (300, 3, 100, 50)
    assert (context.threads, context.threads_batch) == (2, 3)
    assert middle(path, with_options(ctx_size=0)).n_ctx == 768


def cache_bytes(path: Path, **values: Any) -> int:
    return middle(path, with_options(**values)).memory().kv


def test_cache_types_and_sizes(path: Path) -> None:
    row = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q4_0": 18, "q4_1": 20, "iq4_nl": 18, "q5_0": 22, "q5_1": 24}
    assert set(row) == set(CACHE_TYPES)
    for name, size in row.items():
        both = cache_bytes(path, cache_type_k=name, cache_type_v=name)
        assert both == 2 * 2 * size * 256 * SMALL.lanes  # two layers, K and V
        assert cache_bytes(path, cache_type_k=name) == 2 * (size + row["f16"]) * 256 * SMALL.lanes
        assert cache_bytes(path, cache_type_v=name) == 2 * (size + row["f16"]) * 256 * SMALL.lanes
    assert cache_bytes(path, ctx_size=512, lanes=3) == 3 * cache_bytes(path)


def test_compute_buffers_follow_the_batch(path: Path) -> None:
    small, large = (middle(path, with_options(batch_size=64, ubatch_size=n)).memory() for n in (8, 64))
    assert small.compute < large.compute
    assert (small.weights, small.kv) == (large.weights, large.kv)


def test_flash_attention(path: Path) -> None:
    on, off, auto = (logits(path, with_options(flash_attn=value)) for value in ("on", "off", "auto"))
    assert np.allclose(on, off, atol=1e-2)
    assert not np.array_equal(on, off)
    assert np.array_equal(auto, on)  # the CPU has it


def test_full_cache_of_sliding_windows() -> None:
    path = ARCH / "gemma3-dense.gguf"
    source = open_model(path)
    full, rolling = (
        StageModel(source, LayerRange(0, 4), with_options(ctx_size=2048, swa_full=value)) for value in (True, False)
    )
    assert rolling.memory().kv < full.memory().kv
    assert (full.can_trim, rolling.can_trim) == (True, False)


def poisoned(path: Path, out: Path, tensor: str) -> Path:
    def edit(raw: RawGguf) -> None:
        old = raw.tensors[tensor]
        values = np.frombuffer(old.data or b"", np.float32).copy()
        values[len(values) // 2] = np.nan
        raw.tensors[tensor] = RawTensor(old.shape, old.type, values.tobytes())

    return rewrite(path, out, edit)


def test_check_tensors(path: Path, tmp_path: Path) -> None:
    own = poisoned(path, tmp_path / "own.gguf", "blk.2.ffn_up.weight")
    others = poisoned(path, tmp_path / "others.gguf", "blk.3.ffn_up.weight")
    checked = with_options(check_tensors=True)
    with pytest.raises(UserError, match=r"tensor 'blk.2.ffn_up.weight' holds values that are not finite numbers"):
        middle(own, checked)
    middle(own, SMALL)
    middle(others, checked)


def test_options_that_need_a_gpu_are_refused(path: Path) -> None:
    with pytest.raises(UserError, match=r"n_gpu_layers is 1, but .* no GPU"):
        middle(path, with_options(n_gpu_layers=1, device=("none",)))
    with pytest.raises(UserError, match="device 'Nowhere7' does not exist here"):
        middle(path, with_options(device=("Nowhere7",)))
    with pytest.raises(UserError, match="device 'CPU' is no GPU"):
        middle(path, with_options(device=("CPU",)))
    assert middle(path, with_options(n_gpu_layers=0)).native_model.device_names == ["CPU"]
    assert middle(path, with_options(device=("none",))).native_model.device_names == ["CPU"]


def test_direct_io(path: Path) -> None:
    with pytest.raises(UserError, match="direct I/O would read other stages' weights too"):
        middle(path, with_options(direct_io=True))
    assert np.array_equal(logits(path, with_options(direct_io=True)), logits(path, SMALL))


@pytest.mark.parametrize(
    "values",
    [
        {"mmap": False},
        {"kv_offload": False},
        {"op_offload": False},
        {"host_buffer": False},
        {"check_tensors": True},
        {"split_mode": "none"},
        {"swa_full": False},
        {"ctx_size": 512, "lanes": 4, "batch_size": 16, "ubatch_size": 16},
    ],
    ids=str,
)
def test_where_things_lie_changes_no_bit(path: Path, values: dict[str, Any]) -> None:
    assert np.array_equal(logits(path, with_options(device=("none",), **values)), logits(path, SMALL))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tensor_split": (1.0,)}, "tensor_split: wanted 0 shares"),
        ({"main_gpu": 1}, "main_gpu is 1, but .* no GPU"),
    ],
)
def test_options_for_gpus_are_not_ignored_without_one(path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        middle(path, with_options(**wrong))
