"""Tensor types of ggml: numbers, block lengths and block sizes (those of llama.cpp 2026-10, ``ggml_type_traits``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """``block``: elements per block; ``block_bytes``: its bytes; ``weight``: usable as a matrix on every device."""

    name: str
    block: int
    block_bytes: int
    weight: bool = True

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of ``n_elements`` elements; the caller has checked that they are whole blocks."""
        return n_elements // self.block * self.block_bytes


F32 = 0
F16 = 1
BF16 = 30
I32 = 26

# Not weights: types ggml has no dot product for; a matrix of such a type crashes the computation instead of failing.
TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36, weight=False),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292, weight=False),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1, weight=False),
    25: TensorType("I16", 1, 2, weight=False),
    26: TensorType("I32", 1, 4, weight=False),
    27: TensorType("I64", 1, 8, weight=False),
    28: TensorType("F64", 1, 8, weight=False),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}

REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def type_name(number: int) -> str:
    known = TENSOR_TYPES.get(number)
    return known.name if known else f"type {number}"
