"""FedAvg.

H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017; in the
form of the Per-FedAvg paper (section 5), where the users' models are averaged uniformly.

    round k: the server draws A_k and sends w
      user i in A_k:  v = w;  repeat tau times:  v = v - beta g_i(v; B')        B' of `batch` examples, role `outer`
      w = mean over A_k of v

"FedAvg + update" of the paper's tables is the protocol's adaptation step on the final w.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfed.algorithms.base import Algorithm, register


@register("fedavg")
@dataclass(kw_only=True)
class FedAvg(Algorithm):
    """All defaults of the base class: the plain gradient, the plain mean."""
