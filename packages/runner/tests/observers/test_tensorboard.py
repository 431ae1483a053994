from __future__ import annotations

import collections
import io
import math
import resource
import struct

import numpy as np
import pytest
from etils import epath

from layerkit_runner.observers import Histogram, Observer, Observers, TensorBoard


def events(folder):
    """Reads event files by their record format: u64 length, u32 crc, payload, u32 crc."""
    from tensorboardX.proto import event_pb2

    result = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        position = 0
        while position < len(content):
            (length,) = struct.unpack_from("<Q", content, position)
            result.append(
                event_pb2.Event.FromString(content[position + 12 : position + 12 + length])
            )
            position += 12 + length + 4
    return result


def values(folder):
    return [(event.step, value) for event in events(folder) for value in event.summary.value]


def scalars(folder):
    series = collections.defaultdict(list)
    for step, value in values(folder):
        if value.WhichOneof("value") == "simple_value":
            series[value.tag].append((step, value.simple_value))
    return dict(series)


@pytest.fixture
def board(run_info, tmp_path):
    board = TensorBoard()
    board.start(run_info(job_log_dir=epath.Path(tmp_path)))
    return board


def test_scalars_go_to_the_folder_of_their_kind(board, tmp_path):
    board.train_metrics(1, {"loss": 2.5, "learning/lr": 0.25})
    board.train_metrics(2, {"loss": math.inf, "learning/lr": 0.5})
    board.eval_metrics(2, "train", {"loss": 3.0})
    board.eval_metrics(2, "c4/en", {"loss": 4.0})
    board.close()
    summaries = tmp_path / "summaries"
    assert scalars(summaries / "train") == {
        "loss": [(1, 2.5), (2, math.inf)],
        "learning/lr": [(1, 0.25), (2, 0.5)],
    }
    assert scalars(summaries / "eval_train") == {"loss": [(2, 3.0)]}
    assert scalars(summaries / "eval_test_c4_en") == {"loss": [(2, 4.0)]}
    assert len(list(summaries.iterdir())) == 3


def test_scalars_of_a_step_are_one_event_with_allowed_tags(board, tmp_path):
    board.train_metrics(3, {"/loss of all": 2.5, "a/b-c.d": np.float32(0.25)})
    board.close()
    (event,) = (e for e in events(tmp_path / "summaries" / "train") if e.summary.value)
    result = {value.tag: value.simple_value for value in event.summary.value}
    assert result == {"loss_of_all": 2.5, "a/b-c.d": 0.25}


def test_texts_are_written_verbatim(board, tmp_path):
    board.text(5, "prompts", "def f():\n    return *x*")
    board.close()
    folder = tmp_path / "summaries" / "decode_test_prompts"
    ((_, value),) = values(folder)
    assert value.tag.startswith("sample")
    assert value.metadata.plugin_data.plugin_name == "text"
    assert value.tensor.string_val[0].decode() == "    def f():\n        return *x*"


def record_two_starts(run_info, folder, **fields):
    """Report steps 1 and 2, the second one after a resume."""
    config = {
        "experiment": "lm.Toy",
        "fields": {"NUM_LAYERS": 2, "MESH": [1, 2], "TIED": True, "INIT": None, **fields},
        "overrides": {"NUM_LAYERS": "2", "task.train.random_seed": "7"},
        "config": {"task.name": "lm", "task.train.random_seed": 7},
    }
    for step in (1, 2):
        board = TensorBoard()
        board.start(run_info(job_log_dir=epath.Path(folder), start_step=step - 1, config=config))
        board.train_metrics(step, {"loss": 3.0 - step})
        board.eval_metrics(step, "held_out", {"loss": 4.0 - step})
        board.close()


def test_hyperparameters_and_configuration_are_equal_across_a_resume(run_info, tmp_path):
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    record_two_starts(run_info, tmp_path)
    cards = values(tmp_path / "summaries")
    assert [(step, value.tag) for step, value in cards] == [
        (step, tag)
        for step in (0, 1)
        for tag in ("_hparams_/session_start_info", "config/text_summary")
    ]
    assert [value for _, value in cards[:2]] == [value for _, value in cards[2:]]
    data = HParamsPluginData.FromString(cards[0][1].metadata.plugin_data.content)
    shown = {
        name: getattr(value, value.WhichOneof("kind"))
        for name, value in data.session_start_info.hparams.items()
    }
    assert shown == {
        "experiment": "lm.Toy",
        "NUM_LAYERS": 2,
        "MESH": "[1, 2]",
        "TIED": True,
        "INIT": "None",
        "task.train.random_seed": 7,
    }
    text = cards[1][1].tensor.string_val[0].decode()
    assert "    NUM_LAYERS = 2\n" in text and "    task.name = 'lm'" in text


def test_tensorboard_lists_hyperparameters_with_the_last_metrics_of_each_job(run_info, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard import context
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    for layers in (2, 4):
        record_two_starts(run_info, tmp_path / f"job{layers}", NUM_LAYERS=layers)
    events = plugin_event_multiplexer.EventMultiplexer()
    events.AddRunsFromDirectory(str(tmp_path))
    events.Reload()
    provider = data_provider.MultiplexerDataProvider(events, str(tmp_path))
    backend = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    asked = context.RequestContext()
    cards = backend.hparams_metadata(asked, "")
    experiment = backend.experiment_from_metadata(asked, "", True, cards, [])  # noqa: FBT003
    metrics = {(one.name.group, one.name.tag) for one in experiment.metric_infos}
    assert metrics == {("train", "loss"), ("eval_test_held_out", "loss")}
    request = api_pb2.ListSessionGroupsRequest(
        slice_size=9, allowed_statuses=[api_pb2.STATUS_UNKNOWN], include_metrics=True
    )
    handler = list_session_groups.Handler(asked, backend, "", request)
    groups = sorted(handler.run().session_groups, key=lambda group: group.name)
    assert [group.hparams["NUM_LAYERS"].number_value for group in groups] == [2, 4]
    for group in groups:
        last = {one.name.group: (one.training_step, one.value) for one in group.metric_values}
        assert last == {"train": (2, 1.0), "eval_test_held_out": (2, 2.0)}


def test_histograms_and_their_norms_are_written(board, tmp_path):
    edges, counts = np.array([-1.0, 0.0, 2.0]), np.array([3.0, 1.0])
    broken = Histogram(np.full(3, math.nan), np.zeros(2), sum=math.nan, sum_of_squares=math.nan)
    weights = {"vars/w": Histogram(edges, counts, sum=-1.5, sum_of_squares=6.25), "vars/b": broken}
    board.histograms(4, weights)
    board.close()
    folder = tmp_path / "summaries" / "train"
    assert scalars(folder)["vars/w/norm"] == [(4, 2.5)]
    assert math.isnan(scalars(folder)["vars/b/norm"][0][1])
    (value,) = [value for _, value in values(folder) if value.WhichOneof("value") == "histo"]
    assert value.tag == "vars/w"
    histogram = value.histo
    assert (histogram.min, histogram.max, histogram.num) == (-1, 2, 4)
    assert (histogram.sum, histogram.sum_squares) == (-1.5, 6.25)
    assert (list(histogram.bucket_limit), list(histogram.bucket)) == ([0, 2], [3, 1])


def test_images_and_the_histograms_of_an_evaluation(board, tmp_path):
    from PIL import Image

    image = np.random.default_rng(0).integers(256, size=(5, 4, 3)).astype(np.uint8)
    spread = Histogram(np.array([0.0, 1.0]), np.array([2.0]), sum=1.0, sum_of_squares=1.0)
    board.images(3, {"summaries/picture/0": image})
    board.eval_histograms(3, "held_out", {"scores": spread})
    board.close()
    [(_, shown)] = values(tmp_path / "summaries" / "train")
    assert shown.tag == "summaries/picture/0"
    decoded = Image.open(io.BytesIO(shown.image.encoded_image_string))
    np.testing.assert_array_equal(np.asarray(decoded), image)
    result = values(tmp_path / "summaries" / "eval_test_held_out")
    assert [list(v.histo.bucket) for _, v in result if v.tag == "scores"] == [[2.0]]


def test_resumed_run_hides_earlier_events_of_repeated_steps(run_info, tmp_path):
    board = TensorBoard()
    board.start(run_info(job_log_dir=epath.Path(tmp_path), start_step=40))
    board.train_metrics(41, {"loss": 1.0})
    board.close()
    session_starts = [
        event.step
        for event in events(tmp_path / "summaries" / "train")
        if event.WhichOneof("what") == "session_log"
    ]
    assert session_starts == [41]  # TensorBoard drops events of this step and later ones


def test_full_disk_removes_the_observer_without_blocking(run_info, tmp_path):
    lines = []

    class Heard(Observer):
        def message(self, text):
            lines.append(text)

    observers = Observers([Heard(), TensorBoard()])
    observers.start(run_info(job_log_dir=epath.Path(tmp_path)))
    observers.train_metrics(1, {"loss": 1.0})
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a disk on which files cannot grow
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, unlimited[1]))
        for step in range(2, 200):
            observers.train_metrics(step, {"loss": 1.0})
        observers.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert len(lines) == 1
    assert lines[0].startswith("TensorBoard failed and was removed")
    assert "File too large" in lines[0]
