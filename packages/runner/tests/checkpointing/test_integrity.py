"""Findings of damaged files, and the choice of a step."""

from __future__ import annotations

import hashlib
import json

import pytest
import xxhash
from etils import epath

from layerkit_runner.checkpointing import LayoutVersionError, integrity
from layerkit_runner.checkpointing.integrity import Entry, Finding, FindingKind

MANIFEST = "integrity/manifest.json"


@pytest.fixture
def step(tmp_path) -> epath.Path:
    """A step of three files, with its manifest and the files that the commit adds later."""
    directory = epath.Path(tmp_path) / "checkpoint_00000042"
    for name, content in {"state/d/a": b"0123456789", "state/b": b"", "metadata/c": b"{}"}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    (directory / "integrity").mkdir()
    integrity.write(directory)
    (directory / "commit_success.txt").write_text("done")
    (directory / "_CHECKPOINT_METADATA").write_text("{}")
    return directory


def entry(content: bytes) -> Entry:
    return {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}


def test_the_manifest_lists_sizes_and_digests_that_other_tools_can_check(step):
    document = json.loads((step / MANIFEST).read_text())
    assert document["manifest"] == {
        "version": 2,
        "step": 42,
        "files": {
            "metadata/c": {"size": 2, "xxh3_128": xxhash.xxh3_128_hexdigest(b"{}")},
            # The published digest of no bytes, with seed 0.
            "state/b": {"size": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"},
            "state/d/a": {"size": 10, "xxh3_128": xxhash.xxh3_128_hexdigest(b"0123456789")},
        },
    }
    assert integrity.verify(step) == ()


def write_manifest(step, body):
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (step / MANIFEST).write_text(json.dumps({"digest": digest, "manifest": body}))


def test_a_manifest_of_version_1_is_verified_by_sha256(step):
    contents = {"state/d/a": b"0123456789", "state/b": b"", "metadata/c": b"{}"}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    files = {name: {"size": len(contents[name]), "sha256": text} for name, text in digests.items()}
    write_manifest(step, {"version": 1, "files": files})  # the first ones named no step
    assert integrity.verify(step) == ()
    (step / "metadata/c").write_bytes(b"[]")
    assert integrity.verify(step) == (
        Finding(
            "metadata/c",
            FindingKind.ALTERED,
            {"size": 2, "sha256": digests["metadata/c"]},
            {"size": 2, "sha256": hashlib.sha256(b"[]").hexdigest()},
        ),
    )


def test_flipped_bit_of_a_file_is_found(step):
    original = b"0123456789"
    for bit in range(8 * len(original)):
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << (bit % 8)
        (step / "state/d/a").write_bytes(bytes(changed))
        assert integrity.verify(step) == (
            Finding("state/d/a", FindingKind.ALTERED, entry(original), entry(bytes(changed))),
        )


def test_all_findings_are_returned_at_once_by_file_name(step):
    (step / "state/d/a").write_bytes(b"01234")
    (step / "state/b").write_bytes(b"longer")
    (step / "metadata").rmtree()
    (step / "state/stray").write_bytes(b"x")
    assert integrity.verify(step) == (
        Finding("metadata/c", FindingKind.MISSING, entry(b"{}")),
        Finding("state/b", FindingKind.ALTERED, entry(b""), entry(b"longer")),
        Finding("state/d/a", FindingKind.SHORT, entry(b"0123456789"), entry(b"01234")),
        Finding("state/stray", FindingKind.UNLISTED),
    )


def test_flipped_bit_of_the_manifest_is_found_if_it_changes_its_meaning(step):
    original = (step / MANIFEST).read_bytes()
    meaning = json.loads(original)
    for position in range(0, len(original), 7):
        changed = bytearray(original)
        changed[position] ^= 1
        (step / MANIFEST).write_bytes(bytes(changed))
        try:
            same_meaning = json.loads(changed) == meaning
        except ValueError:
            same_meaning = False
        expected = () if same_meaning else (FindingKind.ALTERED,)
        assert tuple(finding.kind for finding in integrity.verify(step)) == expected, position


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'"x"', b'{"digest": 1}', b"\xff\xfe"])
def test_a_manifest_of_another_shape_is_altered(step, content):
    (step / MANIFEST).write_bytes(content)
    altered = Finding(MANIFEST, FindingKind.ALTERED, actual=entry(content))
    assert integrity.verify(step) == (altered,)


def test_a_step_without_manifest_is_damaged(step):
    (step / MANIFEST).unlink()
    assert integrity.verify(step) == (Finding(MANIFEST, FindingKind.MISSING),)


def test_step_under_another_number_is_damaged(step):
    (finding,) = integrity.verify(step.rename(step.parent / "checkpoint_00000043"))
    assert (finding.file, finding.kind) == (MANIFEST, FindingKind.OTHER_STEP)
    assert finding.is_damage
    assert "named step 43, and step 42 was saved" in str(finding)


def test_manifest_of_a_later_version_is_an_error_but_no_damage(raises, step):
    body = json.loads((step / MANIFEST).read_text())["manifest"] | {"version": 3}
    write_manifest(step, body)
    with raises(LayoutVersionError, owner=str(step), value=3):
        integrity.verify(step)


def test_write_merges_the_shares_of_processes_and_hashes_only_other_files(step, monkeypatch):
    (step / MANIFEST).unlink()
    read, hash_file = [], integrity._hash_file
    monkeypatch.setattr(
        integrity,
        "_hash_file",
        lambda path, *name: read.append(path.name) or hash_file(path, *name),
    )
    own = integrity.hash_folder(step / "state" / "d", name="state/d")
    assert (own, read) == ({"state/d/a": entry(b"0123456789")}, ["a"])
    read.clear()
    integrity.write_share(step, own, process=1)
    files = integrity.write(step, num_shares=3)
    assert sorted(read) == ["b", "c"]
    assert files["state/d/a"] == own["state/d/a"]
    assert integrity.verify(step) == ()  # the shares are gone, too


def test_write_raises_when_a_file_is_gone_that_a_process_wrote(step):
    integrity.write_share(step, {"state/d/lost": entry(b"")}, process=0)
    with pytest.raises(FileNotFoundError, match="state/d/lost"):
        integrity.write(step)


def test_shares_verify_every_file_once_and_differ_by_one_file_at_most(step, monkeypatch):
    for number in range(20):
        (step / f"state/d/{number}").write_bytes(b"x" * (100 + number))
    (step / MANIFEST).unlink()
    integrity.write(step)
    (step / "state/d/7").write_bytes(b"y")
    (step / "state/d/8").unlink()
    (step / "state/stray").write_bytes(b"")
    read, hash_file = [], integrity._hash_file
    monkeypatch.setattr(
        integrity, "_hash_file", lambda path, *name: read.append(path) or hash_file(path, *name)
    )
    findings, sizes, seen = [], [], []
    for share in range(3):
        findings += integrity.verify(step, share=share, num_shares=3)
        sizes.append(sum(100 + int(path.name) for path in read if path.name.isdigit()))
        seen += read
        read.clear()
    assert len(seen) == len(set(seen)) == 23
    assert max(sizes) - min(sizes) <= 119
    assert sorted(findings, key=lambda finding: finding.file) == list(integrity.verify(step))
