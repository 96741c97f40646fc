"""Questions of the ablation probe: the answers of the unchanged model, single heads, and named heads together."""

from dataclasses import replace

from headscope.effects.results import sweep_questions
from headscope.results.answers import answer_questions
from headscope.results.questions import Question

_SWEEP = "{change:capital} in {model}, {prompts}"
_SUBJECT = f"{_SWEEP}, one head at a time, change of the {{label}} ({{label_unit}})"

EFFECT = Question(
    name="ablation.head",
    sentence=f"{_SWEEP}: the {{label}} changes by {{value}} ({{label_unit}})",
    number="+.3g",
    samples="prompts",
)
"""The effect of one head."""

QUESTIONS = (
    *answer_questions("ablation"),
    Question(
        name="ablation.prompt",
        sentence=f"{_SWEEP}, [prompt {{pair}}][group {{group}}], one head at a time: the effect of largest size is "
        "that of {unit}, {value}[, followed by {next:+.3g}]; the {label} is {clean:.2f} in the unchanged model",
        headline="{change:capital}, {prompts}, [prompt {pair}][group {group}] ({label} {clean:.2f}): {unit} {value}"
        "[, {next:+.3g}]",
        number="+.3g",
        samples="prompts",
        level="row",
    ),
    *(
        question if question.name != "ablation.top" else replace(question, level="detail", headline="")
        for question in sweep_questions(
            "ablation", _SUBJECT, "{change:capital}, {prompts}", number="+.3g", samples="prompts"
        )
    ),
    Question(
        name="ablation.largest",
        sentence=f"{_SUBJECT}: the effect of largest size is that of {{unit}}, {{value}}",
        headline="{change:capital}, {prompts}, {label}: {unit} {leads} {value}",
        number="+.3g",
        samples="prompts",
        level="headline",
    ),
    EFFECT,
    Question(
        name="ablation.control",
        topic="Ablation on prompts",
        statement=f"{_SWEEP}: the {{label}} is {{comparative}} with these {{size:n heads}} ablated than with random "
        "heads of the same layers ablated",
        sentence="these {size:n heads} change it by {named:+.3g}[ ({named_low:+.3g} to {named_high:+.3g})] "
        "{label_unit}, as many random heads of the same layers by {random:+.3g}"
        "[ ({random_low:+.3g} to {random_high:+.3g})], a difference of {value}",
        headline="{change:capital}, {prompts}, {label}: {size:n heads} {named:+.3g}[ ({named_low:+.3g} to "
        "{named_high:+.3g})], {size} random of the same layers {random:+.3g}[ ({random_low:+.3g} to "
        "{random_high:+.3g})]; more than random: {verdict}",
        number="+.3g",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="ablation.set",
        sentence=f"{_SWEEP}: with all {{size:n named heads}} ablated together, the {{label}} changes by {{value}} "
        "({label_unit}), from {before:.2f} to {after:.2f}[; {control}]",
        number="+.3g",
        samples="prompts",
    ),
)
