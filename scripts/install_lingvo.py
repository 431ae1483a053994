"""Install Lingvo and the smallest tested set of packages for layerkit's adaptors.

    python scripts/install_lingvo.py [arguments of pip install]

Lingvo requires Apache Beam, Jupyter and more, and Beam requires a protobuf version that other
readers do not support. Lingvo's input generators need none of these. This script installs the
TensorFlow release that Lingvo was built for and the few packages that Lingvo imports, and then
Lingvo without its requirements, into the environment of the Python that runs the script.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

# Lingvo's binary requires one release of TensorFlow. lingvo.core imports sympy and sentencepiece
# (0.2.3 requires a protobuf version that other packages exclude). Its summaries and lingvo.tasks.lm
# import matplotlib, which brings pillow.
NEEDED = ("tensorflow==2.21.*", "sympy", "sentencepiece>=0.2.1,<0.2.3", "matplotlib")
LINGVO = "lingvo==0.14.2"
# Imports that must work afterwards. layerkit enables them where Lingvo's native ops do not load.
CHECK = """
import importlib.util
if importlib.util.find_spec("layerkit_inputs") is None:
    print("Lingvo is installed; layerkit-inputs is not.")
else:
    from layerkit_inputs.lingvo import preflight
    problem = preflight.native_ops_problem()
    import lingvo.core.base_input_generator, lingvo.tasks.lm.input_generator
    print("Lingvo is ready" + (f", without its native ops: {problem}." if problem else "."))
"""


def main(arguments: Sequence[str]) -> int:
    """Install in two steps and import; return the exit code of the first step that failed."""
    if not (3, 10) <= sys.version_info < (3, 14):
        print("Lingvo 0.14.2 requires Python 3.10 to 3.13.", file=sys.stderr)
        return 2
    pip = ["-m", "pip", "install", *arguments]
    for step in ([*pip, *NEEDED], [*pip, "--no-deps", LINGVO], ["-c", CHECK]):
        code = subprocess.run([sys.executable, *step], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
