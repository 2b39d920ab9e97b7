"""Screens are tested here, not the engine's wording: what it says of the fixtures is given."""

import pytest

from dflashctl.diagnose.model import Diagnosis, Place

FOUND = {
    "failed": Diagnosis(
        "failed",
        "cudagraph-tls-thread",
        "certain",
        "CUDAGraph-trees state is missing in the autograd thread of drafter 1 (cuda:6)",
        root=Place("run.log", 19, "AssertionError"),
        evidence=(
            Place(
                "run.log",
                16,
                '  File "/opt/venv/lib/python3.12/site-packages/torch/_inductor/cudagraph_trees.py", line 359',
            ),
            Place("run.log", 17, "    assert torch._C._is_key_in_tls(attr_name)"),
        ),
        cascades=(Place("run.log", 24, "AssertionError"),),
        cause="torch 2.11 sets this state only in threads it knows; a compiled backward runs in autograd's own thread",
        advice=("torch >= 2.13", '[runtime] cuda_graphs = "explicit"'),
        retry="not as it is",
    ),
    "oom": Diagnosis(
        "failed", "cgroup-oom", "certain", "the container's memory limit was hit", advice=("raise it",)
    ),
}


@pytest.fixture(autouse=True)
def known_diagnoses(request, monkeypatch):
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name in FOUND:
        monkeypatch.setattr("dflashctl.failure.diagnose", lambda *_, **__: FOUND[name])
