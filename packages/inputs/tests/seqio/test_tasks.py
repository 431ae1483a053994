from __future__ import annotations

import re

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.seqio.seqio_input import SeqIOInput
from layerkit_inputs.seqio.tasks import import_tensorflow


def test_registered_name_is_found_and_an_unknown_one_raises(raises, make_task):
    import seqio

    task = make_task([{"targets": [5]}], name="sentences_about_rivers")
    seqio.TaskRegistry.add_provider(task.name, task)
    try:
        given = {"batch_size": 1, "task_feature_lengths": {"targets": 2}}
        result = SeqIOInput(**given, mixture_name="sentences_about_rivers").get_next()
        assert result.labels.tolist() == [[5, 0]]
        with raises(ConfigError, field="mixture_name", value="sentence_about_river"):
            SeqIOInput(**given, mixture_name="sentence_about_river")
    finally:
        seqio.TaskRegistry.remove(task.name)


@pytest.mark.parametrize("name", ["c4/en:3.0.1", "no_such_data:1.0.0"])
def test_missing_data_raise_and_are_not_downloaded(name, tmp_path):
    import seqio

    task = seqio.Task(
        "missing",
        source=seqio.TfdsDataSource(name),
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
    )
    with pytest.raises(ConfigError, match=re.escape(f"{name} in {tmp_path}")):
        SeqIOInput(
            batch_size=1,
            mixture_or_task=task,
            task_feature_lengths={"targets": 2},
            tfds_data_dir=str(tmp_path),
        )
    assert not list(tmp_path.iterdir())


def test_tfds_data_dir_changes_copies_of_the_tasks(c4_folder, c4_task):
    import seqio

    task = c4_task()
    inner = seqio.Mixture("inner", [(task, 1.0)])
    mixture = seqio.Mixture("outer", [(inner, 2.0)])
    source = SeqIOInput(
        batch_size=1,
        mixture_or_task=mixture,
        task_feature_lengths={"targets": 16},
        is_training=True,
        tfds_data_dir=str(c4_folder),
    )
    assert source.get_next().ids.shape == (1, 16)
    assert task.source.tfds_dataset.data_dir is None


def test_tasks_that_cannot_be_mixed_raise(raises, make_task):
    import seqio

    given = {"batch_size": 1, "task_feature_lengths": {"targets": 2}, "is_training": True}
    one = make_task([{"targets": [5]}], name="one")
    features = {"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=False)}
    other = seqio.Task("other", source=one.source, output_features=features)
    with pytest.raises(ValueError, match="must use the same vocabulary"):
        SeqIOInput(**given, mixture_or_task=seqio.Mixture("mixed", [(one, 1.0), (other, 1.0)]))
    sampled = seqio.Mixture("sampled", [(one, 1.0)], sample_fn=lambda datasets, *_: datasets[0])
    with pytest.raises(ConfigError, match="sample_fn of mixture sampled"):
        SeqIOInput(**given, mixture_or_task=sampled)


def test_tensorflow_leaves_accelerators_to_jax():
    tf = import_tensorflow()
    assert tf.config.get_visible_devices("GPU") == []
    assert tf.config.get_visible_devices("CPU")


def test_sums_of_splits_need_a_name_in_the_task(raises, c4_folder, c4_task):
    import seqio

    given = {"batch_size": 13, "task_feature_lengths": {"targets": 512}}
    with raises(ConfigError, field="split_name", value="train+validation"):
        SeqIOInput(**given, mixture_or_task=c4_task(c4_folder), split_name="train+validation")
    splits = {"some": "train[10:20]+validation"}
    source = seqio.TfdsDataSource("c4/en:3.0.1", tfds_data_dir=str(c4_folder), splits=splits)
    task = c4_task(c4_folder)
    task._source = source
    batches = SeqIOInput(**given, mixture_or_task=task, split_name="some").eval_batches()
    assert sum(batch.eval_sample_weights.sum() for batch in batches) == 23
