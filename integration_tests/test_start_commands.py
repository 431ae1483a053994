"""start.py, noxfile.py and CONTRIBUTING.md agree on the commands of the repository."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `start\.py (\w+)` \| `(\w+)` \|", re.MULTILINE)


def start_commands() -> dict[str, str]:
    """Session by command, of start.py."""
    commands = runpy.run_path(str(ROOT / "start.py"))["COMMANDS"]
    return {command: session for command, (session, _) in commands.items()}


def test_every_nox_session_has_a_command():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    decorated = {f.name: [ast.unparse(one) for one in f.decorator_list] for f in functions}
    sessions = [
        name for name, by in decorated.items() if any(d.startswith("nox.session") for d in by)
    ]
    assert sorted(start_commands().values()) == sorted(sessions)


def test_contributing_lists_every_command_with_its_session():
    assert dict(ROW.findall((ROOT / "CONTRIBUTING.md").read_text())) == start_commands()
