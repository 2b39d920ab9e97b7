"""`dflashctl logs` on real runs."""

import signal
import time

import pytest

from tests.cli import scripts

BAR = (
    scripts.HEAD
    + r"""
load()
for i in range(5): os.write(1, b"\r %d%%|##|" % (i * 25)); time.sleep(0.02)
os.write(1, b"\nafter\n")
os.write(1, b"\x1b[31mred\x1b[0m\xff\n")
"""
)


def test_the_last_lines(cli, started, runner):
    started("done", scripts.FINISHES)
    runner.ended("done")
    shown = cli("logs", "-n", "2")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == ["step 3/3  loss 3.000", "Run finished at step 3"]
    assert cli("logs").stdout.splitlines()[0].startswith("dflash trainer:")
    assert cli("logs", "-n", "0").stdout == ""


@pytest.mark.parametrize(
    ("script", "code", "word"),
    [
        (scripts.FINISHES, 0, "FINISHED"),
        (scripts.FINISHES_LATER, 0, "FINISHED"),
        (scripts.CRASHES, 3, "FAILED"),
    ],
    ids=["finished", "finishes", "crashed"],
)
def test_following_ends_with_the_final_state_and_its_code(cli, started, runner, script, code, word):
    started("run", script)
    process = cli.popen("logs", "-f", "--hosts", str(cli.home / "hosts.toml"))
    first = process.stdout.readline()
    runner.go("run")
    rest, errors = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == code
    assert word in errors
    if code:
        assert f"dflashctl launch --hosts {cli.home}" in errors
    # stdout is the log and nothing else
    assert first + rest == (runner.run_dir("run") / "run.log").read_text()


def test_following_shows_lines_as_they_come(cli, started):
    started("trains", scripts.TRAINS)
    process = cli.popen("logs", "-f", "-n", "1")
    numbers = [int(process.stdout.readline().split("/")[0].removeprefix("step ")) for _ in range(20)]
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert numbers == list(range(numbers[0], numbers[0] + 20))
    assert process.returncode == 130
    assert "detached; the run goes on" in errors
    assert "Traceback" not in errors
    assert cli("status").returncode == 0


def test_since_an_age(cli, started, runner):
    started("done", scripts.FINISHES)
    runner.ended("done")
    folder, now = runner.run_dir("done"), time.time()
    first, *later = (folder / "run.log").read_text().splitlines(keepends=True)
    # as heartbeats note it, had the first line come half an hour ago and the others just now
    (folder / "log.index").write_text(f"{now - 1800} {len(first)}\n{now} {len(''.join([first, *later]))}\n")
    assert cli("logs", "--since", "10m").stdout == "".join(later)
    assert cli("logs", "--since", "1h").stdout == first + "".join(later)


@pytest.mark.parametrize("args", [("--since", "yesterday-ish"), ("--since", "5m", "-n", "3"), ("-n", "-1")])
def test_wrong_usage(cli, args):
    shown = cli("logs", *args)
    assert (shown.returncode, shown.stdout) == (2, "")


def test_a_progress_bar_is_one_line_in_a_pipe_and_raw_is_raw(cli, started, runner):
    started("bar", BAR)
    runner.ended("bar")
    assert cli("logs", "-n", "3").stdout.splitlines() == [" 100%|##|", "after", "red\ufffd"]
    process = cli.popen("logs", "--raw", "-n", "3")
    raw = process.stdout.buffer.read()
    process.wait(60)
    log = (runner.run_dir("bar") / "run.log").read_bytes()
    assert log.endswith(raw)
    assert b"\x1b[31mred\x1b[0m\xff\n" in raw
    assert b"25%|##|\r" in raw


def test_head_ends_it_quietly(cli, started):
    started("trains", scripts.TRAINS)
    process = cli.popen("logs", "-f")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
