"""The command: judge types, variants and ways of use in worker processes, print each verdict, write the table."""

import argparse
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import transformers
from transformers import modeling_layers, modeling_rope_utils, modeling_utils  # noqa: F401  # what every worker needs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import (
    build,
    checkpoint_page,
    checks,
    decoding_and_bf16,
    hub_coverage,
    layout_checks,
    layouts,
    table,
    use_checks,
    variants,
)
from .checks import Verdict
from .worker_processes import run_in_processes

VISION = (
    *("aya_vision", "cohere2_vision", "glm4v", "idefics2", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "ovis2", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    *("video_llava",),
)
"""Vision-language models that are no causal-LM type by themselves; their text part is judged."""
TYPES = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION)

Check = Callable[[], Verdict]


def type_checks(names: tuple[str, ...]) -> dict[str, Check]:
    """A model of each type with its family's defaults, and passes of it that are resumed over a batch of copies."""
    resumption = {"resumed batches": use_checks.USES["resumed batches"]}
    return {name: partial(layout_checks.check_measures, partial(build.tiny, name), resumption) for name in names}


def variant_checks() -> dict[str, Check]:
    """What families may have beside their defaults, as "TYPE, WHAT"."""
    return {
        f"{name}, {description}": partial(checks.check_model, partial(build.tiny, name, changes))
        for name, description, changes in variants.variants()
    }


def usage_checks() -> dict[str, Check]:
    """Cached decoding and bfloat16, for one family of each kind."""
    return {
        f"{name}, {description}": partial(judging, partial(build.tiny, name))
        for name in decoding_and_bf16.KINDS
        for description, judging in (
            ("decoded with a cache", decoding_and_bf16.check_cached_decoding),
            ("in bfloat16", decoding_and_bf16.check_bfloat16),
        )
    }


def every_use_checks(names: tuple[str, ...]) -> dict[str, Check]:
    """Ablation, patching, influence and generation with a model of each type, after the checks of `type_checks`."""
    return {name: partial(use_checks.check_uses, partial(build.tiny, name)) for name in names}


def layout_checks_by_name() -> dict[str, Check]:
    """Every measure on each published layout."""
    return {
        name: partial(layout_checks.check_layout, partial(layouts.build_layout, name)) for name in layouts.layouts()
    }


def run_checks(checks_by_name: Mapping[str, Check], max_processes: int) -> dict[str, Verdict]:
    """The verdict of each check, in order, printed as it comes."""
    names = list(checks_by_name)
    by_name: dict[str, Verdict] = {}
    for index, result, seconds in run_in_processes(list(checks_by_name.values()), max_processes):
        verdict = result if isinstance(result, Verdict) else Verdict("TRACEBACK", str(result))
        by_name[names[index]] = verdict
        print(line(names[index], verdict, seconds), flush=True)
    return {name: by_name[name] for name in names}


def line(name: str, verdict: Verdict, seconds: float) -> str:
    """One row for the terminal."""
    text = f": {verdict.reason}" if verdict.reason else ""
    worst = max(verdict.errors.values(), default=0.0)
    figure = f" (largest error {worst:.0e})" if verdict.kind.startswith("right") else ""
    without = "".join(f"; no {measure}: {reason}" for measure, reason in verdict.refused.items())
    return f"{name:26} {verdict.kind}{text}{figure}{without} [{seconds:.1f} s]"


def main(arguments: list[str]) -> None:
    """Judge the model types named, or all; or the published layouts."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=main.__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--variants", action="store_true", help="their variants as well")
    parser.add_argument("--use", action="store_true", help="cached decoding and bfloat16 as well")
    parser.add_argument(
        "--every-use",
        action="store_true",
        help="ablation, patching in batches, influence and generation with and without padding as well",
    )
    parser.add_argument("--layouts", action="store_true", help="published layouts in place of the types")
    parser.add_argument("--json", type=Path, help="store the verdicts in this file")
    parser.add_argument("--write", type=Path, help="write the table of families, or of layouts, into this file")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="number of worker processes")
    options = parser.parse_args(arguments)
    if options.types and (options.write or options.layouts):
        parser.error("--write and --layouts take all types or layouts: name none")
    transformers.logging.set_verbosity_error()
    start = time.monotonic()
    names = tuple(options.types) or TYPES
    judge_types = every_use_checks if options.every_use else type_checks
    all_checks = layout_checks_by_name() if options.layouts else judge_types(names)
    extra_checks = (variant_checks() if options.variants else {}) | (usage_checks() if options.use else {})
    all_checks |= {name: job for name, job in extra_checks.items() if name.partition(", ")[0] in names}
    verdicts_by_name = run_checks(all_checks, options.children)
    counted = layouts.layouts() if options.layouts else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    counts = Counter(verdict.kind for name, verdict in verdicts_by_name.items() if name in counted)
    processor_seconds = sum(
        resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    refusals = Counter(
        measure for name, verdict in verdicts_by_name.items() if name in counted for measure in verdict.refused
    )
    for measure, count in refusals.items():
        print(f"{count} without {measure}")
    print(f"{time.monotonic() - start:.0f} s, {processor_seconds:.0f} s of processor time")
    if not options.types and not options.layouts:
        covered = hub_coverage.checkpoint_share(hub_coverage.correct_types(verdicts_by_name))
        print(f"{covered:.1%} of the hub's checkpoints of these types are of a right one")
    if options.json:
        options.json.write_text(
            json.dumps({name: asdict(verdict) for name, verdict in verdicts_by_name.items()}, indent=1)
        )
    if options.write and options.layouts:
        options.write.write_text(checkpoint_page.markdown(verdicts_by_name), encoding="utf-8")
    elif options.write:
        table.write(options.write, {name: verdicts_by_name[name] for name in names})
