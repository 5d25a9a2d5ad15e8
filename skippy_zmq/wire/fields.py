"""Converters between a field's value and its msgpack form; each refuses what its description does not allow.

A ``Field`` is built once, at import. ``pack`` and ``unpack`` raise ``FieldError``; ``wanted`` is the description that
docs/protocol.md and the error messages share. Nothing here knows a message.

Most fields also have a type by which msgspec reads them in native code. It admits nothing that the field's own
converter refuses, apart from what ``rest`` then looks at; it may be narrower.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

_MAX_SHOWN = 40


class FieldError(Exception):
    """A value that a field does not allow; ``path`` grows outwards while the exception unwinds."""

    def __init__(self, wanted: str, value: object, path: str = "") -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.got = shown(value)
        self.path = path

    def within(self, outer: str) -> FieldError:
        self.path = outer + self.path
        return self


class Got(str):
    """Words to show in place of a refused value."""

    __slots__ = ()


def shown(value: object) -> str:
    """A short text for a hostile value: never a deep or long one."""
    if isinstance(value, Got):
        return str(value)
    if type(value) is int and value.bit_length() > 64:
        return f"int of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_SHOWN else f"text of {len(value)} characters"
    if isinstance(value, (bytes, tuple, list)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__


@dataclass(frozen=True, slots=True)
class Field:
    """How one field travels. ``depth``: how many arrays deep its msgpack form is.

    ``native``: its type for msgspec, None where there is none. ``rest``: checks what that type leaves open.
    """

    wanted: str
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    depth: int = 0
    native: Any = None
    rest: Callable[[Any], object] | None = None

    @property
    def native_inside(self) -> Any:
        """Its type within an array or a struct, where nobody looks at the rest of each value."""
        return self.native if self.rest is None else None


def boolean() -> Field:
    wanted = "boolean"

    def check(value: Any) -> Any:
        if value is True or value is False:
            return value
        raise FieldError(wanted, value)

    return Field(wanted, check, check, native=bool)


def integer(low: int, high: int) -> Field:
    wanted = f"integer {low}..{high}"

    def check(value: Any) -> Any:
        if type(value) is int and low <= value <= high:
            return value
        raise FieldError(wanted, value)

    return Field(wanted, check, check, native=Annotated[int, Meta(ge=low, le=high)])


def number() -> Field:
    """A finite double. Whole numbers are widened when packed; on the wire only floats are accepted."""
    wanted = "finite float"

    def unpack(value: Any) -> Any:
        if type(value) is float and math.isfinite(value):
            return value
        raise FieldError(wanted, value)

    def pack(value: Any) -> Any:
        if type(value) is int:
            try:
                return float(value)
            except OverflowError:
                raise FieldError(wanted, value) from None
        return unpack(value)

    return Field(wanted, pack, unpack)


def text(low: int, high: int) -> Field:
    """``low`` is 0 or 1; ``high`` counts bytes of UTF-8."""
    wanted = f"text of {low}..{high} bytes"

    def check(value: Any) -> Any:
        if type(value) is not str or len(value) < low:
            raise FieldError(wanted, value)
        if len(value) * 4 > high and (len(value) > high or _utf8_length(value) > high):  # a character is 1 to 4 bytes
            raise FieldError(wanted, value)
        return value

    # msgspec counts characters, of up to 4 bytes.
    return Field(wanted, check, check, native=Annotated[str, Meta(min_length=low, max_length=high // 4)])


def _utf8_length(value: str) -> int:
    return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))


def one_of(values: Iterable[str], name: str = "") -> Field:
    """One of a few texts; ``name`` describes them where the list would be long."""
    known = frozenset(values)
    literal = Literal[tuple(known)]  # type: ignore[valid-type]
    wanted = name or "one of " + ", ".join(f'"{value}"' for value in values)

    def check(value: Any) -> Any:
        if type(value) is str and value in known:
            return value
        raise FieldError(wanted, value)

    return Field(wanted, check, check, native=literal)


def binary(low: int, high: int) -> Field:
    wanted = f"{low}..{high} bytes"

    def check(value: Any) -> Any:
        if type(value) is bytes and low <= len(value) <= high:
            return value
        raise FieldError(wanted, value)

    return Field(wanted, check, check, native=Annotated[bytes, Meta(min_length=low, max_length=high)])


def token_bytes(low: int, high: int) -> Field:
    """``low`` to ``high`` token ids that stay bytes: int32 little-endian, none negative."""
    wanted = f"{low}..{high} token ids as bytes"

    def check(value: Any) -> Any:
        if type(value) is not bytes or not 4 * low <= len(value) <= 4 * high or len(value) % 4:
            raise FieldError(wanted, value)
        if max(value[3::4], default=0) > 0x7F:  # the byte that holds the sign
            raise FieldError(wanted, Got("a negative id"))
        return value

    native = Annotated[bytes, Meta(min_length=4 * low, max_length=4 * high)]
    return Field(wanted, check, check, native=native, rest=check)


def token_ids(low: int, high: int) -> Field:
    """A tuple of token ids; on the wire, bytes: int32 little-endian."""
    wanted = f"{low}..{high} token ids"

    def pack(value: Any) -> Any:
        if type(value) is not tuple or not low <= len(value) <= high:
            raise FieldError(wanted, value)
        if not value:
            return b""
        if set(map(type, value)) != {int}:
            raise FieldError(wanted, Got("an id that is no int"))
        if min(value) < 0:
            raise FieldError(wanted, Got("a negative id"))
        try:
            return struct.pack(f"<{len(value)}i", *value)
        except struct.error:
            raise FieldError(wanted, Got("an id beyond 2147483647")) from None

    def unpack(value: Any) -> Any:
        if type(value) is not bytes or not 4 * low <= len(value) <= 4 * high or len(value) % 4:
            raise FieldError(wanted, value)
        if value and max(value[3::4]) > 0x7F:
            raise FieldError(wanted, Got("a negative id"))
        return struct.unpack(f"<{len(value) // 4}i", value)

    return Field(wanted, pack, unpack)


def biases(high: int) -> Field:
    """Pairs of a token id and a finite float; on the wire, bytes: (int32, float64) little-endian, 12 per pair."""
    wanted = f"0..{high} pairs of token id and finite float"
    pair = struct.Struct("<id")

    def checked(value: tuple[Any, ...]) -> tuple[Any, ...]:
        for item in value:
            if type(item) is not tuple or len(item) != 2:
                raise FieldError(wanted, item)
            token, bias = item
            if type(token) is not int or not 0 <= token <= 0x7FFFFFFF:
                raise FieldError(wanted, token)
            if type(bias) not in (int, float) or not math.isfinite(bias):
                raise FieldError(wanted, bias)
        return value

    def pack(value: Any) -> Any:
        if type(value) is not tuple or len(value) > high:
            raise FieldError(wanted, value)
        try:
            return b"".join(pair.pack(*item) for item in checked(value))
        except OverflowError:
            raise FieldError(wanted, Got("a bias beyond the range of a float")) from None

    def unpack(value: Any) -> Any:
        if type(value) is not bytes or len(value) > pair.size * high or len(value) % pair.size:
            raise FieldError(wanted, value)
        return checked(tuple(pair.iter_unpack(value)))

    return Field(wanted, pack, unpack)


def optional(inner: Field) -> Field:
    pack, unpack = inner.pack, inner.unpack
    return Field(
        f"nil, or {inner.wanted}",
        lambda value: None if value is None else pack(value),
        lambda value: None if value is None else unpack(value),
        inner.depth,
        native=None if inner.native_inside is None else inner.native_inside | None,
    )


def _index(values: tuple[Any, ...], rest: Iterator[Any]) -> int:
    """Where in ``values`` the iterator ``rest`` over them stopped."""
    return len(values) - 1 - operator.length_hint(rest)


def array_of(inner: Field, low: int, high: int) -> Field:
    wanted = f"{low}..{high} of {inner.wanted}"

    def converted(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            if type(value) is not tuple or not low <= len(value) <= high:
                raise FieldError(wanted, value)
            rest = iter(value)
            try:
                return tuple(map(convert, rest))
            except FieldError as refused:
                raise refused.within(f"[{_index(value, rest)}]") from None

        return run

    element = inner.native_inside
    native: Any = None
    if element is not None:
        native = Annotated[tuple[element, ...], Meta(min_length=low, max_length=high)]  # type: ignore[valid-type]
    elif low == 0:
        native = tuple[()]  # so that what holds none of them, as most steps do, can be read natively
    return Field(wanted, converted(inner.pack), converted(inner.unpack), inner.depth + 1, native)


def row_of(*inner: Field) -> Field:
    """A tuple of fixed length whose places have their own rules."""
    wanted = "(" + ", ".join(item.wanted for item in inner) + ")"

    def converted(converts: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            if type(value) is not tuple or len(value) != len(converts):
                raise FieldError(wanted, value)
            rest = iter(value)
            try:
                return tuple(map(operator.call, converts, rest))
            except FieldError as refused:
                raise refused.within(f"[{_index(value, rest)}]") from None

        return run

    packs, unpacks = [item.pack for item in inner], [item.unpack for item in inner]
    natives = [item.native_inside for item in inner]
    native = None if None in natives else tuple[tuple(natives)]  # type: ignore[misc]
    return Field(wanted, converted(packs), converted(unpacks), 1 + max(item.depth for item in inner), native)


def mapping(key: Field, item: Field, high: int) -> Field:
    """A mapping; on the wire, a flat array of key, value, key, value, since a header holds no map."""
    wanted = f"0..{high} pairs of {key.wanted} and {item.wanted}"

    def pack(value: Any) -> Any:
        if not isinstance(value, Mapping) or len(value) > high:
            raise FieldError(wanted, value)
        out: list[Any] = []
        for name, entry in value.items():
            out += (key.pack(name), item.pack(entry))
        return tuple(out)

    def unpack(value: Any) -> Any:
        if type(value) is not tuple or len(value) > 2 * high or len(value) % 2:
            raise FieldError(wanted, value)
        pairs = zip(value[::2], value[1::2], strict=True)
        out = {key.unpack(name): item.unpack(entry) for name, entry in pairs}
        if len(out) * 2 != len(value):
            raise FieldError(wanted, Got("a key given twice"))
        return out

    return Field(wanted, pack, unpack, 1)


def field_names(cls: type[Any]) -> list[str]:
    """Of a dataclass or a msgspec.Struct, in order."""
    return list(cls.__struct_fields__) if issubclass(cls, msgspec.Struct) else [item.name for item in fields(cls)]


def struct_of(cls: type[Any], inner: Mapping[str, Field], check: Callable[[Any], None] | None = None) -> Field:
    """A dataclass or struct; on the wire, the array of its fields in order.

    ``check`` raises FieldError for fields at odds. msgspec reads a struct whose fields all have a native type.
    """
    names = field_names(cls)
    packs = [inner[name].pack for name in names]
    unpacks = [inner[name].unpack for name in names]
    read = operator.attrgetter(*names)
    values_of = read if len(names) > 1 else lambda value: (read(value),)
    count, wanted = len(names), cls.__name__

    def pack(value: Any) -> Any:
        if type(value) is not cls:
            raise FieldError(wanted, value)
        values = values_of(value)
        rest = iter(values)
        try:
            out = tuple(map(operator.call, packs, rest))
        except FieldError as refused:
            raise refused.within(f".{names[_index(values, rest)]}") from None
        if check is not None:
            check(value)
        return out

    def unpack(value: Any) -> Any:
        if type(value) is not tuple:
            raise FieldError(f"{wanted}, an array of {count}", value)
        if len(value) < count:
            raise FieldError(f"{wanted}, an array of {count}", Got("no such field"), f".{names[len(value)]}")
        if len(value) > count:
            raise FieldError(f"{wanted}, an array of {count}", Got(f"{len(value)} values"))
        rest = iter(value)
        try:
            made = cls(*map(operator.call, unpacks, rest))
        except FieldError as refused:
            raise refused.within(f".{names[_index(value, rest)]}") from None
        if check is not None:
            check(made)
        return made

    depth = 1 + max(item.depth for item in inner.values())
    natives = {name: item.native for name, item in inner.items()}
    if not issubclass(cls, msgspec.Struct) or not _let_msgspec_read(cls, natives):
        return Field(wanted, pack, unpack, depth)
    rests = [(name, item.rest) for name, item in inner.items() if item.rest is not None]

    def rest(made: Any) -> None:
        for name, of_field in rests:
            try:
                of_field(getattr(made, name))
            except FieldError as refused:
                raise refused.within(f".{name}") from None
        if check is not None:
            check(made)

    return Field(wanted, pack, unpack, depth, cls, rest if rests or check is not None else None)


def _let_msgspec_read(cls: type[msgspec.Struct], natives: Mapping[str, Any]) -> bool:
    """Have msgspec read the fields of ``cls`` as ``natives``, which narrow its annotations; False where one is missing.

    msgspec looks at annotations when a class is first read or written.
    """
    if None in natives.values():
        return False
    cls.__annotations__ = {**cls.__annotations__, **natives}
    if cls.__struct_defaults__:
        raise TypeError(f"{cls.__name__}: with defaults, msgspec reads arrays that are too short")
    if {field.name: field.type for field in msgspec.structs.fields(cls)} != natives:
        raise TypeError(f"{cls.__name__}: msgspec does not see the rules of its fields")
    return True
