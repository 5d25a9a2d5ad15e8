"""Compose a package into one GGUF file: the whole model, or a sparse file with the bytes of one stage only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from skippy_zmq.errors import OptionError
from skippy_zmq.sources.gguf_layout import TensorEntry, lay_out, pairs_of, text_pair
from skippy_zmq.sources.gguf_model import HELD_LAYERS_KEY, WHOLE_IDENTITY_KEY
from skippy_zmq.sources.package.opening import PackageModel
from skippy_zmq.sources.package.weight_source import BLOCK_BYTES
from skippy_zmq.topology import LayerRange


def compose(
    package: PackageModel,
    output: Path,
    layers: LayerRange | None = None,
    *,
    begin: Callable[[int], object] = lambda _total: None,
    progress: Callable[[int], object] = lambda _bytes: None,
) -> int:
    """Write the model as one GGUF file; return the bytes of the tensors that are in it.

    The parts that are used are checked first. With ``layers`` that are not all, the file has the whole tensor table and
    holes for the tensors of other stages; it says so in its metadata, and opens as these layers only. ``begin`` is told
    the bytes to be copied, ``progress`` those copied since. Raises ModelFileError for parts that are no good,
    OptionError where ``output`` exists or cannot be written.
    """
    whole = LayerRange(0, package.n_layers)
    wanted = whole if layers is None else layers.within(package.n_layers)
    pairs = pairs_of(package.header)
    if wanted != whole:
        pairs += [text_pair(HELD_LAYERS_KEY, str(wanted)), text_pair(WHOLE_IDENTITY_KEY, package.identity())]
    entries = [TensorEntry(t.name, t.type, t.shape, t.nbytes) for t in package.tensors]
    layout = lay_out(pairs, entries, package.alignment)
    owns = package.ownership(wanted).owns
    if os.path.lexists(output):
        raise OptionError(f"{output}: is there already; remove it or give another name")
    partial = output.with_name(f".{output.name}.partial")
    copied = sum(tensor.nbytes for tensor in package.tensors if owns(tensor.name))
    try:
        free = shutil.disk_usage(output.parent).free
        if copied > free:
            raise OptionError(f"{output}: wanted {copied} bytes of space, {free} are free there")
        begin(copied)
        with package.opened(package.used_parts(wanted)) as parts, partial.open("wb") as file:
            file.write(layout.header)
            for tensor, index, offset in zip(package.tensors, package.manifest.part_of, layout.offsets, strict=True):
                if not owns(tensor.name):
                    continue
                file.seek(offset)
                for start in range(0, tensor.nbytes, BLOCK_BYTES):
                    size = min(BLOCK_BYTES, tensor.nbytes - start)
                    file.write(os.pread(parts[index], size, tensor.offset + start))
                    progress(size)
            file.truncate(layout.size)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(output)
    except OSError as error:
        path = output if error.filename in (None, str(partial)) else error.filename
        raise OptionError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    return copied
