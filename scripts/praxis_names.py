"""List the public names of Praxis that docs/coming_from_pax.md does not mention.

It reads the sources of Praxis, writes their public names by module, and fails if one has no row. It
imports neither Praxis nor this project: `pip install --no-deps praxis==1.4.0` is enough.

    python scripts/praxis_names.py integration_tests/praxis_names.json
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/coming_from_pax.md"


def read_names(package: Path) -> dict[str, list[str]]:
    """Return the public classes and functions by module, such as `layers.linears`."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        body = ast.parse(path.read_text()).body
        defined = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        public = sorted(name for name in defined if not name.startswith("_"))
        if public and not re.search(r"^test_|_test$", path.stem):
            names[".".join(path.relative_to(package).with_suffix("").parts)] = public
    return names


def find_undocumented(names: dict[str, list[str]], page: str) -> list[str]:
    """Return `module.name` of the names that no first column of a table of `page` has in code.

    For a function, which begins with a small letter, the end of the name of its module is enough,
    such as `quantization.utils`.
    """
    code = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (.*?) \| ", page, re.M)))
    words = {word for text in code for word in re.findall(r"[\w.]+", text)}
    rows = {word.rpartition(".")[2] for word in words} | {word.split(".")[0] for word in words}
    missing = []
    for module, public in names.items():
        parts = module.split(".")
        has_row = any(".".join(parts[first:]) in words for first in range(len(parts)))
        missing += [
            f"{module}.{name}"
            for name in public
            if name not in rows and not (has_row and name[0].islower())
        ]
    return missing


if __name__ == "__main__":
    SPEC = importlib.util.find_spec("praxis")
    NAMES = read_names(Path(SPEC.origin).parent)
    LINES = ",\n".join(f"{json.dumps(module)}: {json.dumps(NAMES[module])}" for module in NAMES)
    Path(sys.argv[1]).write_text(f"{{\n{LINES}\n}}\n")
    sys.exit("\n".join(find_undocumented(NAMES, PAGE.read_text())) or None)
