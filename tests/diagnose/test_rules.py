"""What a rule must do beyond its one example of patterns.examples."""

from __future__ import annotations

import pytest

from dflashctl.diagnose import diagnose

ENDED = {"process_alive": False, "exit_code": 1}
CAPTURE = (
    "operation not permitted when stream is capturing",
    "operation would result in a merge of separate capture sequences",
    "capture was not ended in the same stream as it began",
    "capturing stream has unjoined work",
    "dependency created on uncaptured work in another stream",
    "operation would make the legacy stream depend on a capturing blocking stream",
    "operation not permitted on an event last recorded in a capturing stream",
    "attempt to terminate a thread-local capture sequence from another thread",
)
"""CUDA's words for its errors 900 and 902 to 908."""


@pytest.mark.parametrize("words", CAPTURE)
def test_each_word_of_cuda_for_a_capture_that_failed(words: str) -> None:
    log = ["Traceback (most recent call last):", f"torch.AcceleratorError: CUDA error: {words}"]
    assert diagnose([line.encode() for line in log], ENDED).class_ == "cuda-graph-capture"


NO_GPU = ["Traceback (most recent call last):", "RuntimeError: No CUDA GPUs are available"]


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ("Failed to initialize NVML: Insufficient Permissions", "gpu-not-permitted"),
        ("[  903.6] NVRM: GPU 0000:98:00.0: RmInitAdapter failed! (0x62:0x65:1792)", "gpu-init-failed"),
    ],
)
def test_why_there_is_no_gpu(said: str, rule: str) -> None:
    """What was said before explains the error, and is no failure without one."""
    found = diagnose([line.encode() for line in (said, *NO_GPU)], ENDED)
    assert (found.class_, found.rule, found.root and found.root.line) == ("no-nvidia-driver", rule, 1)
    assert diagnose([said.encode(), b"step 1 | loss 2.0", b"step 2 | loss 1.9"]).class_ is None


@pytest.mark.parametrize(
    ("said", "class_", "rule"),
    [
        ("NVRM: API mismatch: the client has the version 580.95.05, but", "driver-library-mismatch", ""),
        (
            "NVRM: GPU 0000:98:00.0: RmInitAdapter failed! (0x62:0x65:1792)",
            "no-nvidia-driver",
            "gpu-init-failed",
        ),
    ],
)
def test_the_kernel_tells_why_there_is_no_gpu(said: str, class_: str, rule: str) -> None:
    log = [line.encode() for line in NO_GPU]
    found = diagnose(log, ENDED, kernel=[b"pve1 kernel: " + said.encode()])
    assert (found.class_, found.rule, found.root and found.root.file) == (class_, rule, "kernel")
    other = [b"Traceback (most recent call last):", b"KeyError: 'x'"]
    assert diagnose(other, ENDED, kernel=[said.encode()]).class_ == "user-exception"


def test_a_reset_that_the_driver_asks_for() -> None:
    line = "NVRM: Xid (PCI:0000:0a:00): 154, pid=1, name=python3, GPU recovery action changed from 0x{} ({}) to 0x{} ({})"
    asked = diagnose([line.format(0, "None", 1, "GPU Reset Required").encode()], ENDED)
    assert (asked.class_, asked.rule, asked.where) == ("unknown", "gpu-needs-reset", "the GPU at PCI 0a:00")
    assert diagnose([line.format(1, "GPU Reset Required", 0, "None").encode()]).class_ is None


def test_a_run_that_has_passed_the_check_is_not_told_to_check() -> None:
    said = "target-0 on cuda:0 failed at step 0: ModelError: target.layers names layer 40 of 36"
    found = diagnose([said.encode()], ENDED)
    assert (found.class_, found.rule) == ("config-error", "setting-refused")
    assert not any("--dry-run" in advice for advice in found.advice)
    # the trainer's own fix is better yet
    failed = {
        "worker": "target-0",
        "device": "cuda:0",
        "error": "ModelError: no layer 40\n  fix: leave it out",
    }
    assert diagnose([said.encode()], ENDED, reported=failed).advice == ("leave it out",)
