"""Draws the labelled pictures of docs/how-to-read.md and docs/answers.md, from shipped runs and two small ones, and the
pictures of docs/paper.md, from the shipped example.

Needs the extra `export` and Chromium.

python docs/pictures.py [paper]
"""

import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kaleido
import plotly.graph_objects as go

import headscope as hs
from headscope.plots import curves, head_matrices, head_scatter, layers, learned_frequencies
from headscope.plots.style import HIGHLIGHT_COLOUR
from probes.influence.analysis import sweeps_without_bands, top_heads_by_statistic
from probes.influence.plots import plot_histogram

FOLDER = Path(__file__).parent / "images"
EXAMPLES = Path(hs.__file__).parent / "examples"
WIDTH = 760
Place = tuple[float, float]
"""Where a number stands: x and y as shares of the plot area, which begins at the lower left."""
MAPS, ANSWER = "maps", "answer"
"""Names of the runs that are measured here: of attention maps, whose blocks are smaller than those of the shipped run,
and of the answer to a prompt."""
PROMPT = "When Mary and John went to the store, John gave a drink to"
HEADS = {"example": (18, 6), MAPS: (4, 4)}
"""The head whose page is also searched for charts, by run."""
PICTURES: dict[str, tuple[str, str, list[Place]]] = {
    "matrix": ("example", "Effective length at 12,288: base", [(0.055, 0.017), (0.944, 0.617), (1.1, 0.5)]),
    "growth": ("example", "Effective length against context length", [(0.3, 0.7), (0.6, 0.24), (0.8, 0.24)]),
    "comparison": ("example", "Effective length at 12,288 of each head", [(0.24, 0.7), (0.2, 0.3), (1.11, 0.5)]),
    "spectrum": ("example", "Rotary spectrum of layer 18, head 6", [(0.3, 0.92), (0.4, 0.12), (0.95, 0.42)]),
    "distance": ("example", "Logit by distance: layer 18, head 6", [(0.02, 0.78), (0.4, 0.8), (0.95, 0.2)]),
    "loss": ("example", "Loss relative to base, by position", [(0.05, 0.46), (0.86, 0.7), (0.97, 0.1)]),
    "needles": ("example", "Needle retrieved, by context length", [(0.62, 0.93), (0.62, 0.25), (0.35, 0.12)]),
    "patching": (
        "patching",
        "Denoising of the head output z, ioi: base",
        [(0.455, 0.783), (0.66, 0.817), (0.722, 0.183)],
    ),
    "budget": ("budget", "base, 8,192 tokens: loss by share", [(0.22, 0.16), (0.42, 0.66), (0.95, 0.66)]),
    "map": (MAPS, "Attention map of layer 4, head 4", [(0.004, 0.62), (0.51, 0.3), (0.34, 0.245)]),
    "composition": ("weights", "K-composition by layer: base", [(0.5, 0.62), (0.09, 0.06), (1.1, 0.5)]),
    "qk": ("weights", "What writes the logits of L18H6: base", [(0.92, 0.905), (0.03, 0.62), (0.36, 0.94)]),
    "answer": (
        ANSWER,
        "' Mary' − ' John' by layer and row",
        [(0.965, 0.6), (0.965, 0.79), (0.75, 0.985), (0.035, 0.62)],
    ),
    "training": (
        "from-scratch",
        "Effective length at 512 during training, by layer",
        [(0.06, 0.87), (0.06, 0.2), (0.24, 0.34)],
    ),
}
"""For each picture the shipped run (or `MAPS`, `ANSWER`), the beginning of the chart's title, and the places of the
numbers 1, 2, ..."""


PAPER_WIDTH = 560


def draw_paper() -> None:
    """Write the picture of every claim of docs/paper.md as images/paper-NAME.webp."""
    kaleido.start_sync_server(silence_warnings=True)
    for name, figure in _paper_figures(_open_run("example", ""), _open_run("head-influence", "")):
        figure.write_image(FOLDER / f"paper-{name}.webp", width=PAPER_WIDTH)
    kaleido.stop_sync_server()


def _paper_figures(run: hs.Run, exact_influence: hs.Run) -> Iterator[tuple[str, go.Figure]]:
    heads = run.heads
    yield "loss", curves.plot_loss_difference(run.nll, "yarn")
    yield "frequencies", learned_frequencies.plot_frequency_change(run.positions, "adarope", "log_theta_init")
    yield "lengths", head_scatter.plot_against_baseline(heads, "ess2_12288", "base")
    yield "base", layers.plot_by_layer(heads, "effective_base")
    for statistic in ("tau", "gamma", "cov"):
        yield statistic, head_matrices.plot_distribution(heads, statistic)
    for measured in (run, exact_influence):  # the later picture of a component replaces the earlier
        heads = measured.heads
        top_head = {"top retrieval": top_heads_by_statistic(heads[heads["model"] == "adarope"])["retrieval"]}
        for effects in sweeps_without_bands(measured):
            yield f"influence-{effects.key['intervention']}", plot_histogram(effects, top_head)


def main() -> None:
    """Write every picture as images/read-NAME.webp."""
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as folder:
        _draw(folder)


def _draw(folder: str) -> None:
    kaleido.start_sync_server(silence_warnings=True)
    for run_name in dict.fromkeys(run_name for run_name, _, _ in PICTURES.values()):
        run = _open_run(run_name, folder)
        figures = [
            *(_figures(run.head(*HEADS[run_name], "base")) if run_name in HEADS else []),
            *_figures(run.charts()),
        ]
        for name, (_, title, places) in ((n, entry) for n, entry in PICTURES.items() if entry[0] == run_name):
            figure = next(f for f in figures if " ".join(str(f.layout.title.text).split("<br>")).startswith(title))
            _number(figure, places)
            figure.write_image(FOLDER / f"read-{name}.webp", width=WIDTH, scale=1.4)
    kaleido.stop_sync_server()


def _open_run(name: str, folder: str) -> hs.Run:
    if name == MAPS:
        run: hs.Run = hs.patterns("smollm2-135m", lengths=[1024], docs=1, map=True, out=folder, quiet=True)
        return run
    if name == ANSWER:
        answers = {"prompt": PROMPT, "answer": " Mary", "wrong": " John"}
        of_answer: hs.Run = hs.attribution("smollm2-135m", **answers, out=folder, quiet=True)
        return of_answer
    return hs.Run.open(next(EXAMPLES.glob(f"*-{name}-????????")))


def _figures(blocks: Iterable[Any]) -> Iterator[go.Figure]:
    return (go.Figure(block.figure) for block in blocks if hasattr(block, "figure"))


def _number(figure: go.Figure, places: list[Place]) -> None:
    for number, (x, y) in enumerate(places, start=1):
        figure.add_annotation(
            text=f"<b>{number}</b>",
            x=x,
            y=y,
            xref="paper",
            yref="paper",
            xanchor="center",
            yanchor="middle",
            showarrow=False,
            font={"color": "white", "size": 15},
            bgcolor=HIGHLIGHT_COLOUR,
            borderpad=4,
        )


if __name__ == "__main__":
    draw_paper() if sys.argv[1:] == ["paper"] else main()
