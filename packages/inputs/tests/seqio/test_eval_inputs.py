from __future__ import annotations

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import get_eval_hparams_for_seqio
from layerkit_inputs.seqio.seqio_input import SeqIOInput

LENGTHS = {"inputs": 3, "targets": 2}


def total_score(targets, scores):
    return {"total_score": sum(scores)}


def exact_match(targets, predictions):
    return {"exact_match": 0.0}


@pytest.fixture
def mixture(make_task):
    """A mixture of a task with metrics of scores, one of predictions, and one without."""
    import seqio

    tasks = [
        make_task(
            [{"inputs": [7, 8], "targets": [5, 1]}],
            name=name,
            splits=(split,),
            metric_fns=metric_fns,
        )
        for name, split, metric_fns in [
            ("scored", "validation", [total_score]),
            ("decoded", "test", [exact_match]),
            ("both", "validation", [total_score, exact_match]),
            ("plain", "validation", []),
        ]
    ]
    return seqio.Mixture("several", [(task, 1.0) for task in tasks])


def test_each_task_with_metrics_of_scores_is_one_input(mixture, caplog):
    configs = get_eval_hparams_for_seqio(
        mixture, feature_lengths=LENGTHS, metric_type="score", batch_size=2, input_random_seed=7
    )
    assert {config.name for config in configs} == {"scored", "both"}
    assert "not evaluating task plain: it has no metrics of kind 'score'" in caplog.text
    for config in configs:
        assert config.input_random_seed == 7
        source = config.Instantiate()
        (batch,) = source.eval_batches()
        assert batch.labels.tolist() == [[7, 8, 5, 1, 0], [0] * 5]
        assert batch.weights.tolist() == [[0, 0, 1, 1, 0], [0] * 5]
        assert source.score_metrics({0: -2.5}) == {"total_score": -2.5}


def test_predictions_are_of_prompts_and_splits_may_depend_on_the_task(mixture):
    splits = {"decoded": "test"}
    configs = get_eval_hparams_for_seqio(
        mixture,
        feature_lengths=LENGTHS,
        metric_type="predict",
        split_name=lambda name: splits.get(name, "validation"),
        batch_size=1,
        reset_for_eval=True,
        eval_loop_num_batches=1,
    )
    assert {config.name: config.split_name for config in configs} == {
        "decoded": "test",
        "both": "validation",
    }
    for config in configs:
        source = config.Instantiate()
        assert source.has_prediction_metrics
        assert source.get_next().ids.tolist() == [[0, 7, 8, 0]]


def test_tasks_without_metrics_or_split_are_left_out_as_asked(mixture, raises, caplog):
    given = {"feature_lengths": LENGTHS, "metric_type": "score", "batch_size": 1}
    every = get_eval_hparams_for_seqio(
        mixture, **given, require_metric_fns=False, check_split_exists=True
    )
    assert {config.name for config in every} == {"scored", "both", "plain"}
    assert "not evaluating task decoded: it has no split 'validation'" in caplog.text
    (plain,) = (task for task in mixture.tasks if task.name == "plain")
    with raises(ConfigError, field="task_or_mixture_name", value="plain"):
        get_eval_hparams_for_seqio(plain, **given)
    with raises(ConfigError, field="metric_type", value="scores"):
        get_eval_hparams_for_seqio(mixture, **{**given, "metric_type": "scores"})


def test_registered_task_is_named_in_the_config(make_task):
    import seqio

    task = make_task([{"inputs": [7], "targets": [5]}], name="registered_task")
    seqio.TaskRegistry.add_provider(task.name, task)
    try:
        (config,) = get_eval_hparams_for_seqio(
            task.name,
            feature_lengths=LENGTHS,
            metric_type="score",
            require_metric_fns=False,
            batch_size=1,
        )
        expected = SeqIOInput.HParams.config(
            name="registered_task",
            mixture_name="registered_task",
            split_name="validation",
            task_feature_lengths=LENGTHS,
            feature_converter="language_model",
            weights_on_targets_only=True,
            batch_size=1,
        )
        assert config == expected
        assert config.Instantiate().get_next().labels.tolist() == [[7, 5, 0, 0, 0]]
    finally:
        seqio.TaskRegistry.remove(task.name)
