from __future__ import annotations

import json
import struct

import pytest

from layerkit.errors import ConfigError
from layerkit_runner.observers.loss_curve import draw_loss_curve
from layerkit_runner.observers.metrics_log import smooth

pytestmark = pytest.mark.usefixtures("matplotlib")


def write_record(folder, *, steps, tokens_per_step=64):
    lines = [{"event": "start", "step": 0, "tokens_per_step": tokens_per_step, "experiment": "Toy"}]
    for step in steps:
        lines.append({"step": step, "time": 0.0, "loss": 2 + 3 / step})
        if step % 10 == 0:
            lines.append({"step": step, "time": 0.0, "dataset": "held_out", "loss": 2.1 + 3 / step})
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def png_size(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_picture_is_written_beside_the_metrics_file(tmp_path):
    path = write_record(tmp_path, steps=range(1, 200))
    picture = draw_loss_curve(path, baselines={"trigram table": 1.98})
    assert str(picture) == str(tmp_path / "loss_curve.png")
    assert png_size(tmp_path / "loss_curve.png") == (960, 576)
    assert draw_loss_curve(tmp_path) == picture  # the job folder does as well


def test_picture_depends_on_label_and_baselines_only(tmp_path):
    path = write_record(tmp_path, steps=range(1, 200))
    plain = draw_loss_curve(path, tmp_path / "plain.png").read_bytes()
    again = draw_loss_curve(path, tmp_path / "again.png").read_bytes()
    labeled = draw_loss_curve(path, tmp_path / "labeled.png", y_label="nats").read_bytes()
    lined = draw_loss_curve(path, tmp_path / "lined.png", baselines={"table": 2.2}).read_bytes()
    assert plain == again
    assert len({plain, labeled, lined}) == 3


def test_each_training_program_has_a_curve(tmp_path):
    path = write_record(tmp_path, steps=range(1, 5))
    mixed = draw_loss_curve(path).read_bytes()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["train_programs"] = ["web", "code"]
    for line in lines[1:]:
        if "dataset" not in line:
            line[f"{'web' if line['step'] % 2 else 'code'}/loss"] = line["loss"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    apart = draw_loss_curve(path).read_bytes()
    assert apart != mixed
    lines[0]["train_programs"] = ["code"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert draw_loss_curve(path).read_bytes() not in (apart, mixed)


def test_non_finite_losses_are_omitted(tmp_path):
    path = write_record(tmp_path, steps=range(1, 60))
    expected = draw_loss_curve(path, tmp_path / "expected.png").read_bytes()
    with path.open("a") as file:
        file.write('{"step": 60, "time": 0.0, "loss": "NaN"}\n{"step": 61, "loss": "Infinity"}\n')
    assert draw_loss_curve(path, tmp_path / "with_nan.png").read_bytes() == expected


def test_draw_loss_curve_without_finite_values_raises(raises, tmp_path):
    path = write_record(tmp_path, steps=[])
    with raises(ConfigError, owner=str(path), field="key", value="loss"):
        draw_loss_curve(path)


def test_smooth_returns_windowed_means():
    values = [9.0, 3.0, 6.0, 0.0, 3.0, 9.0]
    assert smooth(values, half_width=1) == pytest.approx([9, 6, 3, 3, 4, 6])
    assert smooth(values, half_width=2) == pytest.approx([9, 6, 21 / 5, 21 / 5, 18 / 4, 4])
