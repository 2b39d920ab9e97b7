"""Each pattern: an example it finds, a near miss it lets pass, and time that grows no faster than the line."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dflashctl.diagnose import diagnose
from dflashctl.diagnose import signatures as sig
from dflashctl.diagnose.literals import Gated
from dflashctl.diagnose.reader import sieve_of
from dflashctl.errors import ConfigError
from tests.diagnose import report

EXAMPLES = Path(__file__).parents[1] / "data" / "diagnose" / "patterns.examples"
KNOWN = sig.load()
PATTERNS = [(s.name, i, p) for s in KNOWN.by_name.values() for i, p in enumerate(s.patterns)]


def examples() -> dict[tuple[str, int], tuple[str, str]]:
    """(class, number of the pattern) -> (positive, near miss)."""
    found: dict[tuple[str, int], tuple[str, str]] = {}
    name, positive, count = "", "", 0
    for line in EXAMPLES.read_text("utf-8").splitlines():
        if line.startswith("["):
            name, count = line.strip("[]"), 0
        elif line.startswith("+ "):
            positive = line[2:]
        elif line.startswith("- "):
            found[name, count] = (positive, line[2:])
            count += 1
    return found


@pytest.mark.parametrize(
    ("name", "number", "pattern"), PATTERNS, ids=lambda v: str(v) if isinstance(v, (str, int)) else ""
)
def test_finds_its_example_and_lets_the_near_miss_pass(name: str, number: int, pattern: sig.Pattern) -> None:
    assert (name, number) in examples(), f"{EXAMPLES.name} has no line for it and none that it passes"
    positive, near_miss = examples()[name, number]
    assert pattern.regex.search(positive)
    assert not pattern.regex.search(near_miss)
    for scope in pattern.scopes:
        found = KNOWN.match(positive, scope)
        assert found is not None
        assert found[0].name == name, "another class takes its example first"
    if {"line", "warn", "hint"} & set(pattern.scopes):
        assert KNOWN.may_match(positive), "the prefilter drops it"


def test_each_rule_names_a_class_that_outside_tools_know() -> None:
    """They build on classes.json, and its groups; a rule may be finer, its class may not."""
    rules = KNOWN.by_name.values()
    assert {s.class_ for s in rules} | {None, "unknown"} == report.CONTRACT
    known = json.loads((report.CORPUS / "classes.json").read_text("utf-8"))
    for rule in rules:
        assert rule.class_ == "unknown" or rule.group == known[rule.class_]["group"], rule.name
    assert {rule.name for rule in rules if rule.class_ == "unknown"} == {
        "killed",
        "gpu-controller-stopped",
        "gpu-needs-reset",
    }


def test_every_example_belongs_to_a_pattern() -> None:
    assert set(examples()) == {(name, i) for name, i, _ in PATTERNS}


def test_no_pattern_names_a_path_a_host_or_an_address() -> None:
    for name, _, pattern in PATTERNS:
        text = pattern.regex.pattern
        assert not re.search(
            r"\d{1,3}\\?\.\d{1,3}\\?\.\d{1,3}|/(?:home|root|workspace|opt|usr|mnt|data)\b|gpu-node", text
        ), name


ADVERSARIES = [
    "CUDA out of memory. Tried to allocate 1.0 GiB ",
    "timed out ",
    "NCCL error ",
    "block: [",
    "killed by ",
    "huggingface ",
    "ImportError: ",
    "wandb: ERROR ",
    "a.cu:1: x: block: [Assertion `",
    "/dev/shm ",
    "DataLoader worker (pid ",
    "loss ",
    "grad ",
    "Xid (",
    "CANCELLED AT ",
    "received SIGTERM ",
    "can't open file ",
    "1 ",
    "12",
    "a.",
    "a:",
    " ",
    "'",
    "\\",
    "=",
    "=====",
    "[rank1]: ",
    "Traceback ",
    'File "',
    "(x pid=1 ",
    "\x1b[",
    "\x1b]",
    "-",
    "exitcode ",
    "--api-key-",
    "token",
    "eyJaaaaaaaa.",
    "a://b:",
    "wandb key ",
    "-----BEGIN PRIVATE KEY-----",
]
"""Pieces that, repeated, make the beginnings of matches that never end."""


def seconds(regex: re.Pattern[Any], line: str, times: int = 1) -> float:
    """CPU time of a search, the best of several."""
    took = []
    text = line if isinstance(regex.pattern, str) else line.encode()
    for _ in range(times):
        begun = time.process_time()
        regex.search(text)
        took.append(time.process_time() - begun)
    return min(took)


def searched(words: str) -> list[re.Pattern[bytes]]:
    """The regexes made of words: those of the sieve, or those of each scope's gate."""
    if words == "sieve":
        return list(sieve_of(KNOWN)._searches)
    return [r for gate in KNOWN._gates.values() for r in gate or ()]


def all_regexes() -> list[tuple[str, re.Pattern[Any]]]:
    from dflashctl.diagnose import bundle, lines, phrases, reader, scanner, sieve, tracebacks, weighing

    found = [(f"{name}-{i}", p.regex) for name, i, p in PATTERNS]
    found += [(f"{words}-{i}", r) for words in ("sieve", "gates") for i, r in enumerate(searched(words))]
    found += [(f"secret-{i}", regex) for i, regex in enumerate(bundle._SECRETS)]
    for module in (bundle, lines, phrases, reader, scanner, sieve, tracebacks, weighing):
        own = {n: v.regex if isinstance(v, Gated) else v for n, v in vars(module).items()}
        found += [(f"{module.__name__}.{n}", v) for n, v in own.items() if isinstance(v, re.Pattern)]
    return found


@pytest.mark.parametrize(("name", "regex"), all_regexes(), ids=lambda v: v if isinstance(v, str) else "")
def test_time_grows_no_faster_than_the_line(name: str, regex: re.Pattern[Any]) -> None:
    for piece in ADVERSARIES:
        short, long = (piece * (n // len(piece) + 1) for n in (2_048, 16_384))
        if seconds(regex, long) < 0.003:
            continue
        # 8 times as long: 8 times the time, and room for a busy machine; a square would be 64
        took = seconds(regex, long, 3)
        assert took < 24 * max(seconds(regex, short, 3), 2e-5), (name, piece, took)


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        '[class.mixer-jammed]\ntitle = "the mixer of shard {shard} jammed"\nadvice = "empty it on rank {rank}"\nretry = "yes"\n'
        "pattern = [{ scope = \"line\", regex = 'MIXER (?P<shard>\\d+) JAMMED' }]\n"
    )
    found = diagnose(
        [b"step 1 | loss 2.0", b"[rank5]: MIXER 7 JAMMED"],
        {"process_alive": False, "exit_code": 3},
        signatures=own,
    )
    assert (found.class_, found.title, found.advice, found.retry) == (
        "mixer-jammed",
        "the mixer of shard 7 jammed",
        ("empty it on rank 5",),
        "yes",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[class.x]\npattern = [{ regex = '(' }]", "no valid regex"),
        ("[class.x]\npattern = [{ scope = 'nowhere', regex = 'a' }]", "unknown scope"),
        ("[class.x]\npattern = [{ scope = 'line' }]", "no valid regex"),
        ("[class.x\n", "own.toml"),
        ("class = 3", "holds no tables"),
        ("[class]\nx = 3", "holds no tables"),
        ("[class.x]\npattern = 'a'", "no list of tables"),
        ("[class.x]\npattern = [{ regex = 'a', over = 'b' }]", "no list of rules"),
        ("[class.x]\npattern = [{ regex = 7 }]", "no valid regex"),
        ("[class.x]\npattern = [{ scope = 7, regex = 'a' }]", "unknown scope"),
        ("[class.x]\ntier = 'high'", "`tier` is 'high'"),
        ("[class.x]\nrole = 'boss'", "unknown role 'boss'"),
        ("[class.x]\ntitle = 3", "`title` is no text"),
        ("[class.x]\nadvice = ['fine', 4]", "`advice 2` is no text"),
        ("[class.x]\nadvice = 'set {a.b} to {'", "`advice 1` is no template"),
        ("[class.x]\ntitle = 'shard {0}'", "`title` is no template"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(ConfigError, match=words):
        diagnose([b"x"], signatures=own)


def test_the_bundled_signatures_are_loaded_once() -> None:
    assert sig.load() is sig.load(None)
