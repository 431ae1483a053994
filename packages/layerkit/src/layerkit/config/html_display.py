"""HTML of configs, weights and tables, which notebooks show for `_repr_html_`.

All texts are escaped. Configs are shown without JAX.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layerkit.config.graphs import assigned_fields, field_names, target_of

_LONGEST = 200


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str | None = None
) -> str:
    """Return an HTML table.

    Args:
      columns: Headings.
      rows: Values of each row. Numbers are aligned to the right.
      caption: Text above the table; None for none.
    """
    head = "".join(f"<th>{text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    above = "" if caption is None else f"<caption>{text(caption)}</caption>"
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text(value: Any) -> str:
    """Return the escaped text of a value, shortened if it is long."""
    full = value if isinstance(value, str) else repr(value)
    return html.escape(full if len(full) <= _LONGEST else f"{full[:_LONGEST]}…")


def config_html(config: Any) -> str:
    """Return a foldable tree of a config: its assigned fields, then its defaults."""
    assigned, target = assigned_fields(config), target_of(config)
    names = [name for name in field_names(config) if name not in assigned]
    folded = ""
    if names:
        rows = _field_rows({name: getattr(config, name, None) for name in names})
        folded = f"<details><summary>{len(names)} defaults</summary>{rows}</details>"
    name = getattr(target, "__qualname__", repr(target))
    return (
        f"<details open><summary><b>{text(name)}</b></summary>"
        f"{_field_rows(assigned) if assigned else ''}{folded}</details>"
    )


def _field_rows(fields: Mapping[Any, Any]) -> str:
    rows = "".join(
        f'<tr><td style="vertical-align:top">{text(str(name))}</td>'
        f'<td style="text-align:left">{_value(value)}</td></tr>'
        for name, value in fields.items()
    )
    return f"<table>{rows}</table>"


def _value(value: Any) -> str:
    nested = getattr(value, "_repr_html_", None)
    if nested is not None and not isinstance(value, type):
        return nested() or text(value)
    if isinstance(value, (list, tuple)) and any(hasattr(item, "_repr_html_") for item in value):
        return "".join(map(_value, value))
    return text(value)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f'<td style="text-align:left">{text(value)}</td>'
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return f'<td style="text-align:right">{shown}</td>'
