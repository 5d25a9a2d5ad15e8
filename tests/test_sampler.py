"""Sampling against the samplers of llama.cpp itself, called through llama-cpp-python on the same vocabulary."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_reference import Reference
from model_files import EOS, TURN_END, tiny
from native_models import open_native
from numpy.typing import NDArray

from skippy_zmq import _native

Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("sampler") / "tiny.gguf", n_layers=1)


@pytest.fixture(scope="module")
def model(path: Path) -> _native.StageModel:
    return open_native(path)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> _native.StageModel:
    return open_native(tiny(tmp_path_factory.mktemp("wide") / "wide.gguf", n_layers=1, unused=10_001))


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[Reference]:
    with Reference(path) as reference:
        yield reference


def peaked(model: _native.StageModel, **logits: float) -> Logits:
    """0 for every token, but the given logits for the tokens named t<id>."""
    values = np.zeros(model.n_vocab, np.float32)
    for name, logit in logits.items():
        values[int(name[1:])] = logit
    return values


def random_logits(seed: int, n_vocab: int, n: int) -> list[Logits]:
    random = np.random.default_rng(seed)
    return [random.normal(0.0, 3.0, n_vocab).astype(np.float32) for _ in range(n)]


def test_greedy_takes_the_first_of_the_most_likely(model: _native.StageModel) -> None:
    sampler = _native.Sampler(model, seed=0)
    assert sampler.sample_logits(peaked(model, t50=2.0, t40=3.0, t60=3.0)) == 40
    assert sampler.sample_logits(peaked(model)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_where_the_first_highest_logit_is(seed: int, wide_model: _native.StageModel) -> None:
    """Wherever that is among very many, banned ones and equals included; NumPy is the oracle."""
    random = np.random.default_rng(seed)
    logits = random.integers(-40, 40, wide_model.n_vocab).astype(np.float32)
    logits[random.random(wide_model.n_vocab) < 0.3] = -math.inf
    if seed % 2:
        logits[random.integers(wide_model.n_vocab)] = 41.0
    if seed % 3 == 0:
        logits -= 1000.0
    assert _native.Sampler(wide_model, seed=0).sample_logits(logits) == int(logits.argmax())


def test_logit_bias(model: _native.StageModel) -> None:
    sampler = _native.Sampler(model, logit_bias=[(40, -math.inf), (50, 5.0), (50, 1.0)], seed=0)
    assert sampler.sample_logits(peaked(model, t40=9.0, t60=5.5)) == 50
    assert sampler.sample_logits(peaked(model, t40=9.0, t60=6.5)) == 60


@pytest.mark.parametrize("seed", range(20))
def test_biases_anywhere_among_very_many(seed: int, wide_model: _native.StageModel) -> None:
    """NumPy is the oracle, as above; every second time one of the biased tokens comes out on top."""
    random = np.random.default_rng(seed)
    n_vocab = wide_model.n_vocab
    logits = random.integers(-40, 40, n_vocab).astype(np.float32)
    bias = [(int(token), float(random.integers(-9, 9))) for token in random.integers(n_vocab, size=50)]
    bias += [(int(token), -math.inf) for token in np.flatnonzero(logits == 39)]
    bias += [(int(random.integers(n_vocab)), 60.0)] * (seed % 2)
    sampler = _native.Sampler(wide_model, logit_bias=bias, seed=0)
    biased = logits.copy()
    for token, more in bias:
        biased[token] += np.float32(more)
    before = logits.copy()
    assert sampler.sample_logits(logits) == int(biased.argmax())
    assert np.array_equal(logits, before)
    logits[n_vocab - 2] = math.nan
    with pytest.raises(RuntimeError, match=f"nan as the logit of token {n_vocab - 2}"):
        sampler.sample_logits(logits)


def test_ignore_eos_bans_every_token_that_ends_a_text(model: _native.StageModel) -> None:
    ends = peaked(model, **{f"t{EOS}": 9.0, f"t{TURN_END}": 8.0}, t70=1.0)
    assert _native.Sampler(model, seed=0).sample_logits(ends) == EOS
    assert _native.Sampler(model, ignore_eos=True, seed=0).sample_logits(ends) == 70


def test_prompt_tokens_count_for_penalties(model: _native.StageModel) -> None:
    logits = peaked(model, t40=3.0, t50=2.9)
    options: dict[str, Any] = {"repeat_penalty": 1.5, "repeat_last_n": 4, "seed": 0}
    assert _native.Sampler(model, **options).sample_logits(logits) == 40
    sampler = _native.Sampler(model, **options)
    sampler.accept(np.array([40], np.int32))
    assert [sampler.sample_logits(logits) for _ in range(3)] == [50, 40, 40]


def test_prompt_tokens_count_for_dry(model: _native.StageModel) -> None:
    logits = peaked(model, t42=3.0, t50=2.9)
    sampler = _native.Sampler(model, dry_multiplier=2.0, dry_penalty_last_n=-1, seed=0)
    sampler.accept(np.array([40, 41, 42, 43, 40, 41], np.int32))
    assert sampler.sample_logits(logits) == 50


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.3, "top_k": -1},
    {"temperature": 2.0, "min_p": 0.3, "top_p": 1.0},
    {"temperature": 1.0, "typical_p": 0.4},
    {"temperature": 1.0, "top_n_sigma": 1.0},
    {"temperature": 1.0, "xtc_probability": 0.8, "xtc_threshold": 0.05, "top_k": 20, "min_p": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 1.0, "repeat_penalty": 0.5, "repeat_last_n": -1, "top_k": 3},
    {"temperature": 0.0, "dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_base": 1.2},
    {"temperature": 0.9, "dry_multiplier": 3.0, "dry_sequence_breakers": ["th", "e"], "top_k": 2},
    {"temperature": 0.8, "mirostat": 1, "mirostat_tau": 2.0},
    {"temperature": 0.8, "mirostat": 2, "mirostat_eta": 0.5},
    {"temperature": 1.0, "logit_bias": [(7, 4.0), (9, -math.inf)]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options)))
@pytest.mark.parametrize("grammar", ["", 'root ::= ([a-m]+ [ .]?)* "é"?'])
def test_tokens_equal_those_of_llama_cpp(
    model: _native.StageModel, reference: Reference, options: dict[str, Any], grammar: str
) -> None:
    for seed in (0, 1, 4_294_967_294):
        prompt = np.random.default_rng(seed).integers(0, 60, 40).astype(np.int32)
        few = np.where(np.arange(model.n_vocab) % 7 == 0, np.float32(4), np.float32(0))  # penalties find repetitions
        ours = _native.Sampler(model, grammar=grammar, seed=seed, **options)
        ours.accept(prompt)
        theirs = reference.sampler(grammar=grammar, seed=seed, **options)
        for token in prompt:
            theirs.accept_prompt(int(token))
        for values in random_logits(seed, model.n_vocab, 60):
            token = ours.sample_logits(values + few)
            assert token == theirs.sample(values + few)
            if model.is_eog(token):
                break


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 2, 2**32 - 1])
def test_a_seed_gives_the_same_tokens_again(model: _native.StageModel, seed: int) -> None:
    def tokens(seed: int) -> list[int]:
        sampler = _native.Sampler(model, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        return [sampler.sample_logits(peaked(model)) for _ in range(20)]

    assert tokens(seed) == tokens(seed)
    assert tokens(seed) != tokens(seed ^ 5)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, 1e300)],
        *[(name, value) for name in ("top_p", "min_p", "typical_p") for value in (-0.1, 1.1, math.nan)],
        *[(name, value) for name in ("xtc_probability", "xtc_threshold") for value in (-0.1, 1.1, math.nan)],
        *[("repeat_penalty", value) for value in (0.0, -1.0, math.nan, math.inf, 1e-40)],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (math.nan, math.inf, 1e30)],
        *[(name, value) for name in ("repeat_last_n", "dry_penalty_last_n") for value in (-2, 2**31)],
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_n_sigma", math.nan),
        ("dry_multiplier", -1.0),
        ("dry_multiplier", math.nan),
        ("dry_base", 0.5),
        ("dry_allowed_length", -1),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["x" * 41]),
        ("dry_sequence_breakers", ["a\0b"]),
        ("dry_sequence_breakers", ["x"] * 17),
        ("dry_sequence_breakers", ["x" * 33] * 4),
        ("mirostat", 3),
        ("mirostat", -1),
        ("mirostat_tau", math.nan),
        ("mirostat_eta", -1.0),
        ("logit_bias", [(-1, 1.0)]),
        ("logit_bias", [(10**6, 1.0)]),
        ("logit_bias", [(2**40, 1.0)]),
        ("logit_bias", [(1, math.nan)]),
        ("logit_bias", [(1, math.inf)]),
        ("logit_bias", [(1, 1.0)] * 5000),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_options_out_of_range_are_named(model: _native.StageModel, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} ?.*(wanted|at most)") as caught:
        _native.Sampler(model, **{"seed": 0, option: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers(model: _native.StageModel, bad: float) -> None:
    for options in ({}, {"temperature": 1.0}, {"mirostat": 2, "temperature": 1.0}):
        sampler = _native.Sampler(model, seed=0, **options)
        with pytest.raises(RuntimeError, match=r"logit of token 45"):
            sampler.sample_logits(peaked(model, t45=bad))
        assert sampler.sample_logits(peaked(model, t45=99.0)) == 45


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"mirostat": 1, "temperature": 1.0}])
def test_no_token_left(model: _native.StageModel, options: dict[str, Any]) -> None:
    nothing = np.full(model.n_vocab, -np.inf, np.float32)
    with pytest.raises(RuntimeError, match="every logit is -inf"):
        _native.Sampler(model, seed=0, **options).sample_logits(nothing)
    one = nothing.copy()
    one[45] = -1e30
    assert _native.Sampler(model, seed=0, **options).sample_logits(one) == 45
    with pytest.raises(RuntimeError, match="every logit is -inf"):
        _native.Sampler(model, seed=0, logit_bias=[(45, -math.inf)], **options).sample_logits(one)


def test_wrong_arrays_are_refused(model: _native.StageModel) -> None:
    sampler = _native.Sampler(model, seed=0)
    with pytest.raises(ValueError, match=f"5 logits: the vocabulary has {model.n_vocab}"):
        sampler.sample_logits(np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="token -1"):
        sampler.accept(np.array([1, -1], np.int32))
    with pytest.raises(ValueError, match=f"token {model.n_vocab}"):
        sampler.accept(np.array([model.n_vocab], np.int32))
    with pytest.raises(TypeError):
        sampler.sample_logits(np.zeros((2, model.n_vocab), np.float32))
    sampler.accept(np.array([], np.int32))


def test_a_huge_history_costs_no_more_than_the_training_context(model: _native.StageModel) -> None:
    sampler = _native.Sampler(
        model, repeat_last_n=2**31 - 1, repeat_penalty=1.1, dry_multiplier=1.0, dry_penalty_last_n=-1, seed=0
    )
    sampler.accept(np.arange(0, 200, dtype=np.int32))
    assert sampler.sample_logits(peaked(model, t250=1.0)) == 250


def test_a_sampler_keeps_its_model(path: Path) -> None:
    model = open_native(path)
    logits = peaked(model, t45=1.0)
    sampler = _native.Sampler(model, grammar="root ::= [a-z]*", seed=0)
    del model
    gc.collect()
    assert 0 <= sampler.sample_logits(logits) < len(logits)
