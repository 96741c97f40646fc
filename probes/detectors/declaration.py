"""Options, stored table and scores of the detectors probe, and a user's own pattern of attention."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from headscope.base import user_input
from headscope.errors import BadInput, OptionError, ResourceMissing
from headscope.results.questions import Question
from headscope.results.scores import Score, ScoreRole, TableRows, top_of_role
from headscope.runs.column_metadata import Statistic
from headscope.runs.columns import GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.study.config import MAX_PROMPT_TOKENS, MultilineOptions, check_prompt, sorted_lengths
from headscope.study.option_rules import Excludes, Needs

Matrix = npt.NDArray[np.float64]


def describe_pattern(pattern: Any) -> str | None:
    """The pattern as a run stores it: the path, the name of the function, or shape and digest of the matrix."""
    if pattern is None or isinstance(pattern, str):
        return pattern
    if callable(pattern):
        return f"function {getattr(pattern, '__name__', type(pattern).__name__)}"
    matrix = np.asarray(pattern, np.float64)
    return f"matrix {' x '.join(map(str, matrix.shape))}, sha256 {hashlib.sha256(matrix.tobytes()).hexdigest()[:12]}"


def pattern_source(pattern: Any) -> Callable[[Sequence[int]], Any]:
    """A function from the token ids of a prompt to its matrix. Raises ResourceMissing or BadInput for a file."""
    if callable(pattern):
        return pattern  # type: ignore[no-any-return]
    matrix = _read_matrix(pattern) if isinstance(pattern, str) else pattern
    return lambda ids: matrix


def _read_matrix(name: str) -> Any:
    file = user_input.expand_path(name, "pattern file")
    if not file.is_file():
        raise ResourceMissing(f"no pattern file {user_input.quote(name)}. Check the path")
    try:
        return (
            np.load(file)
            if file.suffix == ".npy"
            else np.loadtxt(file, delimiter="," if "," in file.read_text() else None)
        )
    except (ValueError, OSError) as error:
        raise BadInput(
            f"pattern file {user_input.quote(name)} holds no matrix of numbers. Write one row per query, or save it "
            "with numpy.save"
        ) from error


def pattern_matrix(source: Callable[[Sequence[int]], Any], ids: Sequence[int]) -> Matrix:
    """The pattern [L, L] for a prompt, by query and key, without the keys after each query.

    Raises BadInput unless it is L x L with values from 0 to 1 and at least one of them above 0 where a query sees the
    key.
    """
    value = source(list(ids))
    try:
        matrix = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, np.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the pattern is a {type(value).__name__}. Give a matrix of numbers") from error
    if matrix.shape != (len(ids), len(ids)):
        shape = " x ".join(map(str, matrix.shape)) or "a single number"
        raise BadInput(
            f"the pattern is {shape}, but a prompt has {len(ids)} tokens. Give {len(ids)} x {len(ids)} values"
        )
    if not ((matrix >= 0) & (matrix <= 1)).all():
        wrong = matrix[~((matrix >= 0) & (matrix <= 1))][0]
        raise BadInput(f"the pattern has the value {wrong:g}. Use weights from 0 to 1")
    visible = np.tril(matrix)
    if not visible.any():
        raise BadInput(
            "the pattern has no weight on a key that a query sees. Use entries [query, key] with key <= query"
        )
    return visible


MIN_PERIOD = 8
"""For shorter periods the chance level is high and the kinds of key overlap."""

MAX_PERIOD = 2**20
"""A forward pass over two periods must fit into memory."""


def _as_prompts(value: Any) -> Any:
    """A single prompt as a tuple, all on one line each."""
    prompts = (value,) if isinstance(value, str) else value
    if not isinstance(prompts, list | tuple):
        return value
    return tuple(check_prompt(text) if isinstance(text, str) else text for text in prompts)


def _as_token_lists(value: Any) -> Any:
    """Token ids of one prompt or of several, also as text "1, 2, 3", as a tuple of prompts."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    elif hasattr(value, "tolist"):
        value = value.tolist()
    is_one_prompt = isinstance(value, list | tuple) and not (value and isinstance(value[0], list | tuple))
    return (value,) if is_one_prompt else value


Prompts = Annotated[str | tuple[str, ...], BeforeValidator(_as_prompts)]
TokenLists = Annotated[
    str | tuple[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], ...],
    BeforeValidator(_as_token_lists),
]


class DetectorsOptions(MultilineOptions):
    """Heads that attend to the previous token, a duplicate or the token after it, on a repeated random token
    sequence, or on your own prompts."""

    option_rules = (
        Excludes("prompt", "tokens"),
        Excludes("periods sequences", "prompt tokens", "{periods} and {sequences} are of random tokens"),
        Needs("pattern exclude_first", "prompt tokens"),
    )

    periods: Annotated[list[Annotated[int, Field(le=MAX_PERIOD)]], sorted_lengths(MIN_PERIOD, "period")] = Field(
        default=[128, 512], description="length of the repeated random token sequence; a context is twice as long"
    )
    sequences: int = Field(8, ge=1, le=10_000, description="random sequences per period")
    prompt: Prompts | None = Field(
        None, description="your own text in place of random tokens; in Python and study files also a list of texts"
    )
    tokens: TokenLists | None = Field(
        None, description="your own token ids, e.g. 504,1297,504; in Python and study files also a list of such lists"
    )
    pattern: Annotated[Any, PlainSerializer(describe_pattern, return_type=str)] = Field(
        None,
        description="detection pattern of the prompts: a file (.npy, or text) with a matrix [L, L] of weights 0 to 1 "
        "by query and key; in Python also the matrix, or a function from token ids to it",
    )
    exclude_first: bool = Field(False, description="leave the first token of a prompt out of the keys")

    @model_validator(mode="after")
    def _check_prompts(self) -> "DetectorsOptions":
        sizes = [len(ids) for ids in self.tokens or ()]
        if sizes and not 2 <= min(sizes) <= max(sizes) <= MAX_PROMPT_TOKENS:
            wrong = next(size for size in sizes if not 2 <= size <= MAX_PROMPT_TOKENS)
            raise OptionError(
                "{tokens} has a prompt of {count} tokens. Use 2 to {limit:,}", count=wrong, limit=MAX_PROMPT_TOKENS
            )
        if self.prompt is not None and (not self.prompt or not all(text.strip() for text in self.prompt)):
            raise ValueError("a prompt is blank. Give some text")
        return self

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts take the place of random token sequences."""
        return self.prompt is not None or self.tokens is not None


DETECTORS = Table(
    "detectors",
    "mean weight of each head on each kind of key, on a repeated random token sequence",
    (
        MODEL,
        LENGTH,
        key("sequence", "index32", "", "number of the random sequence; the same for all models with one tokenizer"),
        LAYER,
        HEAD,
        GROUP,
        key(
            "kind",
            "label",
            "",
            "key of query row i, in a random sequence of m tokens that is repeated once: previous i - 1, current i, "
            "first 0; in the second half also duplicate i - m and induction i - m + 1. Omitted if no row of the layer "
            "sees such a key, e.g. if the layer's window is shorter than m",
            None,
        ),
        Column("score", "value", "", "mean weight on that key over the rows that see it", 0, 1),
        Column("chance", "value", "", "the score of uniform weights: mean of 1 / visible keys", 0, 1),
        Column("rows", "count", "rows", "query rows in the mean", 1),
    ),
)

PROMPT_DETECTORS = Table(
    "prompt_detectors",
    "mean weight of each head on each kind of key, in your own prompts",
    (
        MODEL,
        key("prompt", "index32", "", "number of the prompt, from 0"),
        LAYER,
        HEAD,
        GROUP,
        key(
            "kind",
            "label",
            "",
            "keys of query row i: previous i - 1, current i, first 0, duplicate: all earlier copies of its token, "
            "induction: the tokens after all these copies, own: those of your pattern. Omitted if no row of the layer "
            "sees such a key",
            None,
        ),
        Column(
            "score",
            "value",
            "",
            "weight on these keys, summed over the keys of a row and averaged over the rows that see one; for your own "
            "pattern each weight is multiplied by the pattern. With exclude_first, weight on all keys but the first: "
            "sum over rows of the weight on these keys / sum over rows of the weight on all keys",
            0,
            1,
        ),
        Column("chance", "value", "", "the score of uniform weights", 0, 1),
        Column("rows", "count", "rows", "query rows in the mean: those that see such a key", 1),
        Column("tokens", "count", "tokens", "tokens of the prompt", 2),
    ),
)

TABLES = (DETECTORS, PROMPT_DETECTORS)


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
