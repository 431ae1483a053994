"""Detects files of a checkpoint that changed after they were written, which Orbax does not notice.

Every step has a manifest, `integrity/manifest.json`: `{"digest", "manifest": {"version", "step",
"files"}}`, with the size and XXH3 digest of every file and the SHA-256 digest of the manifest.
Manifests of version 1 have SHA-256 for the files, and at first had no step. XXH3 takes a seventh of
the time of SHA-256; it does not protect against forgery.

No process reads the whole step. Before the commit, each process hashes the files that it wrote
(`write_share`), and process 0 merges these shares and hashes the other, small files (`write`). At a
restore, each process verifies a share of the files (`verify_together`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import jax
import xxhash
from etils import epath

from layerkit_runner.checkpointing import folders
from layerkit_runner.checkpointing.errors import DamagedCheckpointError, later_version
from layerkit_runner.distributed.cluster import gather_results
from layerkit_runner.files.atomic_write import irregular, is_remote, open_read, read_regular

MANIFEST_VERSION = 2
MANIFEST_FOLDER = "integrity"
MANIFEST_FILE = "manifest.json"

# File of each process that hashed files, in the folder of the unfinished step.
_SHARE_NAME = "hashed_by_process_{:05d}.json"
# Orbax writes these at the commit, after the manifest; they hold no state.
_COMMIT_RECORD = "_CHECKPOINT_METADATA"
_COMMIT_FILES = frozenset({_COMMIT_RECORD, folders.COMMIT_FILE})
_REMOTE_READ_BYTES = 8 * 2**20
_READ_BYTES = 2**18  # stays in a core's cache
_READERS = 16  # hashes release the interpreter lock; also hides the latency of remote stores
# Name of the digest in entries that are written; those of version 1 have SHA-256.
_HASH = "xxh3_128"
_HASHES: Mapping[str, Callable[[], Any]] = {_HASH: xxhash.xxh3_128, "sha256": hashlib.sha256}
_FILES_IN_MESSAGE = 8

_T = TypeVar("_T")


Entry = Mapping[str, Any]
"""Size and digest of a file by name of the hash function: `{"size": 2, "xxh3_128": "99aa…"}`."""


class Hasher:
    """The size and digest of bytes that are added one after the other."""

    def __init__(self, name: str = _HASH) -> None:
        """Start without bytes."""
        self._name, self._hash, self._size = name, _HASHES[name](), 0

    def add(self, content: bytes | memoryview) -> None:
        """Add bytes."""
        self._hash.update(content)
        self._size += len(content)

    def entry(self) -> Entry:
        """Return the entry of a file that holds these bytes."""
        return {"size": self._size, self._name: self._hash.hexdigest()}


class FindingKind(enum.StrEnum):
    """Kind of a difference between a file and the manifest."""

    MISSING = "missing"
    SHORT = "short"
    ALTERED = "altered"
    UNLISTED = "unlisted"
    UNREADABLE = "unreadable"
    OTHER_STEP = "of another step"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One file or folder, by its path in the step, that is not as the manifest says."""

    file: str
    kind: str
    expected: Entry | None = None
    actual: Entry | None = None
    reason: str | None = None

    @property
    def is_damage(self) -> bool:
        """Return whether the step cannot be restored. An unlisted file is never read."""
        return self.kind != FindingKind.UNLISTED

    def __str__(self) -> str:
        """Return the finding as one line."""
        expected = self.expected and f"expected {_text(self.expected)}"
        actual = self.actual and f"found {_text(self.actual)}"
        described = (f"{self.file}: {self.kind}", expected, actual, self.reason)
        return ", ".join(part for part in described if part)


def _text(entry: Entry) -> str:
    name, digest = next(((name, entry[name]) for name in _HASHES if name in entry), ("", ""))
    return f"{entry['size']} bytes" + (f" with {name} {digest[:12]}" if name else "")


def hash_folder(directory: epath.Path, *, name: str) -> dict[str, Entry]:
    """Return the entries of all files in a folder, which is `name` relative to the step."""
    if not directory.is_dir():
        return {}
    paths = {f"{name}/{file}": directory / file for file in _walk(directory)}
    return _map_names(paths, lambda file: _hash_file(paths[file]))


def write_share(step_directory: epath.Path, files: Mapping[str, Entry], *, process: int) -> None:
    """Write the entries that a process hashed, by path relative to the step, for `write`."""
    (step_directory / _SHARE_NAME.format(process)).write_text(json.dumps(files))


def write(step_directory: epath.Path, *, num_shares: int = 1) -> dict[str, Entry]:
    """Write the manifest and return its files; hash only files that no process has hashed.

    Args:
      step_directory: The step, complete but not yet committed.
      num_shares: Number of processes that may have called `write_share`.
    """
    shares = [_SHARE_NAME.format(process) for process in range(num_shares)]

    def read(share: str) -> dict[str, Any] | None:
        try:
            return json.loads((step_directory / share).read_text())
        except FileNotFoundError:
            return None  # the process wrote no array, or its files are hashed here

    hashed = {
        name: entry for share in _map_names(shares, read).values() for name, entry in share.items()
    }
    names = set(_walk(step_directory, skip=(MANIFEST_FOLDER, *shares)))
    for lost in sorted(hashed.keys() - names):
        raise FileNotFoundError(f"{step_directory / lost} no longer exists")
    files = _map_names(names, lambda name: hashed.get(name) or _hash_file(step_directory / name))
    step = folders.step_in_name(step_directory)
    body = {"version": MANIFEST_VERSION, **({} if step is None else {"step": step}), "files": files}
    document = {"digest": _digest(body), "manifest": body}
    (step_directory / MANIFEST_FOLDER).mkdir(exist_ok=True)
    (step_directory / MANIFEST_FOLDER / MANIFEST_FILE).write_text(json.dumps(document, indent=1))
    for share in shares:
        (step_directory / share).unlink(missing_ok=True)
    return files


def find_irregular(step_directory: epath.Path) -> tuple[Finding, ...]:
    """Return the files of a local step that are neither regular files nor links to such files."""
    if is_remote(step_directory):
        return ()
    findings: list[Finding | None] = []
    with contextlib.suppress(OSError):  # reported by the verification
        for path in step_directory.iterdir():
            findings += (_irregular(step_directory, name) for name in _files_under(path, path.name))
    return tuple(finding for finding in findings if finding is not None)


def irregular_commit_file(step_directory: epath.Path) -> Finding | None:
    """Return the finding of a commit record that is not a regular file."""
    return None if is_remote(step_directory) else _irregular(step_directory, _COMMIT_RECORD)


def _irregular(step_directory: epath.Path, name: str) -> Finding | None:
    with contextlib.suppress(FileNotFoundError):
        if (kind := irregular(step_directory / name)) is not None:
            reason = f"it is {kind}, expected a regular file"
            return Finding(name, FindingKind.UNREADABLE, reason=reason)
    return None


def verify_own(step_directory: epath.Path) -> tuple[Finding, ...]:
    """Verify the share of this process."""
    return verify(step_directory, share=jax.process_index(), num_shares=jax.process_count())


def merge(verify_share: Callable[[], Iterable[Finding]]) -> tuple[Finding, ...]:
    """Return the findings of all processes by file name; all processes have to call it."""
    shares = gather_results(lambda: [dataclasses.asdict(finding) for finding in verify_share()])
    by_file = {fields["file"]: Finding(**fields) for share in shares for fields in share}
    return tuple(by_file[file] for file in sorted(by_file))


def verify_together(step_directory: epath.Path) -> tuple[Finding, ...]:
    """Verify a step, each process a share of it; return the findings of all processes."""
    return merge(lambda: verify_own(step_directory))


def verify(
    step_directory: epath.Path, *, share: int = 0, num_shares: int = 1
) -> tuple[Finding, ...]:
    """Read a share of the files of a committed step and return the findings, by file name.

    Raises:
      LayoutVersionError: A later version of this package wrote the manifest.
    """
    manifest = _read_manifest(step_directory)
    if isinstance(manifest, Finding):
        return (manifest,)
    findings = []
    if share == 0:
        try:
            present = set(_walk(step_directory, skip=(MANIFEST_FOLDER,)))
        except OSError as error:
            return (_unreadable(".", error),)
        findings = [Finding(name, FindingKind.UNLISTED) for name in present - manifest.keys()]

    def find(name: str) -> Finding | None:
        expected = manifest[name]
        hash_name = next((name for name in _HASHES if name in expected), _HASH)
        try:
            return _compare(name, expected, _hash_file(step_directory / name, hash_name))
        except OSError as error:
            return _unreadable(name, error)

    by_size = sorted(manifest, key=lambda name: (-manifest[name]["size"], name))
    findings += _map_names(by_size[share::num_shares], find).values()
    return tuple(sorted(findings, key=lambda finding: finding.file))


def compare_sizes(step_directory: epath.Path) -> tuple[Finding, ...]:
    """Return the findings of `verify` that need no digests: truncated and missing files."""
    manifest = _read_manifest(step_directory)
    if isinstance(manifest, Finding):
        return (manifest,)
    try:
        sizes = file_sizes(step_directory)
    except OSError as error:
        return (_unreadable(".", error),)
    findings = (
        _compare(name, entry, {"size": sizes[name]} if name in sizes else None)
        for name, entry in sorted(manifest.items())
        if sizes.get(name) != entry["size"]
    )
    return tuple(finding for finding in findings if finding is not None)


def require_sound(step_directory: epath.Path, findings: Sequence[Finding]) -> None:
    """Raise DamagedCheckpointError, which lists the damage of a step, if there is any."""
    if damage := [str(finding) for finding in findings if finding.is_damage]:
        title = f"The checkpoint {step_directory} is damaged:"
        raise DamagedCheckpointError("\n  ".join([title, *damage]))


def file_sizes(step_directory: epath.Path) -> dict[str, int]:
    """Return the bytes of every file of a step, by path relative to it, in order."""
    # epath's own stat needs a user database for local files.
    return {
        name: path.stat().length if is_remote(path) else os.stat(path).st_size
        for child in sorted(step_directory.iterdir())
        for name in sorted(_files_under(child, child.name))
        for path in [step_directory / name]
    }


def step_digest(step_directory: epath.Path) -> str | None:
    """Return the digest of the manifest, if readable, which differs between two saves."""
    try:
        return json.loads(read_regular(step_directory / MANIFEST_FOLDER / MANIFEST_FILE))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage_message(
    step: int, findings: Sequence[Finding], *, directory: epath.PathLike, used_instead: int | None
) -> str:
    """Return the message about a damaged step: its damaged files and the lost training steps."""
    damage = [f"  {finding}" for finding in findings if finding.is_damage]
    if (more := len(damage) - _FILES_IN_MESSAGE) > 0:
        damage[_FILES_IN_MESSAGE:] = [f"  and {more} more files"]
    head = f"CHECKPOINT DAMAGED: step {step} in {directory}"
    return "\n".join([head, *damage, lost_text(step, used_instead)])


def lost_text(step: int, used_instead: int | None) -> str:
    """Return the line about the step that is used instead of another, and the work lost."""
    count = step - (used_instead or 0)
    instead = "No intact checkpoint is left"
    if used_instead is not None:
        instead = f"Step {used_instead} is used instead"
    return f"  {instead}; work lost: {count} step{'' if count == 1 else 's'}."


def _compare(name: str, expected: Entry, actual: Entry | None) -> Finding | None:
    if actual is None:
        return Finding(name, FindingKind.MISSING, expected)
    if actual == expected:
        return None
    kind = FindingKind.SHORT if actual["size"] < expected["size"] else FindingKind.ALTERED
    return Finding(name, kind, expected, actual)


def _read_manifest(step_directory: epath.Path) -> dict[str, Entry] | Finding:
    """Return the entries of the manifest, or the finding that makes it unusable."""
    name = f"{MANIFEST_FOLDER}/{MANIFEST_FILE}"
    try:
        text = read_regular(step_directory / MANIFEST_FOLDER / MANIFEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return Finding(name, FindingKind.MISSING)
    except OSError as error:
        return _unreadable(name, error)
    hasher = Hasher()
    hasher.add(text)
    altered = Finding(name, FindingKind.ALTERED, actual=hasher.entry())
    try:
        document = json.loads(text)
        body = document["manifest"]
        files = body["files"]
        sizes = [body["version"], *(entry["size"] for entry in files.values())]
        if document["digest"] != _digest(body) or not all(isinstance(n, int) for n in sizes):
            return altered
    except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, or of another structure
        return altered
    if body["version"] > MANIFEST_VERSION:
        field = "version of the manifest"
        raise later_version(step_directory, field, body["version"], MANIFEST_VERSION)
    saved, named = body.get("step"), folders.step_in_name(step_directory)
    if saved is not None and named not in (saved, None):
        reason = f"the folder is named step {named}, and step {saved} was saved in it"
        return Finding(name, FindingKind.OTHER_STEP, reason=reason)
    return files


def _unreadable(name: str, error: OSError) -> Finding:
    return Finding(name, FindingKind.UNREADABLE, reason=error.strerror or str(error))


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _map_names(names: Iterable[str], find: Callable[[str], _T | None]) -> dict[str, _T]:
    """Call a function for each name in threads; leave out names for which it returns None."""
    names = sorted(names)
    with futures.ThreadPoolExecutor(_READERS) as readers:
        results = zip(names, readers.map(find, names), strict=True)
        return {name: result for name, result in results if result is not None}


def _hash_file(path: epath.Path, name: str = _HASH) -> Entry | None:
    # The size is counted rather than asked for: stat needs a user database for local files.
    hasher = Hasher(name)
    remote = is_remote(path)
    try:
        with open_read(path, is_buffered=remote) as file:
            while block := file.read(_REMOTE_READ_BYTES if remote else _READ_BYTES):
                hasher.add(block)
    except FileNotFoundError:
        return None
    return hasher.entry()


def _walk(directory: epath.Path, *, skip: Collection[str] = ()) -> Iterator[str]:
    for path in directory.iterdir():
        if path.name not in skip and path.name not in _COMMIT_FILES:
            yield from _files_under(path, path.name)


def _files_under(path: epath.Path, name: str) -> Iterator[str]:
    if not path.is_dir():
        yield name
        return
    for child in path.iterdir():
        yield from _files_under(child, f"{name}/{child.name}")
