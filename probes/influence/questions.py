"""Questions of the influence probe: sweeps of single units, sets of units, bands of rotary pairs, and claims.

Those about the loss of an answer have names that begin with "answer_influence".
"""

from collections.abc import Iterator
from dataclasses import replace

from headscope.effects.results import sweep_questions
from headscope.results.questions import Question

AREAS = {"text": "influence", "answer": "answer_influence"}
"""First part of the names of questions, by objective."""


def _questions(area: str, samples: str, conditions: str, brief_subject: str) -> Iterator[Question]:
    """Questions about one objective; `conditions` is the template of the context length and the loss."""
    subject = f"{{change:capital}} in {{model}}, one {{noun}} at a time ({conditions})"
    together = f"{{change:capital}} in {{model}} ({conditions})"
    effect = Question(name="", sentence="", number="+.2g", value_unit="nats/token", samples=samples)
    yield from sweep_questions(
        area,
        subject,
        brief_subject,
        number=effect.number,
        samples=samples,
        value_unit=effect.value_unit,
    )
    yield Question(
        name=f"{area}.concentration",
        sentence=f"{subject}: the top {{fraction:percent}} of {{units:,}} {{nouns}} contribute {{value}} of the total "
        "rise (Gini coefficient of the absolute changes {gini:.2f}[; {estimated:,} {nouns} were only estimated])",
        number="percent",
    )
    named = "[{group_of} ]the {top_head}"
    yield replace(
        effect,
        name=f"{area}.top_head",
        sentence=f"{subject}: the effect of {named}, {{unit}}, is {{value}}[, rank {{rank:,}} of {{units:,}} "
        "{nouns}]",
    )
    yield replace(
        effect,
        name=f"{area}.all_units",
        sentence=f"{together}: the loss changes by {{value}} with all {{size:,}} {{nouns}} changed, and by "
        "{first:+.2g} nats/token with only the top one",
    )
    yield replace(
        effect,
        name=f"{area}.named_set",
        sentence=f"{together}: changing the {{size:n heads}} of “{{choice}}” together changes the loss by {{value}}",
    )
    yield replace(
        effect,
        name=f"{area}.band",
        sentence=f"Rotary pairs of {{model}} by band, {{kind}} in one {{noun}} at a time ({conditions}): the highest "
        "effect is that of {pairs} of {unit}, {value}[. Changes with a band ablated in all heads at once, "
        "nats/token: {together:+.2g}]",
    )
    yield replace(
        effect,
        name=f"{area}.head",
        sentence=f"Influence in {{model}}, {{change}} ({conditions}): {{value}} for {{unit}}[, rank {{rank:,}} of "
        "{units:,}]",
    )
    yield replace(
        effect,
        name=f"{area}.head_band",
        sentence=f"Influence in {{model}}, largest of {{bands:n bands}}, {{change}} ({conditions}): {{value}} for "
        "{unit}",
    )


_RANK_EVIDENCE = (
    "{model}: [{group_of} ]{head_name} ({statistic_label} {score:.2f}) has rank {rank:,} of {units:,} {nouns} by "
    "influence, with {effect:+.2g} nats/token[ (interval {effect_low:+.2g} to {effect_high:+.2g})][ ({estimate})]. "
    "Its influence minus "
)

QUESTIONS = (
    *_questions("influence", "documents", "{context_length:,} tokens", "Influence, {intervention}"),
    *_questions(
        "answer_influence",
        "trials",
        "loss of the answer, up to {context_length:,} tokens",
        "Influence on answers, {intervention}",
    ),
    Question(
        name="answer_influence.answered",
        sentence="Unchanged, {model} answers {answered:,} of {n:n trials} correctly, {number:percent}",
        number="percent",
        better="higher",
    ),
    Question(
        name="answer_influence.answered_top",
        sentence="{change:capital} in {model}, one {noun} at a time, over the trials that the unchanged model answers: "
        "the highest effect is that of {unit}, {value}",
        number="+.2g",
        value_unit="nats/token",
        samples="trials",
    ),
    Question(
        name="influence.heavy_tail",
        statement="{change:capital}, one {noun} at a time: a few {nouns} account for most of the influence",
        sentence="{model}, {context_length:,} tokens: the top {fraction:percent}, {top:,} of {units:,} {nouns}, "
        "contribute {value} of the total rise",
        criterion="the top {fraction:percent} contribute more than {minimum_share:percent}",
        number="percent",
        samples="documents",
    ),
    Question(
        name="influence.tail_head",
        statement="{change:capital}, one {noun} at a time: [{group_of} ]the {top_head} is among the "
        "{fraction:percent} of {nouns} with the largest influence ({top:,} of {units:,})",
        sentence=f"{_RANK_EVIDENCE}that of the {{noun}} at rank {{top:,}} among the others is {{value}}",
        number="+.2g",
        value_unit="nats/token",
        samples="documents",
    ),
    Question(
        name="answer_influence.largest_head",
        statement="{change:capital}, one {noun} at a time: [{group_of} ]the {top_head} has the largest influence on "
        "answers",
        sentence=f"{_RANK_EVIDENCE}the largest other influence is {{value}}",
        number="+.2g",
        value_unit="nats/token",
        samples="trials",
    ),
    Question(
        name="influence.small_parts",
        statement="{change:capital}, one {noun} at a time: the largest effect of one {noun} is small compared with "
        "changing all of them",
        sentence="{model}, {context_length:,} tokens: {largest:+.2g} nats/token for one {noun}, {all_units:+.2g} for "
        "all {units:,}; a quarter of the effect of all minus the largest is {value}",
        criterion="less than a quarter",
        number="+.2g",
        value_unit="nats/token",
        samples="documents",
    ),
)

EFFECTS = {
    objective: next(question for question in QUESTIONS if question.name == f"{area}.head")
    for objective, area in AREAS.items()
}
"""The question about the effect of one unit, by objective."""
