"""Sphinx extension that highlights the flags of commands, inside which lines do not break."""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.lexer import bygroups, inherit
from pygments.lexers.shell import BashLexer
from pygments.token import Name, Operator, Text
from sphinx.application import Sphinx


class CommandLexer(BashLexer):
    """Bash in which `--flag=value` is a flag, an operator and a text."""

    tokens: ClassVar = {
        "root": [
            (
                r"(?<=\s)(--?[A-Za-z][\w.]*)(=?)([^\s\"'$\\\\]*)",
                bygroups(Name.Attribute, Operator, Text),
            ),
            inherit,
        ]
    }


def setup(app: Sphinx) -> dict[str, Any]:
    """Replace the lexer of commands."""
    for name in ("bash", "sh"):
        app.add_lexer(name, CommandLexer)
    return {"parallel_read_safe": True}
