"""How hard the fuzz tests try: little and always the same in CI; ``DDP_FUZZ=N`` makes it N times as much, at random.

With ``DDP_FUZZ`` what fails is kept in ``.hypothesis`` and tried first the next time.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("DDP_FUZZ", "0"))


def fuzz(examples: int, **more: Any) -> settings:
    """Return the settings of a test that tries so many examples in CI."""
    more = {"deadline": None, "suppress_health_check": list(HealthCheck), **more}
    if TIMES:
        return settings(max_examples=examples * TIMES, **more)
    return settings(max_examples=examples, derandomize=True, database=None, **more)
