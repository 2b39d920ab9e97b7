"""Where blocks begin, against naive loops: every candidate as likely, whatever shares the row or the batch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import anchors
from trainer.data.anchors import Anchors, blocks_a_row


def draw_anchors(mask, lengths, count, block_size, rows, seed, epoch) -> Anchors:
    """One document a row."""
    starts = torch.where(torch.arange(mask.shape[1]) < lengths[:, None], 0, lengths[:, None])
    each = [np.array([row]) for row in rows]
    return anchors.draw_anchors(mask, starts, lengths, count, block_size, each, seed, epoch)


def candidates(mask, length):
    return [p for p in range(length - 1) if mask[p] and mask[p + 1]]


def labels(mask, length, anchor, block_size):
    """Which slots 1..K-1 of a block have a label: the contiguous run of response tokens after the anchor."""
    out, running = [], True
    for k in range(1, block_size):
        running = running and anchor + k < length and bool(mask[anchor + k])
        out.append(running)
    return out


@st.composite
def cases(draw):
    size = draw(st.integers(1, 24))
    rows = draw(st.integers(1, 4))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=size, max_size=size), min_size=rows, max_size=rows))
    lengths = draw(st.lists(st.integers(1, size), min_size=rows, max_size=rows))
    return torch.tensor(mask), torch.tensor(lengths)


@settings(max_examples=300)
@given(cases(), st.integers(1, 30), st.integers(2, 7), st.integers(0, 2**40), st.integers(0, 9))
def test_against_naive_loops(case, count, block_size, seed, epoch):
    mask, lengths = case
    rows = np.arange(len(mask)) + 5
    drawn = draw_anchors(mask, lengths, count, block_size, rows, seed, epoch)
    assert drawn.anchors.dtype == torch.int64
    assert drawn.valid.dtype == drawn.labels_valid.dtype == torch.bool
    assert drawn.labels_valid.shape == (len(mask), count, block_size - 1)
    for b in range(len(mask)):
        length = int(lengths[b])
        allowed = candidates(mask[b], length)
        n = min(count, len(allowed))
        assert drawn.valid[b].tolist() == [True] * n + [False] * (count - n)
        chosen = drawn.anchors[b, :n].tolist()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(allowed)
        assert drawn.anchors[b, n:].tolist() == [0] * (count - n)
        assert not drawn.labels_valid[b, n:].any()
        for a, anchor in enumerate(chosen):
            assert drawn.labels_valid[b, a].tolist() == labels(mask[b], length, anchor, block_size)


@settings(max_examples=50)
@given(cases(), st.integers(1, 8), st.integers(0, 20))
def test_a_row_does_not_depend_on_its_batch(case, count, extra):
    mask, lengths = case
    rows = np.arange(len(mask)) * 7
    together = draw_anchors(mask, lengths, count, 4, rows, 1, 2)
    for b in range(len(mask)):
        padded = torch.nn.functional.pad(mask[b : b + 1], (0, extra))
        alone = draw_anchors(padded, lengths[b : b + 1], count, 4, rows[b : b + 1], 1, 2)
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[b])


def test_seed_epoch_and_row_each_change_the_draw():
    mask, lengths = torch.ones(1, 200, dtype=torch.bool), torch.tensor([200])

    def draw(row, seed, epoch):
        return tuple(draw_anchors(mask, lengths, 20, 4, np.array([row]), seed, epoch).anchors[0].tolist())

    assert len({draw(r, s, e) for r in range(4) for s in range(4) for e in range(4)}) == 64
    assert draw(1, 2, 3) == draw(1, 2, 3)


def test_every_candidate_is_as_likely():
    """4,000 draws of 4 of 15 candidates: each expected 1,067 times, standard deviation 28."""
    mask, lengths = torch.ones(4000, 16, dtype=torch.bool), torch.full((4000,), 16)
    counts = torch.bincount(
        draw_anchors(mask, lengths, 4, 4, np.arange(4000), 0, 0).anchors.flatten(), minlength=16
    )
    assert counts[15] == 0
    assert (counts[:15] - 4000 * 4 / 15).abs().max() < 5 * 28


def test_pairs_are_as_likely():
    """Draws of 2 of 5 candidates: the 10 pairs each come 1,000 times of 10,000, standard deviation 30."""
    mask, lengths = torch.ones(10000, 6, dtype=torch.bool), torch.full((10000,), 6)
    drawn = draw_anchors(mask, lengths, 2, 4, np.arange(10000), 3, 1).anchors
    counts = torch.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25).reshape(5, 5)
    pairs = counts[torch.triu(torch.ones(5, 5), 1).bool()]
    assert pairs.sum() == 10000
    assert (pairs - 1000).abs().max() < 5 * 30


def test_first_token_of_a_response_is_an_anchor_and_a_single_token_is_not():
    mask = torch.tensor([[False, True, True, False, True, False]])
    drawn = draw_anchors(mask, torch.tensor([6]), 3, 4, np.array([0]), 0, 0)
    assert drawn.anchors.tolist() == [[1, 0, 0]]
    assert drawn.valid.tolist() == [[True, False, False]]
    assert drawn.labels_valid.tolist() == [[[True, False, False], [False] * 3, [False] * 3]]


def test_the_draw_is_pinned():
    """A resumed run draws as the one it continues, under any numpy: these figures may never change."""
    mask, lengths = torch.ones(1, 64, dtype=torch.bool), torch.tensor([64])
    drawn = draw_anchors(mask, lengths, 6, 4, np.array([12]), 7, 3)
    assert drawn.anchors.tolist() == [[1, 4, 17, 18, 27, 53]]


@st.composite
def packed_rows(draw):
    """Rows of documents: masks, by document, and dataset indices; every row padded to one size."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        rows.append([draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes])
    size = max(sum(map(len, row)) for row in rows) + draw(st.integers(0, 3))
    indices = np.array(draw(st.permutations(range(sum(map(len, rows))))))
    return rows, size, np.split(indices, np.cumsum([len(row) for row in rows])[:-1])


def lay(rows, size):
    mask, starts = (
        torch.zeros(len(rows), size, dtype=torch.bool),
        torch.zeros(len(rows), size, dtype=torch.int64),
    )
    lengths = torch.tensor([sum(map(len, row)) for row in rows])
    for b, row in enumerate(rows):
        begin = 0
        for document in row:
            here = slice(begin, begin + len(document))
            mask[b, here], starts[b, here] = torch.tensor(document), begin
            begin += len(document)
        starts[b, begin:] = begin
    return mask, starts, lengths


@settings(max_examples=300)
@given(packed_rows(), st.integers(1, 30), st.integers(2, 7), st.integers(0, 2**40), st.integers(0, 9))
def test_packed_rows_against_naive_loops(case, count, block_size, seed, epoch):
    rows, size, indices = case
    mask, starts, lengths = lay(rows, size)
    drawn = anchors.draw_anchors(mask, starts, lengths, count, block_size, indices, seed, epoch)
    for b, row in enumerate(rows):
        begins = np.cumsum([0, *map(len, row)])
        allowed = [[begins[d] + p for p in candidates(m, len(m))] for d, m in enumerate(row)]
        total = min(count, sum(map(len, allowed)))
        assert drawn.valid[b].tolist() == [True] * total + [False] * (count - total)
        chosen = drawn.anchors[b, :total].tolist()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= {p for each in allowed for p in each}
        got = [len(set(chosen) & set(each)) for each in allowed]
        able = sum(1 for each in allowed if each)
        assert sum(1 for n in got if n) == min(able, count) or total > able, "one for each, first"
        if count >= able:
            assert all(n > 0 for n, each in zip(got, allowed, strict=True) if each)
        for a, anchor in enumerate(chosen):
            d = int(np.searchsorted(begins, anchor, side="right")) - 1
            wanted = labels(row[d], len(row[d]), anchor - begins[d], block_size)
            assert drawn.labels_valid[b, a].tolist() == wanted, "labels end with the document"


@settings(max_examples=100)
@given(packed_rows(), st.integers(0, 9))
def test_where_there_is_room_for_all_a_document_draws_as_it_does_alone(case, epoch):
    rows, size, indices = case
    mask, starts, lengths = lay(rows, size)
    drawn = anchors.draw_anchors(mask, starts, lengths, size, 4, indices, 1, epoch)
    for b, row in enumerate(rows):
        begin, found = 0, []
        for document, index in zip(row, indices[b], strict=True):
            alone = draw_anchors(
                torch.tensor([document]), torch.tensor([len(document)]), size, 4, [index], 1, epoch
            )
            found += (alone.anchors[alone.valid] + begin).tolist()
            begin += len(document)
        assert drawn.anchors[b][drawn.valid[b]].tolist() == found


def test_documents_draw_in_proportion_and_a_short_one_is_not_left_out():
    """Documents of 2, 20, 40 and 58 candidates, 30 anchors: a quarter of each (standard deviation of a mean 0.06), and
    always one of the short one, which has half a one by proportion."""
    rows = [[[True] * n for n in (3, 21, 41, 59)]]
    mask, starts, lengths = lay(rows, 130)
    counts = []
    for epoch in range(1000):
        drawn = anchors.draw_anchors(mask, starts, lengths, 30, 4, [np.array([7, 8, 9, 5])], 0, epoch)
        counts.append(np.histogram(drawn.anchors[0], [0, 3, 24, 65, 124])[0])
    mean = np.mean(counts, 0)
    assert min(c[0] for c in counts) == 1
    assert np.abs(mean[1:] / mean[1:].sum() - np.array([20, 40, 58]) / 118).max() < 0.01
    assert mean.sum() == 30


def test_with_more_documents_than_anchors_chance_decides_who_goes_without():
    rows = [[[True] * 3] * 6]
    mask, starts, lengths = lay(rows, 20)
    counts = np.zeros(6)
    for epoch in range(600):
        drawn = anchors.draw_anchors(mask, starts, lengths, 2, 4, [np.arange(6)], 0, epoch)
        where = (drawn.anchors[0] // 3).tolist()
        assert len(set(where)) == 2
        counts[where] += 1
    assert np.abs(counts - 200).max() < 60


def test_blocks_a_row():
    assert [blocks_a_row(6, n) for n in (1, 2, 7, 9)] == [0, 1, 6, 6]
