"""Every other kind of experiment fits on the devices that it is made for, told by shapes alone.

Those of C4 and The Pile are in lm/test_published_values.py.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

import layerkit_experiments
from layerkit_runner.config.registry import read_catalogue
from layerkit_runner.tools.plan.hardware import device_kind

pytestmark = pytest.mark.experiments

# experiment: devices, how many
MADE_FOR = {
    "lm.lm_cloud.LmCloudSpmd2B": ("v4", 4),
    "lm.lm_cloud.LmCloudSpmd2BLimitSteps": ("v4", 4),
    "lm.lm_cloud.LmCloudSpmd32B": ("v4", 64),
    "lm.lm_cloud.LmCloudSpmdPipelineMultislice2B": ("v4", 8),
    "lm.optimal_scaling.OptimalScaling2x2x1": ("v5p", 4),
    "lm.llama.Llama7B": ("h100", 128),
    "lm.llama.Llama13B": ("v5p", 128),
    "lm.llama.Llama70B": ("v5p", 256),
    "lm.llama.Llama7BLora": ("h100", 1),
    "lm.llama.Llama70BLora": ("h100", 8),
    "lm.llama.Llama31_8B": ("h100", 256),
    "lm.llama.Llama31_405B": ("h100", 2048),
    "lm.open_models.Qwen3_30B_A3B": ("h100", 128),
    "lm.open_models.DeepSeekV3": ("h100", 2048),
    "lm.open_models.GptOss120B": ("h100", 512),
    "lm.open_models.Gemma3_4B": ("h100", 128),
    "lm.open_models.Gpt2_124M": ("h100", 8),
    "lm.optimal_scaling.DepthDial": ("h100", 8),
    "lm.moe.Glam126M64E": ("v5p", 64),
    "lm.moe.Glam8B64E": ("v5p", 256),
    "lm.moe.Glam64B64E": ("v4", 1024),
    "lm.jaxformer.Jaxformer1B": ("v4", 32),
    "lm.bert.BertBase": ("v5p", 16),
    "lm.bert.BertLarge": ("v5p", 64),
    "translation.wmt.TransformerBase": ("h100", 8),
    "translation.wmt.TransformerBig": ("h100", 8),
}
# Devices in a summary, as of `runner --mode=plan --target`: v4:4x4x4*2, h100x64.
TARGET = re.compile(r"\((?:v\d\w*:([\dx]+)(?:\*(\d+))?|[abh]\d+x(\d+))\)")


def test_meshes_have_the_devices_of_the_summaries():
    catalogue = read_catalogue(Path(layerkit_experiments.__file__).parent)
    for name, line in catalogue.items():
        target = TARGET.search(line.summary)
        sizes = [int(size) for size in re.findall(r" (\d+)(?= ×|,| across|$)", line.mesh or "")]
        if target is not None and sizes:
            slice_sizes = (target[1] or target[3]).split("x")
            devices = math.prod(map(int, slice_sizes)) * int(target[2] or 1)
            assert math.prod(sizes) == devices, name


def test_weights_and_optimizer_leave_half_of_the_memory(measure_states: Any, num_params: Any):
    for name, result in measure_states(MADE_FOR).items():
        kind, count = MADE_FOR[name]
        assert result["num_devices"] == count, name
        assert result["num_params"] == num_params(name), name
        memory = device_kind(kind).usable_bytes
        assert memory is not None
        assert result["num_bytes_here"] < memory / 2, name
