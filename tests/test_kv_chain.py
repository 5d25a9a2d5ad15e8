"""Token chains."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.chain import DOMAIN, ROOT, PromptChain, TokenLinks, prompt_links

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def spelled_out(tokens: list[int], page_tokens: int) -> list[bytes]:
    links, before = [], hashlib.sha256(DOMAIN).digest()
    for start in range(0, len(tokens), page_tokens):
        ids = tokens[start : start + page_tokens]
        before = hashlib.sha256(before + struct.pack(f"<{len(ids)}i", *ids)).digest()
        links.append(before)
    return links


@given(TOKENS, st.integers(1, 9))
def test_a_link_is_the_hash_of_the_one_before_and_of_the_page(tokens: list[int], page_tokens: int) -> None:
    expected = spelled_out(tokens, page_tokens)
    full = len(tokens) // page_tokens
    assert list(prompt_links(tokens, page_tokens)) == expected[:full]
    chain = PromptChain(page_tokens=page_tokens)
    finished = [link for token in tokens if (link := chain.append(token)) is not None]
    assert finished == expected[:full]
    assert len(chain) == len(tokens)
    assert chain.last == ([ROOT, *expected])[-1]
    links = TokenLinks(tokens, page_tokens)
    for position in range(len(tokens) + 1):
        assert links.at(position) == ([ROOT, *spelled_out(tokens[:position], page_tokens)])[-1]


def test_a_prompt_that_goes_on_shares_its_first_pages_and_another_start_shares_none() -> None:
    prompt = list(range(200))
    links = prompt_links(prompt)
    assert len(links) == 3
    assert prompt_links([*prompt, 7, 8])[:3] == links
    assert not set(prompt_links([1, *prompt[1:]])) & set(links)
    assert prompt_links([*prompt[:100], 0, *prompt[101:]])[0] == links[0]
    assert prompt_links([*prompt[:100], 0, *prompt[101:]])[1] != links[1]


@pytest.mark.parametrize("token", [-1, 2**31])
def test_what_is_no_token_id_is_refused_and_leaves_the_chain_as_it_was(token: int) -> None:
    chain = PromptChain([1, 2], 3)
    with pytest.raises(KvPageError, match=f"token id {token}: wanted 0..2147483647"):
        chain.append(token)
    assert len(chain) == 2
    assert chain.append(3) == prompt_links([1, 2, 3], 3)[0]


def test_positions_outside_the_tokens_have_no_link() -> None:
    with pytest.raises(KvPageError, match=r"position 4: wanted 0\.\.3"):
        TokenLinks([1, 2, 3]).at(4)
