"""Simulated runs in which the truth of every claim is known.

A world is "true" or "false" for every claim of a run, or "undecidable": no effect at all, or a quantity that is exactly
on its threshold. `n` is the number of documents, trials or seeds, or of heads in each of three layers for the claims
about the parameters of one adapter.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.results.result import Result
from probes.adapt.results import MIN_CHANGE
from probes.adapt.results import results as adapt_results
from probes.influence.results import claims as influence_claims
from probes.needle.results import ablation_results
from probes.pretrain.results import results as pretrain_results

World = Literal["true", "false", "undecidable"]
WORLDS: tuple[World, ...] = ("true", "false", "undecidable")
Rng = np.random.Generator
FloatArray = npt.NDArray[np.float64]


class SimulatedRun:
    """The part of a run that claims read."""

    def __init__(self, models: list[dict[str, Any]], heads: pd.DataFrame, **tables: pd.DataFrame):
        self.manifest = {"models": models}
        self.models = [model["label"] for model in models]
        self.heads = heads
        self._frames = tables
        self.tables = [*tables]

    def table(self, name: str) -> pd.DataFrame:
        return self._frames[name]

    def derived(self, derive: Callable[..., Any], *arguments: Any) -> Any:
        return derive(self, *arguments)

    def __getattr__(self, name: str) -> pd.DataFrame:
        return self._frames[name]


def model_entry(label: str, scheme: str, **fields: Any) -> dict[str, Any]:
    """An entry of run.json."""
    name = scheme.partition(":")[0]
    geometry = {"native_context": 8192}
    return {"label": label, "scheme": scheme, "scheme_name": name, "checkpoint": "c", "geometry": geometry, **fields}


def noise(rng: Rng, *shape: int) -> FloatArray:
    """Noise with heavier tails than normal: Student's t with 5 degrees of freedom, standard deviation 1."""
    return np.asarray(rng.standard_t(5, shape) / np.sqrt(5 / 3))


# Head influence: 90 KV groups, of which the top five per cent are five ---------------------------------------------

UNITS, UNIT_NOISE = 90, 4.0
"""Number of KV groups, and the standard deviation of their effects over documents."""
SHIPPED = np.linspace(-0.3, 0.9, UNITS - 5)
UNIT_EFFECTS: Mapping[World, FloatArray] = {
    "true": np.concatenate([[30, 15, 12, 10, 8], SHIPPED]),  # the top five contribute 74 % of the rise
    "false": np.concatenate([[20, -1], np.ones(UNITS - 2)]),
    "undecidable": np.zeros(UNITS),
}
TOTAL_EFFECTS: Mapping[World, float] = {"true": 200, "false": 40, "undecidable": 0}
"""Effect of a change of all units."""
TOP_HEADS: Mapping[World, tuple[int, int]] = {"true": (2, 0), "false": (1, 1), "undecidable": (1, 1)}
"""The top retrieval head in the sweep of texts, where five heads are a tail, and in that of answers."""


def simulate_influence(world: World, rng: Rng, n: int) -> Iterator[Result]:
    for objective, top_head in zip(("text", "answer"), TOP_HEADS[world], strict=True):
        keys = {"model": "adarope", "context_length": 1024, "component": "joint", "target": "init"}
        keys |= {"objective": objective}
        effects = UNIT_EFFECTS[world][:, None] + UNIT_NOISE * noise(rng, UNITS, n)
        unit, doc = np.indices(effects.shape).reshape(2, -1)
        names = np.array([f"d{number:02d}" for number in range(n)])
        rows = pd.DataFrame({"layer": unit, "kv_group": 0, "head": -1, "doc": names[doc], "delta_nll": effects.ravel()})
        together = TOTAL_EFFECTS[world] + 2 * UNIT_NOISE * noise(rng, n)
        sets = pd.DataFrame({"unit": "group", "choice": "top", "size": UNITS, "doc": names, "delta_nll": together})
        heads = pd.DataFrame({"model": "adarope", "layer": range(UNITS), "head": 0, "kv_group": 0})
        yield from influence_claims(
            SimulatedRun(  # type: ignore[arg-type]
                [model_entry("adarope", "adarope:adapter=x")],
                heads.assign(retrieval=0.9 * (heads["layer"] == top_head)),
                influence=rows.assign(method="exact", **keys),
                influence_sets=sets.assign(**keys),
            )
        )


# Ablation of retrieval heads: success depends on the random heads that are drawn -----------------------------------

DRAWS, SET_DEVIATION = 5, 0.2
"""Draws of random heads, and the standard deviation of the success over them."""
SUCCESSES: Mapping[World, tuple[float, float]] = {"true": (0.8, 0.1), "false": (0.3, 0.9), "undecidable": (0.5, 0.5)}
"""Share of trials that succeed with random and with top heads ablated."""


def simulate_needle(world: World, rng: Rng, n: int) -> Iterator[Result]:
    random, top = SUCCESSES[world]
    concentration = random * (1 - random) / SET_DEVIATION**2 - 1
    blocks = []
    for draw in range(DRAWS + 1):
        shares = np.full(2, top) if draw == 0 else rng.beta(random * concentration, (1 - random) * concentration, 2)
        needle = np.arange(n)
        outcomes = {"needle": needle.astype(str), "success": rng.random(n) < shares[needle % 2]}
        blocks.append(pd.DataFrame(outcomes).assign(draw=draw))
    keys = {"model": "base", "mode": "strict", "context_length": 512, "depth": 0.5, "doc": "d"}
    ablated = pd.concat(blocks).assign(ablation="zero", size=4, **keys)
    unchanged = blocks[0].drop(columns="draw").assign(success=True, **keys)
    run = SimulatedRun([model_entry("base", "base")], pd.DataFrame(), needles=unchanged, needle_ablation=ablated)
    yield from (result for result in ablation_results(run) if result.verdict)  # type: ignore[arg-type]


# Adapters ---------------------------------------------------------------------------------------------------------

BINS, LAYERS, PAIRS = 40, 3, 8
BASE, YARN, BARE, ADAROPE = "base", "yarn", "yarn without factor", "adarope"
ADAPTER_MODELS = [
    model_entry(BASE, "base"),
    model_entry(YARN, "yarn:factor=8"),
    model_entry(BARE, "yarn:factor=8,attention_factor=1"),
    model_entry(ADAROPE, "adarope:adapter=x"),
]
LAST_LOSSES: Mapping[World, float] = {"true": -0.3, "false": 0.3, "undecidable": 0.0}
"""Difference of the loss from YaRN's in the last bin."""
OTHER_LOSSES: Mapping[World, float] = {"true": -0.3, "false": -0.3, "undecidable": 0.0}
LAYER_SHIFTS: Mapping[World, FloatArray] = {
    "true": np.array([-0.3, 0, 0.3]),
    "false": np.array([0.3, 0, -0.3]),
    "undecidable": np.zeros(LAYERS),
}
SLOW_AND_FAST: Mapping[World, tuple[float, float]] = {"true": (20, 0), "false": (0, 1), "undecidable": (1, 0)}
"""Squared change of the slow and the fast pairs beyond that of all pairs, as a multiple of the latter: the slow half
has 95 %, 33 % and exactly two thirds of the whole."""
TAUS: Mapping[World, float] = {"true": 1.0, "false": 1.3, "undecidable": 1.1}
POSITIVE_GAMMAS: Mapping[World, float] = {"true": 0.9, "false": 0.3, "undecidable": 0.6}
COV_RATIOS: Mapping[World, float] = {"true": 0.8, "false": 1.2, "undecidable": 0.98}
BASE_SLOPES: Mapping[World, float] = {"true": 3.0, "false": 0.0, "undecidable": 0.6949}
"""Growth of ln(effective base) per layer, in its standard deviations; the last gives a rank correlation of 0.5."""
LOG_RATIOS: Mapping[World, Mapping[str, tuple[float, float]]] = {
    "true": {BARE: (0.7, 1.1), YARN: (0.0, 0.0), ADAROPE: (0.0, 1.1)},
    "false": {BARE: (0.0, 0.0), YARN: (0.7, 0.7), ADAROPE: (0.7, 0.0)},
    "undecidable": {BARE: (MIN_CHANGE,) * 2, YARN: (MIN_CHANGE,) * 2, ADAROPE: (MIN_CHANGE,) * 2},
}
"""Change of ln ESS of the small-ESS and the large-ESS heads."""


def simulate_losses(world: World, rng: Rng, n: int) -> Iterator[Result]:
    effects = np.full(BINS, OTHER_LOSSES[world])
    effects[-1] = LAST_LOSSES[world]
    difference = effects[:, None] + 0.3 * noise(rng, BINS, n) + 0.05 * noise(rng, n)
    place, doc = np.indices(difference.shape).reshape(2, -1)
    keys = pd.DataFrame({"position": place, "doc": [f"d{number}" for number in doc], "context_length": 12288})
    nll = pd.concat([keys.assign(model=YARN, nll=0.0), keys.assign(model=ADAROPE, nll=difference.ravel())])
    positions, heads = _parameters(world, rng, 2)
    run = SimulatedRun(ADAPTER_MODELS, heads[["model", "layer", "head", "kv_group"]], nll=nll, positions=positions)
    yield from (claim for claim in adapt_results(run) if claim.question == "adapt.claim.loss")  # type: ignore[arg-type]


def simulate_adapter(world: World, rng: Rng, n: int) -> Iterator[Result]:
    positions, heads = _parameters(world, rng, n)
    yield from adapt_results(SimulatedRun(ADAPTER_MODELS, heads, positions=positions))  # type: ignore[arg-type]


def _parameters(world: World, rng: Rng, n: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables of the learned frequencies and of the heads, with n heads (each a KV group) in each layer."""
    count = LAYERS * n
    layer, head = np.divmod(np.arange(count), n)
    deviation = 0.3
    shift = LAYER_SHIFTS[world][layer] + deviation * noise(rng, count)
    common = deviation**2 + np.mean(LAYER_SHIFTS[world] ** 2)
    amplitudes = np.sqrt(common * np.repeat(SLOW_AND_FAST[world][::-1], PAIRS // 2))
    change = shift[:, None] + amplitudes * np.tile([1, -1], PAIRS // 2)
    change *= rng.lognormal(0, 0.3, count)[:, None]
    unit, pair = np.indices(change.shape).reshape(2, -1)
    places = pd.DataFrame({"layer": layer[unit], "kv_group": head[unit], "pair": pair, "log_theta_init": 0.0})
    adarope = places.assign(model=ADAROPE, log_theta=change.ravel())
    positions = pd.concat([adarope, *(places.assign(model=label, log_theta=0.0) for label in (YARN, BARE))])
    log_ess = rng.normal(3, 1.2, count)
    is_small, is_large = log_ess <= np.quantile(log_ess, 1 / 3), log_ess >= np.quantile(log_ess, 2 / 3)
    blocks = []
    for label in (BASE, YARN, BARE, ADAROPE):
        small, large = LOG_RATIOS[world].get(label, (0.0, 0.0))
        ratio = small * is_small + large * is_large + 0.2 * noise(rng, count) * (label != BASE)
        ess = np.exp(log_ess + ratio)
        blocks.append(pd.DataFrame({"model": label, "layer": layer, "head": head, "kv_group": head, "ess2_12288": ess}))
    heads = pd.concat(blocks, ignore_index=True)
    is_adarope, is_yarn = heads["model"] == ADAROPE, heads["model"] == YARN
    cov = rng.lognormal(0, 0.2, count)
    both = {YARN: cov, ADAROPE: COV_RATIOS[world] * cov * np.exp(0.1 * noise(rng, count))}
    for name in ("tau", "gamma", "effective_base", "cov"):
        heads[name] = 1.0
    heads.loc[is_adarope, "tau"] = TAUS[world] * np.exp(0.1 * noise(rng, count))
    heads.loc[is_adarope, "gamma"] = np.where(rng.random(count) < POSITIVE_GAMMAS[world], 0.1, -0.1)
    heads.loc[is_adarope, "effective_base"] = np.exp(BASE_SLOPES[world] * layer + rng.normal(size=count))
    for mask, label in ((is_yarn, YARN), (is_adarope, ADAROPE)):
        heads.loc[mask, "cov"] = both[label]
    return positions, heads


# Pretraining: seeds differ ------------------------------------------------------------------------------------------

SEED_DEVIATION = 0.05
PRETRAINED = ("adarope", "rope", "prope", "shared-freq", "alibi")
COVS: Mapping[World, float] = {"true": 0.75, "false": 1.1, "undecidable": 0.95}
GAMMAS: Mapping[World, FloatArray] = {
    "true": np.array([0.4, 0.14, 0.12, 0.1]),
    "false": np.array([-0.2, 0.5, 0.4, 0.3]),
    "undecidable": np.array([0.25, 0.2, 0.1, 0.0]),
}
LOG_SPREADS: Mapping[World, float] = {"true": 1.0, "false": -0.5, "undecidable": float(np.log(1.2))}
"""ln of the ratio of the spreads under AdaRoPE to those under RoPE."""
DEPTH_SLOPES: Mapping[World, float] = {"true": 2.0, "false": -0.5, "undecidable": 0.2835}
"""Growth of ln(effective base) per layer; the last gives a mean rank correlation of 0.3 over 16 KV groups."""
GAPS: Mapping[World, float] = {"true": 0.6, "false": -0.3, "undecidable": 0.0}
"""Loss of the others minus that of AdaRoPE. Without a difference the claim of a difference beyond a margin is false."""


def simulate_pretraining(world: World, rng: Rng, n: int) -> Iterator[Result]:
    labels = {variant: [f"{variant}-s{seed}" for seed in range(n)] for variant in PRETRAINED}
    models = [
        model_entry(label, variant, step=1, pretraining={"variant": variant, "seed": seed})
        for variant, of_variant in labels.items()
        for seed, label in enumerate(of_variant)
    ]
    columns = [_pretrained_heads(world, rng, n, variant) for variant in PRETRAINED[:3]]
    heads = pd.DataFrame({name: np.concatenate([one[name] for one in columns]) for name in columns[0]})
    heads["model"] = np.repeat([label for variant in PRETRAINED[:3] for label in labels[variant]], 32)
    gaps = np.repeat([0.0, *[GAPS[world]] * (len(PRETRAINED) - 1)], n)
    losses = pd.DataFrame(
        {"model": [entry["label"] for entry in models], "nll": 4 + gaps + 0.02 * noise(rng, len(gaps))}
    )
    nll = pd.concat([losses.assign(doc=doc) for doc in "abc"])
    nll = nll.assign(context_length=8192, position=8192, tokens=1)
    yield from pretrain_results(SimulatedRun(models, heads, nll=nll))  # type: ignore[arg-type]


def _pretrained_heads(world: World, rng: Rng, seeds: int, variant: str) -> dict[str, FloatArray]:
    """Columns of the heads of all seeds of a variant: four layers of eight heads."""
    layer, head = np.divmod(np.arange(32), 8)
    ramp = np.linspace(0, 1, 32)
    is_adarope = variant == "adarope"
    first, later, cov, log_spread = SEED_DEVIATION * noise(rng, 4, seeds, 1) * is_adarope
    by_group = DEPTH_SLOPES[world] * np.repeat(np.arange(4), 4) + rng.normal(size=(seeds, 16))
    log_spread = log_spread + LOG_SPREADS[world] * is_adarope
    # ramps, so that the 90th percentile divided by the 10th and the standard deviation have these ratios
    columns = {
        "layer": layer,
        "head": head,
        "kv_group": head // 2,
        "effective_base": np.exp(by_group[:, layer * 4 + head // 2]),
        "gamma": GAMMAS[world][layer] + np.where(layer == 0, first + later, later),
        "cov": (COVS[world] if is_adarope else 1.0) + cov,
        "ess2_8192": np.exp(3 + (3 + log_spread / np.diff(np.quantile(ramp, [0.1, 0.9]))) * ramp),
        "weighted_log_theta": np.exp(log_spread) * ramp,
        "mean_log_theta": ramp,
    }
    return {name: np.broadcast_to(values, (seeds, 32)).ravel() for name, values in columns.items()}


SIMULATIONS: Mapping[str, Callable[[World, Rng, int], Iterator[Result]]] = {
    "influence": simulate_influence,
    "needle": simulate_needle,
    "losses": simulate_losses,
    "adapter": simulate_adapter,
    "pretraining": simulate_pretraining,
}


def truth(claim: Result, world: World) -> World:
    """Whether a claim is true in a world; no difference beyond a margin is false."""
    is_loss = claim.question in ("pretrain.claim.schemes", "pretrain.claim.ablations")
    return "false" if is_loss and world == "undecidable" else world


def is_false_verdict(claim: Result, world: World) -> bool:
    """Whether a verdict contradicts the truth; every verdict does if nothing can be decided."""
    wrong = {"true": {"not supported"}, "false": {"supported"}, "undecidable": {"supported", "not supported"}}
    return claim.verdict in wrong[truth(claim, world)]
