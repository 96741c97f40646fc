"""Numerical check of the scaling theorems: the effective length under lambda(L) against its target."""

from headscope.door import Probe

PROBE = Probe(
    name="scaling",
    title="Scaling theorems",
    tab="Scaling",
    summary="Check in numbers: the effective length under lambda(L) against its target.",
    order=60,
    takes=(),
    example="headscope scaling",
    config="probes.scaling.config:Scaling",
    cells="probes.scaling.cells:ScalingSection",
    tables="probes.scaling.tables:TABLES",
    charts="probes.scaling.shown:charts",
    findings="probes.scaling.shown:findings",
    glossary="probes.scaling.shown:GLOSSARY",
)
