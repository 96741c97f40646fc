"""The file of checks: a YAML list, each a result or a statistic of heads with a bound; and how a check is named."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from headscope.base.heads import format_head, parse_head
from headscope.base.input_files import read_yaml
from headscope.base.output_files import Output
from headscope.base.user_input import check_text, expand_path, quote
from headscope.errors import BadInput, did_you_mean
from headscope.results.collection import results_of_all_models
from headscope.results.questions import questions
from headscope.results.result import Scalar
from headscope.results.words import headline
from headscope.runs.column_metadata import exceeds, is_role_measured, roles
from headscope.runs.run import Run

CHECKS = Output(option="CHECKS.yaml")
BOUNDS = ("at_least", "at_most", "rises_at_most", "falls_at_most")
HEAD_KEYS = ("head", "count_above", "count_below", "median")


def _share(value: Any) -> Any:
    """A number, or the share in a text such as "90 %"."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*%\s*", value) if isinstance(value, str) else None
    return Share(float(match[1]) / 100) if match else value


@dataclass(frozen=True)
class Share:
    """A bound relative to the value in the run to compare with: 0.9 is written "90 %"."""

    value: float


Number = Annotated[float, Field(allow_inf_nan=False)]
BoundValue = Annotated[Number | Share | None, BeforeValidator(_share)]


class Check(BaseModel):
    """One check: a result or a statistic of heads, and a bound."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    name: Annotated[str, AfterValidator(check_text)] = ""
    """What the check is for; by default what it compares."""
    result: str | None = None
    """A question of `run.findings()`, such as "loss.difference"."""
    statistic: str | None = None
    """A column of `run.heads`, such as "ess2_2048", with one of head, count_above, count_below, median."""
    model: str | None = None
    """Label of the model; by default every model that has the value."""
    where: dict[str, Scalar] = Field(default_factory=dict)
    """Conditions of the result, such as context_length; by default every result of the question."""
    head: str | None = None
    """The value of one head, such as L5H2."""
    count_above: Number | None = None
    """The number of heads above this value."""
    count_below: Number | None = None
    median: Literal[True] | None = None
    """The median over heads."""
    at_least: BoundValue = None
    """A number, or a share of the value in the run of --against, such as "90 %"."""
    at_most: BoundValue = None
    rises_at_most: Number | None = None
    """How much higher the value may be than in the run of --against."""
    falls_at_most: Number | None = None

    @field_validator("head", mode="before")
    @classmethod
    def _is_head(cls, value: Any) -> str | None:
        return None if value is None else format_head(*parse_head(value))

    @model_validator(mode="after")
    def _is_complete(self) -> "Check":
        if (self.result is None) == (self.statistic is None):
            raise ValueError("needs either 'result' or 'statistic'")
        if sum(getattr(self, name) is not None for name in BOUNDS) != 1:
            raise ValueError(f"needs exactly one of {', '.join(BOUNDS)}")
        head_keys = [name for name in HEAD_KEYS if getattr(self, name) is not None]
        if self.statistic is not None and len(head_keys) != 1:
            raise ValueError(f"a check of a statistic needs exactly one of {', '.join(HEAD_KEYS)}")
        if self.result is not None and head_keys:
            raise ValueError(f"'{head_keys[0]}' is for checks of a 'statistic'")
        if self.statistic is not None and self.where:
            raise ValueError("'where' is for checks of a 'result'")
        return self

    @property
    def title(self) -> str:
        """The name, or else what is compared and the bound."""
        return self.name or f"{self.measure} {self.bound_text}"

    @property
    def measure(self) -> str:
        """What the check compares: "number of heads with retrieval above 0.1"."""
        if self.result is not None:
            return self.result
        if self.head is not None:
            return f"{self.statistic} of {self.head}"
        if self.count_above is not None:
            return f"number of heads with {self.statistic} above {self.count_above:g}"
        if self.count_below is not None:
            return f"number of heads with {self.statistic} below {self.count_below:g}"
        return f"median {self.statistic}"

    @property
    def bound_text(self) -> str:
        """The bound: "at least 3", "at least 90 % of the earlier value"."""
        bound = getattr(self, self.bound_name)
        amount = f"{100 * bound.value:g} % of the earlier value" if isinstance(bound, Share) else f"{bound:g}"
        return f"{self.bound_name.replace('_', ' ')} {amount}"

    @property
    def bound_name(self) -> str:
        """The bound that the check has."""
        return next(name for name in BOUNDS if getattr(self, name) is not None)

    @property
    def needs_earlier_run(self) -> bool:
        """Whether the bound is relative to another run."""
        return self.bound_name in ("rises_at_most", "falls_at_most") or isinstance(
            getattr(self, self.bound_name), Share
        )


def read_checks(path: Path) -> list[Check]:
    """The checks of a YAML file: a list. Raises BadInput naming the check and the mistake."""
    try:
        content = read_yaml(expand_path(path, "file of checks"), str(path))
    except FileNotFoundError as error:
        raise BadInput(f"no file '{path}'. Create one with: headscope check RUN --init {path}") from error
    return parse_checks(content, str(path))


def parse_checks(content: Any, source: str) -> list[Check]:
    """The checks of a list of mappings. Raises BadInput naming source, check and mistake."""
    if not isinstance(content, list) or not content:
        raise BadInput(f"{source} is not a list of checks. Write one check per '- ', see headscope check --help")
    checks = []
    for number, entry in enumerate(content, 1):
        try:
            checks.append(Check.model_validate(entry))
        except ValidationError as error:
            raise BadInput(f"{source}, check {number}: {_describe_mistake(error, entry)}") from error
    return checks


def _describe_mistake(error: ValidationError, entry: Any) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown key '{key}'{did_you_mean(key, Check.model_fields)}. Use: {', '.join(Check.model_fields)}"
    if first["type"] in ("model_type", "dict_type") and not key:
        return f"{quote(entry)} is not a check. Write keys such as result, model and at_least"
    if not key:
        return first["msg"].removeprefix("Value error, ")
    return f"'{key}' is {quote(first['input'])}. {_remedy(key, first)}"


def _remedy(key: str, mistake: Mapping[str, Any]) -> str:
    """What to write instead of the value of a key."""
    if key == "where":
        return "Write conditions such as {context_length: 512}"
    if key == "median":
        return "Write true, or remove 'median'"
    if key in ("rises_at_most", "falls_at_most") and isinstance(_share(mistake["input"]), Share):
        return f"Write a number, or use {'at_most: 105 %' if key == 'rises_at_most' else 'at_least: 95 %'} for a share"
    if key in ("at_least", "at_most"):
        return "Write a number, or a share of the earlier value such as 90 %"
    if mistake["type"].startswith(("float", "finite")):
        return "Write a number"
    if mistake["type"] == "value_error":
        return str(mistake["ctx"]["error"])
    return "Write a head such as L5H2" if key == "head" else "Write a text"


def write_checks(run: Run, path: Path) -> int:
    """Write a file of checks that the run passes, to edit: of its results, and of the number of heads with each role.

    Return their number. Raises CannotWrite if the file exists, BadInput if nothing of the run can be checked.
    """
    CHECKS.check(path)
    entries = [*_checks_of_results(run), *_checks_of_roles(run)]
    if len(run.models) == 1:  # so that the file also checks runs in which the model has another label
        entries = [(comment, {key: entry[key] for key in entry if key != "model"}) for comment, entry in entries]
    if not entries:
        raise BadInput(
            f"nothing to check in {run.name}: no result with a better direction and no role has an interval. Measure "
            "at least three documents or trials, or write the file by hand"
        )
    text = "".join(f"# {comment}\n{yaml.safe_dump([entry], sort_keys=False)}" for comment, entry in entries)
    CHECKS.write(path, f"# Checks of {run.name}. Run them with: headscope check RUN {path.name}\n{text}".encode())
    return len(entries)


def _checks_of_results(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """A bound at the worse end of the interval of every result that has a better direction."""
    for result in results_of_all_models(run):
        question = questions()[result.question]
        if not question.better or not (result.has_interval and result.is_exact):
            continue
        where = dict(result.where) | ({"baseline": result.baseline} if result.baseline else {})
        bound = {"at_least": _round_down(result.low)} if question.better == "higher" else {}
        bound = bound or {"at_most": -_round_down(-result.high)}
        entry = {"result": result.question, "model": result.model, "where": where, **bound}
        yield headline(result), {name: value for name, value in entry.items() if value not in ("", {})}


def _checks_of_roles(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """The number of heads surely above the threshold of each role, for every model."""
    for name, role in roles().items():
        if role.threshold is None or f"{role.order_by}_low" not in run.heads:
            continue
        for model in run.models:
            heads = run.heads[run.heads["model"] == model]
            count = int(exceeds(heads[f"{role.order_by}_low"], role.threshold).sum())
            if is_role_measured(heads, name) and count:
                entry = {"statistic": role.order_by, "count_above": role.threshold, "model": model}
                yield f"{name} heads of {model}", {**entry, "at_least": count}


def _round_down(value: float) -> float:
    """The value with three significant digits, rounded towards minus infinity."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return float(f"{math.floor(value / unit) * unit:.12g}")
