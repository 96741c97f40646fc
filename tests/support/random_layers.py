"""Random attention layers for hypothesis: every shape and rule of attention."""

import torch
from hypothesis import strategies as st

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from support.measure_laws import geometry_of, random_record


@st.composite
def layers(draw: st.DrawFn, max_length: int = 40) -> tuple[Geometry, AttentionRecord]:
    """One random layer: MHA, GQA or MQA, both layouts, all or some dimensions rotary, any rule of attention."""
    length = draw(st.integers(1, max_length))
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rotary, rest = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    window = draw(st.none() | st.integers(1, max_length + 4))
    chunk = draw(st.none() | st.integers(1, max_length + 4)) if window is None else None
    sinks = st.lists(st.floats(-3, 6), min_size=groups * per_group, max_size=groups * per_group)
    rule = {
        "chunk_size": chunk,
        "softcap": draw(st.none() | st.floats(0.5, 5)),
        "sink": draw(st.none() | sinks.map(torch.tensor)),
    }
    geometry = geometry_of(
        groups * per_group,
        groups,
        2 * (rotary + rest),
        rotary,
        draw(st.sampled_from(["half", "interleaved"])),
        [window],
        2 * draw(st.integers(0, rest)),
    )
    return geometry, random_record(geometry, length, draw(st.integers(0, 2**32)), size=draw(st.floats(0.1, 3)), **rule)
