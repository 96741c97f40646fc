"""The pages of the app as sheets of a bundle: what it shows at an address, its links made into those between files.

There is a file for every page, statistic and head, and it holds all models. Filters, picked heads and pinned baselines
are the app's alone, and a link that needs them becomes text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from flask import Flask

from dashboards import layout
from dashboards.pages import Page, checkpoints, head, overview, runs
from dashboards.pages.probe import ProbePage, has_tables
from dashboards.run_store import RunStore
from dashboards.view_state import describe_statistic, parse_head
from headscope.errors import BadRun
from headscope.plots.highlight import HeadIndex
from headscope.report import assembly
from headscope.report.blocks import Block, HeadTable, Link, Links, PageContent, RecordTable, TextBlock, TextTable
from headscope.report.static_site import SitePage, SortableTable
from headscope.report.text import statistics_table
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from headscope.runs.summary import longest_ess_column

FOLLOWED = {"run", "models", "sets", "model", "stat"}
"""What a link may ask for to be followed; runs and models are all there, and sets are nowhere."""


class Given(RunStore):
    """A library of one run, already open."""

    def __init__(self, run: Run) -> None:
        super().__init__(Path())
        self.run = run

    def list_runs(self) -> dict[str, Run | BadRun]:
        return {}

    def unfinished_cells(self) -> dict[str, int]:
        return {}

    def open_combined(self, names: Sequence[str]) -> Run:
        return self.run


@dataclass(frozen=True)
class Address:
    """Where in the app a sheet is from: a path, perhaps of one statistic, and whether it has a view of every model."""

    path: str
    statistic: str = ""
    of_a_model: bool = False

    @property
    def file(self) -> str:
        """Where in the bundle it lies."""
        name = "/".join(filter(None, (self.path.strip("/"), re.sub(r"[^\w.-]", "-", self.statistic))))
        return f"{name or 'index'}.html"


class Sheets:
    """Every sheet of a run's bundle, made when it is asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.heads: list[HeadIndex] = sorted(set(run.heads[["layer", "head"]].itertuples(index=False, name=None)))
        self._pages = [page for page in layout.all_pages() if _shows(page, run)]
        self._addresses = {page.PATH: [*self._of(page)] for page in self._pages}
        self._files = {address.file for address in self.addresses()}
        self._app = Flask(__name__)
        self._app.config["RUN_STORE"] = Given(run)

    def addresses(self) -> list[Address]:
        """Of every sheet, in the order of the navigation."""
        return [address for of_a_page in self._addresses.values() for address in of_a_page]

    @cached_property
    def pages(self) -> list[Link]:
        """The main pages, the heads' being that of the first notable one."""
        first = next(iter(assembly.notable_heads(self.run.heads)), None)
        files = {page.PATH: self._addresses[page.PATH][0].file for page in self._pages}
        if first is not None:
            files[head.PATH] = Address(f"{head.PATH}/{first[0]}.{first[1]}").file
        return [Link(page.NAME, files[page.PATH]) for page in self._pages]

    def sheet(self, address: Address) -> SitePage:
        """What the app shows there."""
        same = self._addresses.get(address.path, ())
        statistics = [Link(statistic(each.statistic).label, each.file) for each in same if each.statistic]
        models = self.run.models if address.of_a_model else [""]
        with self._app.app_context():
            return SitePage(address.file, {model: self._content(address, model) for model in models}, statistics)

    def _content(self, address: Address, model: str) -> PageContent:
        query = {name: value for name, value in (("model", model), ("stat", address.statistic)) if value}
        page, _, view, content = layout.resolve_url(address.path, query)
        left_out = layout.omission_notes(page, self.run, view)
        first: list[Block] = [TextBlock(left_out)] if left_out else []
        if name := address.statistic:
            first.append(TextBlock([describe_statistic(name)], f"What {statistic(name).label} means", collapsed=True))
        every = {"": [*first, *content.sections.get("", ())], **{k: v for k, v in content.sections.items() if k}}
        if page is overview:
            terms = [f"{term.word}: {term.definition}" for term in assembly.collect_glossary(self.run)]
            every["How to read this"] = [TextBlock(terms, "Words that are used here", collapsed=True)]
        sections = {
            heading: [told for part in parts if (told := self._told(part, model)) is not None]
            for heading, parts in every.items()
        }
        return replace(content, sections={heading: parts for heading, parts in sections.items() if parts})

    def _of(self, page: Page) -> Iterator[Address]:
        controls = page.controls(self.run)
        if page is head:
            yield from (Address(f"{page.PATH}/{layer}.{number}", of_a_model=True) for layer, number in self.heads)
            return
        first = longest_ess_column(self.run.heads)
        known = sorted(assembly.run_statistics(self.run), key=lambda name: name != first)
        one_model = "model" in controls
        # A comparison is drawn of the first statistic: the rest of its page would be the same with any other.
        for name in known if one_model and "stat" in controls else [""]:
            yield Address(page.PATH, name, one_model)

    def _told(self, part: Block, model: str) -> Block | None:
        """The part with links between files; None where nothing of it is left."""
        match part:
            case Links():
                found = [link for each in part.links if (link := self._linked(each, model)).href]
                return Links(found) if found else None
            case TextBlock():
                ways = None if part.links is None else self._told(part.links, model)
                return replace(part, links=ways if isinstance(ways, Links) else None)
            case HeadTable() | RecordTable():
                return self._told(_grid(part) if isinstance(part, HeadTable) else _records(part), model)
            case TextTable():
                kind = SortableTable if isinstance(part, SortableTable) else TextTable
                return kind(
                    part.caption, part.column_names, [[self._cell(each, model) for each in row] for row in part.rows]
                )
            case _:
                return part

    def _cell(self, cell: str | Link | Links, model: str) -> str | Link | Links:
        if isinstance(cell, Links):
            return Links([self._linked(each, model) for each in cell.links])
        return self._linked(cell, model) if isinstance(cell, Link) else cell

    def _linked(self, link: Link, model: str) -> Link:
        """The link between files, from a view of `model`; without a target where the bundle has none."""
        asked = {name: values[-1] for name, values in parse_qs(urlsplit(link.href).query).items()}
        path = urlsplit(link.href).path
        if not path.startswith("/") or asked.keys() - FOLLOWED:
            return Link(link.text, "")
        if path.startswith(f"{head.PATH}/"):
            layer, number = parse_head(path.removeprefix(f"{head.PATH}/"), self.run)
            path = f"{head.PATH}/{layer}.{number}"
        known = [Address(path, asked.get("stat", "")), Address(path), *self._addresses.get(path, [])]
        file = next((address.file for address in known if address.file in self._files), "")
        other = asked.get("model", model)
        return Link(link.text, f"{file}#model={quote(other)}" if file and other != model else file)


def _shows(page: Page, run: Run) -> bool:
    """Whether the page says more of the run than how to measure what it lacks."""
    if isinstance(page, ProbePage):
        return has_tables(page.probe, run)
    if page is head:
        return len(run.heads) > 0
    if page is checkpoints and any(assembly.charts_for_page(assembly.render_context(run), checkpoints.PATH).values()):
        return True
    return page is not runs and (page is overview or bool(page.controls(run)))


def _grid(part: HeadTable) -> TextTable:
    """The heads with the statistic that the page is about; every other has a page of its own."""
    name = part.highlighted_column
    wanted = ("kv_group", name, f"{name}_low", f"{name}_high", "baseline", "change")
    kept = part.heads[[each for each in wanted if each in part.heads]]
    table = statistics_table(f"{part.caption}: {len(kept):,} heads", kept)
    places = part.heads[["layer", "head"]].itertuples(index=False, name=None)
    rows = [
        [Link(f"L{layer}H{number}", f"{head.PATH}/{layer}.{number}"), *row]
        for (layer, number), row in zip(places, table.rows, strict=True)
    ]
    return SortableTable(table.caption, ["head", *table.column_names], rows)


def _records(part: RecordTable) -> TextTable:
    first, *names = part.column_names or [""]
    rows: list[list[str | Link | Links]]
    rows = [[Link(str(row[first]), row.get("href") or ""), *(str(row[name]) for name in names)] for row in part.rows]
    return TextTable(part.caption, [first, *names], rows)
