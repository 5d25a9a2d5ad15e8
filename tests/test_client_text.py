"""Text of answers over real stages: characters split over tokens (X01), stop strings (X02), chat and BOS (X03)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import BOS, FIRST_BYTE_TOKEN, Parrot, parrot
from pipeline_helpers import Pipelines, run_client

from skippy_zmq import Client
from skippy_zmq.errors import RequestError, SkippyError

pytest_plugins = ("pipeline_fixtures",)

EMOJI = "🦙"
TEXTS = {
    "emoji": EMOJI,
    "two emoji": EMOJI + "👍",
    "flag": "🇩🇪!",
    "combining": "e\u0301tude",
    "cjk": "漢字かな",
    "mixed": "a" + EMOJI + "\U0001f44d\U0001f3fd\u200d" + "ü",
}
Recite = Callable[..., tuple[Client, Parrot]]


@pytest.fixture(scope="module")
def recite(pipelines: Pipelines, tmp_path_factory: pytest.TempPathFactory) -> Recite:
    """A client of a pipeline that recites a text."""
    models: dict[str | bytes, Parrot] = {}

    def make(text: str | bytes, stages: int = 1) -> tuple[Client, Parrot]:
        if text not in models:
            models[text] = parrot(tmp_path_factory.mktemp("parrot") / "parrot.gguf", text, context=512)
        return pipelines(models[text].path, stages), models[text]

    return make


def both_ways(client: Client, **arguments: object) -> tuple[str, tuple[int, ...], str]:
    """Text, tokens and finish reason of an answer; streamed and not, they must be the same."""
    whole = client.generate("x", **arguments)  # type: ignore[arg-type]
    chunks = list(client.stream("x", **arguments))  # type: ignore[arg-type]
    text = "".join(chunk.text for chunk in chunks)
    token_ids = tuple(itertools.chain.from_iterable(chunk.token_ids for chunk in chunks))
    assert (text, token_ids, chunks[-1].finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
    assert all(chunk.finish_reason == "" for chunk in chunks[:-1])
    return whole.text, whole.token_ids, whole.finish_reason


@pytest.mark.parametrize("name", TEXTS)
def test_characters_split_over_tokens_arrive_whole(recite: Recite, name: str) -> None:
    client, model = recite(TEXTS[name])
    assert both_ways(client) == (TEXTS[name], model.token_ids, "stop")


def test_two_stages_recite_as_one_does(recite: Recite) -> None:
    client, model = recite(TEXTS["mixed"], stages=2)
    assert both_ways(client) == (TEXTS["mixed"], model.token_ids, "stop")


def test_a_character_is_sent_with_its_last_byte(recite: Recite) -> None:
    client, _ = recite(TEXTS["two emoji"])
    texts = [chunk.text for chunk in client.stream("x")]
    assert texts == ["", "", "", EMOJI, "", "", "", "👍", ""]


@pytest.mark.parametrize("n_bytes", [1, 2, 3])
def test_a_character_cut_short_is_one_replacement_character(recite: Recite, n_bytes: int) -> None:
    client, model = recite(EMOJI)
    assert both_ways(client, max_tokens=n_bytes) == ("\ufffd", model.token_ids[:n_bytes], "length")


def test_an_invalid_byte_is_one_replacement_character(recite: Recite) -> None:
    client, model = recite(b"a\xffb\x00")
    assert both_ways(client) == ("a\ufffdb\0", model.token_ids, "stop")
    printed = run_client("--connect", client.endpoint, "--prompt", "x", "--json")
    assert printed.json()["text"] == "a\ufffdb\0"


def test_the_command_line_prints_the_same_text(recite: Recite) -> None:
    client, model = recite(TEXTS["mixed"])
    streamed = run_client("--connect", client.endpoint, "--prompt", "x")
    assert (streamed.output, streamed.errors, streamed.status) == (TEXTS["mixed"] + "\n", "", 0)
    answer = run_client("--connect", client.endpoint, "--prompt", "x", "--json").json()
    assert (answer["text"], tuple(answer["token_ids"])) == (TEXTS["mixed"], model.token_ids)


GREEK = "alpha beta gamma"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["ta ga"], "alpha be"),
        (["beta X"], GREEK),
        (["mma"], "alpha beta ga"),
        (["gamma"], "alpha beta "),
        (["gammas"], GREEK),
        (["be", "beta"], "alpha "),
        (["beta", "a b"], "alph"),
        (["X", "Y", "Z", "V", "ta"], "alpha be"),
        ("beta", "alpha "),
        (["alpha"], ""),
    ],
)
def test_nothing_of_a_stop_string_is_sent_and_everything_before_it_is(
    recite: Recite, stop: str | list[str], text: str
) -> None:
    client, model = recite(GREEK)
    got, token_ids, reason = both_ways(client, stop=stop)
    assert (got, reason) == (text, "stop")
    assert token_ids == model.token_ids[: len(token_ids)]


def test_tokens_count_up_to_the_end_of_the_stop_string(recite: Recite) -> None:
    client, model = recite(GREEK)
    _, token_ids, _ = both_ways(client, stop=["ta ga"])
    assert token_ids == model.token_ids[: len("alpha beta ga")]


def test_text_held_for_a_stop_string_is_sent_when_tokens_run_out(recite: Recite) -> None:
    client, model = recite(GREEK)
    assert both_ways(client, stop=["beta X"], max_tokens=9) == ("alpha bet", model.token_ids[:9], "length")


def test_a_stop_string_may_be_an_emoji_beside_another(recite: Recite) -> None:
    client, _ = recite(TEXTS["two emoji"])
    text, _, reason = both_ways(client, stop=["👍"])
    assert (text, reason) == (EMOJI, "stop")


def test_a_stop_string_in_the_prompt_does_not_count(recite: Recite) -> None:
    client, _ = recite(GREEK)
    answer = client.generate("beta beta", stop=["beta"])
    assert answer.text == "alpha "


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ["a"] * 17, ["x" * 257]])
def test_stop_strings_that_make_no_sense_are_refused(recite: Recite, stop: str | list[str]) -> None:
    client, _ = recite(GREEK)
    with pytest.raises(RequestError, match="stop"):
        client.generate("x", stop=stop)
    assert client.generate("x", max_tokens=5).text == "alpha"


def test_the_command_line_takes_several_stop_strings(recite: Recite) -> None:
    client, _ = recite(GREEK)
    asked = ("--connect", client.endpoint, "--prompt", "x")
    answer = run_client(*asked, "--stop", "gam", "--stop", "eta", "--json").json()
    assert (answer["text"], answer["finish_reason"]) == ("alpha b", "stop")
    refused = run_client(*asked, "--stop", "")
    assert (refused.status, refused.output) == (2, "")
    assert refused.errors.startswith("error: ")


PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
WITH_BOS = "{{ bos_token }}" + PLAIN


def byte_tokens(text: str) -> tuple[int, ...]:
    return tuple(FIRST_BYTE_TOKEN + byte for byte in text.encode())


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [PLAIN, WITH_BOS], ids=["plain", "with bos"])
def test_a_chat_has_one_bos_where_model_or_template_wants_it(
    one_pipeline: Pipelines, tmp_path: Path, template: str, add_bos: bool
) -> None:
    model = parrot(tmp_path / "parrot.gguf", "yes", chat_template=template, add_bos=add_bos)
    client = one_pipeline(model.path)
    chat = client.generate(messages=[{"role": "user", "content": "hi"}])
    wants = add_bos or template == WITH_BOS
    assert chat.prompt_token_ids == ((BOS,) if wants else ()) + byte_tokens("hi")
    assert chat.text == "yes"
    plain = ((BOS,) if add_bos else ()) + byte_tokens("hi")
    assert client.generate("hi").prompt_token_ids == plain
    assert client.tokenize("hi") == plain
    # The text of BOS, at the beginning of a prompt, is that BOS and no second one.
    assert client.generate("<s>hi").prompt_token_ids == (BOS, *byte_tokens("hi"))


def test_a_chat_of_two_messages_goes_through_the_template(one_pipeline: Pipelines, tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    model = parrot(tmp_path / "parrot.gguf", "ok", chat_template=template, add_bos=False)
    client = one_pipeline(model.path)
    answer = run_client("--connect", client.endpoint, "--chat", "hi", "--system", "be kind", "--json").json()
    prompt = client.detokenize(answer["prompt_token_ids"])
    assert b"system:be kind" in prompt
    assert prompt.index(b"system:be kind") < prompt.index(b"user:hi")


def test_a_model_without_a_template_refuses_a_chat(recite: Recite) -> None:
    client, _ = recite(GREEK)
    with pytest.raises(SkippyError) as caught:
        client.generate(messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "chat_template"
    shown = run_client("--connect", client.endpoint, "--chat", "hi")
    assert (shown.status, shown.errors.count("\n")) == (2, 1)
