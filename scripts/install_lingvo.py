"""Installs Lingvo for layerkit's adaptors: the smallest set of packages that was tested.

    python scripts/install_lingvo.py [arguments of pip install]

Lingvo's own requirements bring Apache Beam, Jupyter and more, and through Beam a protobuf that
other readers cannot use. Its input generators need none of these. So TensorFlow, of the release
that Lingvo was built for, and the few packages that Lingvo imports come first, and Lingvo itself
without its requirements. They go into the environment of the Python that runs this script.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

# Lingvo's binary fits one release of TensorFlow. sympy: shapes in lingvo.core, which also imports
# sentencepiece (0.2.3 wants a protobuf that others forbid); matplotlib (which brings pillow): its
# summaries, and lingvo.tasks.lm.
NEEDED = ("tensorflow==2.21.*", "sympy", "sentencepiece>=0.2.1,<0.2.3", "matplotlib")
LINGVO = "lingvo==0.14.2"
# What must work afterwards; imports of Lingvo go through layerkit where its native ops do not load.
CHECK = """
import importlib.util
if importlib.util.find_spec("layerkit_inputs") is None:
    print("Lingvo is installed; layerkit-inputs is not.")
else:
    from layerkit_inputs.lingvo_adaptor import preflight
    problem = preflight.native_ops_problem()
    import lingvo.core.base_input_generator, lingvo.tasks.lm.input_generator
    print("Lingvo is ready" + (f", without its native ops: {problem}." if problem else "."))
"""


def main(arguments: Sequence[str]) -> int:
    """Installs in two steps, then imports; returns the exit code of the first step that failed."""
    if not (3, 10) <= sys.version_info < (3, 14):
        print("Lingvo 0.14.2 is built for Python 3.10 to 3.13.", file=sys.stderr)
        return 2
    pip = ["-m", "pip", "install", *arguments]
    for step in ([*pip, *NEEDED], [*pip, "--no-deps", LINGVO], ["-c", CHECK]):
        code = subprocess.run([sys.executable, *step], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
