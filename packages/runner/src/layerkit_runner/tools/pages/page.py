"""Renders the HTML pages of the tools.

A page is one file that loads nothing: style, scripts and data are inside, and its
Content-Security-Policy forbids everything else. Templates lie beside the tools that fill them and
extend `pages/base.html.jinja`.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import absolute, atomic_write
from layerkit_runner.files.text import seconds_text, size_text

if TYPE_CHECKING:
    import jinja2
    from etils import epath


def render_page(template: str, *, title: str, data: Any = None, **context: Any) -> str:
    """Return a page as one HTML text.

    Args:
      template: Path of the template below the folder `tools`, such as `report/page.html.jinja`.
      title: Title of the page, as plain text.
      data: Values of JSON, which `pages/charts.js` describes and draws; None for no curves.
        Numbers must be finite.
      **context: Further names that the template uses.

    Raises:
      jinja2.UndefinedError: The template uses a name that `context` lacks.
      ValueError: A number of `data` is not finite.
    """
    page = _templates().get_template(template).render(title=title, data=data, **context)
    return page.encode(
        errors="backslashreplace"
    ).decode()  # A path may hold bytes that are no text.


def render_drawing(macro: str, *arguments: Any) -> str:
    """Return what a macro of `pages/drawings.html.jinja` draws, as HTML that needs no style."""
    module = _templates().get_template("pages/drawings.html.jinja").module
    return str(getattr(module, macro)(*arguments))


def write_page(file: os.PathLike[str] | str, page: str) -> epath.Path:
    """Replace a local or remote file by a page at once, and return its absolute path.

    Raises:
      UsageError: The file, of the flag `--html`, cannot be written.
    """
    path = absolute(file)
    try:
        atomic_write(path, page)
    except OSError as error:
        expected = f"a file that can be written: {error.strerror or error}"
        raise UsageError(field="--html", value=os.fspath(file), expected=expected) from error
    return path


@functools.cache
def _templates() -> jinja2.Environment:
    """Return the templates of all tools."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("layerkit_runner.tools", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"size": size_text, "seconds": seconds_text}
    return environment
