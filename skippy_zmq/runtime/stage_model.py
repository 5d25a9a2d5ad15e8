"""A stage's layers, opened and ready to run batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from skippy_zmq import _native
from skippy_zmq.errors import ModelFileError, NativeError, OptionError, ProtocolError, RequestError
from skippy_zmq.kv.layout import LayerRows as KvLayerRows
from skippy_zmq.runtime import kv_pages
from skippy_zmq.runtime.cached_weights import cached_weights
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.repacking import may_repack
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.topology import LayerRange
from skippy_zmq.wire.messages import CrossingSpec, TensorDescriptor

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
LaneRows = tuple[int, int, int]  # lane, position, number of rows

LLAMA_CPP_BUILD = f"{_native.LLAMA_CPP_PIN} ({_native.LLAMA_CPP_VERSION})"

_WARM_STEP_BYTES = 128 << 10  # tens of microseconds where they have to come from memory

_FLASH_ATTN = {"on": 1, "off": 0, "auto": -1}


class Crossing(msgspec.Struct, frozen=True):
    """One crossing tensor of one micro-batch and its bytes (``descriptor.nbytes`` of them)."""

    descriptor: TensorDescriptor
    data: memoryview


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in this stage's own buffers."""

    weights: int
    kv: int
    compute: int


class StageModel:
    """Layers ``layers`` of ``source``. Not thread-safe: one thread runs it.

    Raises ModelFileError where llama.cpp refuses the file, OptionError where it refuses an option. ``progress`` is
    called with 0.0 to 1.0 while weights load; an exception it raises stops the load.
    """

    def __init__(
        self,
        source: GgufModel,
        layers: LayerRange,
        options: StageOptions,
        *,
        progress: Callable[[float], object] | None = None,
        max_outputs: int | None = None,
    ) -> None:
        self.source = source
        self.layers = layers.within(source.n_layers)
        self.options = options
        n_positions = source.n_positions  # rows of a learned position table: llama.cpp aborts beyond them
        if n_positions is not None and (options.ctx_size or source.context_length) > n_positions:
            raise OptionError(
                f"ctx_size {options.ctx_size or source.context_length}: {source.path.name} has positions for at most "
                f"{n_positions} tokens"
            )
        repacked = options.repack and may_repack(source)
        # "file": as they lie there, "cpu" or "amx": laid out for the processor. Each computes with kernels of its own.
        self.weight_layout = ("amx" if _native.has_amx() else "cpu") if repacked else "file"
        self.native_model = self._open(progress)
        try:
            self.native_context = _native.StageContext(
                self.native_model,
                n_ctx=options.ctx_size,
                lanes=options.lanes,
                n_batch=options.batch_size,
                n_ubatch=options.ubatch_size,
                threads=options.decode_threads,
                threads_batch=options.prefill_threads,
                cache_type_k=options.cache_type_k,
                cache_type_v=options.cache_type_v,
                flash_attn=_FLASH_ATTN[options.flash_attn],
                swa_full=options.swa_full,
                kv_offload=options.kv_offload,
                op_offload=options.op_offload,
                max_outputs=options.lanes if max_outputs is None else max_outputs,
            )
        except RuntimeError as error:
            raise OptionError(f"{source.path}: layers {layers}: {error}") from None
        self.warm_bytes = min(options.warm_weights_bytes, self.native_context.warmable_bytes)

    def _open(self, progress: Callable[[float], object] | None) -> _native.StageModel:
        """From the source's files, or from what it makes while it loads."""
        source, options, layers = self.source, self.options, self.layers
        range_and_counts = (layers.start, layers.end, source.n_layers, source.n_blocks)
        placement: dict[str, Any] = {
            "devices": list(options.device),
            "n_gpu_layers": options.n_gpu_layers,
            "main_gpu": options.main_gpu,
            "split_mode": options.split_mode,
            "tensor_split": list(options.tensor_split),
            "mlock": options.mlock,
            "direct_io": options.direct_io,
            "repack": self.weight_layout != "file",
            "no_host_buffer": not options.host_buffer,
        }
        loading_from = 0.0

        def checking(done: float) -> None:  # only where the source reads its files itself before llama.cpp does
            nonlocal loading_from
            loading_from = 0.5
            if progress is not None:
                progress(done / 2)

        def loading(done: float) -> None:
            to_be_checked = files.check is not None and not loading_from  # which comes first
            if progress is not None and not to_be_checked:
                progress(loading_from + done * (1 - loading_from))

        report = loading if progress is not None else None
        # what is kept of the cache is that nobody removes the file as long as it is mapped
        with (
            cached_weights(source, layers, options, LLAMA_CPP_BUILD, checking) as (source, self._kept_weights),
            source.stage_files(layers, checking) as files,
        ):
            try:
                if source.rows is None:
                    index = {path: number for number, path in enumerate(source.files)}
                    native_model = _native.StageModel(
                        range_and_counts,
                        [(t.name, t.type, t.nbytes, index[t.path], t.offset) for t in source.tensors],
                        list(files.paths),
                        report,
                        files.check,
                        mmap=options.mmap,
                        check_tensors=options.check_tensors,
                        **placement,
                    )
                else:  # always copied, never mapped, and checked for numbers that are not finite: there is no file
                    tensors, rows = source.tensors, source.rows
                    native_model = _native.open_virtual(
                        range_and_counts,
                        source.header.raw,
                        [(t.name, t.type, t.shape, t.offset) for t in tensors],
                        lambda number, first, n: rows(tensors[number], first, n),
                        report,
                        **placement,
                    )
            except ValueError as error:
                raise OptionError(str(error)) from None
            except RuntimeError as error:
                raise ModelFileError(f"{source.path}: {files.readable(str(error))}") from None
        if files.own_bytes not in (None, native_model.own_bytes):  # it would compute with bytes that are not there
            raise NativeError(
                f"{source.path}: layers {layers}: wanted {files.own_bytes} bytes of weights, "
                f"the native side {native_model.own_bytes}"
            )
        return native_model

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.end == self.source.n_layers

    @property
    def n_ctx(self) -> int:
        """Tokens that a lane can hold."""
        return self.native_context.n_ctx

    @property
    def n_vocab(self) -> int:
        return self.native_model.n_vocab

    @property
    def can_trim(self) -> bool:
        """Whether a lane can forget only its last tokens (recurrent models cannot)."""
        return self.native_context.can_trim

    @property
    def wanted(self) -> tuple[CrossingSpec, ...]:
        return tuple(CrossingSpec(*spec) for spec in self.native_context.wanted)

    @property
    def offered(self) -> tuple[CrossingSpec, ...]:
        return tuple(CrossingSpec(*spec) for spec in self.native_context.offered)

    @property
    def kv_layers(self) -> tuple[KvLayerRows, ...]:
        """What the own layers keep of a token; those without attention state of their own are left out."""
        return kv_pages.kv_layers(self.native_context)

    @property
    def kv_refusal(self) -> str:
        """Why lanes of this stage have no pages; empty where they have."""
        return self.native_context.kv_refusal

    @property
    def kv_rope_factors(self) -> str:
        """ "long" or "short" where the size of the context selects one of two sets of rotary factors, else "".

        Pages of one do not fit a context with the other.
        """
        return self.native_context.kv_rope_factors

    def export_kv(self, lane: int, first: int, end: int) -> kv_pages.Payload:
        """The payload of a page of tokens [first, end) of ``lane``; raise KvPageError where there is none."""
        return kv_pages.export_kv(self.native_context, lane, first, end)

    def import_kv(self, lane: int, payloads: Sequence[kv_pages.Buffer], n_tokens: Sequence[int]) -> None:
        """Let ``lane`` hold the tokens of these pages and nothing else; empty it and raise KvPageError if it cannot."""
        kv_pages.import_kv(self.native_context, lane, payloads, n_tokens)

    def warm(self) -> int:
        """For a stage that waits: have the processor load some of the ``warm_bytes`` weights into its cache again.

        Returns how many bytes.
        """
        self.native_context.warm(self.warm_bytes, _WARM_STEP_BYTES)
        return min(self.warm_bytes, _WARM_STEP_BYTES)

    def memory(self) -> Memory:
        return Memory(*self.native_context.memory())

    def serve(self, wanted: Sequence[CrossingSpec]) -> None:
        """Give downstream exactly ``wanted`` from now on; raise ProtocolError where that is not on offer."""
        try:
            self.native_context.serve([(spec.name, spec.occurrence) for spec in wanted])
        except ValueError as error:
            raise ProtocolError(str(error), code="crossing_mismatch") from None

    def micro_batch_rows(self, rows: Sequence[LaneRows]) -> list[int]:
        """Row counts of the micro-batches that a batch runs as."""
        return [n for _, n in self.native_context.micro_batches(list(rows))]

    def run(
        self, rows: Sequence[LaneRows], tokens: Tokens, outputs: Sequence[int] = (), arriving: Sequence[Crossing] = ()
    ) -> list[Crossing]:
        """Run a batch and return what leaves for downstream.

        ``tokens``: int32 ids of all rows. ``outputs``: rising row numbers whose logits are wanted (last stage only).
        Raises ProtocolError before anything changed where the batch or what arrived does not fit, NativeError after a
        failed run (the batch's lanes then stand where they stood).
        """
        tensors = [
            (d.micro_batch, d.name, d.occurrence, d.dtype, d.shape, item.data)
            for item in arriving
            for d in (item.descriptor,)
        ]
        try:
            leaving = self.native_context.run(list(rows), tokens, list(outputs), tensors)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        except RuntimeError as error:
            raise NativeError(f"layers {self.layers}: {error}") from None
        return [
            Crossing(TensorDescriptor(name, occurrence, micro_batch, dtype, shape, data.nbytes), data.data)
            for micro_batch, name, occurrence, dtype, shape, data in leaving
        ]

    def logits(self, row: int) -> Logits:
        """A copy of the logits of ``row`` of the last batch: float32 [n_vocab]; raise ProtocolError if it has none."""
        try:
            return self.native_context.logits(row)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def trim(self, lane: int, position: int) -> None:
        """Forget the tokens of ``lane`` from ``position`` on; raise ProtocolError where the model cannot."""
        try:
            self.native_context.trim(lane, position)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def position(self, lane: int) -> int:
        """Tokens that ``lane`` holds; raise ProtocolError for a lane that does not exist."""
        try:
            return self.native_context.position(lane)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``; raise NativeError where the model has no tokenizer."""
        try:
            return list(map(int, self.native_model.tokenize(text.encode(), add_special, parse_special)))
        except RuntimeError as error:
            raise NativeError(str(error)) from None

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless ``special``. Raise RequestError for no token."""
        try:
            return self.native_model.piece(token, special)
        except IndexError as error:
            raise RequestError(str(error), code="invalid_token") from None

    def detokenize(self, tokens: Sequence[int], *, special: bool = True) -> bytes:
        return b"".join(self.piece(token, special=special) for token in tokens)

    def is_end_of_generation(self, token: int) -> bool:
        return self.native_model.is_eog(token)
