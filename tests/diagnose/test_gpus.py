"""Whether GPUs work: one rule for the engine and for `status`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.diagnose import diagnose
from dflashctl.diagnose.gpus import at_launch, owner, place, working

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


XID = "2026-11-29T10:00:00+0000 pve1 kernel: NVRM: Xid (PCI:0000:{:02x}:00): {}, pid=1, name=python3, text"
SXID = (
    "2026-11-29T10:00:00+0000 pve1 kernel: nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 26"
)
GSP = "pve1 kernel: NVRM: GPU6 _kgspIsHeartbeatTimedOut: Heartbeat timed out, currentTimeMs 812"
LISTED = [f"00000000:{bus:02X}:00.0" for bus in (0x41, 0x42, 0x43, 0x44)]
OURS = {"devices": {"targets": ["cuda:0"], "drafters": ["cuda:1"]}, "gpu_pci": LISTED}
LAUNCHED = at_launch(OURS)
LEFT = {"gpu_pci": LISTED[1:]}  # one of them fell off the bus, or was never ours
TRACEBACK = [b"step 1 | loss 2.0", b"Traceback (most recent call last):", b"KeyError: 'x'"]
ENDED = {"process_alive": False, "exit_code": 1}


@pytest.mark.parametrize(
    ("text", "facts", "whose"),
    [
        (XID.format(0x41, 79), LAUNCHED, "ours"),
        (XID.format(0x41, 79), {**LAUNCHED, **LEFT}, "ours"),  # it is listed no more
        (XID.format(0x43, 79), LAUNCHED, "doubt"),  # of our container, by its number not of our run
        (XID.format(0x51, 79), LAUNCHED, "others"),
        (XID.format(0x51, 79), {**LAUNCHED, "gpu_pci": ["00000000:51:00.0"]}, "others"),
        (XID.format(0x43, 79), at_launch({"gpu_pci": LISTED, "devices": {"targets": ["auto"]}}), "ours"),
        (XID.format(0x41, 79), {"gpu_pci": LISTED}, "ours"),
        (XID.format(0x41, 79), LEFT, "doubt"),
        (XID.format(0x51, 79), {}, "ours"),  # nothing is known
        (XID.format(0x51, 79), {"gpu_pci": ["", "N/A"]}, "ours"),
        ("NVRM: Xid (PCI:0001:41:00): 79, x", LAUNCHED, "others"),  # another domain
        ("NVRM: GPU 0000:98:00.0: RmInitAdapter failed! (0x62:0x65:1792)", LAUNCHED, "others"),
        (SXID, LAUNCHED, "doubt"),
        (GSP, LAUNCHED, "doubt"),
        ("CUDA error: uncorrectable ECC error encountered", LAUNCHED, "ours"),  # our own log says so
    ],
)
def test_whose_a_line_of_the_driver_is(text, facts, whose):
    assert owner(text, facts) == whose


def _with_kernel(facts, *kernel, log=TRACEBACK):
    return diagnose(log, {**ENDED, **facts}, kernel=[line.encode() for line in kernel])


@pytest.mark.parametrize("number", [79, 94, 31, 119])
def test_another_runs_gpu_is_not_our_failure(number):
    """Not in place of our own error, and not where we have none."""
    found = _with_kernel(LAUNCHED, XID.format(0x51, number))
    assert (found.class_, found.cascades) == ("user-exception", ())
    assert _with_kernel(LAUNCHED, XID.format(0x51, number), log=TRACEBACK[:1]).class_ == "unknown"
    living = {"process_alive": True, **LAUNCHED}
    assert diagnose(TRACEBACK[:1], living, kernel=[XID.format(0x51, number).encode()]).verdict == "healthy"


@pytest.mark.parametrize(("line", "facts"), [(XID.format(0x43, 79), LAUNCHED), (XID.format(0x41, 79), LEFT)])
def test_what_may_be_anothers_stays_behind_our_own_error(line, facts):
    found = _with_kernel(facts, line)
    assert (found.class_, found.cascades[0].file) == ("user-exception", "kernel")
    alone = _with_kernel(facts, line, log=TRACEBACK[:1])
    assert (alone.class_, alone.confidence) == ("gpu-fell-off-bus", "likely")
    assert alone.where.endswith(", perhaps not this run's")
    # the exit record is ours too
    assert _with_kernel({**facts, "exit_code": 139}, line, log=TRACEBACK[:1]).class_ == "segfault"
    living = {"process_alive": True, **facts}
    assert diagnose(TRACEBACK[:1], living, kernel=[line.encode()]).verdict == "healthy"


def test_nccl_errors_follow_from_a_switch_that_failed():
    log = [b"step 1 | loss 2.0", b"Traceback (most recent call last):"]
    log += [
        b"torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.27.3"
    ]
    assert _with_kernel({}, log=log).class_ == "nccl-system-error"
    assert _with_kernel(LAUNCHED, SXID, log=log).class_ == "nvlink-error"
    assert _with_kernel(LAUNCHED, SXID).class_ == "user-exception"


def test_what_may_be_anothers_outranks_no_report_of_the_trainer():
    failed = {"worker": "target-0", "device": "cuda:0", "error": "ModelError: no such layer"}
    kernel = [XID.format(0x43, 79).encode()]
    found = diagnose(TRACEBACK[:1], {**ENDED, **LAUNCHED}, kernel=kernel, reported=failed)
    assert (found.title, found.rule) == ("no such layer", "reported")


def test_a_client_of_another_driver_may_be_anyones():
    log = [b"Traceback (most recent call last):", b"RuntimeError: No CUDA GPUs are available"]
    said = "NVRM: API mismatch: the client has the version 580.95.05, but"
    found = _with_kernel(LAUNCHED, said, log=log)
    assert (found.class_, found.notes) == (
        "no-nvidia-driver",
        (f"the host's kernel says, perhaps of another run: {said}",),
    )
    ours = _with_kernel(LAUNCHED, "NVRM: GPU 0000:42:00.0: RmInitAdapter failed! (0x62:0x65:1792)", log=log)
    assert (ours.rule, ours.where) == ("gpu-init-failed", "GPU 1 (PCI 42:00)")


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("PCI:0000:41:00", (0, 0x41, 0)),
        ("00000009:01:1F.0", (9, 1, 0x1F)),
        ("0a:00", (0, 10, 0)),
        ("[N/A]", ()),
        ("", ()),
    ],
)
def test_places(address, found):
    assert place(address) == found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.sampled_from(["cuda:0", *LISTED]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON, JSON)
def test_no_record_or_fact_breaks_it(listed, devices, indices):
    facts = at_launch({"gpu_pci": listed, "devices": devices})
    for known in (facts, {"gpu_pci": listed, "gpu_pci_at_launch": listed, "gpu_indices": indices}):
        assert owner(XID.format(0x41, 79), known) in ("ours", "doubt", "others")
