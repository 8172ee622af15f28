"""Parses YAML into plain data; refuses aliases, which can expand beyond memory, and duplicate keys.

A module of its own, imported when a YAML file is read: importing PyYAML takes longer than all around it."""

from __future__ import annotations

from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeyLoader(_LOADER):  # type: ignore[misc, valid-type]
    """A safe loader that refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice!r} is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """The data of a YAML text without aliases. Raises ValueError, from the parser's own error."""
    try:
        if "*" in text and any(isinstance(one, yaml.AliasEvent) for one in yaml.parse(text, Loader=_LOADER)):
            raise ValueError("aliases are not read")
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
