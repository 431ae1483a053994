"""absl's flags about log messages, such as those of Orbax and TensorFlow Datasets.

Lines of the runner itself do not pass through absl.
"""

from __future__ import annotations

import os

from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import RunOptions

_NAMES = ("alsologtostderr", "logtostderr", "v", "stderrthreshold", "log_dir")


def configure_library_logs(options: RunOptions) -> None:
    """Give absl the flags about log messages; leave absl unchanged if none is set."""
    default = RunOptions()
    given = {n: getattr(options, n) for n in _NAMES if getattr(options, n) != getattr(default, n)}
    if not given:
        return
    # Imported late, because it replaces the class of Python's loggers.
    from absl import flags, logging

    for name, value in given.items():
        flags.FLAGS[name].value = value
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    logging.use_absl_handler()
    if options.log_dir is None:
        return
    try:
        os.makedirs(options.log_dir, exist_ok=True)
        logging.get_absl_handler().use_absl_log_file("runner", options.log_dir)
    except OSError as error:
        raise UsageError(str(error), field="--log_dir", value=options.log_dir) from error
