"""Sphinx extension that adds the sources of the packages to the site, and links names to them.

`link_source` is the `linkcode_resolve` of conf.py. The pages have no theme, so that hundreds of
them take a few seconds.
"""

from __future__ import annotations

import ast
import functools
import html
import importlib
import inspect
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx

SOURCES = Path(__file__).resolve().parents[2] / "packages"
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{name}</title><link rel="stylesheet" href="../_static/pygments.css">
<link rel="stylesheet" href="../_static/source.css">
<body><h1>{name}</h1><p><a href="../index.html">Documentation</a> · <code>{path}</code></p>
{code}</body></html>
"""


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages after the others."""
    app.connect("build-finished", write_sources)
    return {"parallel_read_safe": True}


def link_source(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of a documented class or function, seen from a page of `api/`."""
    value: Any = importlib.import_module(info["module"])
    for part in info["fullname"].split("."):
        value = getattr(value, part, None)
    value = inspect.unwrap(value.fget if isinstance(value, property) else value)
    module = getattr(value, "__module__", None) or ""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return None
    line = definitions(module).get(value.__qualname__) if module.startswith("layerkit") else None
    return f"../source/{module}.html#L-{line}" if line else None


@functools.cache
def definitions(module: str) -> dict[str, int]:
    """Return the first line of each class and function of a module, by its qualified name."""
    lines: dict[str, int] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines[f"{prefix}{node.name}"] = node.lineno
                add(node.body, f"{prefix}{node.name}.")

    add(ast.parse(inspect.getsource(importlib.import_module(module))).body, "")
    return lines


def module_name(path: Path) -> str:
    """Return the full name of the module of a file below `SOURCES`."""
    parts = path.relative_to(SOURCES).with_suffix("").parts[2:]
    return ".".join(parts).removesuffix(".__init__")


def write_sources(app: Sphinx, exception: Exception | None) -> None:
    """Write a page for each module of the packages."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "source"
    folder.mkdir(exist_ok=True)
    formatter = HtmlFormatter(lineanchors="L", linenos="inline", anchorlinenos=True)
    for path in sorted(SOURCES.glob("*/src/**/*.py")):
        name = module_name(path)
        code = highlight(path.read_text(), PythonLexer(), formatter)
        shown = html.escape(str(path.relative_to(SOURCES.parent)))
        (folder / f"{name}.html").write_text(PAGE.format(name=name, path=shown, code=code))
