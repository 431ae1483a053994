"""The eval adaptors on real Lingvo inputs that read by tf.data."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("lingvo")

from layerkit.errors import ConfigError
from layerkit_inputs.lingvo import LingvoEvalAdaptor, LingvoLazyEvalAdaptor
from layerkit_inputs.testing import laws


def params_of(generator, **arguments):
    params = generator.Params()
    params.args.Set(**arguments)
    return params


def hosts(make, count):
    return [make(num_infeed_hosts=count, infeed_host_index=host) for host in range(count)]


def columns(source, *names):
    return [tuple(batch[name].tolist() for name in names) for batch in laws.take(source)]


def assert_raises(make, **data):
    with pytest.raises(ConfigError) as caught:
        make()
    assert {name: getattr(caught.value, name) for name in data} == data


@pytest.mark.parametrize("rows_of_lingvo", [1, 2, 4, 11, 20])
def test_hosts_divide_the_rows_and_end_together(lingvo, rows_of_lingvo):
    params = params_of(lingvo.Count, num=11, batch=rows_of_lingvo)
    sources = hosts(
        lambda **of: LingvoEvalAdaptor(input=params, batch_size=3, cluster_do_eval=True, **of), 3
    )
    nothing = ([0, 0, 0], [0, 0, 0], [-1, -1, -1])
    expected = [
        [([0, 1, 2], [1, 1, 1], [0, 1, 2]), ([9, 10, 0], [1, 1, 0], [9, 10, -1])],
        [([3, 4, 5], [1, 1, 1], [3, 4, 5]), nothing],
        [([6, 7, 8], [1, 1, 1], [6, 7, 8]), nothing],
    ]
    names = ("data", "eval_sample_weights", "provenance")
    assert [columns(source, *names) for source in sources] == expected
    for source in sources:
        with pytest.raises(StopIteration):
            source.get_next()
    sources[0].reset()
    assert columns(sources[0], *names) == expected[0]


def test_host_without_rows_makes_batches_of_padding(lingvo):
    params = params_of(lingvo.Count, num=1)
    sources = hosts(
        lambda **of: LingvoEvalAdaptor(input=params, batch_size=2, cluster_do_eval=True, **of), 3
    )
    weights = [columns(source, "eval_sample_weights") for source in sources]
    assert weights == [[([1, 0],)], [([0, 0],)], [([0, 0],)]]


def test_num_batches_bounds_an_input_without_end(lingvo):
    params = params_of(lingvo.Count, num=4, batch=2)
    source = LingvoEvalAdaptor(input=params, batch_size=3, num_batches=5)
    assert columns(source, "data") == [([0, 1, 2],), ([3, 0, 1],), ([2, 3, 0],), ([1, 0, 0],)]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(lingvo, law):
    def make(**fields):
        params = params_of(lingvo.Count, num=14, batch=3)
        return LingvoEvalAdaptor(
            input=params, **{"batch_size": 4, "cluster_do_eval": True, **fields}
        )

    law(make)


def test_input_without_rows_raises(lingvo):
    source = LingvoEvalAdaptor(
        input=params_of(lingvo.Count, num=0), batch_size=2, cluster_do_eval=True
    )
    assert_raises(source.get_next, owner="LingvoEvalAdaptor")


def test_bucket_batch_limit_that_drops_rows_raises(lingvo):
    params = lingvo.Sequences.Params().Set(bucket_upper_bound=[4], bucket_batch_limit=[8])
    assert_raises(
        lambda: LingvoEvalAdaptor(input=params, batch_size=2, cluster_do_eval=True),
        field="input.bucket_batch_limit",
        value=[8],
    )


def test_sequences_are_read_to_the_last_one(lingvo, tmp_path):
    path = tmp_path / "lines"
    path.write_text("".join(f"{i} {i}\n" for i in range(41)))
    params = lingvo.Sequences.Params().Set(
        file_pattern=str(path), bucket_upper_bound=[4], bucket_batch_limit=[1]
    )
    sources = hosts(
        lambda **of: LingvoEvalAdaptor(input=params, batch_size=2, cluster_do_eval=True, **of), 4
    )
    shares = [laws.take(source) for source in sources]
    assert [len(share) for share in shares] == [6] * 4
    rows = [batch.ids[batch.provenance >= 0, 0] for share in shares for batch in share]
    assert sorted(np.concatenate(rows).tolist()) == list(range(41))


# The lazy one.


def lazy(lingvo, num_samples=13, num=13, batch=3, *, repeat=True, **fields):
    params = params_of(lingvo.Count, num=num, batch=batch)
    params.Set(batch_size=batch, num_samples=num_samples)
    return LingvoLazyEvalAdaptor(input=params, cluster_do_eval=not repeat, **fields)


@pytest.mark.parametrize("repeat", [True, False])
def test_an_epoch_is_a_number_of_samples(lingvo, repeat):
    sources = hosts(lambda **of: lazy(lingvo, repeat=repeat, **of), 3)
    assert [source.num_samples for source in sources] == [6, 4, 3]
    assert [source.batch_size for source in sources] == [3, 3, 3]
    names = ("data", "eval_sample_weights", "provenance")
    nothing = ([0, 0, 0], [0, 0, 0], [-1, -1, -1])
    assert [columns(source, *names) for source in sources] == [
        [([0, 1, 2], [1, 1, 1], [0, 1, 2]), ([9, 10, 11], [1, 1, 1], [9, 10, 11])],
        [([3, 4, 5], [1, 1, 1], [3, 4, 5]), ([12, 0, 0], [1, 0, 0], [12, -1, -1])],
        [([6, 7, 8], [1, 1, 1], [6, 7, 8]), nothing],
    ]


@pytest.mark.parametrize("samples", range(1, 20))
def test_num_samples_of_hosts_add_up(lingvo, samples):
    sources = hosts(lambda **of: lazy(lingvo, samples, num=50, **of), 3)
    assert sum(source.num_samples for source in sources) == samples


def test_num_batches_makes_it_shorter(lingvo):
    sources = hosts(lambda **of: lazy(lingvo, num_batches=1, **of), 3)
    assert [columns(source, "data") for source in sources] == [
        [([0, 1, 2],)],
        [([3, 4, 5],)],
        [([6, 7, 8],)],
    ]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_laws_of_the_lazy_adaptor(lingvo, law):
    law(lambda batch_size=4, **fields: lazy(lingvo, batch=batch_size, **fields))


def test_missing_number_of_samples_raises(lingvo):
    assert_raises(lambda: lazy(lingvo, num_samples=0), field="input.num_samples", value=0)
