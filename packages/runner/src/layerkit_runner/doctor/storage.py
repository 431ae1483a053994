"""The folder that a run writes to, and the one of compiled programs: tried with real bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from layerkit_runner.byte_sizes import size_text
from layerkit_runner.compilation_cache import cache_folder
from layerkit_runner.doctor.finding import Finding, Problem

_BLOCK = 1 << 20
_BLOCKS = 64
# A slow disk has told enough by then.
_SECONDS_OF_WRITING = 3.0
_STORE_BYTES = 8 << 20

_LITTLE_SPACE = 10e9
_NO_SPACE = 1e8
# File systems that are memory, and forgotten when the machine or container ends.
_IN_MEMORY = ("tmpfs", "ramfs")


def check_folder(options: Mapping[str, Any]) -> Finding:
    """Speed, space and abilities of the folder to write to; leaves nothing behind."""
    given = options.get("job_log_dir") or "."
    if "://" in given:
        return _check_store(given)
    folder = Path(given).expanduser().absolute()
    there = _nearest_existing(folder)
    where = str(folder) if there == folder else f"{folder} (not there yet, tried in {there})"
    if not there.is_dir():
        return _refused(where, f"{there} is a file.")
    try:
        trial = Path(tempfile.mkdtemp(prefix=".doctor_", dir=there))
    except OSError as error:
        return _refused(where, f"{error.strerror or error}.")
    try:
        return _try_folder(trial, where)
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _refused(where: str, why: str) -> Finding:
    problem = Problem(f"{where} cannot be written to: {why}", "Give another --job_log_dir=DIR.")
    return Finding([f"{where}: cannot be written to"], {"folder": where}, [problem])


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _try_folder(trial: Path, where: str) -> Finding:
    usage, kind = shutil.disk_usage(trial), file_system(trial)
    block = os.urandom(_BLOCK)
    try:
        written, write_seconds = _write(trial / "speed", block)
        read_seconds = _read(trial / "speed", block, written)
    except OSError as error:
        return _refused(where, f"{error.strerror or error}.")
    broken = [name for name, ability in _ABILITIES.items() if not _has(ability, trial)]
    speeds = {
        "write_bytes_per_second": written / write_seconds,
        "read_bytes_per_second": written / read_seconds,
    }
    write, read = (f"{size_text(speed)}/s" for speed in speeds.values())
    works = [name for name in _ABILITIES if name not in broken]
    lines = [
        f"{where}: {kind or 'file system unknown'}, {size_text(usage.free)} free of"
        f" {size_text(usage.total)}",
        f"writes {write} (with fsync), reads {read}; {', '.join(works) or 'nothing else'} work",
    ]
    values = {
        "folder": where,
        "file_system": kind,
        "free_bytes": usage.free,
        "works": works,
        "does_not_work": broken,
        **speeds,
    }
    return Finding(lines, values, list(_folder_problems(usage.free, kind, broken, where)))


def _folder_problems(
    free: int, kind: str | None, broken: list[str], where: str
) -> Iterator[Problem]:
    if free < _LITTLE_SPACE:
        yield Problem(
            f"{where}: only {size_text(free)} are free.",
            "A checkpoint takes three times the weights with Adam, and several are kept: see"
            " `--mode=inspect --inspect=parameters`, and free some space.",
            fails=free < _NO_SPACE,
        )
    for name in broken:
        yield Problem(
            f"{where}: {name} does not work there.",
            "Give a --job_log_dir on another file system, or in a store such as gs://bucket/run.",
        )
    if kind in _IN_MEMORY:
        yield Problem(
            f"{where} is in memory ({kind}) and is lost with this machine or container.",
            "Give a --job_log_dir on a disk for what should stay.",
            fails=False,
        )


def _write(path: Path, block: bytes) -> tuple[int, float]:
    """Writes the block again and again; returns the bytes and the seconds that it took."""
    began, written = time.perf_counter(), 0
    with open(path, "wb", buffering=0) as file:
        while written < _BLOCKS * _BLOCK and time.perf_counter() - began < _SECONDS_OF_WRITING:
            written += file.write(block)
        os.fsync(file.fileno())
    return written, time.perf_counter() - began


def _read(path: Path, block: bytes, size: int) -> float:
    """The seconds that reading takes; from the disk and not from memory where that can be asked.

    Raises:
      OSError: other bytes come back.
    """
    expected = hashlib.blake2b()
    for _ in range(size // _BLOCK):
        expected.update(block)
    found = hashlib.blake2b()
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, spent = time.perf_counter(), 0.0
        while data := file.read(_BLOCK):
            spent += time.perf_counter() - began
            found.update(data)
            began = time.perf_counter()
    if found.digest() != expected.digest():
        raise OSError("it gives back other bytes than were written")
    return max(spent, 1e-6)


def _rename(trial: Path) -> bool:
    """A file that takes another one's place, and a folder with what it holds."""
    (trial / "new").write_text("new")
    (trial / "old").write_text("old")
    (trial / "new").replace(trial / "old")
    (trial / "before").mkdir()
    (trial / "before" / "file").write_text("kept")
    (trial / "before").rename(trial / "after")
    kept = (trial / "after" / "file").read_text()
    return (trial / "old").read_text() == "new" and kept == "kept"


def _append(trial: Path) -> bool:
    for word in ("one ", "two"):
        with open(trial / "log", "a", encoding="utf-8") as file:
            file.write(word)
    return (trial / "log").read_text() == "one two"


def _fsync_folder(trial: Path) -> bool:
    descriptor = os.open(trial, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


_ABILITIES: dict[str, Callable[[Path], bool]] = {
    "rename": _rename,
    "append": _append,
    "fsync of folders": _fsync_folder,
}


def _has(ability: Callable[[Path], bool], trial: Path) -> bool:
    try:
        return ability(trial)
    except OSError:
        return False


def file_system(path: Path) -> str | None:
    """Its kind, such as `ext4`, `nfs4` or `tmpfs`; None where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    resolved = str(path.resolve())
    holding = [
        (len(mount[1]), mount[2])
        for mount in mounts
        if resolved == mount[1] or resolved.startswith(mount[1].rstrip("/") + "/")
    ]
    # Of mounts over each other, the last one counts.
    return max(reversed(holding), key=lambda each: each[0])[1] if holding else None


def _check_store(given: str) -> Finding:
    """A store such as gs://bucket/run, which needs no rename and no append."""
    from etils import epath

    content = os.urandom(_STORE_BYTES)
    try:
        path = epath.Path(given) / f".doctor_{os.getpid()}"
        began = time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written_at = time.perf_counter()
        came_back = path.read_bytes()
        read_at = time.perf_counter()
        path.unlink()
    except Exception as error:  # each kind of store has its own
        first = (str(error).strip().splitlines() or [""])[0]
        problem = Problem(
            f"{given}: {type(error).__name__}: {first}",
            "Look whether the bucket exists and this machine may write to it.",
        )
        return Finding([f"{given}: does not work"], {"folder": given}, [problem])
    if came_back != content:
        problem = Problem(f"{given} gives back other bytes than were written.", "Use another one.")
        return Finding([f"{given}: does not work"], {"folder": given}, [problem])
    speeds = {
        "write_bytes_per_second": len(content) / (written_at - began),
        "read_bytes_per_second": len(content) / (read_at - written_at),
    }
    write, read = (f"{size_text(speed)}/s" for speed in speeds.values())
    line = f"{given}: writes {write}, reads {read} ({size_text(len(content))} in one piece)"
    return Finding([line], {"folder": given, **speeds})


def check_compile_cache(options: Mapping[str, Any]) -> Finding:
    """Whether compiled programs are kept between runs, and how many there are."""
    folder = cache_folder(options.get("jax_compilation_cache"), os.environ)
    if folder is None:
        return Finding(["off: every start compiles anew"], {"folder": None})
    if "://" in folder:
        return Finding([f"{folder}, in a store"], {"folder": folder})
    path = Path(folder)
    there = _nearest_existing(path)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = Problem(
            f"{folder} cannot be written to, so every start compiles anew.",
            "Give another --jax_compilation_cache=DIR.",
            fails=False,
        )
        return Finding([f"{folder}: cannot be written to"], {"folder": folder}, [problem])
    if there != path:
        return Finding([f"{folder}: empty so far"], {"folder": folder, "programs": 0, "bytes": 0})
    entries = [entry.stat().st_size for entry in os.scandir(path) if entry.name.endswith("-cache")]
    values = {"folder": folder, "programs": len(entries), "bytes": sum(entries)}
    return Finding([f"{folder}: {len(entries)} programs, {size_text(sum(entries))}"], values)
