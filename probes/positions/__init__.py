"""Position parameters of every model: rotary frequencies per KV group, temperatures per head."""

from headscope.plugins import Probe

PROBE = Probe(
    name="positions",
    title="Position parameters",
    summary="Rotary frequencies and logit temperatures of every model, read without a forward pass.",
    tab=None,
    order=0,
    takes=("models",),
    runs_always=True,
    options="",
    runner="probes.positions.run:PositionsRunner",
    tables="probes.positions.schema:TABLES",
)
