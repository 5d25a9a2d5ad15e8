"""Quantization recipes: their names, as llama.cpp's ``llama-quantize`` has them, and which tensors need importances."""

from __future__ import annotations

from dataclasses import dataclass

from skippy_zmq.errors import OptionError

PRESERVE = "preserve"  # the types of the source: no recipe

# Numbers of llama_ftype (llama.h); they go into ``general.file_type``.
_FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "BF16": 32,
    "Q8_0": 7,
    "Q6_K": 18,
    "Q5_K_M": 17,
    "Q5_K_S": 16,
    "Q5_1": 9,
    "Q5_0": 8,
    "Q4_K_M": 15,
    "Q4_K_S": 14,
    "Q4_1": 3,
    "Q4_0": 2,
    "MXFP4_MOE": 38,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "Q3_K_L": 13,
    "Q3_K_M": 12,
    "Q3_K_S": 11,
    "IQ3_M": 27,
    "IQ3_S": 26,
    "IQ3_XS": 22,
    "IQ3_XXS": 23,
    "Q2_K": 10,
    "Q2_K_S": 21,
    "Q2_0": 41,
    "IQ2_M": 29,
    "IQ2_S": 28,
    "IQ2_XS": 20,
    "IQ2_XXS": 19,
    "TQ2_0": 37,
    "TQ1_0": 36,
    "IQ1_M": 31,
    "IQ1_S": 24,
    "Q1_0": 40,
}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

RECIPE_NAMES = (PRESERVE, *_FILE_TYPES)

# Too few bits to quantize well without knowing what matters: ggml type numbers.
_IQ2_XXS, _IQ2_XS, _IQ3_XXS, _IQ1_S, _IQ2_S, _IQ1_M, _Q2_K = 16, 17, 18, 19, 22, 29, 10
_NEEDY = frozenset((_IQ2_XXS, _IQ2_XS, _IQ3_XXS, _IQ1_S, _IQ2_S, _IQ1_M))
_TABLES = frozenset(("token_embd.weight", "per_layer_token_embd.weight", "output.weight"))


@dataclass(frozen=True, slots=True)
class Recipe:
    """``file_type``: llama.cpp's number of it."""

    name: str
    file_type: int

    def needs_importances(self, tensor: str, tensor_type: int) -> bool:
        """Whether llama.cpp refuses to quantize ``tensor`` to ``tensor_type`` without an importance matrix."""
        if tensor in _TABLES:
            return False
        return tensor_type in _NEEDY or (tensor_type == _Q2_K and self.name == "Q2_K_S")


def recipe_named(name: str) -> Recipe | None:
    """The recipe, whatever the case of its name; None for "preserve". Raise OptionError for an unknown one."""
    if name.lower() == PRESERVE:
        return None
    known = _ALIASES.get(name.upper(), name.upper())
    if known not in _FILE_TYPES:
        raise OptionError(f"quant: wanted one of {', '.join(RECIPE_NAMES)}, got {name!r}")
    return Recipe(known, _FILE_TYPES[known])
