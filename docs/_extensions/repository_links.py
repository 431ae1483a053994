"""Sphinx extension for references of pages to files of the repository outside of `docs/`.

A link to a module of a package leads to its page of `source_pages`. The site does not contain the
other files: a link to one becomes its path in the repository, as code.
A link to a file that does not exist is a warning, which ends the build. The last column of a table
is left out if it names tests, under the heading "shown by" or "test".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from source_pages import module_name
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transforms."""
    app.add_transform(ReplaceLinks)
    app.add_transform(DropTests)
    return {"parallel_read_safe": True}


class ReplaceLinks(SphinxTransform):
    """A transform of links whose target lies outside of the source folder."""

    default_priority = 1  # before Sphinx collects downloads

    def apply(self, **kwargs: Any) -> None:
        """Replace each link to a file of the repository."""
        source = Path(self.env.srcdir)
        here = (source / self.env.docname).parent
        kinds = (addnodes.download_reference, addnodes.pending_xref, nodes.reference)
        for node in list(self.document.findall(lambda node: isinstance(node, kinds))):
            target = node.get("reftarget") or node.get("refuri") or ""
            if "://" in target or not target.startswith(("..", "/")):
                continue
            # MyST gives Markdown files as absolute paths without the ending.
            path = (here / target.partition("#")[0]).resolve()
            path = path if path.exists() else path.with_name(f"{path.name}.md")
            if path.is_relative_to(source) or not path.is_relative_to(source.parent):
                continue
            if not path.exists():
                logger.warning("no such file: %s", target, location=node)
                continue
            if path.suffix == ".py" and "src" in path.parts:
                folder = "../" * self.env.docname.count("/") + "source"
                address = f"{folder}/{module_name(path)}.html"
                node.replace_self(nodes.reference("", "", *node.children, refuri=address))
                continue
            shown = str(path.relative_to(source.parent))
            same = node.astext() == shown
            node.replace_self(
                [nodes.literal("", shown)]
                if same
                else [*node.children, nodes.Text(" ("), nodes.literal("", shown), nodes.Text(")")]
            )


class DropTests(SphinxTransform):
    """A transform of tables whose last column names tests."""

    default_priority = 1

    def apply(self, **kwargs: Any) -> None:
        """Remove the column."""
        for group in self.document.findall(nodes.tgroup):
            rows = list(group.findall(nodes.row))
            if rows[0][-1].astext() in ("shown by", "test"):
                for cells in [
                    *rows,
                    [child for child in group if isinstance(child, nodes.colspec)],
                ]:
                    cells[-1].parent.remove(cells[-1])
                group["cols"] -= 1
