"""Paths of numbered layers that are alike, as one: `stack/layers_0…9/w`."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Of a layer in a list: the 3 of `layers_3`.
_NUMBER = re.compile(r"(?<=_)\d+(?=/|$)")


def without_number(path: str) -> str:
    """The same for layers that differ in one number; a path with several stays as it is."""
    return path if len(_NUMBER.findall(path)) > 1 else _NUMBER.sub("#", path)


def joint_path(paths: Sequence[str]) -> str:
    """Of paths that differ in one number.

    >>> joint_path(["stack/layers_0/w", "stack/layers_1/w", "stack/layers_2/w"])
    'stack/layers_0…2/w'
    >>> joint_path(["stack/layers_0/w", "stack/layers_2/w"])
    'stack/layers_0,2/w'
    """
    if len(paths) == 1:
        return paths[0]
    numbers = sorted(int(_NUMBER.findall(path)[0]) for path in paths)
    lowest, highest = numbers[0], numbers[-1]
    is_range = numbers == list(range(lowest, highest + 1))
    text = f"{lowest}…{highest}" if is_range else ",".join(map(str, numbers))
    return _NUMBER.sub(text, paths[0])
