"""Every conformance check holds (see tests/conformance)."""

import math

import pytest
from conformance import collect


@pytest.mark.parametrize("check", collect(), ids=lambda c: f"{c.method}: {c.name}")
def test_conformance(check):
    deviation, distance = check.run()
    assert math.isfinite(deviation) and deviation <= check.tolerance
    assert distance is None or math.isfinite(distance)
