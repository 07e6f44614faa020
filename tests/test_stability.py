"""EASGD against ADMM: the maps against turns worked one by one, the published radii, closed conditions, pictures and report."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.polynomial import Polynomial
from problems import Quadratic, federation, quadratic
from small import algorithm

from perfed.studies import stability as st

PNG, PDF = b"\x89PNG\r\n\x1a\n", b"%PDF-"


def admm_turns(state, eta, rho, p, h):
    """A cycle by the letter of Zhang's round-robin scheme, number by number."""
    x, y, xt = list(state[:p]), list(state[p : 2 * p]), state[2 * p]
    for i in range(p):
        y[i] = y[i] - (x[i] - xt)
        x[i] = (x[i] - eta * h * x[i] + eta * rho * (y[i] + xt)) / (1 + eta * rho)
        xt = sum(x[j] - y[j] for j in range(p)) / p
    return np.array([*x, *y, xt])


def easgd_turns(state, eta, rho, p, h):
    x, xt = list(state[:p]), state[p]
    for i in range(p):
        old = x[i]
        x[i] = old - eta * h * old - eta * rho * (old - xt)
        xt = xt + eta * rho * (old - xt)
    return np.array([*x, xt])


TURNS = {"ADMM": (admm_turns, lambda p: 2 * p + 1), "EASGD": (easgd_turns, lambda p: p + 1)}


@pytest.mark.parametrize("method", TURNS)
@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_matrices_are_the_turns(method, p):
    turns, size = TURNS[method]
    rng = np.random.default_rng(p)
    eta, rho = rng.uniform(0.01, 1, (2, 3)), rng.uniform(0.1, 3, 3)
    stack = st.METHODS[method](eta, rho, p, 0.7)
    assert stack.shape == (2, 3, size(p), size(p))
    for a, b in np.ndindex(2, 3):
        state = rng.normal(size=size(p))
        expected = turns(state, eta[a, b], rho[b], p, 0.7)
        np.testing.assert_allclose(stack[a, b] @ state, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(stack[a, b], st.METHODS[method](eta[a, b], rho[b], p, 0.7))


@pytest.mark.parametrize(
    "p, easgd, admm",
    [(3, 0.99927, 1.00097), (8, 0.99912, 1.00226)],
)
def test_published_radii(p, easgd, admm):
    """eta = .001, rho = 2.5: all five decimals hold."""
    assert round(float(st.radius(st.round_robin_easgd(0.001, 2.5, p))), 5) == easgd
    assert round(float(st.radius(st.round_robin_admm(0.001, 2.5, p))), 5) == admm


def growth(p, eta, rho, method):
    """Norm of a state after many cycles, worked turn by turn, over that after half as many: the radius to that power, without matrices."""
    turns, size = TURNS[method]
    state, norms = np.random.default_rng(0).normal(size=size(p)), []
    for _ in range(2):
        for _ in range(4000):
            state = turns(state, eta, rho, p, 1.0)
        norms.append(np.linalg.norm(state))
    return (norms[1] / norms[0]) ** (1 / 4000)


def test_radius_is_the_growth_of_errors():
    """Turns alone: ADMM's error grows where EASGD's shrinks. A complex pair turns the norm a little, hence 1e-4."""
    for method, grows in (("ADMM", True), ("EASGD", False)):
        found = growth(3, 0.001, 2.5, method)
        assert (found > 1) == grows
        assert found == pytest.approx(float(st.radius(st.METHODS[method](0.001, 2.5, 3))), abs=1e-4)


def characteristic(method, eta, rho, p, h):
    """Radius from the characteristic polynomial of a turn followed by a relabelling, with no matrix of the state.

    Eigenvectors have x_{j+1} = mu x_j, y_{j+1} = mu y_j; the worker that had its turn becomes the last one, so its new x is mu^p x_1, and
    xt becomes mu xt. EASGD: (1 - eta h - a - mu^p) x_1 + a xt = 0 and a x_1 + (1 - a - mu) xt = 0. ADMM in (x_1, y_1, xt), with M = mu^p
    and xt = (x_1 - y_1) (1 + mu + .. + mu^(p-1))/p:
        [-1, 1 - M, 1], [1 - eta h - (1 + a) M, a M, a], [S, -S, -1],  S = (1 + .. + mu^(p-1))/p.
    """
    a, one, mu = eta * rho, Polynomial([1.0]), Polynomial([0.0, 1.0])
    M, S = mu**p, Polynomial(np.full(p, 1 / p))
    if method == "EASGD":
        det = (one * (1 - eta * h - a) - M) * (one * (1 - a) - mu) - a * a
    else:
        r = one * (1 - eta * h) - (1 + a) * M
        det = -1 * (-a * M + a * S) - (one - M) * (-1 * r - a * S) + (-1 * r * S - a * M * S)
    return np.abs(det.trim().roots()).max() ** p


@pytest.mark.parametrize("method", TURNS)
@pytest.mark.parametrize("p", [2, 3, 8])
def test_radius_from_the_characteristic_polynomial(method, p):
    for eta, rho, h in [(0.001, 2.5, 1.0), (0.1, 1.0, 1.0), (0.3, 5.0, 1.0), (0.7, 0.3, 2.0)]:
        found = float(st.radius(st.METHODS[method](eta, rho, p, h)))
        assert found == pytest.approx(characteristic(method, eta, rho, p, h), rel=1e-8)
        assert found == pytest.approx(float(st.radius(st.METHODS[method](eta * h, rho / h, p, 1.0))), rel=1e-9)


def test_conserved_quantities_and_rank():
    """Without a gradient, EASGD's xt + sum x_j is a left eigenvector of 1. ADMM's xt is a function of the rest: one eigenvalue is 0."""
    ones = np.ones(6)
    np.testing.assert_allclose(ones @ st.round_robin_easgd(0.4, 0.8, 5, 0.0), ones, atol=1e-14)
    assert np.abs(ones @ st.round_robin_easgd(0.4, 0.8, 5, 1.0) - ones).max() > 0.1
    tie = np.array([*[1 / 5] * 5, *[-1 / 5] * 5, -1])
    np.testing.assert_allclose(tie @ st.round_robin_admm(0.4, 0.8, 5), 0, atol=1e-15)
    for method, (_, size) in TURNS.items():
        consensus = np.ones(size(5))
        if method == "ADMM":
            consensus[5:10] = 0
        np.testing.assert_allclose(st.METHODS[method](0.4, 0.8, 5, 0.0) @ consensus, consensus, atol=1e-14)


def test_easgd_cannot_grow_below_its_bound():
    """A turn is symmetric with a norm of at most 1 there, in any order and for any p; for odd p the radius is 1 at the bound itself."""
    for eta in (0.01, 0.3, 1.0, 1.9):
        bound = st.easgd_bound(eta)
        for p in (1, 2, 3, 8):
            assert st.radius(st.round_robin_easgd(eta, 0.999 * bound, p)) < 1
            at = float(st.radius(st.round_robin_easgd(eta, bound, p)))
            assert at == pytest.approx(1, abs=1e-9) if p % 2 else at < 1
            assert st.radius(st.round_robin_easgd(eta, 1.07 * bound, p)) > 1
        found = st.boundary("EASGD", eta, 3, (0.5 * bound, 2 * bound))
        np.testing.assert_allclose(found, bound, rtol=1e-6)
    assert st.radius(st.round_robin_easgd(0.01, 100.0, 8, 0.0)) == pytest.approx(1, abs=1e-9)


def test_synchronous_easgd_in_closed_form():
    """20,000 random (eta h, beta_e, p): the condition holds iff the eigenvalues are inside the unit circle.

    For p > 1, |s| < 1 gives 2 - eta h - alpha = 1 + s > 0, so the second inequality needs beta_e < 2, and then |det| < 1 by itself. It is
    |det| < 1 alone that decides for p = 1 and eta h = 5, beta_e = 7: (2 - 12)(2 - 7) = 50 > 49, det = (-11)(-6) - 49 = 17.
    """
    rng = np.random.default_rng(1)
    for p in range(1, 11):
        eta, beta = rng.uniform(0, 6, 2000), rng.uniform(0, 9, 2000)
        eta[:1000], beta[:1000] = eta[:1000] / 3, beta[:1000] / 4
        radius = st.radius(np.array([st.synchronous_easgd(e, b, p) for e, b in zip(eta, beta, strict=True)]))
        closed = np.array([st.synchronous_easgd_stable(e, b, p) for e, b in zip(eta, beta, strict=True)])
        assert ((radius < 1) == closed)[np.abs(radius - 1) > 1e-9].all() and 100 < closed.sum() < 1900
        alpha = beta / p
        rest = (np.abs(1 - eta - alpha) < 1) & ((2 - eta - alpha) * (2 - beta) > alpha * beta)
        assert p == 1 or (rest == closed).all()
    assert not st.synchronous_easgd_stable(5, 7, 1) and st.radius(st.synchronous_easgd(5, 7, 1)) > 1
    for eta in (0.01, 0.5, 1.0):
        assert all(st.synchronous_easgd_stable(eta, beta, p) for beta in (0.01, 0.5, 0.99) for p in (2, 3, 16))


def test_synchronous_admm_is_stable_for_every_lambda():
    for h in (0.01, 1.0, 30.0):
        for lam in np.geomspace(1e-4, 1e4, 9):
            for p in (1, 2, 8):
                expected = (max(h, lam) if p > 1 else lam) / (h + lam)
                assert float(st.radius(st.synchronous_admm(lam, p, h))) == pytest.approx(expected, abs=1e-12)


H = 0.8


def built(p, name, **fields):
    """p users with h x^2/2 each, at random places."""
    fed = federation(algorithm(name, tau=1, **fields), Quadratic(), [quadratic([[H]], [0.0])] * p, np.zeros(1))
    rng = np.random.default_rng(2)
    users = {k: {"w": torch.from_numpy(rng.normal(size=v["w"].shape))} if k in "xy" else v for k, v in fed.state.users.items()}
    fed.state = fed.state._replace(users=users, server={"w": {"w": torch.from_numpy(rng.normal(size=(1, 1)))}})
    return fed


def flat(fed, key):
    return fed.state.users[key]["w"].numpy().ravel().copy(), fed.state.server["w"]["w"].numpy().ravel().copy()


def test_the_method_easgd_is_the_synchronous_map():
    fed = built(4, "easgd", beta=0.3, beta_e=0.9)
    state = np.concatenate(flat(fed, "x"))
    for _ in range(3):
        fed.round()
        state = st.synchronous_easgd(0.3, 0.9, 4, H) @ state
    np.testing.assert_allclose(np.concatenate(flat(fed, "x")), state, rtol=1e-12)


def test_the_method_admm_with_exact_solves_is_the_synchronous_map():
    """On a quadratic one step of 1/(h + lam) is the exact minimiser, whatever the start."""
    lam = 0.5
    fed = built(4, "admm", beta=1 / (H + lam), lam=lam, scheme="full")
    state = np.concatenate(flat(fed, "y")[::-1])
    for _ in range(3):
        fed.round()
        state = st.synchronous_admm(lam, 4, H) @ state
    np.testing.assert_allclose(np.concatenate(flat(fed, "y")[::-1]), state, rtol=1e-11, atol=1e-14)


def test_unstable_interval_and_boundary():
    """ADMM at p = 3: radius 1 at both ends of the interval, above 1 inside and below 1 outside; none at a larger eta or for p = 2."""
    (start, none), (end, nowhere) = st.unstable("ADMM", [0.001, 0.01], 3)
    assert np.isnan(none) and np.isnan(nowhere)
    at = [start, end, 0.99 * start, 1.01 * start, 0.99 * end, 1.01 * end]
    radii = st.scan("ADMM", 0.001, at, 3)[0]
    np.testing.assert_allclose(radii[:2], 1, atol=1e-10)
    assert list(radii[2:] > 1) == [False, True, True, False]
    assert st.boundary("ADMM", 0.001, 3)[0] == start
    assert np.isinf(st.unstable("ADMM", 0.001, 8)[1][0])
    assert st.unstable("ADMM", 0.001, 3, (1.0, 2.0))[0][0] == 1.0
    assert np.isnan(st.last_unstable("ADMM", 2)) and np.isnan(st.boundary("EASGD", 0.001, 3)[0])
    tip = st.last_unstable("ADMM", 3)
    below, above = (st.scan("ADMM", factor * tip, np.geomspace(*st.RHO, 200), 3).max() for factor in (0.999, 1.01))
    assert below > 1 > above


def test_best_coupling():
    radii, rho = st.best("ADMM", [0.1, 1.0], 3)
    for eta, r, at in zip((0.1, 1.0), radii, rho, strict=True):
        assert float(st.radius(st.round_robin_admm(eta, at, 3))) == r <= st.scan("ADMM", eta, np.geomspace(*st.RHO, 400), 3).min() + 1e-5


def test_verdict_follows_the_numbers(monkeypatch):
    monkeypatch.setattr(st, "WORKERS", (3,))
    lines = st.verdict()
    text = "\n".join(lines)
    assert "%" not in text and "winner" not in text
    assert "p = 3: EASGD stable at every rho computed, ADMM unstable from rho = 0.077 to 7.24" in text
    assert "p = 2: none; p = 3: eta = 0.00295" in text
    assert "ADMM alone is unstable at eta = 0.001, rho = 2.5, p = 3; EASGD alone is unstable at eta = 0.3, rho = 10, p = 3" in text
    monkeypatch.setattr(st, "METHODS", {"EASGD": st.round_robin_easgd, "ADMM": st.round_robin_easgd})
    same = "\n".join(st.verdict())
    assert "ADMM alone is unstable at no point of the table; EASGD alone is unstable at no point" in same
    assert "p = 2: eta = 1; p = 3: eta = 1" in same


def frame():
    rounds = np.arange(0, 60, 5)
    return pd.DataFrame(
        [
            {"algo": algo, "setting": setting, "round": k, "mean": 0.9 - 0.7 * np.exp(-k / tau), "half_width": 0.02}
            for setting in ("eta = 0.01, rho = 1", "eta = 0.1, rho = 9")
            for algo, tau in (("easgd", 10), ("admm", 20))
            for k in rounds
        ]
    )


def test_report_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(st, "WORKERS", (3,))
    report = st.write_report(tmp_path / "study", curves=frame(), points=7)
    text = report.read_text(encoding="utf-8")
    names = ["radius_p3_logarithmic", "radius_p3_linear", "best", "curves"]
    for name in names:
        png, pdf = (report.with_name(name + suffix).read_bytes() for suffix in (".png", ".pdf"))
        assert png.startswith(PNG) and len(png) > 10_000 and pdf.startswith(PDF) and len(pdf) > 3_000
        assert f"]({name}.png)" in text
    assert sorted(f.name for f in report.parent.iterdir()) == sorted(["report.md", *(n + s for n in names for s in (".png", ".pdf"))])
    assert st.MAPS in text and all(line in text for line in st.verdict())
    assert "| p = 3, eta = 0.001, rho = 2.5 | 0.99927 | 1.00097 |" in text


def test_boundaries_as_drawn():
    """EASGD's is its bound at p = 3, ADMM's rim closes at the last unstable eta; for p = 2 ADMM has none."""
    eta = np.geomspace(*st.ETA, 9)
    lines = st._boundaries(3, eta)
    x, y, _ = lines["EASGD: radius 1, unstable above"]
    drawn = ~np.isnan(y)
    np.testing.assert_allclose(y[drawn], st.easgd_bound(x[drawn]), rtol=1e-6)
    assert (st.easgd_bound(x[~drawn]) > st.RHO[1]).all()
    x, y, _ = lines["ADMM: radius 1, unstable inside (eta < 0.00295)"]
    assert x.max() == pytest.approx(0.00295, rel=1e-3) and (np.diff(x[: len(x) // 2]) > 0).all()
    np.testing.assert_allclose([float(st.radius(st.round_robin_admm(a, b, 3))) for a, b in zip(x, y, strict=True)], 1, atol=1e-9)
    assert len(st._boundaries(2, eta)["ADMM: radius 1, nowhere here"][0]) == 0


def test_curves_of_diverged_and_single_runs(tmp_path):
    data = frame()
    data.loc[(data["algo"] == "admm") & (data["round"] > 30), "mean"] = np.nan
    data["half_width"] = np.nan
    st.curves(data, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="no finite mean"):
        st.curves(data.assign(mean=np.nan), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_no_torch():
    code = "import sys, perfed.studies.stability as s; s.verdict; sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
