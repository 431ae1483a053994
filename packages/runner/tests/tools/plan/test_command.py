from __future__ import annotations

import pytest


def test_plan_for_sixteen_simulated_devices(plan_json, tmp_path):
    # The number of devices is independent of the 8 in the environment of the tests.
    plan = plan_json("--fdl.MESH=[2,4,2]")
    assert plan["num_devices"] == 16
    assert plan["mesh"] == {"data": 2, "fsdp": 4, "tensor": 2}
    assert plan["batch"]["rows"] == 16
    assert {each["axes"] for each in plan["collectives"]} >= {"fsdp", "tensor", "data"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_page_of_a_plan_is_written_beside_its_json(runner, tmp_path):
    page, other = tmp_path / "plan.html", tmp_path / "other.json"
    result = runner("--json", f"--html={page}")
    assert result.returncode == 0, result.stderr
    other.write_text(result.stdout)
    assert page.read_text().count("<h3>this plan</h3>") == 0
    result = runner("--fdl.MESH=[1,8,1]", f"--html={page}", f"--compare={other}")
    assert result.stdout.endswith(f"wrote {page}\n"), result.stderr
    assert "<b>data 2 × fsdp 2 × tensor 2 (SpmdPartitioner)</b>" in page.read_text()
    assert f"<h3>{other}</h3>" in page.read_text()


@pytest.mark.slow  # the page itself is tested without a process
def test_page_of_a_pmap_experiment(runner):
    result = runner("--fdl.USE_PMAP=True", "--target=cpux3")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "plan of small_lm_experiment.SmallLm"
    assert "mesh         batch 3 (PmapPartitioner)" in lines
    assert len(lines) < 45


# One error in the ordinary tests.
FURTHER_ERRORS = [
    (["--xla_flags_preset=tpu_fsdp"], "--xla_flags_preset='tpu_fsdp'"),
    (["--fdl.task.train.save_max_to_keep=0"], "save_max_to_keep=0"),
    (["--search", "--html=a.html"], "--html='a.html'. Expected a plan without --search"),
    (["--html=a.html", "--compare=a.json"], "--compare='a.json'"),
    (["--fdl.MESH=[1,1]"], "--fdl.partitioner.ici_mesh_shape=[1, 1]"),
]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--num_devices=4"], "the mesh needs 8 devices, but there are 4 (cpu)"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER_ERRORS),
    ],
)
def test_invalid_flags_and_fields_end_with_exit_code_2(runner, tmp_path, flags, named):
    result = runner(*flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
