"""Launching on this machine: real agent, supervisor and processes; the trainer and torch are small stand-ins."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dflashctl import runs
from dflashctl.config import Devices, Host
from dflashctl.errors import ConfigError, ConnectionLostError, DflashError, NotFoundError, PreflightError
from dflashctl.launch import Launched, launch
from dflashctl.profile import load_profile
from dflashctl.remote import supervisor
from dflashctl.remote.session import PATH, Session
from tests.launching import host, modules, trainer
from tests.running import Runner, runner, session, shell_script, wait_for

__all__ = ["host", "modules", "runner", "session", "trainer"]


def go(session: Session, host: Host, **options: Any) -> Launched:
    return launch(session, host, load_profile(options.pop("config", None), host), **options)


def test_the_first_launch_sends_the_trainer_and_the_second_does_not(
    runner: Runner, session: Session, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = runs.candidates
    monkeypatch.setattr(runs, "candidates", lambda stem, _: names(stem, 0.0))  # both in one minute
    said: list[str] = []
    first = go(session, host, tell=said.append)
    assert first.run_id is not None
    assert first.run_id.startswith("tiny-")
    assert (first.state["status"], first.deployed, first.notes) == ("running", True, [])
    assert said[0] == "checking"
    assert said[1].startswith("sending the trainer")
    assert said[2] == "starting"
    second = go(session, host)
    assert (second.run_id, second.deployed) == (first.run_id + "-2", False)
    assert runner.ended(first.run_id)["exit_code"] == 0
    log = (runner.run_dir(first.run_id) / "run.log").read_text()
    assert log.startswith("config [train] steps = 3")
    assert "step 3/3" in log


def test_the_manifest_says_what_was_launched(runner: Runner, session: Session, host: Host) -> None:
    launched = go(session, host, name="mine", environment={"HF_TOKEN": "hf_hidden"})
    manifest = json.loads((runner.run_dir("mine") / "manifest.json").read_text())
    assert manifest["release"] == launched.release
    assert manifest["environment"] == ["HF_TOKEN", "HOST_SECRET", "PYTHONPATH"]
    assert manifest["devices"] == {"targets": ["cpu"], "drafters": ["cpu"]}
    assert manifest["warmup"]["targets"] == 300.0
    assert manifest["config_path"] == "bundled:tiny/train.toml"
    assert manifest["argv"][1:5] == ["-u", "-m", "trainer", "train"]
    assert (manifest["host"], manifest["vmid"], manifest["run_id"]) == ("local", None, "mine")
    assert (runner.run_dir("mine") / "config.toml").read_text().startswith("[train]\nsteps = 3\n")
    environ = Path(f"/proc/{launched.state['pid']}/environ")
    assert not environ.exists() or b"HF_TOKEN=hf_hidden" in environ.read_bytes()


def test_a_configs_path_is_kept_as_it_holds_in_any_folder(
    runner: Runner, session: Session, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    go(session, host, name="mine", config=Path("my.toml"))
    manifest = json.loads((runner.run_dir("mine") / "manifest.json").read_text())
    assert manifest["config_path"] == str(tmp_path / "my.toml")


def test_a_typed_variable_wins_over_the_hosts(
    runner: Runner, session: Session, host: Host, trainer: Path
) -> None:
    (trainer / "__main__.py").write_text("import os; print(os.environ['HOST_SECRET'], os.environ['TYPED'])")
    go(session, host, name="mine", environment={"HOST_SECRET": "typed", "TYPED": "too"})
    runner.ended("mine")
    assert (runner.run_dir("mine") / "run.log").read_text() == "typed too\n"


def test_a_name_is_taken_once(session: Session, host: Host) -> None:
    assert go(session, host, name="mine").run_id == "mine"
    for dry_run in (True, False):
        with pytest.raises(runs.RunExistsError, match="a run named mine exists already") as caught:
            go(session, host, name="mine", dry_run=dry_run)
        assert int(caught.value.exit_code) == 9
    with pytest.raises(runs.RunNameError):
        go(session, host, name="no/slash")


def test_a_dry_run_shows_every_command_and_changes_nothing(
    runner: Runner, session: Session, host: Host
) -> None:
    planned = go(session, host, dry_run=True, environment={"HF_TOKEN": "hf_hidden"})
    assert planned.run_id is None
    assert not (runner.workspace / "dflash" / "runs").exists()
    assert not (runner.workspace / "dflash" / "releases").exists()
    text = "\n".join(planned.commands)
    assert "hidden" not in text
    assert "HF_TOKEN='***'" in text or "HF_TOKEN=***" in text
    assert "-m trainer train" in text
    assert "supervisor.py" in text
    assert f"releases/{planned.release}" in text
    done = go(session, host, environment={"HF_TOKEN": "hf_hidden"})
    assert done.run_id is not None
    assert [line.replace(done.run_id, "RUN") for line in done.commands if "trainer train" in line] == [
        line.replace(Path(planned.path).name, "RUN") for line in planned.commands if "trainer train" in line
    ]


def test_data_of_the_demo_for_another_target_is_noted(tmp_path: Path, session: Session, host: Host) -> None:
    config = tmp_path / "train.toml"
    config.write_text(f"[target]\nmodel = '{tmp_path}'\n")
    notes = go(session, host, config=config, dry_run=True).notes
    assert notes == ["data.path is that of the bundled demo; set it in the config unless it is meant"]


def test_resume_names_the_other_run(runner: Runner, session: Session, host: Host) -> None:
    go(session, host, name="first", environment={"HF_TOKEN": "hf_hidden"})
    runner.ended("first")
    with pytest.raises(PreflightError, match="first saved no checkpoint"):
        go(session, host, name="second", resume="first")
    with (runner.run_dir("first") / "events.jsonl").open("a") as events:
        events.write('{"t": 1.0, "event": "checkpoint", "step": 5, "path": "checkpoints/step-00000005"}\n')
    onward = "goes on from step 5 of first, its last: no step is left, and a run can't be lengthened"
    unset = "first had variables that are not set now: HF_TOKEN (-e NAME=VALUE sets one)"
    planned = go(session, host, resume="first", dry_run=True, environment={"HF_TOKEN": "hf_other"})
    assert planned.notes == [onward]
    assert go(session, host, name="second", resume="first").notes == [onward, unset]
    runner.ended("second")
    assert f"resume {runner.run_dir('first')}\n" in (runner.run_dir("second") / "run.log").read_text()
    assert json.loads((runner.run_dir("second") / "manifest.json").read_text())["resume"] == str(
        runner.run_dir("first")
    )
    with pytest.raises(NotFoundError, match="no run named third"):
        go(session, host, resume="third")


def test_a_trainer_that_dies_at_once(runner: Runner, session: Session, host: Host, trainer: Path) -> None:
    (trainer / "__main__.py").write_text("raise SystemExit('no luck')")
    launched = go(session, host)
    assert launched.run_id is not None
    assert runner.ended(str(launched.run_id))["exit_code"] == 1


# What is refused before anything is started


def refused(session: Session, host: Host, message: str, **options: Any) -> PreflightError:
    with pytest.raises(PreflightError) as caught:
        go(session, host, **options)
    assert message in caught.value.message
    assert int(caught.value.exit_code) == 9
    with pytest.raises(NotFoundError):
        session.call("snapshot")  # no run was made
    return caught.value


@pytest.mark.parametrize("name", ["torch", "tomllib" if sys.version_info >= (3, 11) else "tomli"])
def test_a_module_is_missing(session: Session, host: Host, modules: Path, name: str) -> None:
    (modules / name).mkdir(exist_ok=True)
    (modules / name / "__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')"
    )
    error = refused(session, host, f"{name} can't be imported by")
    assert "ImportError: libcudart.so.13: cannot open shared object file" in error.message
    assert "pip install" in error.hint


def test_torch_crashes_the_interpreter(session: Session, host: Host, modules: Path) -> None:
    (modules / "torch" / "__init__.py").write_text("import os; print('bad libc', flush=True); os.abort()")
    refused(session, host, "can't run the trainer: ")


def test_the_dataset_is_missing(tmp_path: Path, session: Session, host: Host) -> None:
    path = tmp_path / "train.toml"
    path.write_text("[data]\npath = 'none.jsonl'\n")
    refused(session, host, f"{tmp_path.resolve()}/none.jsonl does not exist on local", config=path)


def test_gpus_that_do_not_exist(session: Session, host: Host) -> None:
    host = dataclasses.replace(host, devices=Devices(("cuda:0",), ("cuda:9",)))
    refused(session, host, "cuda:9 does not exist on local: it has cuda:0, cuda:1")


def test_renumbered_gpus_are_refused(session: Session, host: Host) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES can't be set"):
        go(session, host, environment={"CUDA_VISIBLE_DEVICES": "3"})


def test_the_workspace_is_a_file(runner: Runner, session: Session, host: Host) -> None:
    runner.workspace.write_text("")
    try:
        with pytest.raises(PreflightError, match=r"is not writable: .* is not a folder"):
            go(session, host)
    finally:
        runner.workspace.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_the_disk_is_full(runner: Runner, session: Session, host: Host) -> None:
    runner.workspace.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(runner.workspace)], check=True)
    try:
        refused(session, host, " free; 26")
        assert not (runner.workspace / "dflash" / "releases").exists()
    finally:
        subprocess.run(["umount", str(runner.workspace)], check=True)


def test_a_busy_gpu(tmp_path: Path, runner: Runner, host: Host) -> None:
    row = "0, 00000000:41:00.0, H200, 9000, 143771, 3, 99.5, 40"
    shell_script(tmp_path / "nvidia-smi", f'case "$1" in --query-compute*) ;; *) echo "{row}";; esac')
    host = dataclasses.replace(host, devices=Devices(("cuda:0",), ("cpu",)))
    with runner.session(path=f"{tmp_path}:{PATH}") as session:
        with pytest.raises(PreflightError, match="cuda:0 on local is busy: 9,000 MiB in use"):
            go(session, host, name="a")
        launched = go(session, host, name="a", force=True)
        assert launched.notes == ["cuda:0 on local is busy: 9,000 MiB in use (--force)"]
    manifest = json.loads(Path(launched.path, "manifest.json").read_text("utf-8"))
    assert manifest["gpu_pci"] == ["00000000:41:00.0"]  # what an Xid of a GPU that is gone is told by


def test_of_two_launches_on_one_gpu_at_once_one_is_refused(runner: Runner, host: Host, trainer: Path) -> None:
    (trainer / "__main__.py").write_text("import time; time.sleep(60)")
    host = dataclasses.replace(host, devices=Devices(("cuda:0",), ("cuda:1",)))
    barrier = threading.Barrier(3)
    outcomes: list[str] = []

    def start(name: str) -> None:
        with runner.session() as session:
            session.open()
            barrier.wait()
            try:
                outcomes.append(go(session, host, name=name).state["status"])
            except PreflightError as error:
                outcomes.append(error.message.split(" uses ")[-1])

    threads = [threading.Thread(target=start, args=(f"gpu{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["cuda:0, cuda:1", "cuda:0, cuda:1", "running"]
    with runner.session() as session:
        assert go(session, host, name="forced", force=True).state["status"] == "running"


def test_a_cut_connection_ends_the_import(runner: Runner, host: Host, modules: Path) -> None:
    mark = modules / "pid"
    (modules / "torch" / "__init__.py").write_text(
        f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    session = runner.session()
    session.open()
    failure: list[BaseException] = []

    def ask() -> None:
        try:
            go(session, host)
        except DflashError as error:
            failure.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    pid = int(wait_for(lambda: mark.exists() and mark.read_text()))
    ticks = supervisor.start_ticks(pid)
    assert supervisor.alive(pid, ticks)
    session._channel.close_stdin()  # type: ignore[union-attr]
    wait_for(lambda: not supervisor.alive(pid, ticks))
    thread.join()
    assert isinstance(failure[0], ConnectionLostError)


# The import of torch is not paid twice


def test_imports_are_remembered_until_something_changes(session: Session, host: Host, modules: Path) -> None:
    marks = modules / "torch" / "__init__.py.imported"
    go(session, host)
    paid = marks.read_text()
    assert go(session, host).facts["modules"]["torch"] == "2.13.0"
    assert marks.read_text() == paid
    other = dataclasses.replace(host, environment={**host.environment, "PYTHONPATH": f"{modules}:/other"})
    go(session, other)
    assert marks.read_text() == paid * 2
    go(session, other)
    assert marks.read_text() == paid * 2
    (modules / "newly_installed").mkdir()
    go(session, other)
    assert marks.read_text() == paid * 3


@pytest.mark.parametrize(
    "text", ["", "[]", '{"found": {"torch": "9"}}', '{"stamps": {}, "found": {"python": "x"}}']
)
def test_a_damaged_memory_is_no_harm(runner: Runner, session: Session, host: Host, text: str) -> None:
    cache = runner.workspace / "dflash" / "cache" / "preflight.json"
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert go(session, host).facts["modules"]["torch"] == "2.13.0"
