"""Sphinx extension that links inline code such as `BaseLayer` to the API reference.

A name is linked if it is the full path of a documented object, or the end of exactly one: the last
part for a class, function or constant, and `Class.name` for a member. A member's own name is not
linked, since many classes may have it, and neither are common words: a last part needs a capital
letter or an underscore.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\(\))?")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform and the resolution of short names in docstrings."""
    app.add_post_transform(LinkNames)
    app.connect("missing-reference", resolve_short_name)
    return {"parallel_read_safe": True}


def find(app_env: Any, name: str) -> tuple[str, Any] | None:
    """Return (path, entry) of the documented object with a full or a unique short name."""
    objects = app_env.domains["py"].objects
    if name in objects:
        return name, objects[name]
    if not hasattr(app_env, "layerkit_short_names"):
        by_end: dict[str, list[str]] = {}
        for path, entry in objects.items():
            if entry.objtype != "module" and not entry.aliased:
                parts = path.split(".")
                owner = objects.get(".".join(parts[:-1]))
                is_member = owner is not None and owner.objtype != "module"
                for count in (2,) if is_member else (1, 2):
                    by_end.setdefault(".".join(parts[-count:]), []).append(path)
        app_env.layerkit_short_names = by_end
    last = name.rpartition(".")[2]
    if not (re.search(r"[A-Z_]", last) and len(last) > 3):
        return None
    paths = app_env.layerkit_short_names.get(name, [])
    if "." in name and not paths:
        # `layerkit.layers.basic.linears.Linear` is documented in `layerkit.layers`.
        package = name.partition(".")[0]
        ends = app_env.layerkit_short_names.get(last, [])
        paths = [path for path in ends if package.startswith("layerkit") and package in path]
    return (paths[0], objects[paths[0]]) if len(paths) == 1 else None


class LinkNames(SphinxPostTransform):
    """A transform of the inline code of written pages."""

    default_priority = 200

    def run(self, **kwargs: Any) -> None:
        """Replace inline code that names a documented object by a link."""
        docname = self.env.docname
        if docname.startswith("api/"):
            return
        for node in list(self.document.findall(nodes.literal)):
            text = node.astext()
            if not NAME.fullmatch(text) or is_within(node, (nodes.reference, nodes.title)):
                continue
            result = find(self.env, text.removesuffix("()"))
            if result is not None and self.app.builder.format == "html":
                path, entry = result
                link = make_refnode(
                    self.app.builder, docname, entry.docname, entry.node_id, node.deepcopy(), path
                )
                node.replace_self(link)


def is_within(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    """Return whether a node is inside of one of some kinds, at any depth."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def resolve_short_name(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Resolve a reference of a docstring that gives a short or a canonical name."""
    if node.get("refdomain") != "py":
        return None
    result = find(env, node["reftarget"].removesuffix("()"))
    if result is None:
        return None
    path, entry = result
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, path)
