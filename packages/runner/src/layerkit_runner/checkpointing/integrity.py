"""Detects bytes of a checkpoint that changed after they were written.

Orbax does not notice that a committed file was cut, overwritten or deleted. So every step has a
manifest, `integrity/manifest.json`, with the size and SHA-256 of every file:
`{"digest", "manifest": {"version", "step", "files"}}`. The digest covers the rest. Manifests of
earlier versions have no step.

No process reads the whole step. Before the commit, each process hashes the files that it wrote
(`write_share`), and process 0 merges these shares and hashes the few small files besides (`write`).
At a restore, each process verifies a share of the files (`verify`).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import heapq
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

from etils import epath

from layerkit_runner.checkpointing import folders
from layerkit_runner.checkpointing.errors import DamagedCheckpointError

MANIFEST_VERSION = 1
MANIFEST_FOLDER = "integrity"
MANIFEST_FILE = "manifest.json"

# One for each process that hashed files, in the folder of the unfinished step.
_SHARE_NAME = "hashed_by_process_{:05d}.json"
# Orbax writes these at the commit, after the manifest; they hold no state.
_COMMIT_FILES = frozenset({"_CHECKPOINT_METADATA", "commit_success.txt"})
_READ_BYTES = 8 * 2**20
_READERS = 16  # hashlib releases the interpreter lock; also hides the latency of remote stores
_FILES_IN_MESSAGE = 8

_T = TypeVar("_T")


class NewerManifestError(ValueError):
    """A manifest, itself undamaged, was written by a later version of this package."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a file was when the manifest was written.

    Attributes:
      size: bytes.
      sha256: hexadecimal digest of the content; None where only the size was looked at.
    """

    size: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint step.

    Attributes:
      files: What each file was, by path relative to the step (`state/d/1f…`).
      step: The step that was saved; None where it is not recorded.
    """

    files: Mapping[str, Entry]
    step: int | None = None


class FindingKind(enum.Enum):
    """What is wrong with a file."""

    MISSING = "missing"
    SHORT = "short"
    ALTERED = "altered"
    UNLISTED = "unlisted"
    UNREADABLE = "unreadable"
    OTHER_STEP = "of another step"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One file or folder that is not as the manifest says.

    Attributes:
      file: path relative to the step.
      kind: what is wrong.
      expected: the manifest's entry; None if it has none for this file.
      found: what is there now; None if nothing is.
      reason: why it cannot be used, where sizes and digests do not say it.
    """

    file: str
    kind: FindingKind
    expected: Entry | None = None
    found: Entry | None = None
    reason: str | None = None

    @property
    def is_damage(self) -> bool:
        """Whether the step cannot be trusted. An unlisted file is never read."""
        return self.kind is not FindingKind.UNLISTED

    def to_json(self) -> dict[str, Any]:
        """Return JSON values from which `from_json` makes an equal finding."""
        return dataclasses.asdict(self) | {"kind": self.kind.value}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_json` described."""
        entries = {
            name: None if fields[name] is None else Entry(**fields[name])
            for name in ("expected", "found")
        }
        return cls(**{**fields, **entries, "kind": FindingKind(fields["kind"])})

    def __str__(self) -> str:
        described = [f"{self.file}: {self.kind.value}"]
        if self.expected is not None:
            described.append(f"expected {_describe(self.expected)}")
        if self.found is not None:
            described.append(f"found {_describe(self.found)}")
        if self.reason is not None:
            described.append(self.reason)
        return ", ".join(described)


@dataclasses.dataclass(frozen=True)
class SoundStep:
    """The outcome of the search for a step that can be trusted.

    Attributes:
      step: the newest sound step; None if no step is sound.
      damaged: the newer steps that were passed over, newest first, each with its findings.
    """

    step: int | None
    damaged: Mapping[int, Sequence[Finding]]


def hash_folder(directory: epath.Path, *, name: str) -> dict[str, Entry]:
    """Return the size and SHA-256 of every file in a folder; empty if there is no folder.

    Args:
      directory: The folder.
      name: Path of the folder relative to the step, which may differ while the step is unfinished.
    """
    if not directory.is_dir():
        return {}
    paths = {f"{name}/{file}": directory / file for file in _walk(directory, skip=())}
    return _by_name(paths, lambda file: _hash_file(paths[file]))


def write_share(step_directory: epath.Path, files: Mapping[str, Entry], *, process: int) -> None:
    """Write what one process hashed, for `write` to merge.

    Args:
      step_directory: The unfinished step.
      files: What the process wrote, by path relative to the step.
      process: Number of the process.
    """
    text = json.dumps({name: dataclasses.asdict(entry) for name, entry in files.items()})
    (step_directory / _SHARE_NAME.format(process)).write_text(text)


def write(
    step_directory: epath.Path, *, manifest_directory: epath.Path, num_shares: int = 1
) -> Manifest:
    """Write the manifest; hash only files that no process has hashed.

    Args:
      step_directory: The step, complete but not yet committed.
      manifest_directory: The existing folder for the manifest, a child of `step_directory`. It
        may have a temporary name; nothing inside it is listed.
      num_shares: How many processes may have called `write_share`.
    """
    shares = [_SHARE_NAME.format(process) for process in range(num_shares)]
    hashed = _merge_shares(step_directory, shares)
    names = set(_walk(step_directory, skip=(manifest_directory.name, *shares)))
    lost = sorted(hashed.keys() - names)
    if lost:
        raise FileNotFoundError(f"{step_directory / lost[0]} is gone since it was written")
    files = _by_name(names, lambda name: hashed.get(name) or _hash_file(step_directory / name))
    step = folders.step_in_name(step_directory)
    body = {
        "version": MANIFEST_VERSION,
        **({} if step is None else {"step": step}),
        "files": {name: dataclasses.asdict(entry) for name, entry in files.items()},
    }
    document = {"digest": _digest(body), "manifest": body}
    (manifest_directory / MANIFEST_FILE).write_text(json.dumps(document, indent=1))
    for share in shares:
        (step_directory / share).unlink(missing_ok=True)
    return Manifest(files, step)


def verify(
    step_directory: epath.Path, *, share: int = 0, num_shares: int = 1
) -> tuple[Finding, ...]:
    """Read a share of the files of a committed step and return the findings, by file name.

    Args:
      step_directory: The step.
      share: Which of the shares to read. The first one also lists the folder.
      num_shares: Into how many shares the files are divided.

    Raises:
      NewerManifestError: if a later version of this package wrote the manifest. That is no damage.
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
        findings = [Finding(name, FindingKind.UNLISTED) for name in present - manifest.files.keys()]
    names = _divide(manifest.files, num_shares)[share]
    hashed: dict[str, Entry | Finding] = _by_name(
        names, lambda name: _hashed_or_finding(step_directory, name)
    )
    for name in names:
        found, expected = hashed.get(name), manifest.files[name]
        if found is None:
            findings.append(Finding(name, FindingKind.MISSING, expected))
        elif isinstance(found, Finding):
            findings.append(found)
        elif found != expected:
            is_short = found.size < expected.size
            kind = FindingKind.SHORT if is_short else FindingKind.ALTERED
            findings.append(Finding(name, kind, expected, found))
    return tuple(sorted(findings, key=lambda finding: finding.file))


def require_sound(claim: str, findings: Iterable[Finding], *, hint: str = "") -> None:
    """Refuses files of which some are damaged.

    Args:
      claim: What the error says first, as in "The checkpoint DIR is damaged".
      findings: Of `verify` or `compare_sizes`.
      hint: What it says last.

    Raises:
      DamagedCheckpointError: naming them.
    """
    damage = [str(finding) for finding in findings if finding.is_damage]
    if damage:
        last = f"\n{hint}" if hint else ""
        raise DamagedCheckpointError(f"{claim}:\n  " + "\n  ".join(damage) + last)


def compare_sizes(step_directory: epath.Path) -> tuple[Finding, ...]:
    """Return the findings of `verify` that sizes alone show: what was cut, deleted or renamed.

    Raises:
      NewerManifestError: if a later version of this package wrote the manifest.
    """
    manifest = _read_manifest(step_directory)
    if isinstance(manifest, Finding):
        return (manifest,)
    try:
        sizes = file_sizes(step_directory)
    except OSError as error:
        return (_unreadable(".", error),)
    findings = []
    for name, expected in sorted(manifest.files.items()):
        size = sizes.get(name)
        if size is None:
            findings.append(Finding(name, FindingKind.MISSING, expected))
        elif size != expected.size:
            kind = FindingKind.SHORT if size < expected.size else FindingKind.ALTERED
            findings.append(Finding(name, kind, expected, Entry(size, None)))
    return tuple(findings)


def file_sizes(step_directory: epath.Path) -> dict[str, int]:
    """Returns the bytes of every file of a step, by path relative to it, in order."""
    return {
        name: _size_of(step_directory / name)
        for child in sorted(step_directory.iterdir())
        for name in sorted(_files_under(child, child.name))
    }


def step_digest(step_directory: epath.Path) -> str | None:
    """What tells this step from any other that was saved, one of the same number included.

    Copies have it too. None where there is no manifest to read, as of a step that was deleted.
    """
    try:
        return json.loads((step_directory / MANIFEST_FOLDER / MANIFEST_FILE).read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest_sound(
    steps: Sequence[int], findings_of: Callable[[int], Sequence[Finding]]
) -> SoundStep:
    """Chooses the newest step without damage; asks about no step older than that.

    Args:
      steps: the committed steps, in any order.
      findings_of: returns all findings of one step.
    """
    damaged: dict[int, Sequence[Finding]] = {}
    for step in sorted(steps, reverse=True):
        findings = findings_of(step)
        if not any(finding.is_damage for finding in findings):
            return SoundStep(step, damaged)
        damaged[step] = findings
    return SoundStep(None, damaged)


def damage_message(
    step: int,
    findings: Sequence[Finding],
    *,
    directory: epath.PathLike,
    used_instead: int | None,
) -> str:
    """The one message about a damaged step: which files, what was expected, what is lost."""
    damage = [finding for finding in findings if finding.is_damage]
    lines = [f"CHECKPOINT DAMAGED: step {step} in {directory}"]
    lines += [f"  {finding}" for finding in damage[:_FILES_IN_MESSAGE]]
    if len(damage) > _FILES_IN_MESSAGE:
        lines.append(f"  and {len(damage) - _FILES_IN_MESSAGE} files more")
    if used_instead is None:
        lines.append(f"  No sound checkpoint is left; work lost: {_steps(step)}.")
    else:
        lost = _steps(step - used_instead)
        lines.append(f"  Step {used_instead} is used instead; work lost: {lost}.")
    return "\n".join(lines)


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _describe(entry: Entry) -> str:
    digest = "" if entry.sha256 is None else f" with SHA-256 {entry.sha256[:12]}"
    return f"{entry.size} bytes{digest}"


def _read_manifest(step_directory: epath.Path) -> Manifest | Finding:
    """Returns the manifest, or the finding that says why it cannot be used."""
    name = f"{MANIFEST_FOLDER}/{MANIFEST_FILE}"
    try:
        text = (step_directory / MANIFEST_FOLDER / MANIFEST_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Finding(name, FindingKind.MISSING)
    except OSError as error:
        return _unreadable(name, error)
    found = Entry(len(text), hashlib.sha256(text).hexdigest())
    altered = Finding(name, FindingKind.ALTERED, found=found)
    try:
        document = json.loads(text)
        body = document["manifest"]
        if document["digest"] != _digest(body):
            return altered
    except (ValueError, KeyError, TypeError):  # no JSON any more, or JSON of another shape
        return altered
    if body["version"] > MANIFEST_VERSION:
        raise NewerManifestError(
            f"The checkpoint {step_directory} has a manifest of version {body['version']}; this "
            f"version of layerkit-runner reads up to {MANIFEST_VERSION}. Use the newer version "
            "that wrote it."
        )
    saved, named = body.get("step"), folders.step_in_name(step_directory)
    if saved is not None and named not in (saved, None):
        reason = f"the folder is named step {named}, and step {saved} was saved in it"
        return Finding(name, FindingKind.OTHER_STEP, reason=reason)
    return Manifest({name: Entry(**entry) for name, entry in body["files"].items()}, saved)


def _unreadable(name: str, error: OSError) -> Finding:
    return Finding(name, FindingKind.UNREADABLE, reason=error.strerror or str(error))


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _by_name(names: Iterable[str], find: Callable[[str], _T | None]) -> dict[str, _T]:
    """Call a function for each name, side by side; leave out names for which it returns None."""
    names = sorted(names)
    with futures.ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(find, names)
        return {name: each for name, each in zip(names, found, strict=True) if each is not None}


def _merge_shares(step_directory: epath.Path, shares: Sequence[str]) -> dict[str, Entry]:
    """Return what the processes hashed. The files of a process without a share are not in it."""

    def read(share: str) -> dict[str, Any] | None:
        try:
            return json.loads((step_directory / share).read_text())
        except FileNotFoundError:
            return None

    found = _by_name(shares, read).values()
    return {name: Entry(**entry) for share in found for name, entry in share.items()}


def _divide(files: Mapping[str, Entry], num_shares: int) -> list[list[str]]:
    """Divide files into shares of about as many bytes, each name into the smallest share so far."""
    shares: list[list[str]] = [[] for _ in range(num_shares)]
    heap = [(0, index) for index in range(num_shares)]
    by_size = sorted(files.items(), key=lambda item: (-item[1].size, item[0]))
    for name, entry in by_size:
        size, index = heap[0]
        shares[index].append(name)
        heapq.heapreplace(heap, (size + entry.size, index))
    return shares


def _hashed_or_finding(step_directory: epath.Path, name: str) -> Entry | Finding | None:
    try:
        return _hash_file(step_directory / name)
    except OSError as error:
        return _unreadable(name, error)


def _hash_file(path: epath.Path) -> Entry | None:
    """Return size and digest of a file; None if it is gone."""
    # The size is counted rather than asked for: stat needs a user database for local files.
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                size += len(block)
    except FileNotFoundError:
        return None
    return Entry(size, digest.hexdigest())


def _size_of(path: epath.Path) -> int:
    # epath's own stat needs a user database for local files.
    text = os.fspath(path)
    return path.stat().length if "://" in text else os.stat(text).st_size


def _walk(directory: epath.Path, *, skip: Collection[str]) -> Iterator[str]:
    """Yield the files in a folder, relative to it, without `skip` and the commit's own files."""
    for path in directory.iterdir():
        if path.name not in skip and path.name not in _COMMIT_FILES:
            yield from _files_under(path, path.name)


def _files_under(path: epath.Path, name: str) -> Iterator[str]:
    if not path.is_dir():
        yield name
        return
    for child in path.iterdir():
        yield from _files_under(child, f"{name}/{child.name}")
