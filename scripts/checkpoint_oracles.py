"""Write what llama.cpp's converter makes of the checkpoints of the tests: tests/data/checkpoints/*.json.

    python scripts/checkpoint_oracles.py LLAMA_CPP_SOURCES

Needs torch, transformers and sentencepiece beside numpy. Weights are stored as hashes, long lists of metadata too.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LLAMA_CPP = Path(sys.argv[1]).resolve()
sys.path[:0] = [str(ROOT / "tests"), str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]

import checkpoint_files as files  # noqa: E402
import gguf  # noqa: E402
import numpy as np  # noqa: E402

LONG_LIST = 64
TEXTS = [
    "",
    "Hello world",
    " leading space",
    "trailing space ",
    "two  spaces,   three",
    "tabs\tand\t\ttabs",
    "line\nbreak\n\nand more\r\n",
    "don't you'll I'VE",
    "1234567 and 3.14",
    "naïve café",
    "東京 and 你好",
    "한국어",
    "العربية",
    "🙂 emoji 👩‍👩‍👧",
    "nul\0inside",
    "def f(x):\n    return x + 1",
    "<s>not special</s>",
    "ÀÉÎõü",
    "▁underscore▁",
    "a" * 40,
    "....,,,;;;",
    "MixedCASE words",
    "snake_case_name",
    "https://example.org/a?b=c",
    "Ελληνικά",
    "кириллица",
    "ไทย",
    "हिन्दी",
    "\u200bzero width",
    "x²",
    "A.B.C. and e.g.",
    "it's we're they'll SHE'D",
    "tab\tthen newline\t\n x",
    "\n\n\n",
    "   ",
    "3.14159, 2,718; 1/2",
    "C++ & C#",
    "[brackets] {braces} (parentheses)",
    "\u201cquotes\u201d and \u2018single\u2019",
    "em\u2014dash \u2013 en",
    "ÄÖÜ straße",
    "日本語とEnglish混ぜる",
    "٠١٢٣ Ⅷ ½",
    "e\u0301 combining",
    "👍🏽👨‍💻",
    "\t\t\tindented",
    "foo_bar-baz.qux",
    "UPPER lower Title",
    "hello   \n\n  world",
    "<user> says",
]


def main() -> None:
    import conversion.base
    import convert_hf_to_gguf

    # the table of hashes knows no tokenizers of tests
    conversion.base.TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "llama-bpe"
    train_sentencepiece()
    for name, case in files.CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            source = files.write_case(case, Path(folder) / "model")
            out = Path(folder) / "model.gguf"
            kind = "f32" if case.dtype == "F32" else "auto"  # auto takes F32 for F16
            sys.argv = ["convert", str(source), "--outfile", str(out), "--outtype", kind]
            convert_hf_to_gguf.main()
            (files.CHECKPOINTS / f"{name}.json").write_text(json.dumps(described(out), indent=1) + "\n")
    write_tokenizations()


def described(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    tensors = {
        tensor.name: [
            tensor.tensor_type.name,
            [int(extent) for extent in tensor.shape],
            hashlib.sha256(np.ascontiguousarray(tensor.data).tobytes()).hexdigest(),
        ]
        for tensor in reader.tensors
    }
    metadata: dict[str, Any] = {}
    for key, entry in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = entry.contents()
        if isinstance(value, list) and len(value) > LONG_LIST:
            value = hashlib.sha256(json.dumps(value).encode()).hexdigest()
        metadata[key] = [[kind.name for kind in entry.types], value]
    return {"tensors": tensors, "metadata": metadata}


def train_sentencepiece() -> None:
    if files.SENTENCEPIECE.exists():
        return
    import sentencepiece

    corpus = "\n".join(text.replace("\0", "") for text in TEXTS) * 4
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "corpus.txt"
        text.write_text(corpus)
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=f"{folder}/m",
            vocab_size=500,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            user_defined_symbols=["<|plain|>"],
        )
        files.SENTENCEPIECE.write_bytes((Path(folder) / "m.model").read_bytes())


def write_tokenizations() -> None:
    """What the libraries that own the formats make of some texts."""
    import sentencepiece
    from tokenizers import Tokenizer

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(files.SENTENCEPIECE))
    expected: dict[str, Any] = {"texts": TEXTS, "sentencepiece": [pieces.encode(text) for text in TEXTS]}
    for golden in ("llama", "qwen2", "mistral"):
        tokenizer = Tokenizer.from_file(str(files.GOLDEN / golden / "tokenizer.json"))
        expected[golden] = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    train_unsplit()
    content = json.loads(files.UNSPLIT.read_text())
    expected["pre_tokenizers"] = {}
    for name, settings in files.PRE_TOKENIZERS.items():
        tokenizer = Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": settings}))
        expected["pre_tokenizers"][name] = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    (files.CHECKPOINTS / "tokenizations.json").write_text(json.dumps(expected) + "\n")


def train_unsplit() -> None:
    """A byte-level vocabulary whose merges go across words."""
    if files.UNSPLIT.exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=508, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=6, show_progress=False
    )
    tokenizer.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.save(str(files.UNSPLIT), pretty=False)


if __name__ == "__main__":
    main()
