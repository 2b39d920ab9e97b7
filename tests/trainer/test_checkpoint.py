"""Checkpoints: whole or absent, whatever happens; read back exactly; wrong ones refused."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import checkpoint
from trainer.checkpoint import CheckpointError
from trainer.config import parse

ROOT = Path(__file__).parents[2]


def _state(value: float, size: int = 300) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Views of one vector a kind, as the optimizer has them; the kinds differ by 1."""
    state = []
    for offset, kind in enumerate(("masters", "exp_avg", "exp_avg_sq")):
        flat = torch.full((size,), value + offset)
        state.append((kind, {"fc.weight": flat[: size // 2].view(2, -1), "norm.weight": flat[size // 2 :]}))
    return state


def _save(run: Path, step: int, keep: int = 2, size: int = 300) -> Path:
    record = {"settings": {"train.seed": 0}, "counters": {"updates": step}}
    return checkpoint.save(run, step, _state(step + 0.5, size), {"block_size": 8}, record, keep)


def _refused(line: str) -> None:
    raise AssertionError(line)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = _save(tmp_path, 1200)
    assert path == tmp_path / "checkpoints" / "step-00001200"
    assert sorted(p.name for p in path.iterdir()) == [
        "drafter.json", "drafter.safetensors", "optimizer.safetensors", "trainer.json",
    ]  # fmt: skip
    found = checkpoint.latest(tmp_path, _refused)
    assert found is not None
    assert (found.step, found.record["counters"]) == (1200, {"updates": 1200})
    first, second = found.moments()
    for value, tensors in ((1200.5, found.masters()), (1201.5, first), (1202.5, second)):
        assert sorted(tensors) == ["fc.weight", "norm.weight"]
        assert torch.equal(tensors["fc.weight"], torch.full((2, 75), value))
        assert tensors["norm.weight"].dtype == torch.float32
    assert json.loads((path / "drafter.json").read_text()) == {"block_size": 8}


def test_all_is_on_the_disk_before_it_has_a_checkpoints_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves no `step-*` with holes: files and their folder are flushed, then renamed, then the name is."""
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (order.append(f"{a} -> {b}"), rename(a, b))[1])
    path = _save(tmp_path, 7)
    folder = path.parent
    hidden = f"{folder}/.tmp-{path.name}"
    renamed = order.index(f"{hidden} -> {path}")
    assert set(order[:renamed]) == {hidden, *(f"{hidden}/{file.name}" for file in path.iterdir())}
    assert order[renamed - 1] == hidden
    assert order[renamed + 1] == str(folder)


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        _save(tmp_path, step, keep=3)
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000020", "step-00000030", "step-00000040"]


def test_what_is_saved_stays_beside_later_ones(tmp_path: Path) -> None:
    """A run that goes on from an early checkpoint, or begins anew, where a longer one has been."""
    for step in (10, 20, 30):
        _save(tmp_path, step, keep=3)
    for step in (5, 15):
        assert _save(tmp_path, step, keep=1).is_dir()
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000015", "step-00000020", "step-00000030"]


def test_what_cannot_be_removed_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where the folder of a file that somebody reads can't go yet."""
    rmdir = os.rmdir
    read = {"now": True}

    def busy(path: Any, *args: Any, **kwargs: Any) -> None:
        if read["now"]:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        rmdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", busy)
    for step in (10, 20, 30):
        _save(tmp_path, step, keep=1)
    found = checkpoint.latest(tmp_path, _refused)
    assert found is not None
    assert found.step == 30
    read["now"] = False
    _save(tmp_path, 40, keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000040"]


def test_a_step_saved_again_replaces_the_former(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    (tmp_path / "checkpoints/step-00000010/drafter.safetensors").write_bytes(b"broken")
    _save(tmp_path, 10)
    assert checkpoint.read(tmp_path / "checkpoints/step-00000010").step == 10
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda p: (p / "trainer.json").unlink(), "incomplete, it has no trainer.json"),
        (lambda p: (p / "trainer.json").write_text("{"), "can't be read"),
        (lambda p: (p / "trainer.json").write_text("[]"), "can't be read"),
        (lambda p: (p / "trainer.json").write_text('{"schema": 9, "files": {}, "step": 1}'), "schema 9"),
        (lambda p: (p / "trainer.json").write_text('{"schema": 1, "files": {}, "step": 1}'), "does not list"),
        (lambda p: (p / "optimizer.safetensors").unlink(), "optimizer.safetensors can't be read"),
        (lambda p: _cut(p / "drafter.safetensors"), "bytes and should have"),
        (lambda p: _flip(p / "optimizer.safetensors"), "content of optimizer.safetensors is damaged"),
    ],
)
def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path, harm: object, says: str) -> None:
    _save(tmp_path, 10)
    harm(_save(tmp_path, 20))  # type: ignore[operator]
    told: list[str] = []
    found = checkpoint.latest(tmp_path, told.append)
    assert found is not None
    assert found.step == 10
    assert len(told) == 1
    assert "step-00000020" in told[0]
    assert says in told[0]
    with pytest.raises(CheckpointError, match=r"--resume .*step-00000020.*name the run's folder"):
        checkpoint.find(str(tmp_path / "checkpoints/step-00000020"), tmp_path, _refused)


def test_leftovers_are_no_checkpoints_and_go_with_the_next_save(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in (".tmp-step-00000030", ".old-step-00000010"):
        (folder / name).mkdir(parents=True)
        (folder / name / "drafter.safetensors").write_bytes(b"x")
    assert checkpoint.latest(tmp_path, _refused) is None
    _save(tmp_path, 30)
    assert [p.name for p in folder.iterdir()] == ["step-00000030"]


def test_find_takes_a_folder_a_run_or_an_id(tmp_path: Path) -> None:
    run = tmp_path / "tiny-1129-1200"
    path = _save(run, 10)
    for name in (str(path), str(run), "tiny-1129-1200"):
        assert checkpoint.find(name, tmp_path, _refused).path == path
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no usable checkpoint in .*empty/checkpoints"):
        checkpoint.find("empty", tmp_path, _refused)
    with pytest.raises(CheckpointError, match="no such checkpoint, run folder, or run in"):
        checkpoint.find("nowhere", tmp_path, _refused)


def test_resuming_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    then = parse({"train": {"steps": 10}, "devices": {"drafters": ["cpu", "cpu"]}})
    record = {"settings": json.loads(json.dumps(checkpoint.settings(then, "abc")))}
    found = checkpoint.Checkpoint(tmp_path, record)
    free = {"steps": 10, "log_every": 3, "checkpoint_every": 1, "keep": 9}
    how = {"compile": "off", "cuda_graphs": "off", "memory": "warn"}
    devices = {"drafters": ["cuda:0", "cuda:1"], "targets": ["cpu", "cpu"]}
    same = parse({"train": free, "devices": devices, "runtime": how})
    checkpoint.refuse_differences(found, checkpoint.settings(same, "abc"))
    other = parse(
        {"train": {"steps": 20}, "drafter": {"layers": 2}, "runtime": {"fp8_target": True, "fp8_head": True}}
    )
    with pytest.raises(CheckpointError) as error:
        checkpoint.refuse_differences(found, checkpoint.settings(other, "abd"))
    first, *lines = str(error.value).splitlines()
    assert first.endswith("; put these back, or start a new run:")
    assert lines == [
        "  drafter.layers: 5 in the checkpoint, 2 now",
        "  train.steps: 10 in the checkpoint, 20 now",
        "  runtime.fp8_target: False in the checkpoint, True now",
        "  runtime.fp8_head: False in the checkpoint, True now",
        "  devices.drafters (count): 2 in the checkpoint, 1 now",
        "  dataset content: 'abc' in the checkpoint, 'abd' now",
    ]


def test_what_a_resumed_run_may_change_is_named_one_by_one() -> None:
    """A setting that comes to be decides the result until somebody has thought about it."""
    config = parse({})
    sections = {name: vars(getattr(config, name)) for name in checkpoint.COMPARED}
    known = {f"{name}.{key}" for name, keys in sections.items() for key in keys}
    assert known - checkpoint.settings(config, "abc").keys() == checkpoint.FREE_TO_CHANGE
    assert vars(config).keys() - sections.keys() == {"devices", "nodes", "evaluate", "warmup"}
    page = (ROOT / "docs/training.md").read_text()
    said = page[page.index("Free to change: ") : page.index("`[evaluate]`.")]
    free = {name.removeprefix("train.") for name in checkpoint.FREE_TO_CHANGE}
    assert free <= set(re.findall("`([^`]*)`", said))


def test_a_setting_that_came_later_counts_as_its_default(tmp_path: Path) -> None:
    def resume(now: dict[str, Any], without: str) -> None:
        then = {name: value for name, value in now.items() if name != without}
        checkpoint.refuse_differences(checkpoint.Checkpoint(tmp_path, {"settings": then}), now)

    for name in checkpoint.settings(parse({}), "abc").keys() - {"dataset content"}:
        resume(checkpoint.settings(parse({}), "abc"), name)
    other = checkpoint.settings(parse({"runtime": {"fp8_target": True}}), "abc")
    with pytest.raises(
        CheckpointError, match=r"put these back.*\n  runtime.fp8_target: False in .*, True now$"
    ):
        resume(other, "runtime.fp8_target")


def test_a_setting_that_is_gone_is_named_as_such(tmp_path: Path) -> None:
    now = checkpoint.settings(parse({}), "abc")
    found = checkpoint.Checkpoint(tmp_path, {"settings": {**now, "train.heat": 3}})
    with pytest.raises(
        CheckpointError, match=r"train.heat: 3 in the checkpoint, no such setting now"
    ) as error:
        checkpoint.refuse_differences(found, now)
    assert "; resume with the release of the trainer that saved it, which" in str(error.value)


def _stale(folder: Path, **how: Any) -> list[str]:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))


def test_a_full_disk_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file-size limit stands in for the disk: writing fails half-way, with an error of the operating system."""
    _save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-00000020.*could not be saved.*step 10 is intact.*--resume"
        ):
            _save(tmp_path, 20, keep=1, size=1 << 20)
        with pytest.raises(CheckpointError, match="there is none before it"):
            _save(tmp_path / "another", 20, keep=1, size=1 << 20)
        monkeypatch.setattr(Path, "mkdir", _stale)
        with pytest.raises(CheckpointError, match=r"Stale file handle.*there is none before it"):
            _save(tmp_path / "third", 20, keep=1)
        monkeypatch.undo()
        monkeypatch.setattr(os, "listdir", _stale)
        with pytest.raises(CheckpointError, match=r"earlier ones are as they were.*--resume"):
            _save(tmp_path, 20, keep=1, size=1 << 20)
        monkeypatch.undo()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    assert checkpoint.read(tmp_path / "checkpoints/step-00000010").step == 10


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk_leaves_the_old_ones(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("no permission to mount")
    try:
        _save(tmp_path, 10)
        with pytest.raises(CheckpointError, match="No space left on device"):
            _save(tmp_path, 20, size=1 << 18)
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
        assert checkpoint.read(tmp_path / "checkpoints/step-00000010").step == 10
        _save(tmp_path, 30)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Children save as fast as they can and say what they have saved; killed at random, that or a newer one is there.

    All in a process of its own, because forking one that has threads is asking for trouble.
    """
    script = textwrap.dedent(
        """
        import os, random, signal, sys, time
        from pathlib import Path
        from tests.trainer.test_checkpoint import _refused, _save
        from trainer import checkpoint

        run, last = Path(sys.argv[1]), 0
        random.seed(1)
        for _ in range(25):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                while True:
                    last += 1
                    _save(run, last, keep=1, size=20000)
                    os.write(write, b"%d\\n" % last)
            os.close(write)
            said = os.read(read, 100)
            time.sleep(random.uniform(0, 0.04))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            while more := os.read(read, 4096):
                said += more
            os.close(read)
            found = checkpoint.latest(run, _refused)
            saved = int(said.split()[-1])
            assert saved <= found.step <= saved + 1, (saved, found.step)
            assert (found.masters()["norm.weight"] == found.step + 0.5).all()
            last = found.step
        print(last)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 25
