from __future__ import annotations

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.seqio.seqio_input import SeqIOInput


def total_score(targets, scores):
    return {"total_score": sum(scores), "count": len(targets)}


def exact_match(targets, predictions):
    right = sum(target == said for target, said in zip(targets, predictions, strict=True))
    return {"exact_match": right / len(targets)}


@pytest.fixture
def make_text_input():
    """An input of texts, one example each."""
    import seqio
    import tensorflow as tf

    def make(texts=("one", "two"), *, names=("texts",), **fields):
        metric_fns = fields.pop("metric_fns", ())
        vocabulary = seqio.ByteVocabulary()

        def dataset_fn(split, shuffle_files, seed=None):
            return tf.data.Dataset.from_tensor_slices({"targets": list(texts)})

        tasks = [
            seqio.Task(
                name,
                source=seqio.FunctionDataSource(dataset_fn, splits=["test"]),
                preprocessors=[seqio.preprocessors.tokenize],
                output_features={"targets": seqio.Feature(vocabulary, add_eos=False)},
                metric_fns=metric_fns,
                postprocess_fn=lambda text, example, is_target: text.strip().lower(),
            )
            for name in names
        ]
        whole = tasks[0] if len(tasks) == 1 else seqio.Mixture("mixed", [(t, 1.0) for t in tasks])
        given = {"batch_size": 2, "split_name": "test", "task_feature_lengths": {"targets": 8}}
        return SeqIOInput(**{**given, "mixture_or_task": whole, **fields})

    return make


def test_scores_reach_the_metrics_of_the_task(make_text_input):
    source = make_text_input(metric_fns=[total_score])
    assert source.has_score_metrics and not source.has_prediction_metrics
    assert source.score_metrics({1: 2.5, 0: 1.0}) == {"total_score": 3.5, "count": 2.0}


def test_predictions_and_targets_are_postprocessed_and_in_order(make_text_input):
    source = make_text_input(("One", "Two", "Three"), metric_fns=[exact_match])
    assert source.has_prediction_metrics and not source.has_score_metrics
    said = {2: " THREE ", 0: "one", 1: "2"}
    assert source.prediction_metrics(said) == {"exact_match": pytest.approx(2 / 3)}


def test_metrics_of_a_mixture_are_computed_by_task(make_text_input):
    source = make_text_input(names=("first", "second"), metric_fns=[total_score])
    assert source.score_metrics({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}) == {
        "first/total_score": 3.0,
        "first/count": 2.0,
        "second/total_score": 7.0,
        "second/count": 2.0,
    }


def test_names_of_metrics_do_not_depend_on_the_tasks_of_the_examples_read(make_text_input):
    source = make_text_input(
        names=("first", "second"), metric_fns=[total_score], eval_loop_num_batches=1
    )
    assert source.score_metrics({0: 1.0, 1: 2.0}) == {"first/total_score": 3.0, "first/count": 2.0}


@pytest.mark.parametrize(
    ("scores", "value"),
    [
        ({0: 1.0, 1: 1.0, -1: 0.0}, [-1]),
        ({0: 1.0}, [1]),
        ({0: 1.0, 1: 1.0, 7: 1.0}, [7]),
        ({}, [0, 1]),
    ],
)
def test_score_metrics_raise_unless_scores_match_the_examples(
    raises, scores, value, make_text_input
):
    source = make_text_input(metric_fns=[total_score])
    with raises(ConfigError, field="scores", value=value):
        source.score_metrics(scores)


@pytest.mark.parametrize(
    ("reset", "scores"),
    [(None, {1: 2.0, 2: 3.0}), (True, {0: 2.0, 1: 3.0})],
    ids=["rolling", "first"],
)
def test_bounded_evaluation_has_metrics_of_the_examples_it_read(make_text_input, reset, scores):
    fields = {"reset_for_eval": reset, "eval_loop_num_batches": 1}
    source = make_text_input(("one", "two", "three"), metric_fns=[total_score], **fields)
    assert source.score_metrics(scores) == {"total_score": 5.0, "count": 2.0}


def test_metrics_do_not_disturb_the_batches(make_text_input):
    source = make_text_input(("one", "two", "three"), metric_fns=[total_score])
    source.get_next()
    source.score_metrics({0: 1.0, 1: 1.0, 2: 1.0})
    assert source.get_next().provenance.tolist() == [2, -1]


def test_training_and_tasks_without_metrics_have_none(make_text_input):
    assert not make_text_input(metric_fns=[total_score], is_training=True).has_score_metrics
    plain = make_text_input()
    assert not plain.has_score_metrics and plain.score_metrics({0: 1.0}) == {}


def test_metrics_need_one_example_per_row(raises, make_text_input):
    with raises(ConfigError, field="use_packing", value=True):
        make_text_input(metric_fns=[total_score], use_packing=True)
    packed = make_text_input(metric_fns=[total_score], use_packing=True, use_task_metrics=False)
    assert not packed.has_score_metrics and packed.get_next().segment_ids.max() == 2


def test_metrics_of_equal_names_raise_and_text_is_skipped(raises, make_text_input, caplog):
    def with_text(targets, scores):
        return {"best": "one", "mean": 2.0}

    scores = {0: 1.0, 1: 3.0}
    with raises(ConfigError, owner="task texts"):
        make_text_input(metric_fns=[total_score, total_score]).score_metrics(scores)
    assert make_text_input(metric_fns=[with_text]).score_metrics(scores) == {"mean": 2.0}
    assert "skipping metric 'best', which is a str" in caplog.text


@pytest.mark.parametrize("converter", ["language_model", "prefix_lm"])
@pytest.mark.parametrize("weights_on_targets_only", [None, False, True])
def test_scores_that_would_include_the_inputs_raise(
    raises, make_task, converter, weights_on_targets_only
):
    fields = {
        "batch_size": 1,
        "mixture_or_task": make_task(
            [{"inputs": [7, 8], "targets": [5, 1]}], metric_fns=[total_score]
        ),
        "split_name": "validation",
        "task_feature_lengths": {"inputs": 3, "targets": 3},
        "feature_converter": converter,
        "weights_on_targets_only": weights_on_targets_only,
    }
    if weights_on_targets_only or (weights_on_targets_only is None and converter == "prefix_lm"):
        batch = SeqIOInput(**fields).get_next()
        assert batch.weights.sum() == 2  # the targets
    else:
        with raises(ConfigError, field="weights_on_targets_only", value=False):
            SeqIOInput(**fields)
        for other in ({"use_task_metrics": False}, {"is_training": True}):
            assert SeqIOInput(**{**fields, **other}).get_next().weights.sum() > 2
