"""Sphinx extension that writes the API reference from the public names and their docstrings.

Before a build it writes `docs/api/`: a page for each group of modules, the flags of `runner` and
the named experiments. Git ignores the folder. The signature of a class with fields shows these
fields, with types and defaults.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import public_names
from flax import linen as nn
from sphinx.application import Sphinx

from layerkit.base.base_layer import BaseLayer
from layerkit.base.sharding import ShardingRules
from layerkit.errors import UserError

TITLES = {
    "layerkit": "Configuration, base classes, sharding",
    "layers": "Layers",
    "attention": "Attention",
    "models": "Models",
    "decoding": "Decoding",
    "interop": "Hugging Face, PEFT and Praxis",
    "inputs": "Inputs",
    "runner": "Runner",
    "observers": "Observers",
    "optim": "Optimizers, schedules, metrics of tasks",
    "recipes": "Recipes of experiments",
}
# Members of every layer that a page need not repeat.
HIDDEN = {"HParams", "used_only_if", "setup"}
# Fields that Flax adds to every module.
OF_FLAX = {"parent", "name"}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the hooks."""
    app.connect("builder-inited", lambda app: write_reference(Path(app.srcdir) / "api"))
    app.connect("autodoc-process-signature", show_fields)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", convert_docstring, priority=100)
    return {"parallel_read_safe": True}


def write_reference(folder: Path) -> None:
    """Write the pages; those whose text has not changed keep their time of change."""
    folder.mkdir(exist_ok=True)
    pages = dict(public_names.PAGES)
    pages["recipes"] = tuple(public_names.recipe_modules())
    documented = {path: path for path in public_names.experiments()}
    texts = {page: api_page(page, modules, documented) for page, modules in pages.items()}
    texts["layer_table"] = layer_table()
    texts["flags"] = flags_page()
    texts["experiments"] = experiments_page()
    for name, text in texts.items():
        path = folder / f"{name}.rst"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.rst"):
        if path.stem not in texts:
            path.unlink()


def heading(text: str, line: str) -> list[str]:
    """Return the lines of a heading."""
    return ["", text, line * len(text), ""]


def api_page(page: str, modules: tuple[str, ...], documented: dict[str, str]) -> str:
    """Return the page of some modules.

    Args:
      page: Name of the page.
      modules: Modules whose names it documents, grouped by the module that defines them.
      documented: Path under which each defined object is documented; the function adds to it.
    """
    lines = heading(TITLES[page], "=")
    for module in modules:
        lines += heading(f"``{module}``", "-")
        lines += [f".. py:module:: {module}", "", summary(module), ""]
        homes: dict[str, list[str]] = {}
        for name in public_names.names_of(module):
            homes.setdefault(public_names.home_of(module, name), []).append(name)
        elsewhere = []
        for home, names in sorted(homes.items()):
            own = [name for name in names if f"{home}.{name}" not in documented]
            elsewhere += [documented[f"{home}.{name}"] for name in names if name not in own]
            if own and len(homes) > 1 and len(own) < sum(map(len, homes.values())):
                lines += heading(home_title(home, module), "~")
                if home != module:
                    lines += [summary(home), ""]
            for name in own:
                documented[f"{home}.{name}"] = f"{module}.{name}"
                lines += directive(module, name)
        if elsewhere:
            links = ", ".join(f":py:obj:`{path}`" for path in elsewhere)
            lines += [f"Also exported here: {links}.", ""]
    return "\n".join(lines).lstrip() + "\n"


def layer_table() -> str:
    """Return the page with a line for each layer, in a table for each folder of `layers/`.

    The layers of the folder `basic` have a table for each module.
    """
    lines = heading("All layers at a glance", "=")
    lines += ["The first sentence of each layer's documentation, by module of ``layerkit.layers``."]
    lines += [
        "Each name leads to the fields of the layer; those of its base classes are on their pages.",
        ":doc:`/first_layer` writes a new one. :py:obj:`~layerkit.layers.FlaxModule` makes a layer",
        "of any Flax module, such as a convolution.",
        "",
    ]
    folders: dict[str, list[tuple[str, str]]] = {}
    modules = ("layerkit.layers", "layerkit.layers.quantization.lora")
    names = [(home, name) for home in modules for name in public_names.names_of(home)]
    for home, name in names:
        value = getattr(importlib.import_module(home), name)
        if inspect.isclass(value) and issubclass(value, BaseLayer):
            text = " ".join(inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0].split())
            sentence = re.split(r"(?<=\.) (?=[A-Z`])", text)[0]
            parts = value.__module__.split(".")[2:]
            folder = ".".join(parts[:2]) if parts[0] == "basic" else parts[0]
            folders.setdefault(folder, []).append((f"{home}.{name}", sentence))
    for folder, rows in sorted(folders.items()):
        lines += heading(folder, "-")
        lines += [summary(f"layerkit.layers.{folder}"), "", ".. list-table::", "   :widths: 30 70"]
        lines += ["   :class: layer-table", ""]
        for name, sentence in rows:
            lines += [f"   * - :py:obj:`~{name}`", f"     - {escape(sentence)}"]
    return "\n".join(lines).lstrip() + "\n"


def home_title(home: str, module: str) -> str:
    """Return the heading of a submodule, such as `attention.multi_head`."""
    return home.removeprefix(f"{module}.").replace("_", " ")


def summary(module: str) -> str:
    """Return the first paragraph of the docstring of a module."""
    doc = inspect.cleandoc(importlib.import_module(module).__doc__ or "")
    return escape(" ".join(doc.partition("\n\n")[0].split()))


def directive(module: str, name: str) -> list[str]:
    """Return the directive that documents a name."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        return [f".. autoclass:: {module}.{name}", "   :members:", "   :show-inheritance:", ""]
    if inspect.isfunction(value):
        return [f".. autofunction:: {module}.{name}", ""]
    text = escape(public_names.comment_of(module, name)).splitlines()
    if isinstance(value, ShardingRules):
        text += ["", ".. list-table::", "   :header-rows: 1", ""]
        rows = [("logical axis", "mesh axes"), *value.table]
        for axis, axes in rows:
            shown = ", ".join(axes) if isinstance(axes, tuple) else axes or "none"
            text += [f"   * - {axis}", f"     - {shown}"]
    lines = [f".. py:data:: {name}", f"   :module: {module}", ""]
    return [*lines, *(f"   {line}" for line in text), ""]


def flags_page() -> str:
    """Return the page of the flags of `runner`."""
    from layerkit_runner.run_options import FLAGS, MODES

    lines = heading("Flags of runner", "=")
    lines += ["``runner --help all`` prints the same list. A flag of another mode is an error.", ""]
    lines += heading("Modes", "-")
    lines += [".. list-table::", "   :header-rows: 1", "", "   * - ``--mode``", "     - action"]
    for mode, text in MODES.items():
        lines += [f"   * - ``{mode}``", f"     - {escape(text)}"]
    lines += heading("Flags", "-")
    lines += [".. list-table::", "   :header-rows: 1", ""]
    lines += ["   * - flag", "     - default", "     - modes", "     - meaning"]
    for flag in FLAGS:
        default = "" if flag.default is None else f"``{flag.default}``"
        lines += [
            f"   * - ``--{flag.name}``",
            f"     - {default}",
            f"     - {', '.join(flag.modes) or 'all'}",
            f"     - {escape(flag.help)}",
        ]
    return "\n".join(lines).lstrip() + "\n"


def experiments_page() -> str:
    """Return the page of the named experiments, from the catalogue."""
    lines = heading("List of named experiments", "=")
    lines += ["``runner --list`` prints this list; :doc:`/experiments` explains it.", ""]
    groups: dict[str, list[str]] = {}
    rows = public_names.experiments()
    for path in rows:
        groups.setdefault(path.rpartition(".")[0], []).append(path)
    for module, paths in groups.items():
        lines += heading(f"``{module.partition('.')[2]}``", "-")
        elsewhere = ["   :no-index:"] if module in public_names.recipe_modules() else []
        lines += [f".. py:module:: {module}", *elsewhere, "", summary(module), ""]
        for path in paths:
            row = rows[path]
            lines += [f".. autoclass:: {path}", ""]
            number = row.get("num_params")
            facts = {"weights": f"{number:,}" if number else "—"}
            facts |= {key: str(row[key]) for key in ("mesh", "data") if row.get(key)}
            facts["tags"] = ", ".join(row.get("tags", ()))
            known = "; ".join(f"{key}: {text}" for key, text in facts.items() if text)
            lines += [f"   {escape(known)}", ""]
    return "\n".join(lines).lstrip() + "\n"


def escape(text: str) -> str:
    """Return a line of a docstring or of a help text as reStructuredText."""
    return "\n".join(convert(text.splitlines()))


def convert_docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Rewrite a docstring as reStructuredText, before Napoleon reads its sections."""
    lines[:] = convert(lines)
    if what in ("attribute", "property") and lines:
        lines[0] = f": {lines[0]}"  # Napoleon takes the words before the first colon for a type.


def convert(lines: list[str]) -> list[str]:
    """Return plain lines with Markdown's backticks and code blocks as reStructuredText.

    Code is indented by four spaces after a blank line. Backticks around a name become a reference
    and others a literal. Signs that would be markup are escaped.
    """
    blocks: list[list[str]] = [[]]
    is_code = False
    for number, line in enumerate(lines):
        starts = line.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        after_text = any(before.strip() for before in lines[:number])
        base = next((x for x in reversed(lines[:number]) if x.strip()), "")
        ends = bool(line.strip()) and not line.startswith("    ")
        if starts and after_text and not base.startswith(" ") and not is_code:
            blocks += [[".. code-block:: python", ""], [line]]
            is_code = True
        elif ends and is_code:
            blocks.append([line])
            is_code = False
        else:
            blocks[-1].append(line)
    result: list[str] = []
    is_code = False
    for block in blocks:
        if block[:1] == [".. code-block:: python"]:
            result += block
            is_code = True
        else:
            result += block if is_code else convert_text("\n".join(block)).split("\n")
            is_code = False
    return result


def convert_text(text: str) -> str:
    """Return text without code blocks as reStructuredText."""
    parts = re.split(r"(`+[^`]+`+)", text)
    for index, part in enumerate(parts):
        if index % 2:
            code = part.strip("`")
            is_name = re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", code) and re.search(r"[A-Z_.]", code)
            role = f":py:obj:`{code}`" if is_name else f"``{' '.join(code.split())}``"
            # The end of markup must not touch a word, nor its start.
            before = "\\ " if re.search(r"[\w\])]$", parts[index - 1]) else ""
            after = "\\ " if re.match(r"[\w(\[]", parts[index + 1]) else ""
            parts[index] = before + role + after
        else:
            # Napoleon reads `*names:` and `**kwargs:`, which begin entries of sections.
            part = re.sub(r"(?m)([|*])(?!\*?\w+: )", r"\\\1", part)
            parts[index] = re.sub(r"(?<=\w)_(?=\W|$)", r"\_", part)
    return "".join(parts)


def skip_member(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out members that every layer has."""
    return True if name in HIDDEN | OF_FLAX else None


def show_fields(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Return a signature with the class's own fields, their types and defaults."""
    if what != "class":
        return None
    if name.startswith("layerkit_experiments."):
        return "", ""
    fields = getattr(value, "__dataclass_fields__", {})
    own = [
        (field, text)
        for field, text in inspect.get_annotations(value).items()
        if field in fields and not field.startswith("_")
        if field not in HIDDEN and not (field in OF_FLAX and issubclass(value, nn.Module))
    ]
    if not fields:
        return None
    shown = ", ".join(f"{field}: {short(text)}{default_of(fields[field])}" for field, text in own)
    return f"(*, {shown})" if shown else "()", ""


def short(annotation: Any) -> str:
    """Return the text of an annotation, such as that of `Annotated[Any, Tokenizer]`: Tokenizer."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    result = re.fullmatch(r"Annotated\[Any, (.*)\]", text)
    return (result[1] if result else text).replace("~", "")


def default_of(field: dataclasses.Field) -> str:
    """Return ` = DEFAULT`, or nothing for a field without one."""
    value = field.default
    if value is dataclasses.MISSING:
        if field.default_factory is dataclasses.MISSING:
            return ""
        try:
            value = field.default_factory()
        except UserError:
            return " = …"  # a part that needs fields of its own
    return f" = {default_text(value)}"


def default_text(value: Any) -> str:
    """Return the text of a default: that of a template is the class that it makes."""
    from layerkit.config import is_config, target_of

    if is_config(value):
        return f"{target_of(value).__name__}.HParams"
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    if isinstance(value, (tuple, list)) and any(map(is_config, value)):
        return "(…)"
    text = repr(value)
    return text if len(text) <= 60 and "<" not in text and " object at " not in text else "…"
