"""Is EASGD more stable than ADMM? Linear maps of both on h x^2/2, their spectral radii, pictures and a verdict by regime.

The claim is that of S. Zhang, A. Choromanska and Y. LeCun, Deep learning with Elastic Averaging SGD, NeurIPS 2015 (arXiv:1412.6651), who
compare the two in the round-robin scheme. MAPS has the maps and what can be said of them without numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfed import figures as house
from perfed import tables
from perfed.results import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

ETA, RHO, WORKERS = (1e-3, 1.0), (1e-2, 10.0), (3, 8, 16)
"""The region drawn, at h = 1, and the numbers of workers."""
LEVELS = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0, 1.001, 1.01, 1.1, 2.0)  # steps of colour of the radius
POINTS = ((1e-3, 2.5), (1e-3, 0.02), (1e-3, 10.0), (0.01, 1.0), (0.1, 1.0), (0.1, 9.0), (0.3, 10.0), (1.0, 0.25), (1.0, 1.0))
"""(eta, rho) of the report's table."""
MAPS = """\
Every worker has f(x) = h x^2/2 with g(x) = h x; xt is the centre. p workers take turns, and a cycle is one turn of each. A map with a
spectral radius below 1 contracts. Only eta h and rho/h matter; a problem with curvatures in [m, L] needs every h among them.

    ADMM, a turn of worker i (linearised: one gradient step in place of the local argmin, and a full dual step)
        y_i = y_i - (x_i - xt)
        x_i = (x_i - eta g(x_i) + eta rho (y_i + xt)) / (1 + eta rho)
        xt  = mean_j (x_j - y_j)
    EASGD, a turn of worker i, both lines from the old x_i and xt
        x_i = x_i - eta g(x_i) - alpha (x_i - xt),   alpha = eta rho
        xt  = xt + alpha (x_i - xt)
    synchronous EASGD, a round: the same for all i at once, xt with the sum of the pulls, alpha = beta_e/p
    synchronous ADMM, a round with exact local minimisers
        x_i = argmin f(x) + (lambda/2)(x - xt)^2 - y_i x
        xt  = mean_i (x_i - y_i/lambda)
        y_i = y_i - lambda (x_i - xt)

- EASGD: a turn acts on (x_i, xt) by the symmetric [[1 - eta h - alpha, alpha], [alpha, 1 - alpha]]. For eta h <= 2 its eigenvalues lie in
  [-1, 1] iff alpha <= (4 - 2 eta h)/(4 - eta h), so up to there no product of turns grows, for any p. For odd p that is the very boundary:
  with the eigenvector (a, b) of -1, x = (a, -a, ..., a), xt = b becomes its negative. For even p the radius reaches 1 a little later.
- Flat directions, h = 0: an EASGD turn conserves xt + sum_j x_j, and both methods leave consensus (with y = 0) as it is: radius >= 1.
- Synchronous EASGD: for p >= 2, beta_e < 1 and 0 < eta h <= 1 the radius is below 1.
- Synchronous ADMM: the radius is max(h, lambda)/(h + lambda) for p >= 2, below 1 for every lambda, h > 0.
"""


def round_robin_admm(eta: Any, rho: Any, p: int, h: float = 1.0) -> np.ndarray:
    """One cycle of linearised ADMM on (x_1..x_p, y_1..y_p, xt): eta and rho broadcast to [...], the result is [..., 2p+1, 2p+1].

    Row k under construction is entry k of the state as a linear form in the state at the start of the cycle, so turns read as in MAPS.
    """
    step, m = _start(eta, rho, 2 * p + 1)
    pull = step * np.asarray(rho, dtype=np.float64)[..., None]
    x, y, xt = m[..., :p, :], m[..., p : 2 * p, :], m[..., 2 * p, :]
    for i in range(p):
        y[..., i, :] -= x[..., i, :] - xt
        x[..., i, :] = ((1 - step * h) * x[..., i, :] + pull * (y[..., i, :] + xt)) / (1 + pull)
        xt[...] = (x - y).mean(-2)
    return m


def round_robin_easgd(eta: Any, rho: Any, p: int, h: float = 1.0) -> np.ndarray:
    """One cycle of EASGD with alpha = eta rho on the state (x_1..x_p, xt), [..., p+1, p+1]."""
    step, m = _start(eta, rho, p + 1)
    alpha = step * np.asarray(rho, dtype=np.float64)[..., None]
    x, xt = m[..., :p, :], m[..., p, :]
    for i in range(p):
        elastic = alpha * (x[..., i, :] - xt)
        x[..., i, :] = (1 - step * h) * x[..., i, :] - elastic
        xt += elastic
    return m


def _start(eta: Any, rho: Any, d: int) -> tuple[np.ndarray, np.ndarray]:
    eta, rho = np.broadcast_arrays(np.asarray(eta, dtype=np.float64), np.asarray(rho, dtype=np.float64))
    return eta[..., None], np.broadcast_to(np.eye(d), (*eta.shape, d, d)).copy()


METHODS: dict[str, Callable[..., np.ndarray]] = {"EASGD": round_robin_easgd, "ADMM": round_robin_admm}


def easgd_bound(eta: Any, h: float = 1.0) -> Any:
    """The largest rho up to which no turn of EASGD expands, alpha = eta rho <= (4 - 2 eta h)/(4 - eta h); for odd p its very boundary."""
    return (4 - 2 * eta * h) / (4 - eta * h) / eta


def synchronous_easgd(eta: float, beta: float, p: int, h: float = 1.0) -> np.ndarray:
    """A synchronous round on (x_1..x_p, xt): x_i -= eta g(x_i) + alpha (x_i - xt), xt += sum_i alpha (x_i - xt), alpha = beta/p."""
    alpha = beta / p
    m = np.diag(np.append(np.full(p, 1 - eta * h - alpha), 1 - beta))
    m[:p, p] = m[p, :p] = alpha
    return m


def synchronous_easgd_stable(eta: float, beta: float, p: int, h: float = 1.0) -> bool:
    """Is the radius of ``synchronous_easgd`` below 1, in closed form: for eta, beta, h > 0.

    Differences of workers are multiplied by s = 1 - eta h - alpha (p > 1). Mean and centre follow [[s, alpha], [beta, 1 - beta]]; a 2x2
    matrix contracts iff 1 - trace + det > 0 (here eta h beta), 1 + trace + det > 0 and |det| < 1.
    """
    alpha = beta / p
    s = 1 - eta * h - alpha
    det = s * (1 - beta) - alpha * beta
    return bool((p == 1 or abs(s) < 1) and (2 - eta * h - alpha) * (2 - beta) > alpha * beta and abs(det) < 1)


def synchronous_admm(lam: float, p: int, h: float = 1.0) -> np.ndarray:
    """A round of consensus ADMM with exact local minimisers on (xt, y_1..y_p); the x_i are functions of these.

    x_i = argmin h x^2/2 + (lam/2)(x - xt)^2 - y_i x = (lam xt + y_i)/(h + lam),  xt = mean_i (x_i - y_i/lam),  y_i -= lam (x_i - xt).
    Differences of the y_i are multiplied by h/(h + lam), their mean is 0 after a round, and then xt is multiplied by lam/(h + lam).
    """
    x = np.hstack([np.full((p, 1), lam), np.eye(p)]) / (h + lam)
    y = np.hstack([np.zeros((p, 1)), np.eye(p)])
    xt = (x - y / lam).mean(0)
    return np.vstack([xt, y - lam * (x - xt)])


def radius(matrix: np.ndarray) -> np.ndarray:
    """The largest modulus of an eigenvalue, of every matrix in [..., d, d]."""
    return np.abs(np.linalg.eigvals(matrix)).max(-1)


def scan(method: str, eta: Any, rho: Any, p: int, h: float = 1.0) -> np.ndarray:
    """The radius of a cycle for every eta (rows) and rho (columns)."""
    return np.array([radius(METHODS[method](one, np.atleast_1d(rho), p, h)) for one in np.atleast_1d(eta)])


def unstable(method: str, eta: Any, p: int, rho: tuple[float, float] = RHO, points: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """For every eta the first interval of rho within ``rho`` where the radius is 1 or more: its ends, by bisection between ``points``.

    NaN, NaN where the radius is below 1 at every point, infinity where it does not come down again. Narrower intervals can be missed.
    """
    eta, grid = np.atleast_1d(np.asarray(eta, dtype=np.float64)), np.geomspace(*rho, points)
    above = scan(method, eta, grid, p) >= 1
    some, first = above.any(1), above.argmax(1)
    down = ~above & (np.arange(points) > first[:, None])
    back, last = some & down.any(1), down.argmax(1)
    start, end = np.where(some, grid[first], np.nan), np.where(some, np.inf, np.nan)
    for edge, which, k in ((start, some & (first > 0), first), (end, back, last)):
        low, high, e, rising = grid[k[which] - 1], grid[k[which]], eta[which], edge is start
        for _ in range(45 if which.any() else 0):
            middle = np.sqrt(low * high)
            lower = (radius(METHODS[method](e, middle, p)) >= 1) == rising
            low, high = np.where(lower, low, middle), np.where(lower, middle, high)
        edge[which] = high
    return start, end


def boundary(method: str, eta: Any, p: int, rho: tuple[float, float] = RHO, points: int = 80) -> np.ndarray:
    """For every eta the smallest rho within ``rho`` at which the radius reaches 1; NaN where it does not."""
    return unstable(method, eta, p, rho, points)[0]


def best(method: str, eta: Any, p: int, rho: tuple[float, float] = RHO, points: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """For every eta the smallest radius over rho, and that rho: the best of ``points``, refined between its neighbours."""
    eta = np.atleast_1d(np.asarray(eta, dtype=np.float64))
    found = np.empty((2, len(eta)))
    for i, one in enumerate(eta):
        grid = np.geomspace(*rho, points)
        for _ in range(5):
            radii = scan(method, one, grid, p)[0]
            k = int(radii.argmin())
            found[:, i] = radii[k], grid[k]
            grid = np.geomspace(grid[max(k - 1, 0)], grid[min(k + 1, len(grid) - 1)], 21)
    return found[0], found[1]


def last_unstable(method: str, p: int, points: int = 24) -> float:
    """The largest eta within ETA at which some rho within RHO has a radius of 1 or more, on ever finer grids; NaN for none."""
    low, high = ETA
    for _ in range(4):
        eta = np.geomspace(low, high, points)
        bad = np.flatnonzero(~np.isnan(boundary(method, eta, p)))
        if not len(bad):
            return math.nan
        low, high = eta[bad[-1]], eta[min(bad[-1] + 1, points - 1)]
    return float(low)


def _number(value: float) -> str:
    """A radius: five decimals where it is of the order of 1."""
    return f"{value:.5f}" if value < 10 else f"{value:.2g}"


def _each(text: Callable[[int], str]) -> str:
    return "; ".join(f"p = {p}: {text(p)}" for p in WORKERS)


def _where(eta: float, p: int) -> str:
    """For which rho each method is unstable at this eta, in words."""
    parts = []
    for method in METHODS:
        (start,), (end,) = unstable(method, eta, p)
        bad = f"unstable from rho = {start:.3g} {'on' if math.isinf(end) else f'to {end:.3g}'}"
        parts.append(f"{method} {'stable at every rho computed' if math.isnan(start) else bad}")
    return ", ".join(parts)


def _growth(method: str, eta: float, p: int) -> str:
    """The largest radius over rho at this eta, and in how many cycles it multiplies an error by ten."""
    worst = float(scan(method, eta, np.geomspace(*RHO, 80), p).max())
    cycles = math.ceil(math.log(10) / math.log(worst)) if worst > 1 else 0
    return _number(worst) + (f" (tenfold in {cycles} cycle{'s' * (cycles > 1)})" if cycles else "")


def _speed(eta: float, p: int) -> str:
    """The smallest radius over rho of each method, the smaller first."""
    found = sorted((float(r[0]), float(at[0]), name) for name in METHODS for r, at in [best(name, eta, p)])
    edge = ("", ", an end of its range")
    return f"eta = {eta:g}: " + ", ".join(f"{name} {_number(r)} (rho = {at:.3g}{edge[not RHO[0] < at < RHO[1]]})" for r, at, name in found)


def _flat(p: int) -> str:
    """At h = 0 the radius depends on eta rho alone."""
    pull = np.geomspace(1e-5, 1, 200)
    grows = pull[scan("ADMM", 1.0, pull, p, 0.0)[0] > 1 + 1e-6]
    return f"ADMM expands from eta rho = {grows[0]:.2g} to {grows[-1]:.2g}" if len(grows) else "ADMM does not expand"


def _order(worse: str, other: str) -> str:
    """A point of the table at which only ``worse`` is unstable, in words."""
    at = [(*point, p) for p in WORKERS for point in POINTS if scan(worse, *point, p) >= 1 > scan(other, *point, p)]
    return f"{worse} alone is unstable " + ("at eta = {:g}, rho = {:g}, p = {}".format(*at[0]) if at else "at no point of the table")


def verdict() -> list[str]:
    """What the numbers say, regime by regime, as lines of Markdown. Every claim is about the points it names."""
    small, large, speeds, rho = ETA[0], 0.3, (ETA[0], 0.01, 0.1, 1.0), np.geomspace(*RHO, 80)
    tips = {p: last_unstable("ADMM", p) for p in (2, *WORKERS)}
    ends = [f"p = {p}: " + ("none" if math.isnan(tip) else f"eta = {tip:.3g}") for p, tip in tips.items()]
    later = {p: float(scan("ADMM", np.geomspace(np.fmax(1.01 * tips[p], ETA[0]), ETA[1], 30), rho, p).max()) for p in WORKERS}
    exact = max(float(radius(synchronous_admm(lam, p))) for lam in np.geomspace(1e-3, 1e3, 61) for p in WORKERS)
    ratio = {p: f"{boundary('EASGD', large, p)[0] / easgd_bound(large):.4f}" for p in WORKERS}
    return [
        f"**Region.** h = 1, eta in [{ETA[0]:g}, {ETA[1]:g}], rho in [{RHO[0]:g}, {RHO[1]:g}], radii per cycle of p turns (p gradients). "
        "For another curvature read eta h for eta and rho/h for rho.",
        f"**Small step**, eta = {small:g}. {_each(lambda p: _where(small, p))}.",
        f"**How fast it grows there**, ADMM at the worst rho. {_each(lambda p: _growth('ADMM', small, p))}.",
        f"**Where that ends.** The largest eta at which linearised round-robin ADMM is unstable for some rho computed: {'; '.join(ends)}. "
        f"The largest radius computed at larger eta: {_each(lambda p: _number(later[p]))}.",
        f"**Large eta rho**, at eta = {large:g}. {_each(lambda p: _where(large, p))}. "
        f"EASGD's boundary divided by (4 - 2 eta h)/((4 - eta h) eta): {_each(ratio.get)}.",
        f"**How fast it grows there**, EASGD at the worst rho. {_each(lambda p: _growth('EASGD', large, p))}.",
        *(f"**Speed**, best radius over rho, the smaller first, p = {p}. {'; '.join(_speed(eta, p) for eta in speeds)}." for p in WORKERS),
        "**Flat directions**, h = 0, where consensus stays as it is (radius 1), eta rho from 1e-05 to 1. "
        f"{_each(_flat)}. EASGD does not expand for eta rho <= 1.",
        f"**Synchronous ADMM with exact local minimisers.** The largest radius over lambda in [0.001, 1000] is {exact:.4f}; "
        "it is max(h, lambda)/(h + lambda) < 1 for every lambda > 0, so nothing above is about this scheme.",
        f"**Both orders.** {_order('ADMM', 'EASGD')}; {_order('EASGD', 'ADMM')}: a comparison holds in its regime only.",
    ]


def values() -> tables.Grid:
    """The radii of both methods at POINTS."""
    names = {f"p = {p}, eta = {eta:g}, rho = {rho:g}": (eta, rho, p) for p in WORKERS for eta, rho in POINTS}
    rows = [[name, *(_number(float(scan(method, *at)[0, 0])) for method in METHODS)] for name, at in names.items()]
    return tables.grid(["turns, step, coupling", *METHODS], rows, "Spectral radius of one cycle, h = 1; 1 or more is unstable.")


def _boundaries(p: int, eta: np.ndarray) -> dict[str, tuple[Any, Any, Any]]:
    """Label -> eta, rho and dash of the radius 1: of EASGD the smallest rho, of ADMM the rim of its region, up and back."""
    tip, over = np.fmax(last_unstable("ADMM", p), ETA[0]), (RHO[0], 1.1 * RHO[1])
    fine = np.unique(np.concatenate([eta[eta < tip], np.linspace(ETA[0], tip, 30), tip * (1 - np.geomspace(1e-5, 0.1, 20))]))
    start, end = unstable("ADMM", fine, p, over)
    x, start, back = (side[~np.isnan(start)] for side in (fine, start, np.minimum(end, over[1])))
    label = "ADMM: radius 1, " + (f"unstable inside (eta < {tip:.3g})" if len(x) else "nowhere here")
    rim = (np.append(x, x[::-1]), np.append(start, back[::-1]), (0, (4, 1.5)))
    return {"EASGD: radius 1, unstable above": (eta, boundary("EASGD", eta, p, over), "-"), label: rim}


def _heat(p: int, kind: str, points: int) -> Figure:
    """The radius of both methods over (eta, rho) as steps of colour, hatched where unstable, with both boundaries in either panel."""
    from matplotlib import colormaps

    figure = house._figure(9.6, 4.9, f"Spectral radius of a cycle of p = {p} turns on x²/2 (ADMM linearised), {kind} axes")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    eta, rho = np.geomspace(*ETA, points), np.geomspace(*RHO, points)
    scale = {"logarithmic": "log", "linear": "linear"}[kind]
    if kind == "linear":  # and some points more near 0, where ADMM's region is
        eta, rho = (np.union1d(np.linspace(*ends, points), near[::3]) for ends, near in ((ETA, eta), (RHO, rho)))
    colours = colormaps["RdBu_r"](np.append(np.linspace(0.1, 0.45, 5), np.linspace(0.55, 0.9, 5)))
    lines = _boundaries(p, eta)
    for ax, method in zip(panels, METHODS, strict=True):
        steps = np.interp(scan(method, eta, rho, p), [*LEVELS, 4.0], range(len(LEVELS) + 1))
        image = ax.contourf(eta, rho, steps.T, range(len(LEVELS)), colors=colours, hatches=[None] * 5 + ["////"] * 5, extend="max")
        image.set(edgecolor="0.45", linewidth=0)
        for label, (x, y, dash) in lines.items():
            ax.plot(x, y, color="black", linestyle=dash, linewidth=2, label=label)
        ax.set(title=f"{method}, round robin", xlabel="step eta", xscale=scale, yscale=scale, xlim=ETA, ylim=RHO)
    panels[0].set_ylabel("coupling rho")
    bar = figure.colorbar(image, ax=panels, ticks=range(len(LEVELS)), label="radius (hatched: unstable)", fraction=0.05, pad=0.02)
    bar.set_ticklabels([f"{level:g}" for level in LEVELS])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9, handlelength=4)
    return figure


def _best(points: int) -> Figure:
    """Top: (1 - the smallest radius over rho)/eta, per eta; below: the rho that attains it."""
    figure = house._figure(10.5, 6.0, f"The best rho of [{RHO[0]:g}, {RHO[1]:g}] for every eta, and the speed of a cycle with it")
    axes = figure.subplots(2, len(WORKERS), sharex=True, sharey="row", squeeze=False)
    eta = np.geomspace(*ETA, points)
    for column, p in zip(axes.T, WORKERS, strict=True):
        for k, method in enumerate(METHODS):
            look = {**house.style(k), "label": method}
            radii, rho = best(method, eta, p)
            for ax, y in zip(column, ((1 - radii) / eta, rho), strict=True):
                ax.plot(eta, y, markevery=(2 * (method == "ADMM"), 4), **look)
        column[0].axhline(1, color="black", linestyle=(0, (1, 2)), linewidth=1.2, label="a gradient step alone")
        column[0].set(title=f"p = {p}", xscale="log", ylim=(0, 1.05))
        column[1].set(xlabel="step eta", yscale="log", ylim=(0.8 * RHO[0], 1.3 * RHO[1]))
    axes[0, 0].set_ylabel("(1 - best radius) / eta")
    axes[1, 0].set_ylabel("rho of the best radius")
    house._finish(figure, axes.ravel())
    return figure


def figures(folder: Path | str, points: int = 101) -> dict[str, str]:
    """Draw all pictures of the maps as PNG and PDF; the PNGs' names and what they show. ``points`` of eta and of rho per picture."""
    (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
    drawn = {}
    maps = [(f"radius_p{p}_{kind}", f"radius, p = {p}, {kind} axes", p, kind) for p in WORKERS for kind in ("logarithmic", "linear")]
    for name, text, *what in [*maps, ("best", "best radius over rho for every eta")]:
        figure = _heat(*what, points) if what else _best(max(5, points // 2))
        house._save(figure, folder / f"{name}.png")
        drawn[name + ".png"] = text
    return drawn


def curves(frame: DataFrame, path: Path | str) -> None:
    """Training curves, a panel per setting and a line per algo with its 95 % band, as ``figures.lines`` draws them.

    ``frame`` has the columns algo, setting, round, mean, half_width, the last two as fractions; a half_width of NaN draws no band. Means
    that are not finite are left out, which the panel's title says; ValueError where none is finite.
    """
    frame = frame.rename(columns={"setting": "panel", "algo": "line", "round": "x"})
    house.lines(frame, path, "Accuracy of the global model, with 95 % bands", xlabels=dict.fromkeys(frame["panel"], "round"))


_curves = curves


def write_report(folder: Path | str, curves: DataFrame | None = None, points: int = 101) -> Path:
    """Draw everything into ``folder`` and write its report.md; ``curves`` is what the function of that name draws."""
    drawn, report = figures(folder, points), Path(folder) / "report.md"
    if curves is not None:
        _curves(curves, report.with_name("curves.png"))
        drawn["curves.png"] = "training curves of both methods: the global model, not adapted"
    parts = [
        "# EASGD against ADMM\n\nIs EASGD more stable than ADMM, as Zhang, Choromanska and LeCun say (NeurIPS 2015, arXiv:1412.6651)?\n",
        "## Maps\n\n" + MAPS,
        "## Values\n\n" + tables.markdown(values()),
        "## By regime\n\n" + "".join(f"- {line}\n" for line in verdict()),
        "## Pictures\n\nEach also as PDF.\n\n" + "".join(f"![{text}]({name})\n\n" for name, text in drawn.items()),
    ]
    write_text(report, "\n".join(parts))
    return report
