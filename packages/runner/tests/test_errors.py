from __future__ import annotations

import pytest

from layerkit.errors import ConfigError, UserError
from layerkit_runner.errors import NonFiniteError, StorageError, UsageError, to_usage_error


@pytest.mark.parametrize("kind", [UsageError, StorageError, NonFiniteError])
def test_conversion_keeps_class_and_data_of_a_usage_error(kind: type[UsageError]):
    result = to_usage_error(kind("cannot save", owner="disk", value=3), owner="job")
    assert (type(result), result.exit_code) == (kind, kind.exit_code)
    assert (result.problem, result.owner, result.value) == ("cannot save", "job: disk", 3)


@pytest.mark.parametrize("error", [UserError("bad"), ConfigError("bad"), ValueError("bad")])
def test_other_errors_become_usage_errors(error: Exception):
    result = to_usage_error(error, owner="job")
    assert (type(result), result.owner, result.problem) == (UsageError, "job", "bad")
