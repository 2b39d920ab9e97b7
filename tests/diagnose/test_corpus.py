"""The open crash corpus, whole; and our variants in other styles."""

from __future__ import annotations

import pytest

from dflashctl.diagnose import diagnose
from tests.diagnose import report


@pytest.fixture(scope="module")
def scores() -> list[report.Score]:
    return report.score(report.corpus())


def test_the_corpus_is_whole(scores: list[report.Score]) -> None:
    assert len(scores) == 110
    assert len({s.case.class_ for s in scores}) > 60


def test_classes(scores: list[report.Score]) -> None:
    wrong = [(s.case.name, s.case.class_, s.found.class_) for s in scores if not s.class_right]
    assert report.rate([s.class_right for s in scores]) >= 0.95, wrong


def test_root_lines(scores: list[report.Score]) -> None:
    wrong = [(s.case.name, s.case.line, s.found.root) for s in scores if not s.line_right]
    assert report.rate([s.line_right for s in scores]) >= 0.90, wrong


def test_verdicts(scores: list[report.Score]) -> None:
    wrong = [(s.case.name, s.case.verdict, s.found.verdict) for s in scores if not s.verdict_right]
    assert report.rate([s.verdict_right for s in scores]) >= 0.97, wrong


def test_nothing_benign_is_called_failed(scores: list[report.Score]) -> None:
    benign = [s for s in scores if s.case.class_ is None]
    assert len(benign) >= 20
    for s in benign:
        assert s.found.verdict == s.case.verdict
        assert s.found.class_ is None
        assert s.found.root is None


def test_the_log_alone_names_the_failure_too() -> None:
    for case in report.corpus():
        found = diagnose(case.log.split(b"\n"))
        if case.class_ is None:
            assert found.verdict != "failed", case.name
        elif case.verdict in ("failed", "stopped"):
            line = found.root.line if found.root else None
            assert (found.class_, found.verdict, line) == (case.class_, case.verdict, case.line), case.name


@pytest.mark.parametrize("case", report.ours(), ids=lambda case: case.name)
def test_variant(case: report.Case) -> None:
    [s] = report.score([case])
    where = "\n".join(s.found.fired)
    assert (s.found.class_, s.found.verdict) == (case.class_, case.verdict), where
    assert (s.found.root.line if s.found.root else None) == case.line, where
