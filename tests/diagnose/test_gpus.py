"""Whether GPUs work: one rule for the engine and for `status`."""

import pytest

from dflashctl.diagnose import diagnose
from dflashctl.diagnose.gpus import working

CASES = [
    ([98, 97], [610.0, 590.0], True),
    ([98, 97], [120.0, 118.0], False),  # they spin in a collective
    ([100, 0], [610.0, 80.0], False),  # one waits for nothing
    ([0, 0], [75.0, 75.0], False),
    ([98, None], [610.0, None], True),
    ([98], None, False),
    (None, [610.0], False),
    ([None], [None], False),
    (98, 610.0, True),
    ([True], [True], False),
]


@pytest.mark.parametrize(("util", "power", "works"), CASES)
def test_working(util, power, works):
    assert working(util, power) is works


@pytest.mark.parametrize(("util", "power", "works"), CASES)
def test_the_engine_goes_by_the_same_rule(util, power, works):
    log = [b"step 1 | loss 2.0", b"step 2 | loss 1.9"]
    facts = {
        "process_alive": True,
        "seconds_since_last_line": 700,
        "gpu_util_pct": util,
        "gpu_power_w": power,
    }
    assert diagnose(log, facts).verdict == ("healthy" if works else "stalled")
