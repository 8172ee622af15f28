"""Parses YAML into plain data; refuses aliases, whose expansion can exhaust memory, and duplicate keys.

A separate module, imported only when a YAML file is read, because importing PyYAML is slow.
"""

from __future__ import annotations

from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeyLoader(_LOADER):  # type: ignore[misc, valid-type]
    """A safe loader that refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {duplicate!r} occurs twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """Parses a YAML text without aliases. Raises ValueError with the parser's message."""
    try:
        if "*" in text and any(isinstance(one, yaml.AliasEvent) for one in yaml.parse(text, Loader=_LOADER)):
            raise ValueError("aliases are not supported")
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
