"""Names the leaves in the text with which JAX prints the structure of a tree.

Flax's format of Paxml stores a list of arrays and this text, which names them:

    PyTreeDef(CustomNode(TrainState[()], [*, {'params': {'w': *}}, [(*, *)], ()]))

With 0 in place of each leaf, the text becomes a Python expression, which is parsed and never
evaluated.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

# Python parses some texts to 300 bytes per character.
_MAX_CHARACTERS = 2 * 10**6
_QUOTED_OR_LEAF = re.compile(r"'[^'\\]*'|\*")
# The class and its static data: NestedMap[('count', 'm')], namedtuple[MaskedNode], TrainState[()].
_CLASS = re.compile(r"CustomNode\((?P<name>\w+)\[(?P<data>[^\[\]]*)\], ")
_QUOTED = re.compile(r"'([^'\\]*)'")

# Names of the children of classes whose text leaves them out.
_FIELDS = {
    "TrainState": ("step", "mdl_vars", "opt_states", "extra_state"),
    "ScaleByAdamState": ("count", "mu", "nu"),
    "ShardedAdafactorState": ("count", "m", "m_scale", "vr", "vc", "v"),
    "ScaleByScheduleState": ("count",),
    "TraceState": ("trace",),
    "EmaState": ("count", "ema"),
}

Path = tuple[str, ...]


def leaf_paths(text: str) -> list[Path]:
    """Return the path of each leaf, in the order of the leaves.

    Children of lists, tuples and unknown classes are named by their index.
    """
    code = _QUOTED_OR_LEAF.sub(lambda match: "0" if match[0] == "*" else match[0], text)
    try:
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"more than {_MAX_CHARACTERS} characters")
        match ast.parse(_CLASS.sub(_name_children, code), mode="eval").body:
            case ast.Call(func=ast.Name(id="PyTreeDef"), args=[tree]):
                return list(_leaves(tree, ()))
        raise ValueError("another expression")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"expected a text PyTreeDef(…): {error}") from error


def _name_children(match: re.Match[str]) -> str:
    """Replace a class by the names of its children; a NestedMap lists its keys."""
    name = match["data"] if match["name"] == "namedtuple" else match["name"]
    names = _QUOTED.findall(match["data"]) or _FIELDS.get(name, ())
    return f"CustomNode({list(names)}, "


def _leaves(node: ast.expr | None, path: Path) -> Iterator[Path]:
    names: Sequence[ast.expr | None] = ()
    match node:
        case ast.Constant(value=None):
            return
        case ast.Constant(value=0):
            yield path
            return
        case ast.Dict(keys=names, values=children):
            pass
        case ast.List(elts=children) | ast.Tuple(elts=children):
            pass
        case ast.Call(
            func=ast.Name(id="CustomNode"), args=[ast.List(elts=names), ast.List(elts=children)]
        ):
            pass
        case _:
            raise ValueError(f"a node {type(node).__name__}")
    rest = map(ast.Constant, map(str, itertools.count(len(names))))
    for name, child in zip(itertools.chain(names, rest), children, strict=False):
        if not isinstance(name, ast.Constant):
            raise ValueError("a key that is no text")
        yield from _leaves(child, (*path, str(name.value)))
