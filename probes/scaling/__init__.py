"""Probe `scaling`: numerical check of the scaling theorems."""

from headscope.plugins import Probe

PROBE = Probe(
    name="scaling",
    title="Scaling theorems",
    tab="Scaling",
    summary="Check Theorems 4 and 5 of the AdaRoPE paper numerically: effective length under a logit scale.",
    group="Training",
    order=60,
    takes=(),
    example="headscope scaling",
    options="probes.scaling.schema:ScalingOptions",
    runner="probes.scaling.run:ScalingRunner",
    tables="probes.scaling.schema:TABLES",
    charts="probes.scaling.report:charts",
    questions="probes.scaling.results:QUESTIONS",
    results="probes.scaling.results:results",
    glossary="probes.scaling.report:GLOSSARY",
)
