"""Options of the probe `measure`."""

from typing import Literal

from pydantic import Field, field_validator

from headscope.study.config import Lengths, Options

TableName = Literal["attention", "pairs", "distance", "nll"]


class MeasureOptions(Options):
    """What to measure over texts."""

    lengths: Lengths = Field(default=[512, 2048], description="context lengths in tokens")
    tables: list[TableName] = Field(
        default=["attention", "pairs", "distance", "nll"],
        min_length=1,
        description="tables to store",
        json_schema_extra={"flags": ["--measure"]},
    )
    rows: int | Literal["exact"] = Field(
        default=64, description="query rows sampled per head and document, or exact for all"
    )

    @field_validator("rows")
    @classmethod
    def _check_row_count(cls, rows: int | str) -> int | str:
        if isinstance(rows, int) and rows < 2:
            raise ValueError(f"{rows} rows are too few. Give at least 2, or exact")
        return rows
