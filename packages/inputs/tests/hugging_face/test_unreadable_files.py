from __future__ import annotations

import contextlib
import gzip
import re
import resource

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.hugging_face.stream import HuggingFaceStream
from layerkit_inputs.hugging_face.text_input import HuggingFaceInput
from layerkit_inputs.hugging_face.unreadable_files import first_unreadable
from layerkit_inputs.text.tokenizers import SentencePieceTokenizer

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets.disable_progress_bars()

READERS = [HuggingFaceInput, HuggingFaceStream]
GOOD_LINES = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.fixture
def make(tmp_path):
    def make(reader, path, files, **more):
        fields = {"batch_size": 1, "seq_length": 2000, "cache_dir": str(tmp_path / "cache")}
        return reader(path=path, data_files=[str(file) for file in files], **{**fields, **more})

    return make


def write_parquet(path, texts, **options):
    parquet.write_table(pyarrow.table({"text": texts}), path, **options)
    return path


def read_all(source):
    batches = list(source.eval_batches())
    return [source.ids_to_strings(batch.labels, [batch.labels.shape[1]])[0] for batch in batches]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "b', "from record 1 on: Unterminated string"),
        (b"[1]", "from record 1 on: a JSON list, expected an object"),
        (b'{"text": "\\ud800x"}', "from record 1 on: 'utf-8' codec can't encode"),
    ],
)
def test_invalid_json_line_raises_with_its_number(reader, line, problem, make, tmp_path):
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    good.write_bytes(GOOD_LINES)
    bad.write_bytes(b'{"text": "a"}\n' + line)
    for policy in ("refuse", "skip"):
        source = make(reader, "json", [good, bad], on_bad_record=policy)
        with pytest.raises(ValueError, match=re.escape(f"{reader.__name__}: {bad}, {problem}")):
            read_all(source)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": null}', "no text (null)."),
        (b'{"text": "ab\xff"}', "byte 2 of the text is 0xff, which is not UTF-8."),
    ],
)
def test_unusable_example_raises_or_is_counted(
    raises, reader, line, problem, make, tmp_path, sentencepiece_file
):
    tokenizer = SentencePieceTokenizer(path=sentencepiece_file)
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    good.write_bytes(GOOD_LINES)
    bad.write_bytes(b'{"text": "some more"}\n' + line + b'\n{"text": "text"}\n')
    with raises(BadRecordError, owner="split 'train', record 3"):
        read_all(make(reader, "json", [good, bad], tokenizer=tokenizer))
    for _ in range(2):  # the second time from the cache, where there is one
        source = make(
            reader, "json", [good, bad], tokenizer=tokenizer, on_bad_record="skip", packing="none"
        )
        assert read_all(source) == ["one", "two", "some more", "text"]
        assert source.num_skipped == 1


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["empty", "truncated", "no parquet", "no rows"])
def test_incomplete_file_raises_or_is_counted(raises, reader, kind, make, tmp_path):
    good = write_parquet(tmp_path / "a.parquet", ["one", "two"])
    bad = tmp_path / "b.parquet"
    contents = {"empty": b"", "truncated": good.read_bytes()[:-20], "no parquet": b"text" * 50}
    if kind in contents:
        bad.write_bytes(contents[kind])
    else:
        write_parquet(bad, pyarrow.array([], pyarrow.string()))
    problem = {"empty": "the file is empty.", "no rows": "the file has no rows."}.get(
        kind, "not a whole Parquet file ("
    )
    with pytest.raises(BadRecordError, match=re.escape(f"{bad}: {problem}")):
        read_all(make(reader, "parquet", [good, bad]))
    source = make(reader, "parquet", [good, bad], on_bad_record="skip", packing="none")
    assert read_all(source) == ["one", "two"] and source.num_skipped == 1
    with raises(ConfigError, field="data_files", value=[str(bad)]):
        read_all(make(reader, "parquet", [bad], on_bad_record="skip"))


@pytest.mark.parametrize("reader", READERS)
def test_corrupt_parquet_page_raises_with_file_and_records(reader, make, tmp_path):
    texts = [f"text {number} " * 20 for number in range(40)]
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    bad = write_parquet(tmp_path / "bad.parquet", texts, row_group_size=10, **options)
    data = bytearray(bad.read_bytes())
    middle = len(data) * 3 // 8  # in the second of four groups
    data[middle : middle + 300] = bytes(255 - byte for byte in data[middle : middle + 300])
    bad.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"{bad}, from record 10 on: ")):
        read_all(make(reader, "parquet", [bad]))


@pytest.mark.parametrize("reader", READERS)
def test_file_with_other_columns_raises_with_the_names_of_columns(reader, make, tmp_path):
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    good.write_bytes(GOOD_LINES)
    bad.write_bytes(b'{"tex": "x"}\n')
    with pytest.raises(ConfigError, match="tex") as caught:
        read_all(make(reader, "json", [good, bad]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([3, None], "a null among the token ids."),
        ([3, -1], "the token ids"),
        ([60], "token id 60; the tokenizer has 60 ids."),
        (None, "no text (null)."),
    ],
)
def test_invalid_token_ids_raise_or_are_counted(
    raises, reader, ids, problem, make, tmp_path, sentencepiece_file
):
    tokenizer = SentencePieceTokenizer(path=sentencepiece_file)
    file = write_parquet(tmp_path / "ids.parquet", [[5, 6], [7], ids, [8]])
    with raises(BadRecordError, owner="split 'train', record 2"):
        read_all(make(reader, "parquet", [file], tokenizer=tokenizer))
    source = make(reader, "parquet", [file], tokenizer=tokenizer, on_bad_record="skip")
    assert sum(batch.weights.sum() for batch in source.eval_batches()) == 4 + 3
    assert source.num_skipped == 1


def test_truncated_arrow_file_raises_with_file_and_records(tmp_path):
    data = datasets.Dataset.from_list([{"text": f"number {n}"} for n in range(100)])
    data.save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-300])
    source = HuggingFaceInput(path=str(tmp_path / "saved"), batch_size=1)
    with pytest.raises(ValueError, match=re.escape(f"{file}, from record 0 on: ")):
        source.get_next()


def test_valid_remote_and_compressed_files_are_not_blamed(tmp_path):
    good, packed = tmp_path / "good.jsonl", tmp_path / "x.jsonl.gz"
    good.write_bytes(GOOD_LINES)
    packed.write_bytes(gzip.compress(b'{"text": "a"}\nnot json\n'))
    files = [str(good), "https://elsewhere/x.jsonl", str(packed)]
    assert first_unreadable(files, "json") is None


def test_row_group_above_the_bound_raises_before_it_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    file = write_parquet(tmp_path / "data" / "train.parquet", ["x"] * (1 << 16))
    fields = {"batch_size": 1, "cache_dir": str(tmp_path / "c"), "max_row_group_bytes": 1 << 12}
    for data in ({"path": "parquet", "data_files": str(file)}, {"path": str(file.parent)}):
        with pytest.raises(ValueError, match=r"train.parquet, row group 0: .*max_row_group_bytes"):
            HuggingFaceInput(**fields, **data).get_next()


@contextlib.contextmanager
def no_file_opens():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("reader", READERS)
def test_storage_that_fails_is_no_bad_record(reader, make, tmp_path):
    # Else the import would fail, before any file of data is opened.
    pytest.importorskip("datasets.packaged_modules.parquet.parquet")
    good = write_parquet(tmp_path / "a.parquet", ["one", "two"])
    source = make(reader, "parquet", [good], on_bad_record="skip")
    with pytest.raises(OSError, match=r"a\.parquet.*Too many open files"), no_file_opens():
        source.get_next()
    assert source.num_skipped == 0


def test_storage_that_fails_for_a_moment_is_no_unreadable_file(make, tmp_path):
    good = tmp_path / "a.jsonl"
    good.write_bytes(GOOD_LINES)
    source = make(HuggingFaceStream, "json", [good])
    failure = pytest.raises(OSError, match="Too many open files")
    with failure, source._naming_unreadable_files():
        try:
            with no_file_opens():
                good.read_bytes()
        except OSError as error:
            raise datasets.exceptions.DatasetGenerationError("as the library does") from error


def test_storage_that_fails_during_the_search_is_no_unreadable_file(tmp_path):
    good = tmp_path / "a.jsonl"
    good.write_bytes(GOOD_LINES)
    with pytest.raises(OSError, match="Too many open files"), no_file_opens():
        first_unreadable([str(good)], "json")
