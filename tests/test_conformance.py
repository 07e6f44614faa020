"""Every conformance check holds (see tests/conformance). The slowest ones, iterations to a fixed point, belong to the slow suite."""

import math

import pytest
from conformance import collect

SLOW = {
    "admm: 2 of 5 users with tracking: consensus at the optimum, y_i = grad f_i",
    "admm: 4 of 5 users without tracking: biased away from w_0",
    "admm: full: consensus at the optimum, y_i = grad f_i",
    "admm: many local steps are the exact solve",
    "apfl: fixed point of w and v",
    "apfl: fixed point of w and v without the chain rule's factor",
    "apfl: iterates, adaptive weight, clipped at both ends",
    "apfl: tau = 1: the mixture goes to the user's optimum, v to (x_i* - (1 - a) w)/a",
    "aruba: tau = 1, all users, diagonal Hessians: phi ends at the minimiser of the mean loss",
    "aruba: zero gradients keep eta at beta",
    "ditto: the global track is FedAvg bit for bit (adam)",
    "ditto: the global track is FedAvg bit for bit (momentum)",
    "ditto: v_i = (A_i + lam I)^-1 (b_i + lam w) at FedAvg's fixed point",
    "ditto: v_i at FedAvg's fixed point is pFedMe's map there",
    "easgd: tau = 5: the rest point of the iterated map",
    "fedavg: tau = 6: w = (sum Q_i)^-1 sum Q_i x_i*, Q_i = I - (I - beta A_i)^tau",
    "fedbabu: FedAvg on f_i(., v_0): sum Q_i u = sum Q_i u_i*",
    "fedmeta: quadratics: first order ends elsewhere, where its mean direction is 0",
    "fedmeta: quadratics: the iterates end at the minimiser of F",
    "fedprox: fixed point on quadratics",
    "fedprox: fixed point with exact local solutions goes to the minimiser as mu grows",
    "fedrep: two head steps, four body steps",
    "fedrep: two head steps, one body step: ends in the minimiser of sum f_i(u, v_i)",
    "fedu: closed form on quadratics, complete graph, tau=8, beta=.1, from w_0",
    "fedu: closed form on quadratics, weighted graph, tau=8, beta=.1, from w_0",
    "l2gd: the expected round rests at the minimiser, pulled once",
    "lattice: consensus optimum (sum A_i)^-1 sum b_i: admm, 2 of 5 users",
    "lattice: consensus optimum (sum A_i)^-1 sum b_i: scaffold, option I, 2 of 5 users, tau=3",
    "lattice: consensus optimum (sum A_i)^-1 sum b_i: scaffold, option II, 2 of 5 users, tau=3",
    "lattice: pfedme = easgd = mtl = l2gd, tau = 1: one minimiser, w* the mean of th_i",
    "metasgd: one diagonal Hessian: a becomes its inverse",
    "metasgd: with a = 1/h one adaptation step ends at the user's minimiser",
    "mocha: hinge loss: long coordinate ascent in numpy; the duality gap closes",
    "mocha: squared loss, mean, 2 users: the linear system",
    "mocha: squared loss, mean, all users: the linear system",
    "mtl: mean, all users, tau=1: the minimiser",
    "mtl: mean, all users, tau=5: the minimiser",
    "partial: joint, tau=1: ends in the minimiser of sum f_i(u, v_i)",
    "partial: joint, tau=4",
    "perfedavg: tau = 6: w = (sum Q_i)^-1 sum Q_i x_i*, Q_i = I - (I - beta M_i)^tau",
    "perfedavg_hf: tau = 6: w = (sum Q_i)^-1 sum Q_i x_i*, Q_i = I - (I - beta M_i)^tau",
    "pfedme: fixed point of w, 5 inner steps, tau = 5",
    "pfedme: fixed point of w, exact th, tau = 1",
    "pfedme: fixed point of w, exact th, tau = 20",
    "pfedme: fixed point of w, exact th, tau = 5",
    "pfedme: proximal adaptation from w and from th: the steps, and their limit th_i(w)",
    "pfedme: tau = 1: (w, th) minimise sum f_i(x_i) + lam/2 ||x_i - w||^2 (the minimiser of L2GD and EASGD)",
    "qfedavg: losses times c with beta / c: the same map, for every q",
    "scaffold: option I, 2 of 5 users, 4 steps: the minimiser",
    "scaffold: option II, 2 of 5 users, 4 steps: the minimiser",
}


def case(check):
    name = f"{check.method}: {check.name}"
    return pytest.param(check, id=name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize("check", [case(check) for check in collect()])
def test_conformance(check):
    deviation, distance = check.run()
    assert math.isfinite(deviation) and deviation <= check.tolerance
    assert distance is None or math.isfinite(distance)


def test_slow_checks_exist():
    assert {f"{check.method}: {check.name}" for check in collect()} >= SLOW
