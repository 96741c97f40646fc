"""Charts and cards of scores of heads (`headscope.results.scores`)."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from headscope.rendering.blocks import Card, Chart, ChartGroup, RenderContext
from headscope.rendering.statistic_charts import comparison_chart, matrix_chart, top_heads_card
from headscope.results.scores import HasScores, Score, role_answers


def score_charts(probe: HasScores, context: RenderContext) -> Iterator[ChartGroup]:
    """Under each heading, the matrix of every score in the first model, and its comparison with the other models."""
    drawn = [score for score in probe.scores() if score.heading]
    for heading, members in groupby(drawn, lambda score: score.heading):
        yield ChartGroup(probe.title, heading, _charts([*members], context))


def _charts(scores: Sequence[Score], context: RenderContext) -> Iterator[Chart]:
    models = {score.column: [*context.finite_values(score.column)] for score in scores}
    for score in scores:
        for label in models[score.column][:1]:
            yield matrix_chart(context.heads, score.column, label, context.scale_heads, score.caption)
    for score in scores:
        if len(models[score.column]) > 1:
            yield comparison_chart(context.heads, score.column, models[score.column][0])


def score_cards(probe: HasScores, context: RenderContext) -> Iterator[Card]:
    """The top heads of every score whose role has a card."""
    for score in probe.scores():
        if score.role and score.role.has_card:
            name, threshold = score.role.name, score.role.threshold
            answers = role_answers(score, context.run, context.heads, context.models)
            yield from top_heads_card(context, score.column, f"Which heads are {name} heads?", answers, name, threshold)
