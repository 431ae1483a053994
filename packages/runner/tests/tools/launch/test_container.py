"""The recipes for containers and Kubernetes; neither Docker nor a cluster is needed."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.run.resolve import resolve_entry
from layerkit_runner.tools.launch import local

ROOT = Path(__file__).resolve().parents[5]
RECIPE = ROOT / "docs/launch/Dockerfile"

pytestmark = pytest.mark.skipif(not RECIPE.exists(), reason="needs the whole repository")


def test_copied_files_and_built_packages_exist_and_images_name_no_registry():
    text = RECIPE.read_text()
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert images == ["python:3.12-slim", "python:3.12-slim"]
    copied = re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE)
    built = re.findall(r"\./(packages/\w+)", text)
    assert copied == ["packages", "constraints.txt"]
    assert {ROOT / folder for folder in built} == {
        path.parent for path in ROOT.glob("packages/*/pyproject.toml")
    }
    allowed = (RECIPE.parent / "Dockerfile.dockerignore").read_text()
    assert all(f"!{source}\n" in allowed for source in copied)


def test_extras_are_those_of_the_packages():
    extras = {
        name: set(tomllib.loads(path.read_text())["project"].get("optional-dependencies", {}))
        for name in ("runner", "inputs")
        for path in [ROOT / f"packages/{name}/pyproject.toml"]
    }
    page = (RECIPE.parent / "container.md").read_text()
    devices = re.search(r"\| `DEVICES` \| `(\w+)`, `(\w+)` or `cpu`", page)
    inputs = re.search(r"^ARG INPUTS=(\S+)$", RECIPE.read_text(), re.MULTILINE)
    assert devices is not None and set(devices.groups()) <= extras["runner"]
    assert inputs is not None and set(inputs[1].split(",")) <= extras["inputs"]


def test_jobset_runs_a_valid_command_that_fits_its_pods():
    result = yaml.safe_load((RECIPE.parent / "jobset.yaml").read_text())
    name = result["metadata"]["name"]
    (job,) = result["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert tuple(rule["onExitCodes"]["values"]) == local.FINAL_EXIT_CODES
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    bash, option, line = container["command"]
    assert (bash, option) == ("bash", "-c")
    words = [word.replace("$JOB_COMPLETION_INDEX", "0") for word in shlex.split(line)]
    assert words[:2] == ["exec", "runner"]
    flags = parse_flags(words[2:])
    assert spec["parallelism"] == spec["completions"] == flags.options.num_processes
    (port,) = container["ports"]
    address = f"{name}-{job['name']}-0-0.{name}:{port['containerPort']}"
    assert flags.options.coordinator_address == address
    # The vocabulary is on the volume of the cluster.
    overrides = [each for each in flags.overrides if each.path != "VOCAB_PATH"]
    mesh = resolve_entry(find_experiment(flags.exp), overrides).partitioner
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus * spec["completions"] == math.prod([*mesh.ici_mesh_shape, *mesh.dcn_mesh_shape])
