"""llama.cpp's own samplers and grammars, called through llama-cpp-python, in the order of its common/sampling.cpp."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import llama_cpp
import numpy as np
from numpy.typing import NDArray


class Reference:
    """The vocabulary of a model file."""

    def __init__(self, path: Path) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self._samplers: list[ReferenceSampler] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _t: TracebackType | None
    ) -> None:
        for sampler in self._samplers:
            sampler.free()
        llama_cpp.llama_model_free(self._model)

    def sampler(self, **options: Any) -> ReferenceSampler:
        sampler = ReferenceSampler(self, **options)
        self._samplers.append(sampler)
        return sampler


class ReferenceSampler:
    def __init__(
        self,
        reference: Reference,
        *,
        seed: int,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        top_n_sigma: float = -1.0,
        repeat_last_n: int = 64,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = 64,
        dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*"),
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        mirostat: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        logit_bias: Sequence[tuple[int, float]] = (),
        grammar: str = "",
        ignore_eos: bool = False,
    ) -> None:
        vocab, n_vocab = reference.vocab, reference.n_vocab
        self._n_vocab = n_vocab
        self._chain: Any = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        ends = [t for t in range(n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, t)] if ignore_eos else []
        biases = [*logit_bias, *((token, -math.inf) for token in ends)]
        if biases:
            array = (llama_cpp.llama_logit_bias * len(biases))(*biases)
            self._add(llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(biases), array))
        if mirostat:
            self._add(llama_cpp.llama_sampler_init_temp(temperature))
            if mirostat == 1:
                self._add(llama_cpp.llama_sampler_init_mirostat(n_vocab, seed, mirostat_tau, mirostat_eta, 100))
            else:
                self._add(llama_cpp.llama_sampler_init_mirostat_v2(seed, mirostat_tau, mirostat_eta))
        else:
            last_n = 2048 if repeat_last_n == -1 else repeat_last_n
            breakers = (ctypes.c_char_p * len(dry_sequence_breakers))(*(b.encode() for b in dry_sequence_breakers))
            penalties = (repeat_penalty, frequency_penalty, presence_penalty)
            self._add(llama_cpp.llama_sampler_init_penalties(n_vocab, last_n, *penalties))
            dry = (dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n)
            self._add(llama_cpp.llama_sampler_init_dry(vocab, *dry, breakers, len(breakers)))
            self._add(llama_cpp.llama_sampler_init_top_n_sigma(top_n_sigma))
            self._add(llama_cpp.llama_sampler_init_top_k(top_k))
            self._add(llama_cpp.llama_sampler_init_typical(typical_p, 0))
            self._add(llama_cpp.llama_sampler_init_top_p(top_p, 0))
            self._add(llama_cpp.llama_sampler_init_min_p(min_p, 0))
            self._add(llama_cpp.llama_sampler_init_xtc(xtc_probability, xtc_threshold, 0, seed))
            self._add(llama_cpp.llama_sampler_init_temp_ext(temperature, 0.0, 1.0))
            self._add(llama_cpp.llama_sampler_init_dist(seed))
        self._grammar: Any = None
        if grammar:
            self._grammar = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
            assert self._grammar

    def _add(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def free(self) -> None:
        llama_cpp.llama_sampler_free(self._chain)
        if self._grammar:
            llama_cpp.llama_sampler_free(self._grammar)

    def accept_prompt(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._chain, token)

    def sample(self, logits: NDArray[np.float32]) -> int:
        token = self._apply(self._candidates(logits), self._chain)
        if self._grammar and not self.fits([token])[0]:
            candidates = self._candidates(logits)
            self._apply(candidates, self._grammar)
            token = self._apply(candidates, self._chain)
        self.accept_generated(token)
        return token

    def fits(self, tokens: Sequence[int]) -> list[bool]:
        """Whether the grammar lets each of ``tokens`` come next."""
        candidates = (llama_cpp.llama_token_data * len(tokens))(*((token, 1.0, 0.0) for token in tokens))
        self._apply(candidates, self._grammar)
        return [candidate.logit != -math.inf for candidate in candidates]

    def accept_generated(self, token: int) -> None:
        if self._grammar:
            llama_cpp.llama_sampler_accept(self._grammar, token)
        llama_cpp.llama_sampler_accept(self._chain, token)

    def _candidates(self, logits: NDArray[np.float32]) -> Any:
        return (llama_cpp.llama_token_data * self._n_vocab)(*((i, float(x), 0.0) for i, x in enumerate(logits)))

    @staticmethod
    def _apply(candidates: Any, sampler: Any) -> int:
        array = llama_cpp.llama_token_data_array(candidates, len(candidates), -1, False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return array.data[array.selected].id if array.selected >= 0 else -1
