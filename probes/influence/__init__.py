"""Head influence: how the loss changes when one head or KV group is reset or ablated."""

from typing import Any

from headscope.probe import Probe


class Influence(Probe):
    """The declaration of the probe `influence`."""

    name = "influence"
    title = "Head influence"
    tab = "Influence"
    summary = "Measure how the loss changes when one head or KV group is reset or ablated."
    group = "Causes"
    order = 40
    example = "headscope influence --model learned=smollm2-135m@adarope:adapter=PATH --length 2048"
    parts = (
        "options runner tables statistics head_columns questions results head_results glossary charts "
        "overview_cards page"
    )


__all__ = ["PROBE", "head_influence"]
PROBE = Influence()


def __getattr__(name: str) -> Any:
    if name == "head_influence":  # imports torch
        from probes.influence.run import head_influence

        return head_influence
    raise AttributeError(f"module 'probes.influence' has no attribute '{name}'")
