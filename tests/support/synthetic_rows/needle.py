"""Synthetic needle trials for tests and benchmarks: heads of low growth copy; deep and long trials fail more often."""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows

SUCCESS_DROP = 0.15
"""Drop of the success rate from each model to the next."""


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell with trials of one model at 4 depths of 2 needles in 2 haystacks."""
    rng = np.random.default_rng([sizes.seed, model_index])
    trials = pd.DataFrame(
        list(product(("strict", "absent"), ("bell", "ledger"), sizes.lengths, (0.0, 0.33, 0.67, 1.0), (0, 1))),
        columns=["mode", "needle", "context_length", "depth", "seed"],
    ).assign(model=model)
    trials["doc"] = "synthetic/" + trials["seed"].astype(str)
    trials["prompt_tokens"] = trials["context_length"]
    trials["achieved_depth"] = trials["depth"]
    trials["span_start"] = (trials["depth"] * (trials["context_length"] - 60)).astype(int) + 9
    trials["span_end"] = trials["span_start"] + 8
    hidden = trials["mode"] == "strict"
    longest = trials["context_length"] == max(sizes.lengths)
    chance = np.where(hidden, 0.95 - SUCCESS_DROP * model_index - 0.2 * trials["depth"] * longest, 0.0)
    trials["success"] = rng.random(len(trials)) < chance
    trials["recall"] = np.where(trials["success"], 1.0, 0.1)
    trials["answer"] = np.where(trials["success"], "1847 by Odette Marchbanks.", "the king.")
    trials["steps"] = 10
    keys = ["model", "mode", "needle", "context_length", "depth", "doc", "seed"]
    heads = sizes.units.merge(trials[[*keys, "success"]], how="cross")
    may_copy = np.where(heads["mode"] == "strict", 0.3 + 0.7 * heads["success"], 0)
    skill = np.clip(1 - 4 * heads["growth"], 0, 1) * may_copy
    heads["copies"] = rng.binomial(8, 0.95 * skill)
    heads["score"] = heads["copies"] / 8
    heads["mass"] = np.clip(0.7 * skill + 0.01 * rng.random(len(heads)), 0, 1)
    stored = {"needles": trials, "retrieval": heads.drop(columns=["growth", "success"])}
    answers, ablations = (
        _synthetic_answers(trials, heads, keys),
        _synthetic_ablation(sizes, trials[hidden], model, model_index),
    )
    yield "trials", {**stored, **answers, **ablations, "needle_attribution": _synthetic_attribution(heads, rng)}


def _synthetic_answers(trials: pd.DataFrame, heads: pd.DataFrame, keys: list[str]) -> dict[str, pd.DataFrame]:
    """Prompts, answer steps and copies: every copying head copies once, at the step that equals its number modulo 3."""
    hidden = trials[trials["mode"] == "strict"]
    texts = {
        "before": "The king sleeps. ",
        "cue": "The harbour bell of Port Selwyn was cast in the year",
        "scored": " 1847 by Odette Marchbanks.",
        "after": " Enter <b>a messenger</b> \u05e9\u05dc\u05d5\u05dd.",
        "question": "\n\nQuestion: When was the bell cast?\nAnswer: The harbour bell was cast in the year",
    }
    steps = hidden[[*keys, "answer"]].assign(text=hidden["answer"].str.findall(r"\s*\S+")).explode("text")
    steps["step"] = steps.groupby(keys).cumcount()
    copies = heads[(heads["mode"] == "strict") & (heads["copies"] > 0)].merge(hidden[[*keys, "span_start"]], on=keys)
    copies["step"] = copies["head"] % 3
    copies["key"] = copies["span_start"] + copies["step"]
    columns = [*keys, "step", "layer", "head", "kv_group", "key"]
    prompts = hidden[keys].assign(tokens=[_synthetic_tokens(trial) for trial in hidden.itertuples()])
    return {
        "needle_keys": copies[columns].assign(weight=0.75),
        "needle_prompts": prompts,
        "needle_tokens": hidden[keys].assign(**texts),
        "needle_steps": steps[[*keys, "step", "text"]],
        "needle_copies": copies[columns],
    }


def _synthetic_tokens(trial: Any) -> str:
    """The tokens of a prompt: numbered words, with the scored tokens in their place."""
    tokens = [f" w{position}" for position in range(trial.context_length)]
    tokens[trial.span_start : trial.span_end] = [" 18", "47", " by", " Odette", " March", "bank", "s", "."]
    return json.dumps(tokens)


def _synthetic_attribution(heads: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    through = 0.5 * heads["score"] + 0.02 * rng.standard_normal(len(heads))
    rest = 0.1 * rng.standard_normal(len(heads))
    return heads.drop(columns=["growth", "success", "copies", "score", "mass"]).assign(through=through, rest=rest)


def _synthetic_ablation(sizes: Sizes, trials: pd.DataFrame, model: str, model_index: int) -> dict[str, pd.DataFrame]:
    """Ablation of the top heads, which lowers success, and of three random sets, which hardly does."""
    ranked = sizes.units.sort_values("growth", ignore_index=True)
    questions = trials.drop(columns=["prompt_tokens", "achieved_depth", "span_start", "span_end", "steps"])
    trial_blocks, head_blocks = [], []
    for size, draw, half in product((1, 4), range(4), range(2)):
        rng = np.random.default_rng([sizes.seed, model_index, size, draw, half])
        set_keys: dict[str, Any] = {"ablation": "zero", "size": size, "draw": draw}
        answers = questions[questions["needle"] == ("bell", "ledger")[half]].assign(**set_keys)
        answers["success"] &= rng.random(len(answers)) < (0.95 if draw else 0.3 if size > 1 else 0.8)
        answers["recall"] = np.where(answers["success"], 1.0, 0.1)
        heads = ranked.head(size) if draw == 0 else ranked.iloc[rng.permutation(len(ranked))[:size]]
        head_blocks.append(heads.assign(**set_keys, half=half, score=1 - heads["growth"]))
        trial_blocks.append(answers)
    heads = pd.concat(head_blocks).drop(columns="growth").assign(model=model)
    return {"needle_ablation": pd.concat(trial_blocks), "needle_ablated_heads": heads}
