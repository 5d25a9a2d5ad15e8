from __future__ import annotations

import pytest

from skippy_zmq.chat.bos import add_special_for


@pytest.mark.parametrize(
    ("rendered", "bos_text", "adds_bos", "expected"),
    [
        ("<s>[INST] hi [/INST]", "<s>", True, False),  # template with BOS, model wants one: not two
        ("[INST] hi [/INST]", "<s>", True, True),  # template without, model wants one: not none
        ("<s>[INST] hi [/INST]", "<s>", False, False),
        ("<|im_start|>user", "", False, False),
        ("<|im_start|>user", "", True, True),  # the tokenizer knows a BOS that has no text
        (" <s>hi", "<s>", True, True),  # only at the very beginning
        ("", "<s>", True, True),
    ],
)
def test_exactly_one_bos_where_the_model_wants_one(
    rendered: str, bos_text: str, adds_bos: bool, expected: bool
) -> None:
    assert add_special_for(rendered, bos_text, adds_bos) is expected
