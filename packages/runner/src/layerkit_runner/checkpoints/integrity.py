"""Notices bytes that changed after a checkpoint was written.

Storage commits a checkpoint step as a whole, so a step is there or it is not. It does not notice
that a committed file was cut, overwritten or deleted later: arrays then restore with wrong
numbers and no error. So every step carries a manifest, one entry per file with its size and
SHA-256, written after all other files and before the commit.

The promise: what `verify` passes is, byte for byte, what the manifest's writer read back from
storage. Its edges: the manifest cannot know of damage done before it was written, and it leaves
out the storage layer's own two files in the step's root, which are written after it and hold no
state. An unlisted file is reported but does no harm, since nothing reads it.

The manifest is `integrity/manifest.json` inside the step: `{"digest", "manifest": {"version",
"files"}}`, where the digest covers the rest, so that the manifest notices its own damage. The one
caller is `CheckpointManager`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

from etils import epath

from layerkit_runner.checkpoints.errors import DamagedCheckpointError

MANIFEST_VERSION = 1
MANIFEST_FOLDER = "integrity"
MANIFEST_FILE = "manifest.json"

# Written by the storage layer at the commit itself, after the manifest.
_COMMIT_FILES = frozenset({"_CHECKPOINT_METADATA", "commit_success.txt"})
_READ_BYTES = 8 * 2**20
_READERS = 8  # hashlib releases the interpreter lock; also hides the latency of remote stores
_FILES_IN_MESSAGE = 8


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
    """The files of one checkpoint step, by path relative to the step (`state/d/1f…`)."""

    files: Mapping[str, Entry]


class FindingKind(enum.Enum):
    """What is wrong with a file."""

    MISSING = "missing"
    SHORT = "short"
    ALTERED = "altered"
    UNLISTED = "unlisted"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One file that is not as the manifest says.

    Attributes:
      file: path relative to the step.
      kind: what is wrong.
      expected: the manifest's entry; None if it has none for this file.
      found: what is there now; None if nothing is.
    """

    file: str
    kind: FindingKind
    expected: Entry | None = None
    found: Entry | None = None

    @property
    def is_damage(self) -> bool:
        """Whether the step cannot be trusted. An unlisted file is never read."""
        return self.kind is not FindingKind.UNLISTED

    def __str__(self) -> str:
        described = [f"{self.file}: {self.kind.value}"]
        if self.expected is not None:
            described.append(f"expected {_describe(self.expected)}")
        if self.found is not None:
            described.append(f"found {_describe(self.found)}")
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


def write(step_directory: epath.Path, *, manifest_directory: epath.Path) -> Manifest:
    """Reads every file of a step back and writes the manifest.

    Args:
      step_directory: the step, complete but not yet committed.
      manifest_directory: the existing folder for the manifest, a child of `step_directory`. It
        may have a temporary name; nothing inside it is listed.
    """
    files = _hash_files(step_directory, _walk(step_directory, skip=manifest_directory.name))
    body = {
        "version": MANIFEST_VERSION,
        "files": {name: dataclasses.asdict(entry) for name, entry in files.items()},
    }
    document = {"digest": _digest(body), "manifest": body}
    (manifest_directory / MANIFEST_FILE).write_text(json.dumps(document, indent=1))
    return Manifest(files)


def verify(step_directory: epath.Path) -> tuple[Finding, ...]:
    """Reads every file of a committed step and returns all findings, by file name.

    Raises:
      NewerManifestError: if a later version of this package wrote the manifest. That is no damage.
    """
    manifest = _read_manifest(step_directory)
    if isinstance(manifest, Finding):
        return (manifest,)
    present = set(_walk(step_directory, skip=MANIFEST_FOLDER))
    hashed = _hash_files(step_directory, present & manifest.files.keys())
    findings = [Finding(name, FindingKind.UNLISTED) for name in present - manifest.files.keys()]
    for name, expected in manifest.files.items():
        found = hashed.get(name)
        if found is None:
            findings.append(Finding(name, FindingKind.MISSING, expected))
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
    """Like `verify`, but looks at sizes alone, and so is quick: finds what was cut or deleted.

    Raises:
      NewerManifestError: if a later version of this package wrote the manifest.
    """
    manifest = _read_manifest(step_directory)
    if isinstance(manifest, Finding):
        return (manifest,)
    sizes = file_sizes(step_directory)
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
    return Manifest({name: Entry(**entry) for name, entry in body["files"].items()})


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hash_files(directory: epath.Path, names: Iterable[str]) -> dict[str, Entry]:
    """Hashes files side by side; leaves out those that are gone when they are opened."""
    names = sorted(names)
    with futures.ThreadPoolExecutor(_READERS) as readers:
        entries = readers.map(lambda name: _hash_file(directory / name), names)
        return {
            name: entry for name, entry in zip(names, entries, strict=True) if entry is not None
        }


def _hash_file(path: epath.Path) -> Entry | None:
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


def _walk(step_directory: epath.Path, *, skip: str) -> Iterator[str]:
    """Yields the files under a step, relative to it, without `skip` and the commit's own files."""
    for path in step_directory.iterdir():
        if path.name != skip and path.name not in _COMMIT_FILES:
            yield from _files_under(path, path.name)


def _files_under(path: epath.Path, name: str) -> Iterator[str]:
    if not path.is_dir():
        yield name
        return
    for child in path.iterdir():
        yield from _files_under(child, f"{name}/{child.name}")
