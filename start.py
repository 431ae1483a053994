"""Sets this project up and runs one of its commands: `python3 start.py train`, or `test`.

All it needs is Python 3.11 or later with pip. It never touches the system's Python: nox goes into
`.start/`, the environments that nox makes go into `.nox/`. Deleting both folders undoes everything.

The way there takes three steps, once. `pip install --target` is allowed where the system's Python
refuses global installs (PEP 668); it fetches virtualenv, which, unlike venv, needs no ensurepip;
virtualenv makes the environment in which nox lives.
"""

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

# Command: the nox session that does it, and what it is for.
COMMANDS = {
    "train": ("train", "train a small language model on text of this machine; no download of data"),
    "test": ("tests", "build the four packages, install them and run their tests"),
    "slow": ("slow", "the tests that `test` leaves out: many kills, more cases of each kind"),
    "meshes": ("meshes", "one model on all 56 meshes of eight simulated devices"),
    "chaos": ("chaos", "a run that is killed fifty times, under each partitioner"),
    "experiments": ("experiments", "train a reduced form of every named experiment"),
    "plans": ("plans", "plan every named experiment on the devices that it is made for"),
    "compilers": ("compilers", "test what is compiled for TPUs and GPUs that are not here"),
    "parity": ("parity", "compare with PyTorch and transformers; prints a table of errors"),
    "readers": ("readers", "test the readers on TensorFlow: SeqIO, TFDS folders and Lingvo"),
    "lingvo": ("lingvo_native", "test Lingvo's native ops, on a newer C library where needed"),
    "lint": ("lint", "check formatting, lint rules, types and the borders between the packages"),
    "alone": ("layerkit_alone", "test the layerkit package in an environment of its own"),
    "newest": ("newest", "test with the newest versions allowed, on each Python installed"),
    "lowest": ("lowest", "test with the lowest versions allowed, on Python 3.11"),
}


def main(arguments):
    """Runs the command that `arguments` name; what follows it goes to the command itself."""
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
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"There is no command {command!r}.{hint}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    session, _ = COMMANDS[command]
    nox = [str(nox_python()), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    sys.stdout.flush()
    # nox takes the place of this process: Ctrl-C and the exit code stay between it and the user.
    os.execv(nox[0], [*nox, "--session", session, "--", *rest])


def usage():
    """The commands, a line each."""
    lines = [f"  {name:12} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["Usage: python3 start.py COMMAND [ARGUMENT ...]", "", *lines])


def nox_python():
    """The Python of the environment that holds nox; makes that environment where it is missing."""
    environment = START / "nox-python{}.{}".format(*sys.version_info)
    python = environment / "bin" / "python"
    complete = environment / "complete"
    wanted = CONSTRAINTS.read_text()
    if complete.is_file() and complete.read_text() == wanted and python.exists():
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
    complete.write_text(wanted)
    return python


def run(command, env=None):
    """Runs one step of the set-up, and ends here with its exit code where it fails."""
    code = subprocess.call(command, env=env)
    if code:
        print(f"This step of the set-up failed: {' '.join(command)}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
