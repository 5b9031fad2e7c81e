"""Column types: inferred from JSON values, merged between files, and checked against values.

A JSON column gets a nested Arrow type when all its values have one shape: every object in it has the same keys, and
the items of every list have one type. Anything else (text here and an object there, objects with changing keys) is kept
as JSON text, in a string field that says so in its metadata.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from pagedgen.data.streams import encodable, is_encodable

_ENCODING_KEY = b"pagedgen:encoding"
_EXACT_FLOAT = 1 << 53
_MAX_NESTING = 16
_INTEGER = frozenset({int})


def json_field(name: str) -> pa.Field:
    """A string field whose values are JSON text."""
    return pa.field(name, pa.string(), metadata={_ENCODING_KEY: b"json"})


def is_json_field(field: pa.Field) -> bool:
    return bool(field.metadata) and field.metadata.get(_ENCODING_KEY) == b"json"


class ColumnInference:
    """The columns of rows seen so far, in order of appearance. A type of None stands for JSON text."""

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType | None] = {}

    def add(self, columns: Mapping[str, Any]) -> None:
        for name, value in columns.items():
            if name in self._types:
                self._types[name] = _merge(self._types[name], infer_type(value))
            elif is_encodable(name):
                self._types[name] = infer_type(value)

    def schema(self) -> pa.Schema:
        """One field a column; a column that was always null is taken to be text."""
        return pa.schema([_field(name, type_) for name, type_ in self._types.items()])


def infer_type(value: Any, depth: int = 0) -> pa.DataType | None:
    """The Arrow type that holds a value `json.loads` returned, or None when only JSON text does. depth: how deep in
    lists and objects it stands; Parquet has an end to that."""
    if depth > _MAX_NESTING:
        return None
    match value:
        case None:
            return pa.null()
        case bool():
            return pa.bool_()
        case int():
            return pa.int64() if -(1 << 63) <= value < 1 << 63 else None
        case float():
            return pa.float64()
        case str():
            return pa.string()
        case list():
            item: pa.DataType | None = pa.null()
            for element in value:
                item = _merge(item, infer_type(element, depth + 1))
            return None if item is None else pa.list_(item)
        case dict() if value and all(is_encodable(key) for key in value):
            fields = {key: infer_type(element, depth + 1) for key, element in value.items()}
            return None if None in fields.values() else pa.struct(list(fields.items()))
    return None


def _merge(first: pa.DataType | None, second: pa.DataType | None) -> pa.DataType | None:
    """The type that holds the values of both without changing them, or None when only JSON text does."""
    if first is None or second is None:
        return None
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_integer(first) and pa.types.is_integer(second):
        return pa.int64() if pa.uint64() not in (first, second) else None
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (first, second)):
        return pa.float64()
    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in (first, second)):
        return pa.large_string()
    if pa.types.is_list(first) and pa.types.is_list(second):
        item = _merge(first.value_type, second.value_type)
        return None if item is None else pa.list_(item)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return _merge_structs(first, second)
    return None


def _merge_structs(first: pa.StructType, second: pa.StructType) -> pa.DataType | None:
    others = {field.name: field.type for field in second}
    if {field.name for field in first} != others.keys():
        return None
    fields = [(field.name, _merge(field.type, others[field.name])) for field in first]
    return None if any(type_ is None for _, type_ in fields) else pa.struct(fields)


def _field(name: str, type_: pa.DataType | None) -> pa.Field:
    return json_field(name) if type_ is None else pa.field(name, _null_as_text(type_))


def _null_as_text(type_: pa.DataType) -> pa.DataType:
    """What was null or an empty list in every sampled row is most likely text in a later one."""
    if pa.types.is_null(type_):
        return pa.string()
    if pa.types.is_list(type_):
        return pa.list_(_null_as_text(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _null_as_text(field.type)) for field in type_])
    return type_


def merge_schemas(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The union of the columns, in order of appearance; types that differ become the wider number, or JSON text."""
    types: dict[str, pa.DataType | None] = {}
    for schema in schemas:
        for field in schema:
            type_ = None if is_json_field(field) else field.type
            types[field.name] = _merge(types[field.name], type_) if field.name in types else type_
    return pa.schema([json_field(name) if type_ is None else pa.field(name, type_) for name, type_ in types.items()])


def plain_type(type_: pa.DataType) -> pa.DataType:
    """The type of the same Python values without an encoding: dictionaries, views, run-end and extension types, and
    times in units that Parquet has not got."""
    if isinstance(type_, pa.BaseExtensionType):
        return plain_type(type_.storage_type)
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return plain_type(type_.value_type)
    if pa.types.is_timestamp(type_) and type_.unit == "s":
        return pa.timestamp("ms", type_.tz)
    if pa.types.is_time32(type_):
        return pa.time32("ms")
    if pa.types.is_date64(type_):
        return pa.date32()
    if pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_list(type_) or pa.types.is_list_view(type_):
        return pa.list_(plain_type(type_.value_type))
    if pa.types.is_large_list(type_) or pa.types.is_large_list_view(type_):
        return pa.large_list(plain_type(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, plain_type(field.type)) for field in type_])
    return type_


def fits(type_: pa.DataType) -> Callable[[Any], bool]:
    """A check whether a non-null value is of `type_` and would come back from it unchanged.

    Arrow itself is no such check: it drops unknown keys of a struct, and takes 1.0 for an integer.
    """
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return lambda value: type(value) is str and is_encodable(value)
    if pa.types.is_boolean(type_):
        return lambda value: type(value) is bool
    if pa.types.is_integer(type_):
        signed = pa.types.is_signed_integer(type_)
        low, high = (-(1 << type_.bit_width - 1), 1 << type_.bit_width - 1) if signed else (0, 1 << type_.bit_width)
        return lambda value: type(value) is int and low <= value < high
    if pa.types.is_float64(type_):
        return lambda value: type(value) is float or (type(value) is int and abs(value) <= _EXACT_FLOAT)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _list_fits(type_)
    if pa.types.is_struct(type_):
        return _struct_fits(type_)
    return lambda value: _converts(value, type_)


def _list_fits(type_: pa.ListType) -> Callable[[Any], bool]:
    item_fits = fits(type_.value_type)
    if not pa.types.is_integer(type_.value_type):
        return lambda value: type(value) is list and all(item is None or item_fits(item) for item in value)

    def check(value: Any) -> bool:
        if type(value) is not list:
            return False
        if _INTEGER.issuperset(map(type, value)):  # token ids, say; their order is that of their bounds
            return not value or (item_fits(min(value)) and item_fits(max(value)))
        return all(item is None or item_fits(item) for item in value)

    return check


def _struct_fits(type_: pa.StructType) -> Callable[[Any], bool]:
    members = {field.name: fits(field.type) for field in type_}

    def check(value: Any) -> bool:
        return (
            type(value) is dict
            and value.keys() == members.keys()
            and all(member is None or members[key](member) for key, member in value.items())
        )

    return check


def _converts(value: Any, type_: pa.DataType) -> bool:
    try:
        pa.scalar(value, type_)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return False
    return True


def to_json(value: Any) -> str:
    """JSON text of any value, always valid JSON and UTF-8: NaN and infinities become null, bytes and dates text."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    return text if is_encodable(text) else json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | Decimal):
        return (value if isinstance(value, float) else str(value)) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def identifier(columns: Mapping[str, Any], row: int) -> str:
    """The row's `id` or `custom_id` as text, else its number. Null and the empty text are no identifier."""
    for name in ("id", "custom_id"):
        value = columns.get(name)
        if type(value) is str and value:
            return encodable(value)
        if value is not None and value != "":
            return to_json(value) if isinstance(value, bool | int | float | list | dict) else str(value)
    return str(row)
