"""Probe `circuit`: whether a set of heads answers prompts without all other heads."""

from headscope.probe import Probe


class Circuit(Probe):
    """The declaration of the probe `circuit`."""

    name = "circuit"
    title = "Circuit of heads"
    tab = "Circuit test"
    summary = "Test a set of heads on prompts, with all other heads ablated: faithfulness, minimality, completeness."
    group = "Causes"
    order = 47
    example = "headscope circuit --model base=smollm2-135m --pairs ioi --count 8 --by span --heads L20H0,L23H3,L29H1"
    parts = (
        "options runner tables statistics=results.STATISTICS head_columns=results.head_statistics questions "
        "results head_results glossary charts"
    )


PROBE = Circuit()
