"""The scores of the detectors probe: one for each kind of key, on random token sequences and in the user's prompts."""

from collections.abc import Mapping
from types import MappingProxyType

from headscope.results.questions import Question
from headscope.results.scores import Score, ScoreRole, TableRows, top_of_role
from headscope.runs.column_metadata import Statistic
from probes.detectors.schema import DETECTORS, PROMPT_DETECTORS

THRESHOLD = 0.5
"""Weight on one kind of key above which a head has that role: more than on all other keys together [ours]."""
TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "previous": "the previous token",
        "current": "the token itself",
        "first": "the first token",
        "duplicate": "an earlier copy of the token",
        "induction": "the token after an earlier copy",
    }
)
"""Kind of key -> what such a head attends to."""
PROMPT_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        **TARGETS,
        "duplicate": "all earlier copies of the token",
        "induction": "the tokens after all earlier copies",
        "own": "the keys of your own pattern",
    }
)
"""The same in a prompt, in which a token may have several copies."""
ROLES: Mapping[str, str] = MappingProxyType({kind: f"{kind}-token" for kind in TARGETS} | {"induction": "induction"})
"""Kind of key -> role of the heads that attend to it."""

_FROM_SECOND_HALF = "mean weight of query rows in the second half on the"
_MEANINGS = {
    "first": "mean weight on the first token of the context",
    "duplicate": f"{_FROM_SECOND_HALF} same token in the first half",
    "induction": f"{_FROM_SECOND_HALF} token after the same token in the first half",
}
_FORMULAS = {
    "previous": "mean αᵢ,ᵢ₋₁",
    "duplicate": "mean αᵢ,ᵢ₋ₘ over the second m tokens",
    "induction": "mean αᵢ,ᵢ₋ₘ₊₁ over the second m tokens",
}
_MISSING = "; missing if no row sees that far back"
_TOP_IN_PROMPTS = Question(
    name="prompt_detectors.top_head",
    sentence="In the prompts, {unit} of {model} puts the most weight on {target}: {value}[; chance is {chance:.3g}]",
    headline="{unit} has the largest weight on {target}: {value}",
    samples="prompts",
    level="headline",
)


def _random_token_score(kind: str) -> Score:
    meaning = _MEANINGS.get(kind, f"mean weight on {TARGETS[kind]}")
    missing = _MISSING if meaning.startswith(_FROM_SECOND_HALF) else ""
    role, where = ROLES[kind], "on a repeated random token sequence"
    return Score(
        column=f"{kind}_token",
        statistic=Statistic(
            f"{role} score", "", f"{meaning}, {where}, at the longest length{missing}", formula=_FORMULAS.get(kind, "")
        ),
        rows=TableRows(DETECTORS.name, "score", sample="sequence", kind=kind),
        limits=(0, 1),
        role=ScoreRole(
            name=role,
            meaning=f"more than half of the weight on {TARGETS[kind]}, {where}",
            threshold=THRESHOLD,
            level="headline" if kind == "induction" else "detail",
            has_card=kind == "induction",
        ),
        top=top_of_role(role, "sequences"),
        heading="Scores of each head on a repeated random token sequence",
    )


def _prompt_score(kind: str) -> Score:
    return Score(
        column="prompt_own_pattern" if kind == "own" else f"prompt_{kind}_token",
        statistic=Statistic(
            f"{ROLES.get(kind, 'own-pattern')} score, prompts",
            "",
            f"mean weight on {PROMPT_TARGETS[kind]}, in your own prompts, over the query rows that see such a key; "
            "with exclude_first the weight on these keys over all weight outside the first token, both summed over "
            "these rows",
        ),
        rows=TableRows(PROMPT_DETECTORS.name, "score", sample="prompt", kind=kind),
        limits=(0, 1),
        top=_TOP_IN_PROMPTS,
        where={"kind": kind},
        details={"target": PROMPT_TARGETS[kind]},
        heading="Scores of each head in your prompts",
    )


SCORES = (*map(_random_token_score, TARGETS), *map(_prompt_score, PROMPT_TARGETS))
