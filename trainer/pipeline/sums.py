"""The order of a sum over drafters, of one node or of many, and who of a node adds up what."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

CHUNK = 1 << 24
"""Elements of a gradient that are summed at a time: bounds what the sum needs beside the gradients themselves."""

ALIGNED = 64
"""Elements from the front of which every part begins at a multiple: hardware reads whole words, and kernels know it."""

SHARED_FROM = 4
"""Drafters of one node from which each adds up a part, and takes the others' parts from them.

Of gradients of 2 bytes an element and sums of 4, a worker then fetches 2 + 4 bytes times (D - 1) / D instead of
2 times (D - 1): 4.8 instead of 8 with five drafters, as much with three.
"""


def fetched(drafters: int) -> float:
    """What a worker fetches of others, and adds, in a step: in gradients of one drafter."""
    others = drafters - 1
    return others if drafters < SHARED_FROM else 3 * others / drafters


def part_of(index: int, drafters: int, begin: int, end: int) -> tuple[int, int]:
    """Where the part begins and ends that worker `index` adds up, of what lies between `begin` and `end`."""
    length = end - begin
    cuts = [n * length // drafters // ALIGNED * ALIGNED for n in range(drafters)] + [length]
    return begin + cuts[index], begin + cuts[index + 1]


def sum_in_pairs(out: Tensor, parts: Iterable[Tensor]) -> None:
    """Write the sum of `parts` to `out`, in its dtype: neighbours first, then neighbouring sums, as in
    ((p0 + p1) + (p2 + p3)) + p4.

    So a sum of sums is the same to the last bit where each of these has the same power of two of parts; and nodes with
    1, 2, 4 or 8 drafters each add up what one node with all of them would.

    Args:
        out: `[N]`.
        parts: at least one, each like `out`, of its dtype or a narrower one, on its device; not changed. On a GPU all are
            held at once, else taken one by one.
    """
    if out.is_cuda:
        from trainer.kernels import sums as kernel

        kernel.sum_in_pairs(out, list(parts))
        return
    sums: list[tuple[int, Tensor]] = []  # (n, the sum of 2 ** n parts): from left to right n falls
    for part in parts:
        level = 0
        while sums and sums[-1][0] == level:
            part = sums.pop()[1].add_(part)
            level += 1
        if level == 0:
            part = part.to(out.dtype, copy=True) if sums else out.copy_(part)
        sums.append((level, part))
    _, total = sums.pop()
    while sums:
        total = sums.pop()[1].add_(total)
