"""Making Lingvo ready: what is imported when, and what is said where something is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from layerkit_inputs.lingvo import preflight

GLIBC = (
    "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.99' not found (required by "
    "/somewhere/lingvo/core/ops/x_ops.so)"
)


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_missing_lingvo_is_an_error_with_the_remedy():
    printed = run(
        "import sys; sys.modules['lingvo'] = None\n"  # as Python treats what is not installed
        "from layerkit_inputs.base.errors import MissingExtraError\n"
        "from layerkit_inputs.lingvo import LingvoInputAdaptor\n"
        "try: LingvoInputAdaptor()\n"
        "except MissingExtraError as error: print(error)"
    )
    pytest.importorskip("tensorflow")
    assert printed == (
        "Lingvo inputs need the packages lingvo: pip install 'tensorflow==2.21.*' sympy "
        "matplotlib, then pip install --no-deps lingvo==0.14.2"
    )


def test_old_glibc_is_reported_with_the_needed_version():
    here = os.confstr("CS_GNU_LIBC_VERSION").removeprefix("glibc ")
    assert preflight.why_ops_do_not_load(GLIBC) == (
        f"they need glibc 2.99 or newer, and this machine has {here} (Ubuntu 24.04 and Debian 13 "
        "are new enough)"
    )


def test_ops_of_another_tensorflow_are_reported():
    assert preflight.why_ops_do_not_load("x_ops.so: undefined symbol: _ZN3tsl\nmore") == (
        "they do not load: x_ops.so: undefined symbol: _ZN3tsl. Install matching "
        f"versions of Lingvo and TensorFlow: {preflight.INSTALL}"
    )


def test_preparing_twice_changes_nothing(lingvo):
    ops = sys.modules["lingvo.core.ops"]
    before = ops.gen_x_ops
    assert preflight.prepare() is lingvo.tf
    assert sys.modules["lingvo.core.ops"] is ops and ops.gen_x_ops is before


def test_call_of_a_missing_native_op_names_it(lingvo):
    problem = preflight.native_ops_problem()
    if problem is None:
        pytest.skip("Lingvo's native ops load here")
    from lingvo.core import ops
    from lingvo.core.ops import hyps_pb2  # the folder's Python modules are still there

    assert hyps_pb2.__name__ == "lingvo.core.ops.hyps_pb2"
    whole = (
        "this input calls pack_sequences, one of Lingvo's native ops, which cannot be used here: "
        f"{problem}. Use an input of tf.data, such as those of DefineTFDataInput and "
        "TFDataSequenceInputGenerator."
    )
    for op in (ops.pack_sequences, ops.gen_x_ops.pack_sequences):
        with pytest.raises(preflight.NativeOpsError, match=f"^{re.escape(whole)}$"):
            op([1], [1])


def test_input_that_needs_missing_native_ops_raises(lingvo):
    if preflight.native_ops_problem() is None:
        pytest.skip("Lingvo's native ops load here")
    from layerkit_inputs.lingvo import LingvoInputAdaptor

    params = lingvo.NativeNumbers.Params().Set(batch_size=2, file_random_seed=0)
    source = LingvoInputAdaptor(input=params, is_training=True)
    with pytest.raises(OSError, match="^this input calls generic_input, one of Lingvo's native"):
        source.get_next()
