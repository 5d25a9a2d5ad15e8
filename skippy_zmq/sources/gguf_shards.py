"""Find the shards of a model and check them against each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import MAX_TENSORS, GgufHeader, parse_header
from skippy_zmq.sources.gguf_values import INT32, UINT16, shown, type_text

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z", re.DOTALL)
MAX_SHARDS = 65_535


def open_shards(path: Path) -> tuple[GgufHeader, ...]:
    """Headers of all files of the model, checked one by one and against each other; raise ModelFileError."""
    name = _SHARD_NAME.match(path.name)
    if name and int(name["number"]) > 1:
        first = f"{name['prefix']}-00001-of-{name['count']}.gguf"
        number, count = int(name["number"]), int(name["count"])
        raise ModelFileError(f"{path}: this is shard {number} of {count}; give {first} instead")
    first_header = parse_header(path)
    count = _split_value(first_header, "split.count", UINT16) or 1
    if count < 2:
        return (first_header,)
    if _split_value(first_header, "split.no", UINT16) not in (None, 0):
        raise ModelFileError(f"{path}: split.no: wanted 0 in the first shard; give the first shard of the model")
    if name is None or int(name["count"]) != count:
        raise ModelFileError(f"{path}: split.count is {count}, so wanted a name ending in -00001-of-{count:05d}.gguf")
    paths = [path.with_name(f"{name['prefix']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    for shard in paths:
        if not shard.exists():
            raise ModelFileError(f"{path}: shard {shard.name} is missing from {shard.parent}; wanted {count} shards")
    headers = (first_header, *(parse_header(shard) for shard in paths[1:]))
    _check_shards(headers)
    return headers


def _split_value(header: GgufHeader, key: str, wanted: int) -> int | None:
    value = header.values.get(key)
    if value is None:
        return None
    if value.type != wanted:
        text = "u16" if wanted == UINT16 else "i32"
        raise ModelFileError(f"{header.path}: {key}: wanted a {text}, got {type_text(value)}")
    number = header.scalar(key)
    return int(number) if number is not None else None


def _check_shards(headers: Sequence[GgufHeader]) -> None:
    owner: dict[str, Path] = {}
    for index, header in enumerate(headers):
        if index and _split_value(header, "split.no", UINT16) != index:
            found = _split_value(header, "split.no", UINT16)
            raise ModelFileError(f"{header.path}: split.no: wanted {index}, got {found}")
        if _split_value(header, "split.count", UINT16) != len(headers):
            found = _split_value(header, "split.count", UINT16)
            raise ModelFileError(f"{header.path}: split.count: wanted {len(headers)}, got {found}")
        for tensor in header.tensors:
            first = owner.setdefault(tensor.name, header.path)
            if first is not header.path:
                raise ModelFileError(f"{header.path}: tensor {shown(tensor.name)} is also in {first}")
    announced = _split_value(headers[0], "split.tensors.count", INT32)
    if announced != len(owner):
        raise ModelFileError(
            f"{headers[0].path}: split.tensors.count: wanted {len(owner)}, the tensors of all shards, got {announced}"
        )
    if len(owner) > MAX_TENSORS:
        raise ModelFileError(f"{headers[0].path}: number of tensors: wanted at most {MAX_TENSORS}, got {len(owner)}")
