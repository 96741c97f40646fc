"""Window probe: the closed form equals a transformer that runs token by token; studies can be resumed."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.refusals import refuses
from torch import Tensor

from headscope.errors import BadOption, Interrupted
from headscope.study import runner as study
from headscope.study.config import build_study
from probes.window import run as window
from probes.window.declaration import WindowOptions
from probes.window.results import SOLVED_ACCURACY, accuracy_by_width, mass_bounds
from probes.window.run import SCHEMES, WindowModels, train_models

SMALL = WindowOptions(center=12, widths=[3, 7], seeds=2, steps=150)
DISTANCES = torch.arange(1, 2 * SMALL.center).float()


def token_by_token_logits(models: WindowModels, scheme: int, seed: int, length: int) -> Tensor:
    """YES - NO logits of a plain transformer for the needle at each distance 1..length-1.

    One batch row per distance: embed, project, rotate by position, attend causally from the last token, read out.
    """
    needle, background, query = range(3)
    tokens = torch.full((length - 1, length), background)
    tokens[:, -1] = query
    for row, distance in enumerate(range(1, length)):
        tokens[row, length - 1 - distance] = needle
    x = models.embedding[scheme, seed][tokens]
    q, k, v = (x @ getattr(models, name)[scheme, seed] for name in ("query", "key", "value"))
    angle = torch.arange(length)[:, None] * models.theta()[scheme, seed]
    rotation = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * rotation) for t in (q, k))
    q, k = q.flatten(-2), k.flatten(-2)
    logits = (q[:, -1:] @ k.mT) / math.sqrt(q.shape[-1])
    attended = (logits.softmax(-1) @ v)[:, 0] @ models.output[scheme, seed]
    return ((x[:, -1] + attended) @ models.read_out[scheme, seed])[:, 0] + models.bias[scheme, seed]


def test_the_closed_form_equals_the_token_by_token_transformer() -> None:
    models = WindowModels(8, 2, 0)
    with torch.no_grad():
        models.log_change.normal_(generator=torch.Generator().manual_seed(1))
        answers = models(DISTANCES)
        for scheme in range(len(SCHEMES)):
            for seed in range(2):
                expected = token_by_token_logits(models, scheme, seed, 2 * SMALL.center)
                torch.testing.assert_close(answers[scheme, seed], expected, rtol=1e-4, atol=1e-4)


def test_training_token_by_token_gives_the_same_profile() -> None:
    width, length = 7, 2 * SMALL.center
    trained = train_models(width, SMALL, seed=3)
    models = WindowModels(SMALL.dims, SMALL.seeds, 3)
    inside = ((DISTANCES - SMALL.center).abs() <= width / 2).float()
    balance = torch.where(inside > 0, 0.5 / inside.sum(), 0.5 / (1 - inside).sum())
    weights = [p for name, p in models.named_parameters() if name != "log_change"]
    optimiser = torch.optim.Adam(
        [
            {"params": weights, "lr": window.LEARNING_RATE},
            {"params": [models.log_change], "lr": window.FREQUENCY_LEARNING_RATE},
        ]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: window._rate_factor(step, SMALL.steps))
    learned = SCHEMES.index("learned")
    for _ in range(SMALL.steps):
        optimiser.zero_grad()
        answers = token_by_token_logits(models, learned, 0, length)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(answers, inside, reduction="none")
        (loss * balance).sum().backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        even, odd = (coefficients[learned, 0, 0] for coefficients in models.logit_coefficients())
        angle = models.theta()[learned, 0][:, None] * DISTANCES
        profile = even[:, None] * angle.cos() + odd[:, None] * angle.sin()
    torch.testing.assert_close(trained.pair_logits(DISTANCES)[learned, 0], profile, rtol=1e-2, atol=1e-2)
    assert float(trained.loss[learned, 0]) == pytest.approx(float((loss * balance).sum().detach()), abs=1e-2)


def test_amplitude_and_phase_reproduce_the_pair_logits() -> None:
    models = WindowModels(8, 2, 5)
    with torch.no_grad():
        even, odd = (coefficients[:, :, 0] for coefficients in models.logit_coefficients())
        trained = window.TrainedModels(even, odd, models.theta(), torch.hypot(even, odd), -torch.atan2(odd, even))
        angle = models.theta()[..., None] * DISTANCES
        expected = even[..., None] * angle.cos() + odd[..., None] * angle.sin()
    torch.testing.assert_close(trained.pair_logits(DISTANCES), expected, rtol=1e-4, atol=1e-5)


def test_log_sum_exp_of_others_leaves_out_each_position() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30
    for index in range(20):
        expected = torch.cat((logits[:, :index], logits[:, index + 1 :]), -1).logsumexp(-1)
        torch.testing.assert_close(window._log_sum_exp_of_others(logits)[:, index], expected)


def test_nope_does_not_solve_the_window_task() -> None:
    trained = train_models(7, SMALL)
    nope = SCHEMES.index("nope")
    assert (trained.accuracy[nope] - 0.5).abs().max() < 1e-6
    assert (trained.frequency_mass[nope] == 0).all()


def test_learned_frequencies_start_at_the_fixed_ones_and_change() -> None:
    trained = train_models(7, SMALL)
    fixed, learned = SCHEMES.index("fixed"), SCHEMES.index("learned")
    assert torch.equal(WindowModels(8, 2, 0).theta()[fixed], WindowModels(8, 2, 0).theta()[learned])
    assert not torch.allclose(trained.theta[fixed], trained.theta[learned], rtol=1e-3)


def test_training_depends_only_on_the_seed() -> None:
    first, again, other = train_models(3, SMALL, 1), train_models(3, SMALL, 1), train_models(3, SMALL, 2)
    assert torch.equal(first.amplitude, again.amplitude)
    assert not torch.equal(first.amplitude, other.amplitude)


def test_the_fitted_bounds_hold_for_every_solved_model_and_are_tight() -> None:
    rows = pd.DataFrame(
        {
            "scheme": ["fixed", "fixed", "learned", "nope"],
            "width": [2, 64, 64, 64],
            "accuracy": [1.0, 1.0, 0.7, 0.5],
            "frequency_mass": [0.4, 0.1, 9.0, 0.0],
        }
    )
    bounds = mass_bounds(rows)
    assert bounds is not None
    assert bounds.solved_models == 2
    for width, mass in ((2, 0.4), (64, 0.1)):
        assert bounds.lower_bound(width) <= mass + 1e-12
        assert mass <= bounds.upper_bound(width) + 1e-12
    assert bounds.lower_bound(2) == pytest.approx(0.4)
    assert bounds.upper_bound(64) == pytest.approx(0.1)


def test_an_accuracy_on_the_threshold_solves_the_task_in_every_result() -> None:
    accuracy = np.array([np.nextafter(np.float32(SOLVED_ACCURACY), np.float32(0)), 0.98], np.float32)
    assert accuracy[0] < SOLVED_ACCURACY
    rows = pd.DataFrame({"scheme": "fixed", "width": 2, "seed": [0, 1], "accuracy": accuracy, "frequency_mass": 0.4})
    bounds = mass_bounds(rows)
    assert bounds is not None
    assert bounds.solved_models == 1
    assert accuracy_by_width(rows.assign(dominant_theta=0.1))["solved"].tolist() == [1]


def test_an_interrupted_window_study_resumes_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_study({"name": "window", "models": {}, "window": SMALL.model_dump() | {"steps": 5, "seeds": 3}})
    uninterrupted = study.run_study(plan, tmp_path / "whole")
    original = window.train_models

    def interrupted_training(width: int, config: WindowOptions, seed: int = 0) -> window.TrainedModels:
        if width == 7:
            raise KeyboardInterrupt
        return original(width, config, seed)

    monkeypatch.setattr(window, "train_models", interrupted_training)
    with pytest.raises(Interrupted):
        study.run_study(plan, tmp_path / "cut")
    monkeypatch.setattr(window, "train_models", original)
    resumed = study.run_study(plan, tmp_path / "cut", resume=True)
    for table in ("window", "window_pairs"):
        assert (resumed.path / f"{table}.parquet").read_bytes() == (
            uninterrupted.path / f"{table}.parquet"
        ).read_bytes()
    assert resumed.models == []
    timings = resumed.manifest["timings"]
    assert (timings["cells_done_now"], timings["cells"]) == (1, 2)
    by_width = accuracy_by_width(resumed.window)
    assert list(by_width["scheme"].unique()) == list(SCHEMES)
    assert np.isfinite(by_width[["accuracy", "low", "high"]].to_numpy()).all()


def test_widths_beyond_the_sequence_are_refused() -> None:
    with refuses(BadOption, "window", "widths [30]", 1, 21):
        build_study({"window": {"center": 12, "widths": [30]}})
