"""Cards of an overview for sweeps over heads: the units of largest effect, and the largest one in a sentence."""

from headscope.plots.top_heads import plot_unit_bars
from headscope.rendering.blocks import Card
from headscope.results.effects.ranking import chosen_unit
from headscope.results.effects.sweep import UNIT_KEYS, Effects
from headscope.results.effects.units import unit_name
from headscope.results.result import Result
from headscope.results.words import sentence

CARD_UNITS = 6
"""Units on a card."""


def effects_card(effects: Effects, largest: Result, question: str, title: str, axis: str, href: str) -> Card:
    """The units of largest effect, exact ones if there are any; `axis` is the axis title, with a unit in brackets."""
    top = effects.candidates.sort_values("effect", ascending=False)[:CARD_UNITS]
    chosen = [chosen_unit(effects, row) for _, row in top.iterrows()]
    unit = axis.partition("(")[2].removesuffix(")")
    figure = plot_unit_bars(
        f"{title}: {effects.model}",
        [unit_name(row) for _, row in top.iterrows()],
        top["effect"].tolist(),
        top[[*UNIT_KEYS]].to_numpy().tolist(),
        f"%{{x:+.3g}} {unit}".rstrip(),
        effects.model,
        [(row["low"], row["high"]) for row in chosen],
    )
    figure.update_layout(margin_l=120).update_xaxes(title_text=axis)
    return Card(figure, sentence(largest), half_width=True, question=question, href=href)
