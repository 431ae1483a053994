"""Preparation of Lingvo: missing packages and missing native ops."""

from __future__ import annotations

import subprocess
import sys

import pytest

from layerkit_inputs.lingvo import preflight


def test_missing_lingvo_is_an_error_with_the_command_to_install_it():
    pytest.importorskip("tensorflow")
    program = (
        "import sys; sys.modules['lingvo'] = None\n"  # as Python treats what is not installed
        "from layerkit_inputs.base.errors import MissingExtraError\n"
        "from layerkit_inputs.lingvo import LingvoInputAdaptor\n"
        "try: LingvoInputAdaptor()\n"
        "except MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("pip install --no-deps lingvo==0.14.2")


def test_call_of_a_missing_native_op_raises_with_its_name_and_the_reason(lingvo):
    from lingvo.core import ops

    if not isinstance(ops, preflight._MissingOps):
        pytest.skip("Lingvo's native ops load here")
    from lingvo.core.ops import hyps_pb2  # the folder's Python modules are still there

    from layerkit_inputs.lingvo import LingvoInputAdaptor

    assert hyps_pb2.__name__ == "lingvo.core.ops.hyps_pb2"
    with pytest.raises(preflight.NativeOpsError, match="^pack_sequences, one of Lingvo's"):
        ops.gen_x_ops.pack_sequences([1], [1])
    params = lingvo.NativeNumbers.Params().Set(batch_size=2, file_random_seed=0)
    source = LingvoInputAdaptor(input=params, is_training=True)
    with pytest.raises(preflight.NativeOpsError, match="^generic_input, one of Lingvo's native"):
        source.get_next()
