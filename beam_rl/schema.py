"""Checks a nested mapping against SkyRL's configuration dataclasses: unknown keys and wrong types, by name."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union

from beam_rl.model.errors import BadInput


def check(values: Mapping[str, Any], cls: type, where: str, known: list[str]) -> None:
    """Raise BadInput for the first key of `values` that `cls` lacks, or whose value has another type.

    `where` is the dotted path of `values` ("trainer.policy"); `known` holds all dotted keys, to name the nearest.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    for key, value in values.items():
        check_text(key, where)
        path = f"{where}.{key}"
        if key not in fields:
            raise unknown_key(path, known)
        check_value(value, fields[key], path, known)


def check_text(key: Any, where: str) -> None:
    """Raise BadInput for a key that YAML did not read as text: `1:` is a number, `on:` is true."""
    if not isinstance(key, str):
        raise BadInput(f"{where}: the key {key!r} is {type_name(key)}, but text is wanted.")


def without_null_sections(values: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """`values` without the keys of sections of `cls` that are null: a section with nothing in it is absent."""
    hints = typing.get_type_hints(cls)
    kept: dict[str, Any] = {}
    for key, value in values.items():
        nested = nested_dataclass(hints.get(key))
        if nested is not None and isinstance(value, Mapping):
            kept[key] = without_null_sections(value, nested)
        elif nested is None or value is not None:
            kept[key] = value
    return kept


def check_value(value: Any, hint: Any, path: str, known: list[str]) -> None:
    """Raise BadInput unless `value`, as YAML gives it, is of the annotated type `hint`."""
    nested = nested_dataclass(hint)
    if nested is not None and isinstance(value, Mapping):
        check(value, nested, path, known)
    elif not matches(value, hint):
        raise BadInput(f"{path}: {value!r} is {type_name(value)}, but {describe(hint)} is wanted.")


def unknown_key(path: str, known: list[str]) -> BadInput:
    """The error for a key that does not exist, naming the nearest one that does."""
    last = path.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    near = near or [key for key in known if key.rsplit(".", 1)[-1] == last][:1]
    near = near or difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return BadInput(f"unknown key {path}.{hint}")


def keys(cls: type, where: str) -> Iterator[str]:
    """All dotted keys below the dataclass `cls`, itself at `where`."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = f"{where}.{field.name}"
        yield path
        nested = nested_dataclass(hints[field.name])
        if nested is not None:
            yield from keys(nested, path)


def nested_dataclass(hint: Any) -> type | None:
    """The dataclass in an annotation such as `X` or `X | None`; None where there is none."""
    for option in options(hint):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None


def options(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union annotation; a single annotation is its own only alternative."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def matches(value: Any, hint: Any) -> bool:
    """Whether a YAML value is of an annotated type; a whole number is good where a float is wanted."""
    if hint is Any:
        return True
    if len(options(hint)) > 1:
        return any(matches(value, option) for option in options(hint))
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(matches(element, item) for element in value)
    kind = origin or hint
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def type_name(value: Any) -> str:
    """A value's type in a reader's words."""
    names = {str: "text", bool: "true/false", int: "a whole number", float: "a number", list: "a list", dict: "keys"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def describe(hint: Any) -> str:
    """An annotated type in a reader's words."""
    if len(options(hint)) > 1:
        return " or ".join(describe(option) for option in options(hint))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"a list ({describe(typing.get_args(hint)[0])} each)"
    if nested_dataclass(hint) is not None:
        return "a section with keys of its own"
    names = {str: "text", bool: "true or false", int: "a whole number", float: "a number", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
