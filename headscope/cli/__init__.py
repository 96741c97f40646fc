"""The command line: how a command runs a study and prints its result. Modules: the commands and their flags."""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headscope.runs.run import Run
    from headscope.study.config import Study


def execute(study: "Study", out: Path, resume: bool, quiet: bool) -> "Run":
    """Run the study into `out`, showing progress unless `quiet`, and return the finished run."""
    quiet_libraries(quiet)
    from headscope.study.progress import console_progress
    from headscope.study.runner import run_study

    return run_study(study, out, resume=resume, progress=console_progress(quiet))


def print_result(run: "Run", as_json: bool, show_all: bool) -> None:
    """Print the summary of a finished run, or with `show_all` all results, and what to do next; or the run as JSON."""
    from headscope.rendering.terminal import print_next_steps, print_summary, print_warnings, run_to_dict

    print_warnings(run)
    if as_json:
        print(json.dumps(run_to_dict(run)))
    else:
        print_summary(run, show_all)
        print_next_steps(run)


def quiet_libraries(warnings_only: bool = False) -> None:
    """Hide progress bars and notices of other libraries.

    headscope's own notices go to standard error; with `warnings_only`, only its warnings do.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("headscope").setLevel(logging.WARNING if warnings_only else logging.INFO)
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # logs a line for every matrix product
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
