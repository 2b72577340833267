"""Recipes as nested mappings: reading YAML, `key=value` overrides, dotted keys, merging."""

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from beam_rl.model.errors import BadInput


class Loader(yaml.SafeLoader):
    """YAML 1.2's numbers (1e-6 is a number) and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} appears twice", node.start_mark)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read(path: Path) -> dict[str, Any]:
    """The file as nested mappings. Raises BadInput: no file, not YAML, not a mapping."""
    if not path.is_file():
        raise BadInput(f"{path}: no such recipe. Give the path of a YAML file, for example recipes/quickstart.yaml.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise BadInput(
            f"{path}: a recipe is a mapping of sections (trainer, generator, data, environment, beam), not {content!r}."
        )
    return content


def parse_override(item: str) -> tuple[str, Any]:
    """`trainer.seed=3` as ("trainer.seed", 3). Raises BadInput."""
    key, separator, text = item.partition("=")
    if not separator or not key or "." not in key:
        raise BadInput(f"{item!r}: an override is written section.key=value, for example trainer.seed=2.")
    try:
        return key, yaml.load(text, Loader) if text else ""
    except yaml.YAMLError as error:
        raise BadInput(f"{item!r}: the value is not valid YAML: {error}") from error


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested mappings. Raises BadInput where a part of the path holds a plain value."""
    *parents, last = key.split(".")
    for position, parent in enumerate(parents):
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise BadInput(f"{key}: {'.'.join(parents[: position + 1])} has a value, not keys.")
    values[last] = value


def drop(values: dict[str, Any], key: str) -> None:
    """Remove a dotted key, and the sections that it leaves empty; there may be none."""
    first, _, rest = key.partition(".")
    if rest and isinstance(values.get(first), dict):
        drop(values[first], rest)
    if not rest or values.get(first) == {}:
        values.pop(first, None)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` on top, section by section; neither is changed."""
    result = deepcopy(dict(base))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else deepcopy(value)
    return result


def lookup(values: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, or None."""
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
