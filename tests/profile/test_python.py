"""The Python function: a name that the package of the same topic does not hide."""

import meshwise
import meshwise.profile
from tests.profile.traces import SGLANG


def test_a_trace_is_profiled_from_python():
    found = meshwise.profile_run(SGLANG)
    assert repr(found).startswith("<Diagnosis: 10.4 ms a step: ")
    assert found.to_dict()["causes"][0]["name"] == "launch-bound"
    assert sum(found.profile.partition_s.values()) == found.profile.step_s
