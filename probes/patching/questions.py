"""Questions that results of activation patching answer."""

from typing import Any

from headscope.effects.results import sweep_questions
from headscope.results.answers import answer_questions
from headscope.results.questions import Question

TOPIC = "Activation patching"
_SWEEP = "{direction:capital} of the {activation}, {prompts}"
_SUBJECT = f"{_SWEEP}, in {{model}}"
_EFFECT: dict[str, Any] = {"number": "+.2f", "samples": "pairs"}

EFFECT = Question(
    name="patching.head",
    sentence=f"{_SUBJECT}: the effect of {{unit}} is {{value}}[, rank {{rank:,}} of {{units:,}} {{nouns}} by size]",
    **_EFFECT,
)
"""The effect of one head or KV group."""

LAYER_EFFECT = Question(
    name="patching_layers.layer",
    sentence=f"{_SUBJECT}[, only at the positions of {{span}}]: the effect of layer {{patched_layer}} is {{value}}",
    **_EFFECT,
)
"""The effect of one layer."""

QUESTIONS = (
    *answer_questions("patching", "pairs", has_corrupted=True),
    *sweep_questions("patching", _SUBJECT, "{direction:capital} of {intervention}, {prompts}", **_EFFECT),
    Question(
        name="patching.pair",
        sentence=f"{_SWEEP}, [pair {{pair}}][group {{group}}], in {{model}}: {{unit}} has the largest effect, {{value}}"
        "[, followed by {next:+.2f}][; the most negative is that of {negative:+.2f}]; the {label} is {clean:.2f} for "
        "clean and {corrupted:.2f} for corrupted prompts",
        headline="{direction:capital} of {intervention}, {prompts}, [pair {pair}][group {group}]: {unit} {value}"
        "[, {next:+.2f}][; negative: {negative:+.2f}]",
        level="row",
        **_EFFECT,
    ),
    Question(
        name="patching.span",
        sentence=f"{_SUBJECT}, only at the positions of {{span}}: the effect of largest size is that of {{unit}}, "
        "{value}",
        **_EFFECT,
    ),
    EFFECT,
    Question(
        name="patching.set",
        sentence=f"{_SUBJECT}[, only at the positions of {{span}}]: with all {{size:,}} named {{nouns}} patched "
        "together, the effect is {value}",
        headline="{direction:capital} of {intervention}, {prompts}[, at {span}], {size:,} named {nouns} together: "
        "{value}",
        level="headline",
        **_EFFECT,
    ),
    LAYER_EFFECT,
    *sweep_questions(
        "patching_layers",
        f"{_SUBJECT}[, only at the positions of {{span}}]",
        "{direction:capital} of {intervention}, {prompts}[, at {span}]",
        unit="layer {patched_layer}",
        **_EFFECT,
    ),
    Question(
        name="patching.position",
        sentence="{direction:capital} of the {activation} at single positions, {prompts}, in {model}: {leads} is that "
        "of {place}, {value}[, followed by {next:+.2f}][; the most negative is that of {lowest:+.2f}]",
        headline="{direction:capital} of {intervention} by position, {prompts}: {place} {value}[, {next:+.2f}]"
        "[; negative: {lowest:+.2f}]",
        level="row",
        **_EFFECT,
    ),
    Question(
        name="patching.models",
        sentence=f"{_SWEEP}, {{model}} against {{baseline}}, over the same {{pairs:n pairs}}: the rank correlation of "
        "the effects of {compared:,} {nouns} is {value}[; {estimated:,} of them are estimated in at least one model]",
        number=".2f",
    ),
    Question(
        name="patching.largest_change",
        sentence=f"{_SWEEP}, {{model}} against {{baseline}}: the largest change is that of {{unit}}, from "
        "{before:+.2f} to {after:+.2f}, {value}",
        **_EFFECT,
    ),
    Question(
        name="patching.kept",
        topic=TOPIC,
        statement=f"{_SWEEP}: the {{top:,}} {{nouns}} of largest exact effect in {{baseline}} keep at least "
        "{share:percent} of their summed effect in {model}",
        sentence="{heads:words}[: the sum is {before:+.2f} in {baseline} and {after:+.2f} in {model}; {model} minus "
        "{share:percent} of {baseline} is {value}]",
        criterion="fixed before the shipped runs were measured",
        **_EFFECT,
    ),
    Question(
        name="patching.changed",
        topic=TOPIC,
        statement=f"{_SWEEP}: from {{baseline}} to {{model}}, the effect of at least one unit changes by more than "
        "{limit} in either direction",
        sentence="of {compared:,} {nouns} patched exactly in both models, the absolute change exceeds {limit} in "
        "{changed:,}, is below {limit} in {stable:,}, and is undecided in {undecided:,}[; about {needed:n pairs} would "
        "decide at the spread seen]. The largest is that of {unit}, from {before:+.2f} to {after:+.2f}, {value}",
        criterion="decided by intervals that hold for all these {nouns} at once",
        **_EFFECT,
    ),
)
