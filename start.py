"""Set up this project and run one of its commands: `python3 start.py train`, or `test`.

The script needs Python 3.11 or later with pip. It does not change the system's Python: nox is
installed in `.start/`, and its environments are in `.nox/`. Delete both folders to undo everything.

The first run takes three steps. `pip install --target`, which also works where global installs are
disabled (PEP 668), downloads virtualenv. virtualenv, which unlike venv needs no ensurepip, creates
an environment. nox is installed there.
"""

import ast
import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
START = ROOT / ".start"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_PYTHON = (3, 11)

# Commands that have another name than their nox session.
NAMES = {
    "tests": "test",
    "layerkit_alone": "alone",
    "pax_reference": "pax",
}


def commands():
    """Return the session of noxfile.py and its purpose, by the name of the command."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        NAMES.get(function.name, function.name): (function.name, ast.get_docstring(function))
        for function in functions
        if any(ast.unparse(one).startswith("nox.session") for one in function.decorator_list)
    }


def main(arguments):
    """Run the command that `arguments` name, with the remaining arguments."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            "This project needs Python {}.{} or later; {} is Python {}.{}.".format(
                *OLDEST_PYTHON, sys.executable, *sys.version_info
            )
        )
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    command, *rest = arguments
    if command not in commands():
        near = difflib.get_close_matches(command, commands(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"Unknown command {command!r}.{hint}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    session, _ = commands()[command]
    nox = [str(nox_python()), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    sys.stdout.flush()
    # nox replaces this process, so that it receives Ctrl-C and its exit code is returned.
    os.execv(nox[0], [*nox, "--session", session, "--", *rest])


def usage():
    """Return the usage text, with a line per command."""
    lines = [f"  {name:12} {purpose}" for name, (_, purpose) in commands().items()]
    return "\n".join(["Usage: python3 start.py COMMAND [ARGUMENT ...]", "", *lines])


def nox_python():
    """Return the Python of the environment with nox; create that environment if it is missing."""
    environment = START / "nox-python{}.{}".format(*sys.version_info)
    python = environment / "bin" / "python"
    complete = environment / "complete"
    pins = CONSTRAINTS.read_text()
    if complete.is_file() and complete.read_text() == pins and python.exists():
        return python

    print(f"Setting up nox in {environment} (once)", flush=True)
    tools = START / "virtualenv"
    shutil.rmtree(environment, ignore_errors=True)
    shutil.rmtree(tools, ignore_errors=True)
    install = ["-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    run([sys.executable, *install, "--target", str(tools), "virtualenv"])
    run(
        [sys.executable, "-m", "virtualenv", "--quiet", "--no-periodic-update", str(environment)],
        env=dict(os.environ, PYTHONPATH=str(tools)),
    )
    run([str(python), *install, "nox"])
    shutil.rmtree(tools)
    complete.write_text(pins)
    return python


def run(command, env=None):
    """Run one step of the set-up; if it fails, exit with its code."""
    code = subprocess.call(command, env=env)
    if code:
        print(f"This step of the set-up failed: {' '.join(command)}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
