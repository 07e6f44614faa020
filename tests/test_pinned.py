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
    "admm": (1, 265.19659295383417),
    "apfl": (1, 112.8779097278954),
    "aruba": (1, 50.43347999048745),
    "ditto": (1, 113.48164660881174),
    "easgd": (1, 113.21951530400142),
    "fedavg": (1, 22.73135178163603),
    "fedbabu": (1, 26.91100951531342),
    "fedmeta": (1, 22.565077383610575),
    "fedper": (1, 64.31120063129202),
    "fedprox": (1, 22.73805243334276),
    "fedrep": (1, 58.633634713897536),
    "fedu": (1, 113.16689324134924),
    "l2gd": (1, 109.74532529289286),
    "lgfedavg": (1, 56.61373897777095),
    "local": (1, 90.38998610659189),
    "metasgd": (1, 60.113931187230854),
    "mocha": (1, 289.49186561761036),
    "mtl": (1, 136.8290883814486),
    "partial": (1, 64.31120063129202),
    "perfedavg": (1, 22.5860217979249),
    "perfedavg_fo": (1, 22.660699736971424),
    "perfedavg_hf": (1, 22.586021794937547),
    "pfedme": (1, 113.48550450133281),
    "pooled": (1, 29.95806062634751),
    "qfedavg": (1, 22.84442663546096),
    "reptile": (1, 22.73135178163603),
    "scaffold": (1, 204.17244757454864),
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
