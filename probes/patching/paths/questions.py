"""Questions that results of path patching answer."""

from typing import Any

from headscope.effects.results import sweep_questions
from headscope.results.answers import answer_questions
from headscope.results.questions import Question

_SWEEP = "path patching, {direction}[, norms {other_norms}][, MLPs {other_mlps}], {prompts}"
_SUBJECT = f"{_SWEEP}, in {{model}}"
_EFFECT: dict[str, Any] = {"number": "+.2f", "samples": "pairs"}

EFFECT = Question(
    name="paths.between_heads",
    sentence=f"{_SUBJECT}: the strongest path between heads is {{path}}, {{value}}",
    **_EFFECT,
)
"""The effect of one path."""

QUESTIONS = (
    *answer_questions("paths", "pairs", has_corrupted=True),
    Question(
        name="paths.pair",
        sentence=f"{_SWEEP}, pair {{pair}}, in {{model}}: the strongest of the patched paths is {{path}}, {{value}}",
        headline=f"{_SWEEP}, pair {{pair}}: {{path}} {{value}}",
        level="row",
        **_EFFECT,
    ),
    *sweep_questions("paths", _SUBJECT, _SWEEP, unit="{path}", **_EFFECT),
    EFFECT,
    Question(
        name="paths.head",
        sentence=f"{_SUBJECT}: the strongest path {{end}} this head is {{path}}, {{value}}",
        **_EFFECT,
    ),
)
