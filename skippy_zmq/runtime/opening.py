"""Open the model that a stage's options ask for: as it is, or quantized while it loads."""

from __future__ import annotations

import logging
from pathlib import Path

from skippy_zmq.errors import OptionError
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.recipes import recipe_named
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.imatrix import ImportanceMatrix, read_imatrix
from skippy_zmq.sources.models import open_located
from skippy_zmq.sources.references import LocatedModel

log = logging.getLogger("skippy_zmq.stage")


def open_with_options(located: LocatedModel, options: StageOptions) -> GgufModel:
    """The model with ``options.quant`` and ``options.imatrix``; a relative imatrix is beside the model.

    Raises ModelFileError for files, OptionError for a recipe or an importance matrix that cannot be used here.
    """
    recipe = recipe_named(options.quant)
    if recipe is None and options.imatrix:
        raise OptionError("imatrix: wanted a recipe beside it (--quant), which it is for")
    source = open_located(located)
    if options.weights_cache and source.rows is None:
        raise OptionError(f"weights_cache: {located.path} is no checkpoint; weights of a file are mapped as they are")
    if recipe is None:
        return source
    if source.rows is None:
        raise OptionError(
            f"quant {recipe.name}: {located.path} is no checkpoint; weights of a GGUF file stay as they are"
        )
    from skippy_zmq.runtime.quantize import quantized  # loads llama.cpp, which the rest does not need

    imatrix = _imatrix(located.path, options.imatrix)
    return quantized(source, recipe, imatrix=imatrix, threads=options.prefill_threads, strict=options.quant_strict)


def _imatrix(path: Path, name: str) -> ImportanceMatrix | None:
    if not name:
        return None
    imatrix = read_imatrix((path if path.is_dir() else path.parent) / name)
    log.info("importance matrix %s, sha256 %s", imatrix.path, imatrix.sha256)
    return imatrix
