"""A tiny run of every algorithm against stored numbers: results that change need a higher ``version`` of the algorithm.

The numbers are not an oracle (the closed forms are, in the other files); they notice a change that nobody meant to make.
After a change that is meant: raise ``version``, run ``python tests/test_pinned.py`` and paste what it prints.
"""

from __future__ import annotations

import pytest
import torch
from small import algorithm, cloud, federation, ranges, split

from perfed import tree
from perfed.algorithms import ALGORITHMS

PINNED = {  # version, weight_sum
    "fedavg": (1, 22.73135178163603),
    "local": (1, 90.38998610659189),
    "perfedavg": (1, 22.5860217979249),
    "perfedavg_fo": (1, 22.660699736971424),
    "perfedavg_hf": (1, 22.586021794937547),
}


def weight_sum(name: str) -> float:
    """Sum of cos over all parameters of server and users after 3 rounds: no two parameters can cancel unnoticed."""
    x, y = cloud(60)
    parts = [split(ranges([12, 7, 20, 3]), ranges([4] * 4, 42))]
    fed = federation(algorithm(name, batch=8), x, y, parts, active=2, backend="loop")
    for _ in range(3):
        fed.round()
    return sum(float(torch.cos(3 * leaf).sum()) for leaf in tree.leaves((fed.state.server, fed.state.users)))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_results_are_those_of_this_version(name):
    version, expected = PINNED[name]
    assert ALGORITHMS[name].version == version
    assert weight_sum(name) == pytest.approx(expected, rel=1e-11)


if __name__ == "__main__":
    for name in sorted(ALGORITHMS):
        print(f'    "{name}": ({ALGORITHMS[name].version}, {weight_sum(name)!r}),')
