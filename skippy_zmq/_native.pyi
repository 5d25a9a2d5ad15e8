"""Stages of a model, run by llama.cpp."""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray


LLAMA_CPP_VERSION: str = '0.5.0-dev'

LLAMA_CPP_PIN: str = 'llama-cpp-python 0.3.36'

def set_log_level(level: int) -> None:
    """
    Show llama.cpp's log from this level on: 0 nothing, 1 debug ... 4 errors.
    """

def has_amx() -> bool:
    """Whether llama.cpp would lay weights out for AMX."""

def amx_fault() -> str:
    """Why weights must not be rearranged for AMX here, or an empty string."""

def devices() -> list[tuple[str, str]]:
    """(name, description) of every device that llama.cpp sees."""

class StageModel:
    def __init__(self, layers: tuple[int, int, int, int], extents: Sequence[tuple[str, int, int, int, int]], files: Sequence[str], progress: object | None, check: object | None = None, *, devices: Sequence[str], n_gpu_layers: int, main_gpu: int, split_mode: str, tensor_split: Sequence[float], mmap: bool, mlock: bool, direct_io: bool, repack: bool, check_tensors: bool, no_host_buffer: bool) -> None:
        """
        Open layers (start, end, layers run, blocks stored) of a GGUF file or of its shards, whose tensors are given as (name, type, bytes, file index, offset). check: called before the first weight is read.
        """

    @property
    def device_names(self) -> list[str]: ...

    @property
    def own_bytes(self) -> int:
        """Bytes of the weights of this stage."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_ctx_train(self) -> int: ...

    @property
    def bos(self) -> int: ...

    @property
    def eos(self) -> int: ...

    @property
    def eot(self) -> int: ...

    @property
    def adds_bos(self) -> bool: ...

    @property
    def adds_eos(self) -> bool: ...

    @property
    def description(self) -> str: ...

    def is_eog(self, token: int) -> bool: ...

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> numpy.typing.NDArray[numpy.int32]: ...

    def piece(self, token: int, special: bool) -> bytes: ...

    def chat_template(self) -> str: ...

class StageContext:
    def __init__(self, model: StageModel, *, n_ctx: int, lanes: int, n_batch: int, n_ubatch: int, threads: int, threads_batch: int, cache_type_k: str, cache_type_v: str, flash_attn: int, swa_full: bool, kv_offload: bool, op_offload: bool, max_outputs: int) -> None: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_batch(self) -> int: ...

    @property
    def n_ubatch(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def threads_batch(self) -> int: ...

    @property
    def can_trim(self) -> bool: ...

    @property
    def wanted(self) -> list[tuple[str, int, str, int, int]]: ...

    @property
    def offered(self) -> list[tuple[str, int, str, int, int]]: ...

    def serve(self, keys: Sequence[tuple[str, int]]) -> None: ...

    def trim(self, lane: int, position: int) -> None: ...

    def position(self, lane: int) -> int: ...

    def micro_batches(self, rows: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]: ...

    def run(self, rows: Sequence[tuple[int, int, int]], tokens: NDArray[numpy.int32], outputs: Sequence[int], arriving: Sequence[tuple[int, str, int, str, Sequence[int], object]]) -> list[tuple[int, str, int, str, tuple[int, int, int, int], NDArray[numpy.uint8]]]: ...

    def logits(self, row: int) -> numpy.typing.NDArray[numpy.float32]: ...

    def pretend(self, lane: int, n_rows: int) -> None:
        """Let a lane hold more tokens, with made-up contents."""

    def trial(self, first_lane: int, n_lanes: int) -> list[dict[tuple[str, int], bytes]]:
        """Run a row on each of some neighbouring lanes; the bits of each."""

    def forget_trials(self) -> None:
        """Empty every lane and leave no trace of trials."""

    def warm(self, limit: int, n_bytes: int) -> None:
        """
        Load the next n_bytes of the first limit bytes of the weights into the processor's cache.
        """

    @property
    def warmable_bytes(self) -> int: ...

    @property
    def kv_refusal(self) -> str: ...

    @property
    def kv_rope_factors(self) -> str: ...

    @property
    def kv_layers(self) -> list[tuple[int, str, str, int, int, bool]]:
        """
        (layer, K type, V type, bytes of K, bytes of V of a token, whether V is transposed) of own layers.
        """

    def export_kv(self, lane: int, first: int, end: int) -> NDArray[numpy.uint8]: ...

    def import_kv(self, lane: int, pages: Sequence[tuple[NDArray[numpy.uint8], int]]) -> None:
        """
        Let a lane hold the tokens of (payload, number of tokens), one behind the other, and nothing else.
        """

    def memory(self) -> tuple[int, int, int]: ...

class GrammarError(ValueError):
    pass

class Sampler:
    """The state of one session's sampling."""

    def __init__(self, model: StageModel, *, temperature: float = 0.0, top_k: int = 40, top_p: float = 0.95, min_p: float = 0.05, typical_p: float = 1.0, top_n_sigma: float = -1.0, repeat_last_n: int = 64, repeat_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0, dry_multiplier: float = 0.0, dry_base: float = 1.75, dry_allowed_length: int = 2, dry_penalty_last_n: int = 64, dry_sequence_breakers: Sequence[str] = ['\n', ':', '"', '*'], xtc_probability: float = 0.0, xtc_threshold: float = 0.1, mirostat: int = 0, mirostat_tau: float = 5.0, mirostat_eta: float = 0.1, logit_bias: Sequence[tuple[int, float]] = [], grammar: str = '', ignore_eos: bool = False, seed: int) -> None:
        """
        Raise ValueError for an option out of range, GrammarError for a grammar that cannot be used.
        """

    def accept(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Add int32 tokens of the prompt to the history that penalties look at."""

    def sample(self, context: StageContext, row: int) -> int:
        """
        Choose a token by the logits of row `row` of the last run, accept and return it.
        """

    def sample_logits(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """Choose a token by float32 logits [n_vocab], accept and return it."""

    def fits(self, token: int) -> bool:
        """Whether the grammar lets `token` come next; True without a grammar."""

def open_virtual(layers: tuple[int, int, int, int], header: bytes, tensors: Sequence[tuple[str, int, Sequence[int], int]], rows: Callable[[int, int, int], object], progress: Callable[[float], object] | None, *, devices: Sequence[str], n_gpu_layers: int, main_gpu: int, split_mode: str, tensor_split: Sequence[float], mlock: bool, direct_io: bool, repack: bool, no_host_buffer: bool) -> StageModel:
    """
    Open layers of a GGUF file of which only the header exists. `tensors`: (name, type, shape innermost first, offset) in file order; rows(tensor number, first row, number of rows) returns the bytes of those rows.
    """

def recipe_types(header: bytes, tensors: Sequence[tuple[str, int, Sequence[int], int]], file_type: int, has_imatrix: bool) -> list[tuple[int, int]]:
    """
    For each tensor, the type that llama.cpp's quantizer gives it, and what that would be if rows of every length fitted every type.
    """

def quantize_rows(source: object, source_type: int, type: int, row_length: int, first_row: int, rows_per_expert: int, imatrix: NDArray[numpy.float32] | None, threads: int) -> NDArray[numpy.uint8]:
    """Quantize rows of f32, f16 or bf16 as llama.cpp's quantizer does."""
