"""Conversations that outlive their pipeline: saved, loaded into other processes and splits, the same to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from model_files import tiny
from pipeline_helpers import Pipelines, run_client
from whole_model import Batches

from skippy_zmq import AsyncClient, Client, LocalPipeline
from skippy_zmq.client.results import Generation
from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.session_files import SavedSession
from skippy_zmq.wire.messages import SamplingParams

pytest_plugins = ("pipeline_fixtures",)

GEMMA = Path(__file__).parent / "data" / "golden" / "gemma3_text" / "reference-f32.gguf"  # a window of 16 tokens
N_CTX = 256
# Chunks of one size, whatever the machine's speed.
CHUNKS = {"ctx_size": N_CTX, "chunk_policy": "fixed", "chunk_sizes": (64,)}
PROMPT = tuple((37 * i + 11) % 290 + 4 for i in range(150))
ADDED = tuple((53 * i + 29) % 290 + 4 for i in range(30))
N_ANSWER, N_MORE = 30, 6
ENDLESS = SamplingParams(ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: first answer, and what was answered when it went on in the pipeline where it had been kept."""

    pipelines: Pipelines
    model: Path
    cache_type: str
    first: Generation
    more: Generation
    directory: Path

    @property
    def continued(self) -> tuple[int, ...]:
        """The prompt that goes on with it."""
        return (*PROMPT, *self.first.token_ids, *ADDED)


def options(cache_type: str) -> dict[str, object]:
    return {**CHUNKS, "cache_type_k": cache_type, "cache_type_v": cache_type}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", hidden=128)


@pytest.fixture(
    scope="module",
    params=[("llama", "f32"), ("llama", "f16"), ("llama", "q8_0"), ("gemma", "f32"), ("gemma", "f16")],
    ids="-".join,
)
def talk(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    name, cache_type = request.param
    model = llama if name == "llama" else GEMMA
    pipelines = Pipelines()  # ended with this talk: there are many
    try:
        client = pipelines(model, 2, **options(cache_type))
        first = client.generate(token_ids=PROMPT, max_tokens=N_ANSWER, sampling=ENDLESS, keep=True, logits=True)
        directory = tmp_path_factory.mktemp("saved") / "talk"
        client.export_session(first.session, directory, token_ids=(*PROMPT, *first.token_ids))
        asked = (*PROMPT, *first.token_ids, *ADDED)
        more = client.generate(token_ids=asked, session=first.session, max_tokens=N_MORE, sampling=ENDLESS, logits=True)
        yield Talk(pipelines, model, cache_type, first, more, directory)
    finally:
        pipelines.close()


def go_on(client: Client, talk: Talk, name: str) -> Generation:
    return client.generate(token_ids=talk.continued, session=name, max_tokens=N_MORE, sampling=ENDLESS, logits=True)


def assert_same_bits(one: np.ndarray | None, other: np.ndarray | None) -> None:
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_a_kept_session_goes_on_as_if_it_had_never_ended(talk: Talk) -> None:
    """Its logits are llama.cpp's, with the whole model and the same batches."""
    assert talk.first.finish_reason == "length"
    assert talk.more.reused_tokens == len(PROMPT) + N_ANSWER - 1  # the last token was chosen, and never run
    batches = Batches()
    batches.prompt(PROMPT)
    batches.generated(talk.first.token_ids[:-1])
    batches.prompt((talk.first.token_ids[-1], *ADDED))
    batches.generated(talk.more.token_ids[:-1])
    wanted = batches.logits(talk.model, talk.cache_type, N_CTX)
    assert_same_bits(talk.first.logits, wanted[:N_ANSWER])
    assert_same_bits(talk.more.logits, wanted[N_ANSWER:])


@pytest.mark.parametrize("split", [(), (1, 3)], ids=["one stage", "1,3"])
def test_a_saved_session_goes_on_in_new_processes_of_another_split(talk: Talk, split: tuple[int, ...]) -> None:
    client = talk.pipelines(talk.model, split=split, **options(talk.cache_type))
    name = client.import_session(talk.directory)
    assert name == talk.first.session
    again = go_on(client, talk, name)
    assert (again.reused_tokens, again.token_ids) == (talk.more.reused_tokens, talk.more.token_ids)
    assert_same_bits(again.logits, talk.more.logits)


def test_a_session_goes_on_any_number_of_times_and_beside_others(talk: Talk) -> None:
    """Imported twice, too: what is there already does no harm."""
    client = talk.pipelines(talk.model, split=(1, 3), **options(talk.cache_type))
    name = client.import_session(talk.directory)
    assert client.import_session(talk.directory) == name
    for _ in range(5):  # more than there are lanes
        assert_same_bits(go_on(client, talk, name).logits, talk.more.logits)
    with client.stream(token_ids=(9, 8, 7), max_tokens=200, sampling=ENDLESS) as other:
        assert next(other).token_ids
        beside = client.generate(token_ids=talk.continued, session=name, max_tokens=N_MORE, sampling=ENDLESS)
        assert beside.reused_tokens == talk.more.reused_tokens


def test_a_prompt_that_parts_from_a_session_keeps_what_they_share(talk: Talk) -> None:
    client = talk.pipelines(talk.model, split=(1, 3), **options(talk.cache_type))
    name = client.import_session(talk.directory)
    asked = (*talk.continued[:160], 5, 6, 7)
    parted = client.generate(token_ids=asked, session=name, max_tokens=2, sampling=ENDLESS, logits=True)
    assert parted.reused_tokens == 160
    batches = Batches()
    batches.prompt(PROMPT)
    batches.generated(talk.first.token_ids[:10])
    batches.prompt((5, 6, 7))
    batches.generated(parted.token_ids[:1])
    assert_same_bits(parted.logits, batches.logits(talk.model, talk.cache_type, N_CTX)[-2:])


def test_a_conversation_is_saved_and_loaded_many_times(pipelines: Pipelines, llama: Path, tmp_path: Path) -> None:
    """Each time in another split; it ends as one that was never interrupted."""
    said, name = PROMPT[:70], ""
    batches = Batches()
    batches.prompt(said)
    for split in ((), (2,), (1, 3)):
        client = pipelines(llama, split=split, **options("f16"))
        if name:
            name = client.import_session(tmp_path / "talk")
        answer = client.generate(token_ids=said, session=name, max_tokens=5, sampling=ENDLESS, keep=True, logits=True)
        batches.generated(answer.token_ids[:-1])
        said = (*said, *answer.token_ids)
        name = answer.session
        client.export_session(name, tmp_path / "talk", token_ids=said)
        assert SavedSession(tmp_path / "talk").facts.tokens == said
        assert_same_bits(answer.logits, batches.logits(llama, "f16", N_CTX)[-5:])
        batches.prompt((said[-1], *ADDED[:3]))
        said = (*said, *ADDED[:3])


def test_an_exported_session_reports_its_progress(talk: Talk, tmp_path: Path) -> None:
    client = talk.pipelines(talk.model, 2, **options(talk.cache_type))
    reports: list[tuple[int, int]] = []
    client.export_session(talk.first.session, tmp_path / "s", progress=lambda *counts: reports.append(counts))
    n_pages = 2 * 3  # stages, and pages of 179 tokens
    assert reports == [(3, n_pages), (6, n_pages)]  # of each stage all in one message


def test_the_asynchronous_client_saves_and_loads(talk: Talk, tmp_path: Path) -> None:
    endpoint = talk.pipelines(talk.model, 2, **options(talk.cache_type)).endpoint

    async def run() -> Generation:
        async with AsyncClient(endpoint) as client:
            first = await client.generate(token_ids=PROMPT, max_tokens=N_ANSWER, sampling=ENDLESS, keep=True)
            assert first.session == talk.first.session
            await client.export_session(first.session, tmp_path / "s")
            pages = []
            reply = await client.export_pages(first.session, pages.append)
            assert await client.import_session(tmp_path / "s") == first.session
            layers = {page.descriptor.layers[0].layer for page in pages}
            assert len(layers) == 2

            def of(stage: object) -> list:
                start = stage.layer_start  # type: ignore[attr-defined]
                mine = [page for page in pages if page.descriptor.layers[0].layer == start]
                return sorted(mine, key=lambda page: page.descriptor.first)

            assert await client.import_pages(reply.token_ids, reply.n_prompt, of) == first.session
            with pytest.raises(KvPageError, match="stage 0: session 5e5e"):
                await client.export_session("5e" * 32, tmp_path / "other")
            return await client.generate(
                token_ids=talk.continued, session=first.session, max_tokens=N_MORE, logits=True
            )

    assert_same_bits(asyncio.run(run()).logits, talk.more.logits)


# K03: a prompt that is there whole, or in part.


def prefill_rows(client: Client) -> int:
    return client.stats()[0].counters.get("prefill_rows", 0)


@pytest.fixture(scope="module")
def restarted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, str]]:
    """A session of a 40-token prompt, saved by one pipeline and loaded by another."""
    directory = tmp_path_factory.mktemp("saved") / "s"
    with LocalPipeline(llama, stages=2, **CHUNKS) as pipeline, pipeline.client() as client:  # type: ignore[arg-type]
        kept = client.generate(token_ids=PROMPT[:40], max_tokens=3, sampling=ENDLESS, keep=True)
        client.export_session(kept.session, directory)
    with LocalPipeline(llama, stages=2, **CHUNKS) as pipeline, pipeline.client() as client:  # type: ignore[arg-type]
        yield client, client.import_session(directory)


@pytest.mark.parametrize(
    ("asked", "reused"),
    [(PROMPT[:40], 39), (PROMPT[:20], 19), ((*PROMPT[:20], *ADDED[:20]), 20), (PROMPT[40:60], 0)],
    ids=["the same prompt", "its beginning", "its beginning and others", "another"],
)
def test_the_first_token_after_a_known_prompt_is_that_of_a_cold_run(
    restarted: tuple[Client, str], asked: tuple[int, ...], reused: int
) -> None:
    """Logits are computed afresh, and what is reported as reused was not computed."""
    client, name = restarted
    cold = client.generate(token_ids=asked, max_tokens=4, sampling=ENDLESS, logits=True)
    assert cold.reused_tokens == 0
    before = prefill_rows(client)
    warm = client.generate(token_ids=asked, session=name, max_tokens=4, sampling=ENDLESS, logits=True)
    assert warm.reused_tokens == reused
    assert prefill_rows(client) - before == len(asked) - reused
    assert warm.token_ids == cold.token_ids
    # A last token alone has another kernel than in a chunk: numbers agree, bits need not.
    assert warm.logits is not None
    assert cold.logits is not None
    np.testing.assert_allclose(warm.logits, cold.logits, atol=2e-3)


# The command line.


def test_a_conversation_goes_on_from_the_command_line(llama: Path, tmp_path: Path) -> None:
    stage = ["--model", llama, "--ctx-size", N_CTX, "--threads", 1, "--json", "--max-tokens", 4, "--ignore-eos"]
    begun = run_client(*stage, "--prompt", "the other one", "--save-session", tmp_path / "s").json()
    assert len(begun["session"]) == 64
    saved = SavedSession(tmp_path / "s").facts
    assert list(saved.tokens) == begun["prompt_token_ids"] + begun["token_ids"]
    load = ["--load-session", tmp_path / "s"]
    split = ["--split", "1,3"]
    ended = run_client(*stage, *split, *load, "--prompt", " and then", "--save-session", tmp_path / "s")
    assert ended.status == 0, ended.errors
    more = ended.json()
    assert more["prompt_token_ids"][: len(saved.tokens)] == list(saved.tokens)
    assert more["reused_tokens"] == len(saved.tokens) - 1
    added = more["prompt_token_ids"][len(saved.tokens) :]
    assert added
    assert len(SavedSession(tmp_path / "s").facts.tokens) == len(saved.tokens) + len(added) + 4
    by_ids = run_client(*stage, *load, "--token-ids", "7,8", "--stats")
    assert by_ids.json()["prompt_token_ids"][-2:] == [7, 8]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--cache-type-k", "f32", "--cache-type-v", "f32"], "K cache of layer 0: wanted f32, got f16"),
        (["--kv-page-tokens", "128"], "wanted pages of 128 tokens"),
        (["--kv-cache-bytes", "0"], "keeps no pages"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(llama: Path, tmp_path: Path, changed: list[str], words: str) -> None:
    stage = ["--model", llama, "--ctx-size", N_CTX, "--threads", 1, "--max-tokens", 2, "--prompt", "x"]
    assert run_client(*stage, "--save-session", tmp_path / "s").status == 0
    ended = run_client(*stage, *changed, "--load-session", tmp_path / "s")
    assert (ended.status, ended.output) == (2, "")
    assert ended.errors.startswith("error: ")
    assert ended.errors.count("\n") == 1
    assert words in ended.errors


def test_a_model_of_the_same_shape_is_not_the_same_model(llama: Path, tmp_path: Path) -> None:
    other = tiny(tmp_path / "other.gguf", hidden=128, seed=1)
    arguments = ["--ctx-size", N_CTX, "--threads", 1, "--max-tokens", 2, "--prompt", "x"]
    assert run_client("--model", llama, *arguments, "--save-session", tmp_path / "s").status == 0
    ended = run_client("--model", other, *arguments, "--load-session", tmp_path / "s")
    assert (ended.status, ended.output) == (2, "")
    assert "it is of another model: wanted other.gguf" in ended.errors
    assert "got tiny.gguf" in ended.errors


def test_a_state_that_is_not_kept_is_not_saved_and_the_answer_is_there(llama: Path, tmp_path: Path) -> None:
    arguments = ["--ctx-size", N_CTX, "--threads", 1, "--max-tokens", 2, "--prompt", "x", "--kv-cache-bytes", "0"]
    ended = run_client("--model", llama, *arguments, "--save-session", tmp_path / "s")
    assert ended.status == 2
    assert ended.output.strip()
    assert "not saved: no state is kept by all stages" in ended.errors
    assert not (tmp_path / "s").exists()
