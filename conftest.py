"""Configuration of all tests, which must run before JAX is imported.

Tests run on eight simulated CPU devices, so meshes and collectives need no accelerator.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.metadata
import importlib.util
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from packaging.version import Version

PACKAGES = ("layerkit", "layerkit_inputs", "layerkit_runner", "layerkit_experiments")
DEVICES = "--xla_force_host_platform_device_count"
# Compilation dominates the time of a test, so the compiled code need not be fast. Parallel code
# generation takes more CPU time in total.
QUICK_COMPILES = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# Without fusion emitters a layer compiles in less than half the time. jaxlib 0.11.1 removed the
# flag, and XLA ends the process for an unknown flag.
if Version(importlib.metadata.version("jaxlib")) < Version("0.11.1"):
    QUICK_COMPILES.append("--xla_cpu_use_fusion_emitters=false")

COLLECTIVES = [
    # XLA's concurrency-optimized scheduler lets each device start independent collectives in a
    # different order. Devices that wait in different collectives deadlock, as in pipelines.
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    # A collective that waits longer than this ends the process. XLA's default of 40 seconds is too
    # short on a busy machine.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
]

if "jax" in sys.modules:
    raise pytest.UsageError(
        "JAX was imported before conftest.py could request eight simulated devices. "
        "Find the plugin or PYTHONSTARTUP file that imports it."
    )
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    flags = [os.environ.get("XLA_FLAGS", ""), f"{DEVICES}=8", *QUICK_COMPILES, *COLLECTIVES]
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# NPROC is the size of XLA's thread pool. A collective with more waiting devices than threads never
# ends, and the process aborts.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Shells start background processes with SIGINT ignored, and nohup ignores SIGHUP. Child processes
# of the tests inherit ignored signals, and a bash script cannot trap them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# There is no deadline, because the first example compiles. `--hypothesis-profile=thorough` runs
# more examples; a test that sets a number keeps it.
hypothesis.settings.register_profile("ordinary", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=200)
hypothesis.settings.load_profile("ordinary")


def package_origins() -> dict[str, Path]:
    """Return the origin of each package of the project that this interpreter can import."""
    specs = {name: importlib.util.find_spec(name) for name in PACKAGES}
    return {name: Path(spec.origin) for name, spec in specs.items() if spec and spec.origin}


def pytest_configure(config: pytest.Config) -> None:
    """Fail if installed wheels are to be tested and a package comes from a source folder.

    `LAYERKIT_TEST_INSTALLED` is a comma-separated list of the packages that must be installed. No
    other package of the project may be importable.
    """
    expected = os.environ.get("LAYERKIT_TEST_INSTALLED")
    if expected is None:
        return
    installed = Path(sysconfig.get_path("purelib")).resolve()
    origins = package_origins()
    if set(origins) != set(expected.split(",")):
        raise pytest.UsageError(
            f"LAYERKIT_TEST_INSTALLED={expected}: expected the importable packages,"
            f" {','.join(origins)}"
        )
    for name, origin in origins.items():
        if installed not in origin.resolve().parents:
            raise pytest.UsageError(f"{name} comes from {origin}, not from a wheel in {installed}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector from reading all modules and tests again and again.

    It takes a tenth of the time otherwise.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Report the folders of the packages under test."""
    return [f"{name}: {origin.parent}" for name, origin in package_origins().items()]


MESSAGES = Path(__file__).parent / "integration_tests" / "error_messages.md"
# Python 3.13 appends this suggestion to its own message; earlier versions do not.
PYTHON_SUGGESTION = re.compile(
    r"(?P<message>\(\) got an unexpected keyword argument '\w+')\. Did you mean '\w+'\?"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites the recorded error messages."""
    parser.addoption(
        "--update-messages",
        action="store_true",
        help=f"rewrite the sections of {MESSAGES.name} of the tests that run; review them with git",
    )


@pytest.fixture
def raises(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a replacement of `pytest.raises` that checks an error's data.

    Keyword arguments are attributes of the error:

        with raises(ConfigError, field="input_dims", value=0):

    The first message of a test that has a section in `integration_tests/error_messages.md` is
    compared with it.
    """
    messages = _Messages(request)

    @contextlib.contextmanager
    def check(kind: type[Exception], **data: Any) -> Iterator[pytest.ExceptionInfo]:
        with pytest.raises(kind) as caught:
            yield caught
        result = {name: getattr(caught.value, name) for name in data}
        assert result == data, str(caught.value)
        messages.check(str(caught.value))

    return check


class _Messages:
    """The section of a test on the page of error messages, if it has one."""

    def __init__(self, request: pytest.FixtureRequest):
        self._heading = f"## {request.node.nodeid}\n\n"
        self._update = request.config.getoption("--update-messages")
        base = request.getfixturevalue("tmp_path_factory").getbasetemp()
        self._folder = re.compile(rf"{re.escape(str(base))}/\w+")
        self._is_first = True

    def check(self, message: str) -> None:
        """Compare the test's first message with its section, or rewrite the section."""
        if not self._is_first or self._heading not in MESSAGES.read_text():
            return
        self._is_first = False
        message = self._folder.sub("TMP", message)
        message = PYTHON_SUGGESTION.sub(r"\g<message>", message).rstrip("\n")
        with MESSAGES.open("r+") as file:  # several workers of pytest-xdist write to one file
            fcntl.flock(file, fcntl.LOCK_EX)
            before, heading, rest = file.read().partition(self._heading)
            recorded, end, after = rest.partition("\n\n## ")
            if self._update:
                file.seek(0)
                file.truncate()
                file.write(before + heading + message + ("\n" if not end else "") + end + after)
                return
        assert message == recorded.rstrip("\n"), (
            "The message differs from the one in integration_tests/error_messages.md. If the new"
            " wording is right, run this test with --update-messages."
        )
