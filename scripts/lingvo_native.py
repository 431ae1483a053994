"""Run the tests of Lingvo's native ops, also on a system with an older C library.

    python scripts/lingvo_native.py [arguments of pytest]

Lingvo's native ops require glibc 2.38. On an older Debian, `apt-get` downloads the C library of a
newer release into a temporary folder, from the mirror of this machine; nothing is installed. The
dynamic loader of that folder then starts Python with the newer library. The interpreter that runs
this script needs the packages of `install_lingvo.py`, pytest and hypothesis.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "packages/inputs/tests/lingvo"
NEEDED = (2, 38)
SUITE = "trixie"  # Debian 13, with glibc 2.41
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1")
# This check runs first, because the tests are skipped if the ops do not load.
OPS_LOAD = """
import sys
from layerkit_inputs.lingvo import preflight
problem = preflight.native_ops_problem()
sys.exit(problem and f"Lingvo's native ops: {problem}")
"""


def main(arguments: Sequence[str]) -> int:
    """Return the exit code of pytest, or that of the first step that failed."""
    with tempfile.TemporaryDirectory(prefix="lingvo_native_") as folder:
        if glibc_version() >= NEEDED:
            python, environment = [sys.executable], dict(os.environ)
        else:
            python, environment = interpreter_on(fetch_c_library(Path(folder)))
        checks = [["-c", OPS_LOAD], ["-m", "pytest", str(TESTS / "test_native.py"), *arguments]]
        for check in checks:
            code = subprocess.run(
                [*python, *check], cwd=ROOT, env=environment, check=False
            ).returncode
            if code:
                return code
    return 0


def glibc_version() -> tuple[int, ...]:
    """Return the version of the C library of this interpreter."""
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", os.confstr("CS_GNU_LIBC_VERSION") or "")
    if found is None:
        sys.exit("Lingvo's native ops require Linux with glibc.")
    return int(found[1]), int(found[2])


def fetch_c_library(folder: Path) -> Path:
    """Download and unpack the packages; return the root folder of their files."""
    state, root = folder / "apt", folder / "root"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True)
    root.mkdir()
    sources = state / "newer.sources"
    sources.write_text(source_of(SUITE))
    # apt keeps its whole state in the folder, so the system's state does not change.
    options = {
        "Dir::State": state / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": state / "cache",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "--quiet"]
    for name, value in options.items():
        apt += ["-o", f"{name}={value}"]
    subprocess.run([*apt, "update"], cwd=state, check=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=state, check=True)
    for package in state.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


def source_of(suite: str) -> str:
    """Return an apt source for another Debian suite on the mirror of this machine."""
    policy = subprocess.run(["apt-cache", "policy"], capture_output=True, text=True, check=True)
    # Line format: priority, mirror address, `bookworm/main`, architecture, `Packages`.
    mirrors = re.findall(r"^ *\d+ (\S+:/\S*) [\w-]+/main ", policy.stdout, flags=re.MULTILINE)
    debian = [mirror for mirror in mirrors if mirror.rstrip("/").endswith("/debian")]
    if not debian:
        sys.exit(
            "apt on this machine has no Debian source. Use a machine with glibc 2.38 or newer, "
            "such as Ubuntu 24.04 or Debian 13."
        )
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    return (
        f"Types: deb\nURIs: {debian[0]}\nSuites: {suite}\nComponents: main\nSigned-By: {keyring}\n"
    )


def interpreter_on(root: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment that run this Python with the C library of `root`."""
    triplet = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    newer = root / "usr/lib" / triplet
    libraries = [
        newer,
        sysconfig.get_config_var("LIBDIR"),
        f"/lib/{triplet}",
        f"/usr/lib/{triplet}",
    ]
    # Python finds a virtual environment by the name of its executable, which the loader hides.
    python = Path(sys.executable).resolve()
    environment = dict(os.environ)
    paths = [*sorted(ROOT.glob("packages/*/src")), sysconfig.get_path("purelib")]
    before = [environment["PYTHONPATH"]] if "PYTHONPATH" in environment else []
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *before])
    loader = next(newer.glob("ld-linux-*.so.*"))
    command = [str(loader), "--library-path", ":".join(map(str, libraries)), str(python)]
    return command, environment


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
