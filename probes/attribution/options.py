"""Options of the probe: context lengths."""

from pydantic import Field

from headscope.study.config import Lengths, Options


class AttributionOptions(Options):
    """What each head adds directly to the logit of the next token."""

    lengths: Lengths = Field(default=[2048], description="context lengths in tokens")
