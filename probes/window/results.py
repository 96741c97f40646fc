"""Results of the window probe: accuracy of each scheme, frequency mass by width, and the constants of Theorem 1."""

from collections.abc import Iterator

import pandas as pd

from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.results.samples import allow_for_choice
from headscope.runs.run import Run
from probes.window.analysis import SCHEME_NAMES, accuracy_by_width, mass_bounds

QUESTIONS = (
    Question(
        name="window.solved",
        sentence="With {scheme}, {value} of {n:n models} solve the task",
        headline="With {scheme}, {value} of {n:n models} solve the task",
        number=",.0f",
        level="headline",
        better="higher",
    ),
    Question(
        name="window.accuracy",
        sentence="With {scheme} the mean accuracy over {n:n widths} is {value}",
        number=".3f",
        better="higher",
    ),
    Question(
        name="window.lowest_accuracy",
        sentence="With {scheme} the accuracy is lowest at W = {width:,}: {value}",
        number=".3f",
        samples="models",
        better="higher",
    ),
    Question(
        name="window.mass_by_width",
        sentence="Under fixed RoPE the rank correlation of frequency mass and width is {value} over {n:n widths}",
        number="+.2f",
    ),
    Question(
        name="window.mass_bounds",
        sentence="The frequency mass of all {n:n models} that solve the task is between C1 / (W/2 + 1) with C1 = "
        "{value} and pi / (W + 1) + C2 with C2 = {c2:number} rad/token (Theorem 1, r = 1)",
    ),
)


def results(run: Run) -> Iterator[Result]:
    """Results of the trained models, by scheme and over all."""
    if "window" not in run.tables:
        return
    widths = accuracy_by_width(run.window)
    for scheme, rows in widths.groupby("scheme", observed=True, sort=False):
        yield from _scheme_results(SCHEME_NAMES[str(scheme)], rows)
    fixed = widths[widths["scheme"] == "fixed"]
    if len(fixed) > 2:
        correlation = fixed["width"].rank().corr(fixed["frequency_mass"].rank())
        yield Result(question="window.mass_by_width", value=float(correlation), n=len(fixed))
    if bounds := mass_bounds(run.window):
        details = {"c2": bounds.c2}
        yield Result(question="window.mass_bounds", value=bounds.c1, n=bounds.solved_models, details=details)


def _scheme_results(name: str, widths: pd.DataFrame) -> Iterator[Result]:
    """The models of one scheme that solve the task, and their accuracies by width."""
    where = {"scheme": name}
    solved, models = int(widths["solved"].sum()), int(widths["seeds"].sum())
    yield Result(question="window.solved", value=solved, n=models, where=where)
    yield Result(question="window.accuracy", value=float(widths["accuracy"].mean()), n=len(widths), where=where)
    worst = widths.sort_values("accuracy").iloc[0]
    lowest = Result(
        question="window.lowest_accuracy",
        value=float(worst["accuracy"]),
        low=float(worst["low"]),
        high=float(worst["high"]),
        n=int(worst["seeds"]),
        where=where,
        details={"width": int(worst["width"])},
    )
    yield allow_for_choice(lowest, len(widths), (0.0, 1.0))
