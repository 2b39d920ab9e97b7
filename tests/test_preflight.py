"""Judging the facts before a launch: each failure with its own words, and what is no failure."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from dflashctl.config import LocalHost, PctHost
from dflashctl.errors import PreflightError
from dflashctl.preflight import NEEDS, OLDEST_TORCH, judge
from dflashctl.profile import Profile, load_profile
from trainer import __main__ as trainer

ROOT = Path(__file__).parents[1]
HOST = PctHost(name="ct200", workspace="/workspace", python="/opt/venv/bin/python", via="pve1", vmid=200)
GPU = {"name": "H200", "memory_total_mib": 143771, "utilization_pct": 0}

FACTS: dict[str, Any] = {
    "writable": True,
    "disk": {"free_bytes": 10**12},
    "need_bytes": 10**9,
    "missing_paths": [],
    "gpus": {"rows": [{**GPU, "index": i, "memory_used_mib": 4} for i in range(8)]},
    "gpu_processes": {"rows": []},
    "runs_active": [],
    "modules": {
        "python": "3.11.2",
        "torch": "2.11.0+cu130",
        "transformers": "5.0",
        "pyarrow": "20",
        "safetensors": "0.5",
        "cuda_devices": 8,
    },
}


def profile(targets: str = "'cuda:0'", drafters: str = "'cuda:5'") -> Profile:
    return load_profile(
        None, HOST, text=f"[devices]\ntargets = [{targets}]\ndrafters = [{drafters}]\n", origin="x"
    )


def facts(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FACTS), **changes}


def modules(**changes: Any) -> dict[str, Any]:
    return facts(modules={**FACTS["modules"], **changes})


def refused(given: dict[str, Any], **devices: str) -> PreflightError:
    with pytest.raises(PreflightError) as caught:
        judge(given, profile(**devices), HOST, "ct200 on pve1", force=False)
    assert caught.value.hint
    assert int(caught.value.exit_code) == 9
    return caught.value


def test_all_well() -> None:
    assert judge(FACTS, profile(), HOST, "ct200 on pve1", force=False) == []
    assert (
        judge(
            facts(gpus={"unread": "nvidia-smi not found"}), profile("'cpu'", "'cpu'"), HOST, "x", force=False
        )
        == []
    )
    assert judge(facts(disk={"unread": "?"}), profile(), HOST, "x", force=False) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            modules(missing={"torch": "ModuleNotFoundError: No module named 'torch'"}),
            "/opt/venv/bin/python on ct200 on pve1 has no torch",
        ),
        (
            modules(
                missing={
                    "torch": "ModuleNotFoundError: No module named 'torch'",
                    "transformers": "ModuleNotFoundError: No module named 'yaml'",
                    "pyarrow": "ModuleNotFoundError: No module named 'pyarrow'",
                }
            ),
            "/opt/venv/bin/python on ct200 on pve1 has no torch, pyarrow",
        ),
        (
            modules(missing={"torch": "ModuleNotFoundError: No module named 'typing_extensions'"}),
            "torch can't be imported by /opt/venv",
        ),
        (
            modules(missing={"pyarrow": "ImportError: x"}),
            "pyarrow can't be imported by /opt/venv/bin/python on ct200 on pve1",
        ),
        (
            facts(modules={"unread": "/opt/venv/bin/python not found"}),
            "can't run the trainer: /opt/venv/bin/python not found",
        ),
        (modules(torch="2.9.1"), "torch 2.9.1 on ct200 on pve1 is too old; 2.11 or newer is needed"),
        (
            facts(writable="permission denied: /workspace"),
            "the workspace /workspace on ct200 on pve1 is not writable",
        ),
        (
            facts(disk={"free_bytes": 5}),
            "/workspace on ct200 on pve1 has 5 B free; 1.0 GB are needed",
        ),
        (
            facts(missing_paths=["/workspace/chat.jsonl"]),
            "/workspace/chat.jsonl does not exist on ct200 on pve1",
        ),
        (
            modules(cuda_devices=0),
            "torch 2.11.0+cu130 sees no GPU on ct200 on pve1, although nvidia-smi lists 8",
        ),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    assert message in refused(given).message


def test_python_3_10_is_told_to_install_tomli() -> None:
    missing = {name: f"ModuleNotFoundError: No module named '{name}'" for name in ("torch", "tomli")}
    error = refused(modules(python="3.10.13", missing=missing))
    assert error.message == "/opt/venv/bin/python on ct200 on pve1 has no torch, tomli"
    assert "safetensors 'jinja2>=3.1.6' tomli; or" in error.hint
    del missing["tomli"]
    assert "safetensors 'jinja2>=3.1.6'; or" in refused(modules(missing=missing)).hint


@pytest.mark.parametrize("python", ["python3", "/usr/bin/python3"])
def test_the_systems_python_is_not_to_be_installed_into(python: str) -> None:
    """Debian's pip refuses (PEP 668): the fix must work as it stands."""
    missing = modules(missing={"torch": "ModuleNotFoundError: No module named 'torch'"})
    host = dataclasses.replace(HOST, python=python)
    with pytest.raises(PreflightError) as caught:
        judge(missing, profile(), host, "ct200 on pve1", force=False)
    assert "python3 -m venv /opt/venv && /opt/venv/bin/pip install 'torch>=" in caught.value.hint
    assert caught.value.hint.endswith("set `python` of this host in hosts.toml to /opt/venv/bin/python")


def test_devices_that_do_not_exist() -> None:
    few = facts(gpus={"rows": FACTS["gpus"]["rows"][:2]})
    error = refused(few, targets="'cuda:0'", drafters="'cuda:5', 'cuda:6'")
    assert error.message == "cuda:5, cuda:6 do not exist on ct200 on pve1: it has cuda:0, cuda:1"
    assert "nvidia-smi" not in error.hint
    none = facts(gpus={"unread": "nvidia-smi not found"}, modules={**FACTS["modules"], "cuda_devices": 0})
    error = refused(none)
    assert (
        error.message == "cuda:0, cuda:5 do not exist on ct200 on pve1: it has no GPU (nvidia-smi not found)"
    )
    assert error.hint.endswith("try nvidia-smi there and on the host that passes them through")


def test_torch_counts_where_nvidia_smi_is_missing() -> None:
    assert judge(facts(gpus={"unread": "nvidia-smi not found"}), profile(), HOST, "x", force=False) == []


@pytest.mark.parametrize(("used", "busy"), [(1023, False), (1024, True)])
def test_a_gpu_is_busy_from_one_gib_on(used: int, busy: bool) -> None:
    given = facts(gpus={"rows": [{**GPU, "index": i, "memory_used_mib": used} for i in range(8)]})
    noted = judge(given, profile(), HOST, "ct200 on pve1", force=True)
    assert bool(noted) is busy


def test_busy_gpus_are_refused_unless_forced() -> None:
    rows = copy.deepcopy(FACTS["gpus"]["rows"])
    rows[5]["memory_used_mib"] = 70_000
    rows[1]["memory_used_mib"] = 70_000  # not one of ours
    who = {"rows": [{"pid": 42, "gpu": 5, "memory_mib": 70_000, "name": "python"}]}
    busy = facts(gpus={"rows": rows}, gpu_processes=who)
    message = "cuda:5 on ct200 on pve1 is busy: 70,000 MiB in use by python (pid 42)"
    assert refused(busy).message == message
    assert "--force" in refused(busy).hint
    assert judge(busy, profile(), HOST, "ct200 on pve1", force=True) == [message + " (--force)"]


def test_a_run_that_lives_there_is_named() -> None:
    busy = facts(runs_active=[{"run_id": "a-1129-1554", "devices": ["cuda:0", "cuda:1"], "pid": 9}])
    assert refused(busy).message == "run a-1129-1554 on ct200 on pve1 uses cuda:0"
    on_cpu = facts(runs_active=[{"run_id": "a", "devices": ["cpu"], "pid": 9}])
    assert judge(on_cpu, profile("'cpu'", "'cpu'"), HOST, "x", force=False) == []


def test_several_failures_are_all_told() -> None:
    error = refused(facts(writable="permission denied: /workspace", missing_paths=["/a", "/b"]))
    assert error.where == "also: /a does not exist on ct200 on pve1; /b does not exist on ct200 on pve1"


def test_a_missing_path_says_whose_paths_they_are() -> None:
    there = refused(facts(missing_paths=["/workspace/chat.jsonl"])).hint
    assert there.endswith("paths are those of ct200, relative ones begin at its workspace")
    with pytest.raises(PreflightError) as caught:
        judge(facts(missing_paths=["/x"]), profile(), LocalHost("local"), "local", force=False)
    assert caught.value.hint == "correct the path in the training config, or put the files there"


def test_a_target_that_is_missing_may_be_an_id_of_the_hub() -> None:
    model = profile().config.target.model
    assert "not an id of the Hub" in refused(facts(missing_paths=[model])).hint
    assert "Hub" not in refused(facts(missing_paths=["/x"])).hint


def test_what_pip_is_told_is_what_the_package_says() -> None:
    """`python -m trainer` says it too, for want of a module."""
    project = (ROOT / "pyproject.toml").read_text()
    extra = project[project.index("trainer = [") : project.index("# targets in GGUF")]
    least = dict(re.findall(r'"([\w-]+)>=([\d.]+)', extra))
    told = dict(re.findall(r"'?([\w-]+)(?:>=)?([\d.]*)'?", NEEDS))
    assert told.keys() <= least.keys()
    assert all(version in ("", least[name]) for name, version in told.items())
    assert least["torch"] == told["torch"] == ".".join(map(str, OLDEST_TORCH))
    assert set(told) <= set(re.findall(r"\w+", trainer.NEEDS))
