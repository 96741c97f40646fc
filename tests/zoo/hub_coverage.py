"""How many checkpoints on the hub are of a type that is measured right, by the registry of transformer-lens."""

import json
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .checks import Verdict


def checkpoints() -> Counter[str]:
    """Checkpoints by causal-LM type: all that the registry lists of an architecture that transformers knows as one."""
    registry = files("transformer_lens") / "tools/model_registry/data/supported_models.json"
    listed = Counter(model["architecture_id"] for model in json.loads(registry.read_text(encoding="utf-8"))["models"])
    types: dict[str, list[str]] = {}
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        types.setdefault(architecture, []).append(model_type)
    counts: Counter[str] = Counter()
    for architecture, count in listed.items():
        if architecture in types:
            counts[_named_after(architecture, types[architecture])] += count
    return counts


def _named_after(architecture: str, types: list[str]) -> str:
    """Of several types that share an architecture, the one that it is named after, or else the first."""
    name = architecture.lower()
    return next(
        (model_type for model_type in types if name.startswith(model_type.replace("_", "").replace("-", ""))), types[0]
    )


def correct_types(verdicts: Mapping[str, Verdict]) -> set[str]:
    """The types that are measured right."""
    return {name for name, verdict in verdicts.items() if verdict.kind.startswith("right")}


def checkpoint_share(types: set[str]) -> float:
    """The share of those checkpoints whose type is one of these."""
    counted = checkpoints()
    return sum(count for name, count in counted.items() if name in types) / counted.total()
