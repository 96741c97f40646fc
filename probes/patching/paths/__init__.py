"""Probe `paths`: effects of paths between heads on the answer, by path patching between two prompts."""

from headscope.plugins import Probe

PROBE = Probe(
    name="paths",
    title="Path patching",
    tab="Paths",
    summary="Measure the effect of single paths on the answer by path patching: from a head to a later head or to the "
    "logits.",
    group="Causes",
    order=45,
    example="headscope paths --model base=smollm2-135m --pairs ioi --count 8",
    options="probes.patching.paths.schema:PathsOptions",
    runner="probes.patching.paths.run:PathsRunner",
    tables="probes.patching.paths.schema:TABLES",
    charts="probes.patching.paths.report:charts",
    questions="probes.patching.paths.questions:QUESTIONS",
    results="probes.patching.paths.results:results",
    head_results="probes.patching.paths.results:head_results",
    glossary="probes.patching.paths.report:GLOSSARY",
    overview="probes.patching.paths.results:overview",
    synthetic_rows="probes.patching.paths.schema:synthetic_cells",
)
