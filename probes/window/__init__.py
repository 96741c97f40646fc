"""Probe `window`: which rotary frequencies one head needs to retrieve a needle from a window of distances."""

from headscope.plugins import Probe

PROBE = Probe(
    name="window",
    title="Needle retrieval from a window",
    tab="Window",
    summary="Train one-head toy models to retrieve a needle from a window, with fixed, learned, partial or no RoPE.",
    group="Training",
    order=50,
    takes=(),
    example="headscope window",
    options="probes.window.schema:WindowOptions",
    runner="probes.window.run:WindowRunner",
    tables="probes.window.schema:TABLES",
    charts="probes.window.report:charts",
    questions="probes.window.results:QUESTIONS",
    results="probes.window.results:results",
    glossary="probes.window.report:GLOSSARY",
)
