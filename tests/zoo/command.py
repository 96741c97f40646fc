"""The command: judge types, variants and ways of use in forked children, print each verdict, write the table."""

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
from transformers import modeling_layers, modeling_rope_utils, modeling_utils  # noqa: F401  # what every child needs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import build, checks, decoding_and_bf16, hub_coverage, table, variants
from .checks import Verdict
from .worker_processes import in_children

VISION = (
    *("aya_vision", "cohere2_vision", "glm4v", "idefics2", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "ovis2", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    *("video_llava",),
)
"""Vision-language models that are no causal-LM type by themselves; their text part is judged."""
TYPES = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION)

Work = Callable[[], Verdict]


def of_types(names: tuple[str, ...]) -> dict[str, Work]:
    """A model of each type with its family's defaults."""
    return {name: partial(checks.judged, partial(build.tiny, name)) for name in names}


def of_variants() -> dict[str, Work]:
    """What families may have beside their defaults, as "TYPE, WHAT"."""
    return {
        f"{name}, {what}": partial(checks.judged, partial(build.tiny, name, changes))
        for name, what, changes in variants.variants()
    }


def of_use() -> dict[str, Work]:
    """Cached decoding and bfloat16, for one family of each kind."""
    return {
        f"{name}, {what}": partial(judging, partial(build.tiny, name))
        for name in decoding_and_bf16.KINDS
        for what, judging in (
            ("decoded with a cache", decoding_and_bf16.decoding),
            ("in bfloat16", decoding_and_bf16.halving),
        )
    }


def verdicts(work: Mapping[str, Work], at_once: int) -> dict[str, Verdict]:
    """The verdict of each piece of work, in order, printed as it comes."""
    names = list(work)
    by_name: dict[str, Verdict] = {}
    for index, result, seconds in in_children(list(work.values()), at_once):
        verdict = result if isinstance(result, Verdict) else Verdict("TRACEBACK", str(result))
        by_name[names[index]] = verdict
        print(line(names[index], verdict, seconds), flush=True)
    return {name: by_name[name] for name in names}


def line(name: str, verdict: Verdict, seconds: float) -> str:
    """One row for the terminal."""
    text = f": {verdict.what}" if verdict.what else ""
    worst = max(verdict.errors.values(), default=0.0)
    figure = f" (largest error {worst:.0e})" if verdict.kind.startswith("right") else ""
    return f"{name:26} {verdict.kind}{text}{figure} [{seconds:.1f} s]"


def main(arguments: list[str]) -> None:
    """Judge the model types named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=main.__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--variants", action="store_true", help="their variants as well")
    parser.add_argument("--use", action="store_true", help="cached decoding and bfloat16 as well")
    parser.add_argument("--json", type=Path, help="store the verdicts in this file")
    parser.add_argument("--write", type=Path, help="write the table of families into this file")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="how many at once")
    chosen = parser.parse_args(arguments)
    if chosen.types and chosen.write:
        parser.error("the table is of all types: name none with --write")
    transformers.logging.set_verbosity_error()
    start = time.monotonic()
    names = tuple(chosen.types) or TYPES
    work = of_types(names)
    beside = (of_variants() if chosen.variants else {}) | (of_use() if chosen.use else {})
    work |= {name: job for name, job in beside.items() if name.partition(", ")[0] in names}
    judged = verdicts(work, chosen.children)
    of_causal = {name: verdict for name, verdict in judged.items() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    counts = Counter(verdict.kind for verdict in of_causal.values())
    processor_seconds = sum(
        resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    print(f"{time.monotonic() - start:.0f} s, {processor_seconds:.0f} s of processor time")
    if not chosen.types:
        covered = hub_coverage.share(hub_coverage.right(judged))
        print(f"{covered:.1%} of the hub's checkpoints of these types are of a right one")
    if chosen.json:
        chosen.json.write_text(json.dumps({name: asdict(verdict) for name, verdict in judged.items()}, indent=1))
    if chosen.write:
        table.write(chosen.write, {name: judged[name] for name in names})
