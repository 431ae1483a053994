"""WebDataset: tars that are written here, damaged and hostile ones too."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import WebDataset
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.images.web_dataset import expand_ranges
from layerkit_inputs.testing import laws
from layerkit_inputs.testing.image_files import encode_image, write_tar

pytest.importorskip("PIL.Image")
pytest.importorskip("grain")

PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1), "image_size": 8, "num_classes": 9, "batch_size": 4}


def image(number):
    return encode_image(np.full((8, 8, 3), 10 * number, np.uint8))


@pytest.fixture
def tars(tmp_path):
    """Return the pattern of tars of four, zero and three samples with labels of three kinds."""
    labels = (("cls", b"%d\n"), ("txt", b"%d"), ("json", b'{"label": %d, "width": 8}'))
    rows = iter(range(7))
    for shard, count in enumerate((4, 0, 3)):
        files = []
        for number, (suffix, text) in zip(range(count), 2 * labels, strict=False):
            row = next(rows)
            files += [(f"./x.y/{number}.{suffix}", text % row), (f"./x.y/{number}.PNG", image(row))]
            files += [(f"./x.y/{number}.seg.png", b"not read")]
        write_tar(tmp_path / f"s-{shard + 8:02}.tar", files)
    return str(tmp_path / "s-{08..10}.tar")


def source(*paths, **fields):
    return WebDataset(**{**PLAIN, "paths": [str(path) for path in paths], **fields})


def assert_rows(reader, rows):
    batch = reader.get_next()
    valid = batch.eval_sample_weights > 0
    assert batch.labels[valid].tolist() == rows
    pixels = batch.inputs[valid][:, 0, 0, 0] * 255
    np.testing.assert_allclose(pixels, 10 * np.array(rows), atol=1e-3)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, tars):
    law(lambda **more: source(tars, **{"is_training": True, **more}))


def test_samples_of_all_shards_are_read_by_number(tars):
    assert_rows(source(tars, batch_size=8), list(range(7)))
    assert expand_ranges("a{0..1}/{8..10}") == [
        f"a{outer}/{inner}" for outer in (0, 1) for inner in (8, 9, 10)
    ]


@pytest.mark.parametrize(
    "files",
    [
        [("1.png", image(1))],
        [("1.cls", b"1")],
        [("1.png", image(1)), ("1.jpg", image(1)), ("1.cls", b"1")],
        [("1.png", image(1)), ("1.cls", b"dog")],
        [("1.png", image(1)), ("1.cls", b"9" * 30)],
        [("1.png", image(1)), ("1.json", b"{}")],
        [("1.png", image(1)), ("1.json", b"[" * 60_000)],
        [("1.png", image(1)), ("1.json", json.dumps({"label": 1.5}).encode())],
    ],
    ids=["no label", "no image", "two images", "text", "large", "field", "nested", "fraction"],
)
def test_incomplete_sample_raises_with_its_key_or_is_skipped(files, tmp_path, raises):
    path = tmp_path / "a.tar"
    write_tar(path, [("0.png", image(0)), ("0.cls", b"0"), *files])
    with raises(BadRecordError, owner=f"{path}, 1"):
        source(path).get_next()
    assert_rows(source(path, on_bad_record="skip"), [0])


def test_label_outside_of_the_classes_raises(tmp_path, raises):
    path = tmp_path / "a.tar"
    write_tar(path, [("0.png", image(0)), ("0.cls", b"-1")])
    with raises(BadRecordError, field="label", value=-1):
        source(path).get_next()


def hostile(**changes):
    """Return a tar of a sample whose first header declares other values."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("0.png")
        pax = changes.pop("pax_headers", {})
        member.size, member.pax_headers = len(image(0)), pax
        for name, value in changes.items():
            setattr(member, name, value)
        archive.addfile(member)
        file.write(image(0).ljust(512, b"\0"))
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        hostile(size=1 << 40),
        hostile(size=1 << 20, type=tarfile.GNUTYPE_LONGNAME),
        hostile(pax_headers={"size": "-1024"}),
        hostile(pax_headers={"size": str(1 << 70)}),
        hostile()[:700],
        b"\x1f\x8b" + bytes(1000),
        b"",
    ],
    ids=["size", "long name", "negative", "beyond", "truncated", "compressed", "empty"],
)
def test_hostile_and_damaged_tars_raise_with_their_name(data, tmp_path, raises):
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with raises(BadRecordError, owner=str(path)):
        source(path).get_next()


def test_names_that_leave_the_folder_write_and_read_no_file(tmp_path):
    path = tmp_path / "in" / "a.tar"
    path.parent.mkdir()
    write_tar(path, [("../0.png", image(3)), ("../0.cls", b"3"), ("/etc/passwd", b"")])
    assert_rows(source(path, on_bad_record="skip"), [3])
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["a.tar", "in"]


def test_links_are_no_images(tmp_path, raises):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("0.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with raises(ConfigError):
        source(path).get_next()


def test_paths_without_tars_raise(tmp_path, raises):
    (tmp_path / "a.txt").write_text("")
    with raises(ConfigError, field="paths"):
        source(tmp_path).get_next()
