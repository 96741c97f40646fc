"""Questions that the results of the probe `patterns` answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="patterns.example",
        sentence="In {doc}, {unit} in {model} attends from “{query}” to “{key}”, {distance:,} tokens back, with weight "
        "{value}",
    ),
    Question(
        name="patterns.maps",
        sentence="In {model}, {value} heads have an attention map",
        number=",.0f",
    ),
    Question(
        name="patterns.unlisted",
        sentence="In {model}, no head has the named key among the {keys} stored keys of a row. Use a larger --keys, or "
        "other tokens",
        level="warning",
    ),
    Question(
        name="patterns.prompt",
        sentence="In {model}, {unit} attends from “{query}” to “{key}” with weight {value}: {weights}",
        headline="{unit} attends from “{query}” to “{key}” with weight {value}: {weights}",
        number=".2f",
        level="headline",
    ),
)
