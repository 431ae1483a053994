"""Names, folders and devices are settled when an input is built."""

from __future__ import annotations

import re

import pytest

from layerkit_inputs.seqio_adaptor.input import SeqIOInput
from layerkit_inputs.seqio_adaptor.tasks import import_tensorflow


def test_a_registered_name_is_found_and_a_wrong_one_gets_the_nearest(make_task):
    import seqio

    task = make_task([{"targets": [5]}], name="sentences_about_rivers")
    seqio.TaskRegistry.add_provider(task.name, task)
    try:
        given = {"batch_size": 1, "task_feature_lengths": {"targets": 2}}
        found = SeqIOInput(**given, mixture_name="sentences_about_rivers").get_next()
        assert found.labels.tolist() == [[5, 0]]
        whole = (
            "SeqIOInput: mixture_name='sentence_about_river'; did you mean "
            "'sentences_about_rivers'? Import the module that registers it."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
            SeqIOInput(**given, mixture_name="sentence_about_river")
    finally:
        seqio.TaskRegistry.remove(task.name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c4/en:3.0.1", "task missing reads c4/en:3.0.1 in {folder}, "),
        ("no_such_data:1.0.0", "task missing reads no_such_data:1.0.0 in {folder}, "),
    ],
)
def test_data_that_are_not_there_are_refused_and_not_downloaded(name, text, tmp_path):
    import seqio

    task = seqio.Task(
        "missing",
        source=seqio.TfdsDataSource(name),
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
    )
    with pytest.raises(ValueError, match=re.escape(text.format(folder=tmp_path))):
        SeqIOInput(
            batch_size=1,
            mixture_or_task=task,
            task_feature_lengths={"targets": 2},
            tfds_data_dir=str(tmp_path),
        )
    assert not list(tmp_path.iterdir())


def test_a_folder_moves_the_tasks_of_a_mixture_and_not_the_registered_ones(c4_folder, c4_task):
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


def test_tasks_that_do_not_go_together_are_refused(make_task):
    import seqio

    given = {"batch_size": 1, "task_feature_lengths": {"targets": 2}, "is_training": True}
    one = make_task([{"targets": [5]}], name="one")
    features = {"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=False)}
    other = seqio.Task("other", source=one.source, output_features=features)
    with pytest.raises(ValueError, match="tasks one and other have different vocabularies for"):
        SeqIOInput(**given, mixture_or_task=seqio.Mixture("mixed", [(one, 1.0), (other, 1.0)]))
    sampled = seqio.Mixture("sampled", [(one, 1.0)], sample_fn=lambda datasets, *_: datasets[0])
    with pytest.raises(ValueError, match="mixture sampled has a sample_fn of its own"):
        SeqIOInput(**given, mixture_or_task=sampled)


def test_tensorflow_leaves_accelerators_to_jax():
    tf = import_tensorflow()
    assert tf.config.get_visible_devices("GPU") == []
    assert tf.config.get_visible_devices("CPU")


def test_parts_of_splits_are_named_by_the_task(c4_folder, c4_task):
    import seqio

    given = {"batch_size": 13, "task_feature_lengths": {"targets": 512}}
    text = r"split_name='train\+validation'; expected one of \['train', 'validation'\]\. For parts"
    with pytest.raises(ValueError, match=text):
        SeqIOInput(**given, mixture_or_task=c4_task(c4_folder), split_name="train+validation")
    splits = {"some": "train[10:20]+validation"}
    source = seqio.TfdsDataSource("c4/en:3.0.1", tfds_data_dir=str(c4_folder), splits=splits)
    task = c4_task(c4_folder)
    task._source = source
    batches = SeqIOInput(**given, mixture_or_task=task, split_name="some").eval_batches()
    assert sum(batch.eval_sample_weights.sum() for batch in batches) == 23


def test_a_task_that_needs_an_offline_cache_is_refused(make_task):
    import seqio

    task = make_task(
        [{"targets": [5]}],
        preprocessors=[seqio.CacheDatasetPlaceholder(required=True)],
    )
    with pytest.raises(ValueError, match=r"tasks \['task'\] can only be read from SeqIO's offline"):
        SeqIOInput(batch_size=1, mixture_or_task=task, task_feature_lengths={"targets": 1})
