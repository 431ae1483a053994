"""Set up this project and run one of its commands: `python3 start.py train`, or `test`.

The script needs Python 3.11 or later with pip. It does not change the system's Python: nox is
installed in `.start/`, and its environments are in `.nox/`. Delete both folders to undo everything.

The first run takes three steps. `pip install --target`, which also works where global installs are
disabled (PEP 668), downloads virtualenv. virtualenv, which unlike venv needs no ensurepip, creates
an environment. nox is installed there.
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

# The nox session and the purpose of each command.
COMMANDS = {
    "train": ("train", "train a small language model on text of this machine; downloads no data"),
    "test": ("tests", "build the four packages, install them and run their tests"),
    "slow": ("slow", "run the tests that `test` leaves out: many kills, more cases of each kind"),
    "one_device": ("one_device", "test models and decoding on one device instead of eight"),
    "meshes": ("meshes", "train a model on all 56 meshes of eight simulated devices"),
    "chaos": ("chaos", "kill a run fifty times under each partitioner"),
    "experiments": ("experiments", "train a reduced form of every named experiment"),
    "plans": ("plans", "plan every named experiment on its target devices"),
    "compilers": ("compilers", "compile kernels and plans for TPUs and GPUs, without the devices"),
    "gpu": ("gpu", "compare kernels on an NVIDIA GPU with float32, and measure their speed"),
    "parity": ("parity", "compare with PyTorch and transformers; prints a table of errors"),
    "published": ("published", "chat with, score and tune a published model as transformers does"),
    "readers": ("readers", "test the readers that need TensorFlow: SeqIO, TFDS folders and Lingvo"),
    "notebooks": ("notebooks", "run the notebooks of docs/notebooks; prints the time of each"),
    "lingvo": ("lingvo_native", "test Lingvo's native ops, with a newer C library where needed"),
    "lint": ("lint", "check formatting, lint rules, prose, types and imports between packages"),
    "pax": ("pax_reference", "record weights and runs of paxml 1.4.0; needs Python 3.10"),
    "alone": ("layerkit_alone", "test the layerkit package in an empty environment"),
    "newest": ("newest", "test with the newest versions allowed, on each Python installed"),
    "lowest": ("lowest", "test with the lowest versions allowed, on Python 3.11"),
    "bounds": ("bounds", "run `lowest`, then `newest` on each Python installed"),
    "docs": ("docs", "build the documentation site, check it and open it"),
    "release": ("release", "build wheels and sdists of the four packages, and check them"),
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
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"Unknown command {command!r}.{hint}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    session, _ = COMMANDS[command]
    nox = [str(nox_python()), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    sys.stdout.flush()
    # nox replaces this process, so that it receives Ctrl-C and its exit code is returned.
    os.execv(nox[0], [*nox, "--session", session, "--", *rest])


def usage():
    """Return the usage text, with a line per command."""
    lines = [f"  {name:12} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["Usage: python3 start.py COMMAND [ARGUMENT ...]", "", *lines])


def nox_python():
    """Return the Python of the environment with nox; create that environment if it is missing."""
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
    """Run one step of the set-up; if it fails, exit with its code."""
    code = subprocess.call(command, env=env)
    if code:
        print(f"This step of the set-up failed: {' '.join(command)}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
