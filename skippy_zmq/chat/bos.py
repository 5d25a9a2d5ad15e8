"""One BOS, not two and not none."""

from __future__ import annotations


def add_special_for(rendered: str, bos_text: str, adds_bos: bool) -> bool:
    """Whether the tokenizer is to add its special tokens (``add_special``) to ``rendered``.

    ``bos_text``: the text of the model's BOS token, "" if it has none. ``adds_bos``: the model's own flag
    (``tokenizer.ggml.add_bos_token``, or what its kind of tokenizer does by default).

    The same rule for a rendered chat template and a plain prompt: a model that wants a BOS gets exactly one at the
    beginning; where the text begins with it already, none is added. A model that wants none gets what the text says.
    """
    return adds_bos and not (bos_text and rendered.startswith(bos_text))
