from __future__ import annotations

import json
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.seqio.seqio_input import SeqIOInput
from layerkit_inputs.testing import laws

LENGTHS = {"targets": 6}


@pytest.fixture(scope="module")
def thirteen(make_task):
    """Return example n, the id n + 3 repeated 1 to 5 times."""
    return make_task([{"targets": [n + 3] * (1 + n % 5)} for n in range(13)], name="thirteen")


def reader(task, lengths=LENGTHS, *, batch_size=1, **fields):
    return SeqIOInput(
        batch_size=batch_size, mixture_or_task=task, task_feature_lengths=lengths, **fields
    )


def real(batches):
    """Return the numbers of the examples in the batches, without padding."""
    numbers = np.concatenate([batch.provenance for batch in batches])
    return numbers[numbers >= 0].tolist()


CONFIGURATIONS = [
    pytest.param({}, id="eval"),
    pytest.param({"is_training": True}, id="training"),
    pytest.param(
        {"reset_for_eval": True, "eval_loop_num_batches": 2},
        id="first batches",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"eval_loop_num_batches": 2, "use_packing": True}, id="rolling", marks=pytest.mark.slow
    ),
    pytest.param(
        {"is_training": True, "each_host_reads": "everything"},
        id="training on any number of hosts",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("fields", CONFIGURATIONS)
def test_reader_obeys_the_laws_of_inputs(law, fields, make_task):
    # Opening a pipeline costs more than the few examples read from it, so epochs are not too short.
    count = 30 if fields.get("is_training") else 13
    task = make_task([{"targets": [n + 3] * (1 + n % 5)} for n in range(count)], name="counted")
    given = {
        "batch_size": 2,
        "mixture_or_task": task,
        "task_feature_lengths": LENGTHS,
        "packing_window_rows": 3,
    }
    law(lambda **changes: SeqIOInput(**{**given, **fields, **changes}))


def test_hosts_end_together_after_the_last_example(make_task):
    task = make_task([{"targets": [n + 3]} for n in range(41)])
    hosts = [
        list(
            reader(
                task,
                batch_size=2,
                split_name="validation",
                infeed_host_index=host,
                num_infeed_hosts=4,
            ).eval_batches()
        )
        for host in range(4)
    ]
    assert [len(batches) for batches in hosts] == [6, 6, 6, 6]
    together = [batch for batches in hosts for batch in batches]
    assert sorted(real(together)) == list(range(41))
    assert sum(batch.eval_sample_weights.sum() for batch in together) == 41
    # The weights are those of the examples, so padding adds nothing to a loss.
    assert sum(batch.weights.sum() for batch in together) == 41
    assert not hosts[3][-1].weights.any() and (hosts[3][-1].provenance == -1).all()


def test_hosts_without_examples_make_batches_of_padding(make_task):
    task = make_task([{"targets": [5, 6]}])
    for host, numbers in enumerate([[0], [-1], [-1]]):
        (batch,) = reader(task, infeed_host_index=host, num_infeed_hosts=3).eval_batches()
        assert batch.provenance.tolist() == numbers and batch.ids.shape == (1, 6)


# What LanguageModelFeatures of paxml 1.4.0 makes of the two examples. With None for
# weights_on_targets_only, the data decide: negative ids have no weight.
@pytest.mark.parametrize(
    ("weights_on_targets_only", "weights"),
    [
        (None, [[0, 1, 1, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0]]),
        (True, [[0, 0, 1, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]),
        (False, [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]),
    ],
)
def test_negative_ids_have_the_weights_of_praxis(make_task, weights_on_targets_only, weights):
    task = make_task(
        [{"inputs": [-7, 8], "targets": [5, -6, 1]}, {"inputs": [9], "targets": [-4, 3]}]
    )
    given = {"task": task, "lengths": {"inputs": 4, "targets": 4}, "batch_size": 2}
    batch = reader(**given, weights_on_targets_only=weights_on_targets_only).get_next()
    assert batch.ids.tolist() == [[0, 7, 8, 5, 6, 1, 0, 0], [0, 9, 4, 3, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[7, 8, 5, 6, 1, 0, 0, 0], [9, 4, 3, 0, 0, 0, 0, 0]]
    assert batch.paddings.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]]
    assert batch.weights.tolist() == weights
    prompts = reader(**given, feature_converter="prompts").get_next()
    assert prompts.ids.tolist() == [[0, 7, 8, 0, 0], [0, 9, 0, 0, 0]]


@pytest.mark.parametrize("converter", ["language_model", "encoder_decoder", "prompts"])
def test_other_features_are_passed_through(converter, make_task, raises):
    task = make_task(
        [
            {"inputs": [7, 8], "targets": [5], "domain": [3], "scores": [4, 6, 2]},
            {"inputs": [9], "targets": [4, 3], "domain": [1], "scores": [5]},
        ]
    )
    fields = {
        "batch_size": 3,
        "mixture_or_task": task,
        "task_feature_lengths": {"inputs": 4, "targets": 4, "domain": 1, "scores": 2},
        "feature_converter": converter,
        "use_packing": False,
    }
    batch = SeqIOInput(**fields).get_next()
    assert batch.domain.tolist() == [[3], [1], [0]] and batch.domain.dtype == np.int32
    assert batch.scores.tolist() == [[4, 6], [5, 0], [0, 0]]
    trained = SeqIOInput(**fields, is_training=True, shuffle=False).get_next()
    assert trained.domain.tolist() == [[3], [1], [3]]
    assert SeqIOInput.blank_batch(SeqIOInput.HParams.config(**fields), 3) is None
    longer = SeqIOInput(**fields, trim_output_features=False, on_bad_record="skip")
    assert longer.get_next().domain.tolist() == [[1], [0], [0]] and longer.num_skipped == 1
    if converter != "prompts":
        packed = {**fields, "use_packing": None, "is_training": True}
        with raises(ConfigError, field="use_packing", value=True):
            SeqIOInput(**packed)


def test_feature_named_like_an_array_of_the_batch_raises(raises, make_task):
    task = make_task([{"targets": [5], "labels": [1]}])
    with raises(ConfigError, field="task_feature_lengths", value="labels"):
        reader(task, {"targets": 2, "labels": 2}).get_next()


def test_prompts_are_the_inputs_after_bos(make_task):
    task = make_task([{"inputs": [7, 8], "targets": [5, 1]}, {"inputs": [9], "targets": [1]}])
    batch = reader(
        task, {"inputs": 3, "targets": 3}, batch_size=3, feature_converter="prompts"
    ).get_next()
    assert batch.ids.tolist() == [[0, 7, 8, 0], [0, 9, 0, 0], [0, 0, 0, 0]]
    assert batch.prompt_lengths.tolist() == [3, 2, 0]
    assert batch.provenance.tolist() == [0, 1, -1]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_arrays_equal_those_of_the_seqio_converter(packed, make_task):
    """Compare with SeqIO's converter on examples that both pack alike."""
    import seqio

    examples = [
        {"inputs": [7, 8, 5, 1], "targets": [3, 9, 1]},
        {"inputs": [8, 4, 9, 3, 1], "targets": [4, 1]},
        {"inputs": [6, 2, 8, 9, 9, 1], "targets": [5, 3, 3, 1]},
    ]
    lengths = {"inputs": 7, "targets": 8}
    task = make_task(examples)
    reference = seqio.PrefixLMFeatureConverter(pack=packed)(
        task.get_dataset(lengths, split="train", shuffle=False), lengths
    )
    rows = list(reference.as_numpy_iterator())
    batch = reader(
        task, lengths, batch_size=len(rows), feature_converter="prefix_lm", use_packing=packed
    ).get_next()
    names = {
        "decoder_input_tokens": "ids",
        "decoder_target_tokens": "labels",
        "decoder_loss_weights": "weights",
        "decoder_causal_attention": "inputs_indicator",
    }
    if packed:
        names |= {"decoder_segment_ids": "segment_ids", "decoder_positions": "segment_pos"}
    for theirs, ours in names.items():
        np.testing.assert_array_equal(
            batch[ours], np.stack([row[theirs] for row in rows]), err_msg=ours
        )


@pytest.mark.slow
def test_new_process_resumes_exactly_and_exits(c4_folder):
    """Resume in the second epoch, shuffled and packed, with endless inputs open at exit."""
    script = pathlib.Path(__file__).with_name("read_c4.py")
    source = runpy.run_path(str(script))["make_input"](str(c4_folder))
    for _ in range(11):
        source.get_next()
    state = json.dumps(source.get_state())
    expected = [source.get_next().ids.tolist() for _ in range(3)]
    (epoch, _, _) = json.loads(state)["position"]["at"]["examples"]["at"][0]
    assert epoch == 1 and len(state) < 1024
    argument = f"[{json.dumps(str(c4_folder))}, {state}, 3]"
    run = subprocess.run(
        [sys.executable, str(script), argument], capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == expected


def test_training_hosts_read_each_file_once_an_epoch(c4_folder, c4_task):
    texts = []
    for host in range(2):
        source = reader(
            c4_task(c4_folder),
            {"targets": 512},
            batch_size=4,
            is_training=True,
            use_packing=False,
            infeed_host_index=host,
            num_infeed_hosts=2,
        )
        for _ in range(5):
            batch = source.get_next()
            texts += source.ids_to_strings(batch.labels, [512] * 4)
    assert len(texts) == len(set(texts)) == 40


def test_more_hosts_than_files_share_the_records_with_a_warning(make_task, caplog):
    task = make_task([{"targets": [n + 3]} for n in range(6)])
    ids = []
    for host in range(3):
        source = reader(
            task,
            {"targets": 1},
            batch_size=2,
            is_training=True,
            use_packing=False,
            infeed_host_index=host,
            num_infeed_hosts=3,
        )
        ids += source.get_next().labels.ravel().tolist()
    assert sorted(ids) == [3, 4, 5, 6, 7, 8]
    assert "has 1 files for 3 hosts" in caplog.text


def test_mixture_keeps_its_rates_at_every_position(make_task):
    import seqio

    tasks = [
        make_task([{"targets": [3 + n]} for n in range(5)], name="often"),
        make_task([{"targets": [50 + n]} for n in range(3)], name="seldom"),
    ]
    mixture = seqio.Mixture("both", [(tasks[0], 3.0), (tasks[1], 1.0)])
    source = reader(mixture, {"targets": 1}, is_training=True, use_packing=False)
    seldom = np.cumsum([source.get_next().labels[0, 0] >= 50 for _ in range(24)])
    assert np.abs(seldom - np.arange(1, 25) / 4).max() < 1


def test_evaluating_a_mixture_reads_each_example_once(make_task):
    import seqio

    tasks = [
        make_task([{"targets": [3 + n]} for n in range(5)], name="first"),
        make_task([{"targets": [50 + n]} for n in range(2)], name="second"),
        make_task([{"targets": [90]}], name="without", splits=["train"]),
    ]
    mixture = seqio.Mixture("all", [(task, 1.0) for task in tasks])
    source = reader(mixture, {"targets": 1}, batch_size=4, split_name="validation")
    batches = list(source.eval_batches())
    labels = np.concatenate([batch.labels[:, 0] for batch in batches])
    assert labels.tolist() == [3, 4, 5, 6, 7, 50, 51, 0] and real(batches) == list(range(7))


def test_two_inputs_read_one_task_from_different_folders(c4_task, tmp_path):
    from layerkit_inputs.testing.tfds_folders import write_tfds_folder

    task = c4_task()
    inputs = []
    for name in ("one", "other"):
        write_tfds_folder(
            tmp_path / name, "c4/en:3.0.1", texts={"train": [f"text {name}"]}, num_shards=1
        )
        inputs.append(reader(task, {"targets": 32}, tfds_data_dir=str(tmp_path / name)))
    assert [source.ids_to_strings(source.get_next().labels, [32])[0] for source in inputs] == [
        "text one",
        "text other",
    ]


def test_input_rejects_a_state_of_other_fields(raises, thirteen):
    state = reader(thirteen, batch_size=2, is_training=True).get_state()
    value = {"packing_window_rows": 32, "use_packing": True}
    with raises(ConfigError, field="state.data", value=value):
        reader(thirteen, batch_size=2, is_training=True, use_packing=False).set_state(state)


def test_seeds_change_order_and_epochs_differ(thirteen):
    def epochs(seed):
        source = reader(
            thirteen, batch_size=13, is_training=True, use_packing=False, input_random_seed=seed
        )
        return [source.get_next().labels[:, 0].tolist() for _ in range(2)]

    orders = epochs(1) + epochs(2)
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(3, 16)) for order in orders)


def test_input_raises_for_fields_that_do_not_fit_each_other(raises, thirteen):
    given = {"batch_size": 2, "mixture_or_task": thirteen, "task_feature_lengths": LENGTHS}
    with raises(ConfigError, field="mixture_name", value=None):
        SeqIOInput(**{**given, "mixture_or_task": None})
    with raises(ConfigError, field="task_feature_lengths", value="input"):
        SeqIOInput(**{**given, "task_feature_lengths": {"targets": 4, "input": 4}})
    with raises(ConfigError, field="task_feature_lengths", value=LENGTHS):
        SeqIOInput(**given, feature_converter="encoder_decoder")
