"""Lingvo input generators to test on: real ones, small, by tf.data and by native ops."""

from __future__ import annotations

import random
import types

import pytest


@pytest.fixture(scope="session")
def lingvo():
    """Generators and the modules of Lingvo that tests need, in a namespace."""
    pytest.importorskip("lingvo")
    from layerkit_inputs.lingvo import preflight

    tensorflow = preflight.prepare()
    from lingvo.core import base_input_generator, cluster, datasource, generic_input, py_utils

    def count(num=10, batch=1, shuffle=0):
        """`data` counts up; `a.b` the same, nested; `text` is a string."""
        numbers = tensorflow.data.Dataset.range(num)
        if shuffle:
            numbers = numbers.shuffle(shuffle)
        return numbers.batch(batch).map(
            lambda i: {"a": {"b": i}, "data": i, "text": tensorflow.strings.as_string(i)}
        )

    def sharded(num=12, batch=1):
        context = cluster.GetInfeedContext()
        numbers = tensorflow.data.Dataset.range(num)
        numbers = numbers.shard(context.num_infeed_hosts, context.infeed_host_index)
        return numbers.batch(batch).map(lambda i: {"data": i})

    def unrepeatable(num=10):
        """Draws that no seed of TensorFlow reaches."""
        draws = {"data": [[random.random()] for _ in range(num)]}
        return tensorflow.data.Dataset.from_tensor_slices(draws)

    def tf_records(path="", batch=1):
        records = tensorflow.data.TFRecordDataset(path).batch(batch)
        return records.map(lambda r: {"data": tensorflow.strings.to_number(r)})

    class Sequences(base_input_generator.TFDataSequenceInputGenerator):
        """Lines of numbers, in buckets by how many there are."""

        def LoadDataset(self, file_pattern):
            return tensorflow.data.TextLineDataset(tensorflow.io.gfile.glob(file_pattern))

        def ProcessDataset(self, dataset):
            def parse(line):
                ids = tensorflow.strings.to_number(tensorflow.strings.split(line), "int32")
                return py_utils.NestedMap(ids=ids)

            return dataset.map(parse, num_parallel_calls=4)

        def GetSequenceLength(self, example):
            return tensorflow.size(example.ids)

        def _InputShape(self, key):
            return (None,) if key == "ids" else super()._InputShape(key)

    class NativeNumbers(base_input_generator.BaseInputGeneratorFromFiles):
        """Records that are numbers, read by Lingvo's own op."""

        @classmethod
        def Params(cls):
            p = super().Params()
            p.Define("number_type", tensorflow.int32, "Their dtype.")
            return p

        def _DataSourceFromFilePattern(self, file_pattern, **_):
            p = self.params

            def process(source_id, record):
                number = tensorflow.strings.to_number(record, tensorflow.int32)
                return py_utils.NestedMap(num=tensorflow.cast(number, p.number_type)), 1

            batch, _ = generic_input.GenericInput(
                processor=process, file_pattern=file_pattern, **self.CommonInputOpArgs()
            )
            return batch

    define = base_input_generator.DefineTFDataInput
    return types.SimpleNamespace(
        tf=tensorflow,
        datasource=datasource,
        py_utils=py_utils,
        Count=define("Count", count),
        Sharded=define("Sharded", sharded),
        Unrepeatable=define("Unrepeatable", unrepeatable),
        TfRecords=define("TfRecords", tf_records),
        Sequences=Sequences,
        NativeNumbers=NativeNumbers,
    )


@pytest.fixture
def write_records(lingvo, tmp_path):
    """Writes records to a TFRecord file and returns its path."""

    def write(records, name="records"):
        path = tmp_path / name
        with lingvo.tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
        return path

    return write
