"""The commands `compare` and `check`: what changed between two runs, and whether a run is within bounds."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headscope.cli.flags import Json
from headscope.errors import BadInput

FAILED, UNDECIDED = 5, 6
"""Exit codes of `check`: a check failed; none failed, but at least one is undecided."""


def compare(
    before: Annotated[Path, typer.Argument(metavar="RUN", help="The earlier run.")],
    after: Annotated[Path, typer.Argument(metavar="RUN", help="The later run.")],
    show_all: Annotated[bool, typer.Option("--all", help="Also list what did not clearly change.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two runs: every result that both have, the clearest changes first, and heads that gained or lost a role.

    A difference has a 95 % confidence interval, paired by document, pair or trial where both runs have the same ones.
    Models are matched by label; two runs of one model each are compared whatever their labels are.

    headscope compare runs/MONDAY runs/TUESDAY
    """
    from headscope.rendering.comparison import comparison_to_dict, print_comparison
    from headscope.results.comparison import compare as compare_runs
    from headscope.runs.run import Run

    first, second = Run.open(before), Run.open(after)
    comparison = compare_runs(first, second)
    if as_json:
        print(json.dumps(comparison_to_dict(comparison)))
    else:
        print_comparison(first.name, second.name, comparison, show_all)


def check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run to check.")],
    checks: Annotated[Path, typer.Argument(metavar="CHECKS.yaml", help="The file of checks.")],
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RUN", help="The earlier run for relative bounds, e.g. last night's."),
    ] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Write a file of checks that the run passes, to edit, and check nothing.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write the outcomes as JUnit XML.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether results and statistics of heads are within bounds. Exit code 5: failed, 6: undecided.

    A check passes only if the whole 95 % confidence interval is on the allowed side, and fails only if it is on the
    other side.
    CHECKS.yaml is a list:

    - {result: loss.difference, model: yarn, at_most: 0.02}

    - {statistic: induction_token, count_above: 0.5, at_least: 3}

    - {result: retrieval.success, at_least: 90 %}      (of the run of --against)

    - {statistic: retrieval, head: L17H4, falls_at_most: 0.1}

    headscope check runs/RUN checks.yaml --init
    """
    from headscope.results.check_file import read_checks, write_checks
    from headscope.results.checks import run_checks
    from headscope.runs.run import Run

    checked = Run.open(run)
    if init:
        if against or junit or as_json:
            raise BadInput("--init writes a file of checks and checks nothing. Remove the other flags")
        print(f"Checks: {write_checks(checked, checks)} in {checks}")
        return
    if junit is not None:
        from headscope.rendering.junit import remove_earlier_outcomes, write_junit

        remove_earlier_outcomes(junit)
    outcomes = run_checks(checked, read_checks(checks), Run.open(against) if against else None)
    if junit is not None:
        write_junit(outcomes, checked.name, junit)
    from headscope.rendering.comparison import print_outcomes, without_nan

    if as_json:
        print(json.dumps([without_nan(asdict(outcome)) for outcome in outcomes]))
    else:
        print_outcomes(outcomes)
    kinds = {outcome.outcome for outcome in outcomes}
    if code := FAILED if "fails" in kinds else UNDECIDED if "undecided" in kinds else 0:
        raise typer.Exit(code)
