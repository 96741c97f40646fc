"""Probe `imported`: scores of heads from a file of another tool, stored beside headscope's own measures."""

from headscope.probe import Probe


class Imported(Probe):
    """The declaration of the probe `imported`."""

    name = "imported"
    title = "Imported scores"
    tab = "Imported"
    summary = (
        "Store the head scores of another tool's file with a model, to compare them with headscope's own measures."
    )
    group = "Heads"
    order = 48
    command = "import"
    function = "import_scores"
    takes = ("models",)
    example = "headscope import --model base=smollm2-135m --file scores.json"
    parts = "options runner tables scores questions=results.QUESTIONS results charts"


PROBE = Imported()
