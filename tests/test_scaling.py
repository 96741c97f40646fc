"""Scaling probe: closed forms, inequalities of the theorems, and convergence of effective lengths to their targets."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.integrate import quad
from support.refusals import refuses

from headscope.errors import BadOption
from headscope.study import runner as study
from headscope.study.config import build_study
from probes.scaling.declaration import theorem_case
from probes.scaling.run import ROPE_BASE, log_ess, logit_means, logit_scale

SEEDS = st.integers(0, 2**31)


def random_logits(seed: int, length: int, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.floats(0, 60), st.integers(2, 10_000))
def test_one_hot_logits_have_the_papers_closed_form(height: float, length: int) -> None:
    logits = torch.zeros(length, dtype=torch.float64)
    logits[0] = height
    other_weights = math.exp(-height) * (length - 1)
    expected = (1 + other_weights) ** 2 / (1 + math.exp(-height) * other_weights)
    assert float(log_ess(logits, 2.0).exp()) == pytest.approx(expected, rel=1e-9)


@given(SEEDS, st.integers(1, 200), st.floats(0.1, 20), st.floats(0.1, 5).filter(lambda b: abs(b - 1) > 0.01))
def test_effective_length_lies_between_one_and_the_length(seed: int, length: int, size: float, beta: float) -> None:
    log_length = float(log_ess(random_logits(seed, length, size), beta))
    assert -1e-9 <= log_length <= math.log(length) + 1e-9


@given(SEEDS, st.integers(2, 200), st.floats(0.1, 20))
def test_effective_length_falls_with_its_order(seed: int, length: int, size: float) -> None:
    log_lengths = [float(log_ess(random_logits(seed, length, size), beta)) for beta in (0.25, 0.5, 1.5, 2.0, 4.0)]
    assert all(low <= high + 1e-9 for high, low in pairwise(log_lengths))


@pytest.mark.parametrize("distance", [0, 1, 7, 100, 3000])
def test_rope_means_are_the_integral_over_frequencies(distance: int) -> None:
    expected, _ = quad(lambda x: math.cos(distance * ROPE_BASE**-x), 0, 1, limit=4000)
    assert float(logit_means("rope", distance + 1)[-1]) == pytest.approx(expected, abs=1e-6)


def test_nope_logit_scale_follows_theorem_4() -> None:
    length = 10_000
    mu = logit_means("nope", length)
    assert logit_scale(mu, 0.9, 2.0) == pytest.approx(math.sqrt(math.log(length / length**0.9)), rel=1e-6)
    assert logit_scale(mu, 0.5, 2.0) == pytest.approx(math.sqrt(math.log(2 * length / length**0.5)), rel=1e-6)


@pytest.mark.parametrize(("exponent", "case"), [(0.9, "i"), (0.51, "i"), (0.5, "ii"), (0.3, "none"), (0.0, "iii")])
def test_targets_belong_to_the_cases_of_the_theorems(exponent: float, case: str) -> None:
    assert theorem_case(exponent, 2.0) == case
    assert theorem_case(exponent, 0.5) == case  # the critical exponent is 1 - min(beta, 1 / beta)


def test_effective_length_approaches_its_target(tmp_path: Path) -> None:
    plan = {"lengths": [100, 10_000, 200_000], "exponents": [0.9, 0.0], "seeds": 8}
    run = study.run_study(build_study({"name": "scaling", "models": {}, "scaling": plan}), tmp_path)
    error = (run.scaling.astype({"ratio": "float64"}).set_index("context_length")["ratio"] - 1).abs()
    assert error.loc[200_000].max() < 0.1
    assert error.loc[200_000].mean() < 0.03
    assert error.loc[200_000].mean() < error.loc[100].mean()


@given(SEEDS, st.integers(1, 20), st.integers(1, 200), st.floats(0, 12))
def test_retrieval_is_stable_while_effective_length_is(seed: int, signals: int, noises: int, gap: float) -> None:
    """Theorem 2 and its corollary, beta = 2: with dominant signals the output moves by at most 2 |v| relESS."""
    signal, noise = random_logits(seed, signals), random_logits(seed + 1, noises) - gap
    values = torch.nn.functional.normalize(random_logits(seed + 2, (signals + noises) * 3).view(-1, 3), dim=-1)
    keys = torch.cat((signal, noise))
    weights = keys.softmax(0)
    assume(float(weights[signals:].sum()) <= 0.5)  # the theorem's dominant signals
    assume(float(log_ess(signal, 2.0)) <= float(log_ess(noise, 2.0)))
    change = float((weights @ values - signal.softmax(0) @ values[:signals]).norm())
    growth = math.expm1(float(log_ess(keys, 2.0) - log_ess(signal, 2.0)))
    assert change <= 2 * growth + 1e-9


@given(SEEDS, st.integers(2, 400), st.floats(0, 1))
def test_aggregation_needs_an_effective_length_that_grows_linearly(seed: int, length: int, size: float) -> None:
    """Theorem 3, beta = 2: C exp(-D_2) n <= ESS_2 <= n with C = 1 / max_i (n pi_i), for any target pi."""
    fraction = (np.arange(length) + 1) / length
    target = (1 + fraction) / (1 + fraction).sum()
    weights = torch.from_numpy(target).log() + random_logits(seed, length, size)
    alpha = weights.softmax(0).numpy()
    divergence = math.log((alpha**2 / target).sum())
    effective = math.exp(float(log_ess(weights, 2.0)))
    assert math.exp(-divergence) / target.max() <= effective * (1 + 1e-9)
    assert effective <= length * (1 + 1e-9)


def test_bad_options_are_refused_in_one_line() -> None:
    with refuses(BadOption, "scaling.exponents.0", 1.5, 1):
        build_study({"scaling": {"exponents": [1.5]}})
    with refuses(BadOption, "scaling", "exponent 0.3", "order 2", 0, 0.5):
        build_study({"scaling": {"exponents": [0.9, 0.3]}})
