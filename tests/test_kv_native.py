"""Pages of lanes: what they hold is what llama.cpp saves, and a restored lane gives the bits of one that computed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import STRING, UINT32, RawGguf, RawTensor, scalar
from kv_lanes import Stages, rows_of, tokens_of
from kv_oracle import Unsplit
from model_files import LATENT_ROW, latent, rewrite, tiny

from skippy_zmq.errors import KvPageError
from skippy_zmq.runtime.options import CacheType, StageOptions
from skippy_zmq.sources.demo_models import demo_model
from skippy_zmq.sources.gguf_model import open_model

DATA = Path(__file__).parent / "data"
ARCHITECTURES = ("llama-moe", "gemma3-dense", "gpt2-dense", "qwen2-dense")
GOLDEN = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
N_UBATCH, PROMPT, STEPS = 32, 43, 3
ELEMENT = {"f32": 4, "f16": 2, "bf16": 2}

Cache = tuple[CacheType, CacheType, str]  # K, V, flash attention
CACHES: tuple[Cache, ...] = (("f16", "f16", "on"), ("f32", "f32", "off"), ("q8_0", "q8_0", "on"))
OTHER_CACHES: tuple[Cache, ...] = (
    ("f32", "f32", "on"),
    ("f16", "f16", "off"),
    ("bf16", "bf16", "on"),
    ("q4_0", "q4_0", "on"),
    ("q4_1", "q5_1", "on"),
    ("q5_0", "iq4_nl", "on"),
    ("q8_0", "f16", "on"),
)


def options(cache: Cache = CACHES[0], *, ctx_size: int = 96, lanes: int = 3) -> StageOptions:
    k, v, flash_attn = cache
    return StageOptions.model_validate(
        {"cache_type_k": k, "cache_type_v": v, "flash_attn": flash_attn, "ctx_size": ctx_size, "lanes": lanes}
        | {"batch_size": N_UBATCH, "ubatch_size": N_UBATCH, "threads": 1}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def wide(folder: Path) -> Path:
    """Heads wide enough for every type of cache, and for the rotation that llama.cpp gives quantized ones."""
    return tiny(folder / "wide.gguf", hidden=128, heads=2, kv_heads=2)


@pytest.fixture(scope="module")
def mla(folder: Path) -> Path:
    return latent(folder / "mla.gguf")


def model_path(name: str, folder: Path) -> Path:
    if name == "mla":
        return latent(folder / "mla-again.gguf")
    return DATA / "arch" / f"{name}.gguf" if name in ARCHITECTURES else DATA / "golden" / name / "reference-f32.gguf"


def prompt(side: Stages | Unsplit, lane: int, tokens: np.ndarray) -> None:
    for start in range(0, len(tokens), N_UBATCH):
        side.run(lane, start, tokens[start : start + N_UBATCH])


def assert_payload_is_what_llama_cpp_saves(path: Path, cache: Cache, *, keys_only: bool = False) -> None:
    with Unsplit(path, options(cache), keys_only=keys_only) as whole:
        tokens = tokens_of(1, PROMPT, whole.n_vocab)
        staged = Stages(path, [2], options(cache))
        for side in (whole, staged):
            prompt(side, 1, tokens)
        saved = whole.saved(1)
        blocks = staged.export(1, 0, PROMPT)
    parts = []
    for rows in staged.layers:
        k, v = rows_of(blocks, rows, PROMPT, ELEMENT.get(rows.v_type, 0))
        parts += [("k", k)] + [("v", v)] * (not keys_only)
    found = []
    for part, ours in parts:
        theirs = [
            i
            for i, rows in enumerate(saved)
            if rows.part == part
            and rows.rows.shape[1] == ours.shape[1]
            and np.array_equal(rows.rows, ours[list(rows.positions)])
        ]
        assert len(theirs) == 1
        found += theirs
    assert sorted(found) == list(range(len(saved)))
    # a page is its part of it
    for first, end in ((0, 1), (7, 30), (PROMPT - 1, PROMPT), (5, 5)):
        page = staged.export(1, first, end)
        for rows in staged.layers:
            element = ELEMENT.get(rows.v_type, 0)
            for ours, all_of_it in zip(
                rows_of(page, rows, end - first, element), rows_of(blocks, rows, PROMPT, element), strict=True
            ):
                assert np.array_equal(ours, all_of_it[first:end])


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_payload_of_architectures(name: str, cache: Cache, folder: Path) -> None:
    assert_payload_is_what_llama_cpp_saves(model_path(name, folder), cache)


@pytest.mark.parametrize("cache", OTHER_CACHES, ids=str)
def test_payload_of_cache_types(cache: Cache, wide: Path) -> None:
    assert_payload_is_what_llama_cpp_saves(wide, cache)


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_payload_of_latent_attention(cache: Cache, mla: Path) -> None:
    """Its cache has no V."""
    assert_payload_is_what_llama_cpp_saves(mla, cache, keys_only=True)
    rows = Stages(mla, [1], options(CACHES[1])).layers
    assert [(r.layer, r.k_row_bytes, r.v_row_bytes, r.v_transposed) for r in rows] == [
        (layer, LATENT_ROW * 4, 0, False) for layer in range(4)
    ]


def assert_restored_equals_computed(path: Path, cache: Cache, n_layers: int = 4) -> None:
    """Computed in two stages, restored in three (or as many as there are layers) on another lane of a larger context
    whose lanes were used before; the bits are those of llama.cpp unsplit."""
    first_split = [n_layers // 2]
    other_split = [1, n_layers - 1] if n_layers > 2 else [1]
    ctx_size = min(300, open_model(path).n_positions or 300)
    with Unsplit(path, options(cache)) as whole:
        tokens = tokens_of(1, PROMPT + STEPS, whole.n_vocab)
        computed = Stages(path, first_split, options(cache))
        for side in (whole, computed):
            prompt(side, 1, tokens[:PROMPT])
        pages = computed.pages(1, PROMPT)
        expected = [whole.run(1, PROMPT + i, tokens[PROMPT + i : PROMPT + i + 1]) for i in range(STEPS)]
        whole.trim(1, 20)
        expected_after_trim = whole.run(1, 20, tokens[20:25])
    restored = Stages(path, other_split, options(cache, ctx_size=ctx_size, lanes=2))
    for lane, used in ((0, 9), (1, 60)):  # another session was here, a longer one
        prompt(restored, lane, tokens_of(7, used, restored.model.last.n_vocab))
    neighbour = restored.export(1, 0, 60)
    restored.restore(0, pages)
    assert [stage.position(0) for stage in restored.stages] == [PROMPT] * len(restored.stages)
    for i, wanted in enumerate(expected):
        logits = restored.run(0, PROMPT + i, tokens[PROMPT + i : PROMPT + i + 1])
        assert np.array_equal(logits.view(np.uint32), wanted.view(np.uint32)), f"step {i}"
    restored.trim(0, 20)
    after_trim = restored.run(0, 20, tokens[20:25])
    assert np.array_equal(after_trim.view(np.uint32), expected_after_trim.view(np.uint32))
    for layer, block in restored.export(1, 0, 60).items():
        assert np.array_equal(block, neighbour[layer])
    restored.restore(1, pages[:2])  # over what the lane holds, and the pages of a part of it
    again = restored.pages(1, 32)
    for (ours, n), (theirs, _) in zip(again, pages[:2], strict=True):
        assert n == 16
        for layer, block in ours.items():
            assert np.array_equal(block, theirs[layer])


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "mla"])
def test_restored_equals_computed(name: str, cache: Cache, folder: Path) -> None:
    assert_restored_equals_computed(model_path(name, folder), cache)


@pytest.mark.parametrize("cache", OTHER_CACHES, ids=str)
def test_restored_equals_computed_with_other_cache_types(cache: Cache, wide: Path) -> None:
    assert_restored_equals_computed(wide, cache)


@pytest.mark.parametrize("name", GOLDEN)
def test_restored_equals_computed_golden(name: str, folder: Path) -> None:
    path = model_path(name, folder)
    n_layers = len(Stages(path, [], options()).layers)
    assert_restored_equals_computed(path, CACHES[1], n_layers)


@pytest.mark.real_model
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_restored_equals_computed_real_model(cache: Cache) -> None:
    """From stages 0:15 and 15:30 into 0:10, 10:20 and 20:30."""
    path = demo_model("smollm2")
    with Unsplit(path, options(cache)) as whole:
        tokens = tokens_of(1, PROMPT + 1, whole.n_vocab)
        prompt(whole, 2, tokens[:PROMPT])
        expected = whole.run(2, PROMPT, tokens[PROMPT:])
    computed, restored = Stages(path, [15], options(cache)), Stages(path, [10, 20], options(cache, lanes=1))
    prompt(computed, 0, tokens[:PROMPT])
    restored.restore(0, computed.pages(0, PROMPT))
    logits = restored.run(0, PROMPT, tokens[PROMPT:])
    assert np.array_equal(logits.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("cache", CACHES[:2], ids=str)
def test_lanes_used_at_random(cache: Cache) -> None:
    """Whatever was appended, trimmed, cleared and imported before, a lane's pages are what llama.cpp saves of it."""
    path = DATA / "arch" / "llama-moe.gguf"
    chance = random.Random(4)
    with Unsplit(path, options(cache)) as whole:
        staged = Stages(path, [2], options(cache))
        held = [0, 0, 0]
        for _ in range(60):
            lane = chance.randrange(3)
            if chance.random() < 0.6 and held[lane] < 80:
                n = chance.randint(1, min(N_UBATCH, 80 - held[lane]))
                tokens = tokens_of(chance.randrange(50), n, whole.n_vocab)
                logits = [side.run(lane, held[lane], tokens) for side in (whole, staged)]
                assert np.array_equal(*logits)
                held[lane] += n
            elif chance.random() < 0.5:
                held[lane] = chance.randint(0, held[lane])
                for side in (whole, staged):
                    side.trim(lane, held[lane])
            elif held[lane]:
                staged.restore(lane, staged.pages(lane, held[lane]))
            for other in range(3):
                saved = whole.saved(other)
                blocks = staged.export(other, 0, held[other])
                for i, rows in enumerate(staged.layers if held[other] else ()):
                    k, v = rows_of(blocks, rows, held[other], ELEMENT[rows.v_type])
                    assert np.array_equal(k, saved[i].rows)
                    assert np.array_equal(v, saved[len(staged.layers) + i].rows)


def test_context_size_can_select_other_rotary_factors(wide: Path, folder: Path) -> None:
    """Then keys are rotated in another way, and a page of one context is wrong in the other: pages have to say so."""

    def edit(raw: RawGguf) -> None:
        raw.values["llama.rope.scaling.type"] = scalar(STRING, "longrope")
        raw.values["llama.rope.scaling.original_context_length"] = scalar(UINT32, 256)
        for name, factor in (("long", 4.0), ("short", 1.0)):
            factors = np.full(32, factor, np.float32)
            raw.tensors[f"rope_factors_{name}.weight"] = RawTensor((32,), 0, factors.tobytes())

    path = rewrite(wide, folder / "longrope.gguf", edit)
    keys = []
    for ctx_size, factors in ((96, "short"), (256, "short"), (300, "long")):
        staged = Stages(path, [2], options(ctx_size=ctx_size))
        assert [stage.kv_rope_factors for stage in staged.stages] == [factors] * 2
        prompt(staged, 0, tokens_of(0, 8, staged.model.last.n_vocab))
        keys.append(staged.export(0, 0, 8)[0])
    assert np.array_equal(keys[0], keys[1])
    assert not np.array_equal(keys[1], keys[2])
    assert Stages(wide, [2], options()).stages[0].kv_rope_factors == ""


# ---- refusals


@pytest.fixture
def held(wide: Path) -> Stages:
    """All layers in one stage; lane 0 holds ``PROMPT`` tokens, lane 1 holds 20."""
    staged = Stages(wide, [], options())
    prompt(staged, 0, tokens_of(0, PROMPT, staged.model.last.n_vocab))
    prompt(staged, 1, tokens_of(1, 20, staged.model.last.n_vocab))
    return staged


def assert_lane_is_empty_and_usable(staged: Stages, lane: int, path: Path, cache: Cache = CACHES[0]) -> None:
    (stage,) = staged.stages
    assert stage.position(lane) == 0
    with Unsplit(path, options(cache)) as whole:
        tokens = tokens_of(3, 9, whole.n_vocab)  # what was there stays in the cells behind
        wanted = whole.run(lane, 0, tokens)
    assert np.array_equal(staged.run(lane, 0, tokens).view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize(
    ("lane", "first", "end", "complaint"),
    [
        (0, 0, PROMPT + 1, f"tokens 0 to {PROMPT + 1} of lane 0: wanted a range within the {PROMPT} that it holds"),
        (0, 8, 7, "tokens 8 to 7 of lane 0"),
        (0, -1, 7, "tokens -1 to 7 of lane 0"),
        (2, 0, 1, "tokens 0 to 1 of lane 2: wanted a range within the 0"),
        (3, 0, 0, "lane 3: wanted 0 to 2"),
        (-1, 0, 0, "lane -1: wanted 0 to 2"),
    ],
)
def test_pages_that_a_lane_does_not_hold(held: Stages, lane: int, first: int, end: int, complaint: str) -> None:
    (stage,) = held.stages
    with pytest.raises(KvPageError, match=complaint):
        stage.export_kv(lane, first, end)
    assert [stage.position(i) for i in range(3)] == [PROMPT, 20, 0]
    assert len(stage.export_kv(0, 0, PROMPT)) == PROMPT * sum(rows.token_bytes for rows in stage.kv_layers)


@pytest.mark.parametrize(
    ("lane", "change", "count", "complaint"),
    [
        (1, -1, 16, "a page of 16 tokens and 32767 bytes: wanted 32768"),
        (1, 1, 16, "a page of 16 tokens and 32769 bytes: wanted 32768"),
        (1, -32768, 16, "a page of 16 tokens and 0 bytes"),
        (1, 0, 15, "a page of 15 tokens and 32768 bytes"),
        (1, 0, 0, "a page of 0 tokens behind 16 others: wanted 1 to 80"),
        (1, 0, -1, "a page of -1 tokens"),
        (1, 0, 81, "a page of 81 tokens behind 16 others: wanted 1 to 80 in a context of 96"),
        (1, 0, 2**31 - 1, "a page of 2147483647 tokens"),
    ],
)
def test_pages_that_do_not_fit(held: Stages, wide: Path, lane: int, change: int, count: int, complaint: str) -> None:
    (stage,) = held.stages
    good = stage.export_kv(0, 0, 16)
    bad = np.resize(good, len(good) + change)
    with pytest.raises(KvPageError, match=complaint):
        stage.import_kv(lane, [good, bad], [16, count])
    assert stage.position(0) == PROMPT
    assert_lane_is_empty_and_usable(held, lane, wide)


def test_lane_that_does_not_exist(held: Stages) -> None:
    (stage,) = held.stages
    page = stage.export_kv(0, 0, 16)
    for lane in (-1, 3):
        with pytest.raises(KvPageError, match=f"lane {lane}: wanted 0 to 2"):
            stage.import_kv(lane, [page], [16])
    with pytest.raises(KvPageError, match="1 payloads with 2 numbers of tokens"):
        stage.import_kv(0, [page], [16, 16])
    assert [stage.position(i) for i in range(3)] == [PROMPT, 20, 0]


def test_nothing_to_import_empties_the_lane(held: Stages, wide: Path) -> None:
    held.stages[0].import_kv(1, [], [])
    assert_lane_is_empty_and_usable(held, 1, wide)


@pytest.mark.parametrize("cache", [*CACHES, *OTHER_CACHES], ids=str)
@pytest.mark.parametrize("part", "kv")
def test_values_that_are_no_numbers(wide: Path, cache: Cache, part: str) -> None:
    """Masked cells still take part in attention: one infinity would outlive its session and spoil the next."""
    staged = Stages(wide, [], options(cache))
    (stage,) = staged.stages
    prompt(staged, 0, tokens_of(0, 32, staged.model.last.n_vocab))
    pages = [stage.export_kv(0, 0, 16), stage.export_kv(0, 16, 32)]
    rows = stage.kv_layers[0]
    k_bytes = rows.k_row_bytes * 16
    start = 2 * rows.token_bytes * 16 + (k_bytes if part == "v" else 0)  # of layer 2
    width = {"f32": 4}.get(rows.k_type if part == "k" else rows.v_type, 2)
    infinity = {"f32": 0x7F800000, "bf16": 0x7F80}.get(rows.k_type if part == "k" else rows.v_type, 0x7C00)
    pages[1][start : start + width] = np.frombuffer(infinity.to_bytes(width, "little"), np.uint8)
    what = "keys" if part == "k" else "values"
    with pytest.raises(KvPageError, match=f"layer 2: {what} of tokens 16 to 32 are not finite numbers"):
        stage.import_kv(1, pages, [16, 16])
    assert_lane_is_empty_and_usable(staged, 1, wide, cache)


def test_payloads_need_not_be_aligned(held: Stages) -> None:
    (stage,) = held.stages
    payload = stage.export_kv(0, 0, PROMPT)
    raw = memoryview(b"x" + payload.tobytes())[1:]
    stage.import_kv(2, [raw], [PROMPT])
    assert np.array_equal(stage.export_kv(2, 0, PROMPT), payload)


def test_recurrent_state_is_refused_by_name() -> None:
    path = DATA / "arch" / "granitehybrid-dense.gguf"
    staged = Stages(path, [2], options())
    prompt(staged, 0, tokens_of(0, PROMPT, staged.model.last.n_vocab))
    for stage in staged.stages:
        assert stage.kv_refusal == "architecture 'granitehybrid' keeps recurrent state, which cannot be cut by tokens"
        assert stage.kv_layers == ()
        with pytest.raises(KvPageError, match="'granitehybrid' keeps recurrent state"):
            stage.export_kv(0, 0, 1)
        assert stage.position(0) == PROMPT
        with pytest.raises(KvPageError, match="'granitehybrid' keeps recurrent state"):
            stage.import_kv(0, [b""], [1])
        assert stage.position(0) == 0


def test_rolling_window_is_refused() -> None:
    path = DATA / "arch" / "gemma3-dense.gguf"
    rolling = options(ctx_size=600).model_copy(update={"swa_full": False})
    (stage,) = Stages(path, [], rolling).stages
    assert stage.kv_refusal == "the sliding-window cache keeps only the last tokens of a lane: pages need swa_full"
    with pytest.raises(KvPageError, match="pages need swa_full"):
        stage.export_kv(0, 0, 0)
