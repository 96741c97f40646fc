"""The app's pages as files of a static site, with links between the files.

Every page, statistic and head has one file with all models. The site has no filters, selected heads or pinned
baselines; a link that needs them becomes plain text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from flask import Flask

from dashboards import layout, navigation
from dashboards.pages import Page, checkpoints, head, overview, runs
from dashboards.pages.probe import ProbePage, has_tables
from dashboards.run_store import RunStore, Scan
from dashboards.view_state import describe_statistic, parse_head
from headscope.base.heads import Head
from headscope.rendering import assembly
from headscope.rendering.blocks import Block, HeadTable, Link, PageContent, TextBlock
from headscope.rendering.static_site import SitePage, SortableTable, static_block
from headscope.rendering.text import statistics_table
from headscope.results.words import count_nouns
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models, longest_ess_column

SUPPORTED_PARAMETERS = {"run", "models", "sets", "model", "stat"}
"""URL parameters of links that the site can follow: it has all runs and models; it ignores sets."""


class SingleRunStore(RunStore):
    """A store of one open run."""

    def __init__(self, run: Run) -> None:
        super().__init__(Path(), is_read_only=True)
        self.run = run

    def _current_scan(self) -> Scan:
        return Scan(Path(), {}, (), [], 0, 0.0)

    def open_combined(self, names: Sequence[str]) -> Run:
        return self.run


@dataclass(frozen=True)
class Address:
    """A page of the app: its path, its statistic if it has one, and whether it has a view for every model."""

    path: str
    statistic: str = ""
    is_per_model: bool = False

    @property
    def file(self) -> str:
        """Path of the file within the site."""
        name = "/".join(filter(None, (self.path.strip("/"), re.sub(r"[^\w.-]", "-", self.statistic))))
        return f"{name or 'index'}.html"


class SitePages:
    """The pages of a run's static site, rendered on request."""

    def __init__(self, run: Run) -> None:
        self.run = run
        run.is_drawn_for_all_models = True
        self.heads: list[Head] = sorted(set(run.heads[["layer", "head"]].itertuples(index=False, name=None)))
        self._pages = [page for page in navigation.all_pages() if _has_content(page, run)]
        self._addresses = {page.PATH: [*self._addresses_of(page)] for page in self._pages}
        self._files = {address.file for address in self.addresses()}
        self._find_target = cache(self._target)  # the same links stand on hundreds of pages
        self._app = Flask(__name__)
        self._app.config["RUN_STORE"] = SingleRunStore(run)

    def addresses(self) -> list[Address]:
        """The addresses of all pages, in the order of the navigation."""
        return [address for addresses in self._addresses.values() for address in addresses]

    @cached_property
    def pages(self) -> list[Link]:
        """Links to the main pages; the page of heads is that of the first notable head."""
        first = next(iter(assembly.notable_heads(self.run.heads)), None)
        files = {page.PATH: self._addresses[page.PATH][0].file for page in self._pages}
        if first is not None:
            files[head.PATH] = Address(f"{head.PATH}/{first[0]}.{first[1]}").file
        return [Link(page.NAME, files[page.PATH]) for page in self._pages]

    def page(self, address: Address) -> SitePage:
        """Render the page at an address."""
        siblings = self._addresses.get(address.path, ())
        statistics = [
            Link(statistic(sibling.statistic).label, sibling.file) for sibling in siblings if sibling.statistic
        ]
        models = self.run.models if address.is_per_model else [""]
        # The default models show the same charts, and memory holds only those drawn last: they come one after another.
        in_drawing_order = sorted(models, key=lambda model: model not in default_models(self.run))
        with self._app.app_context():
            contents = {model: self._content(address, model) for model in in_drawing_order}
        return SitePage(address.file, {model: contents[model] for model in models}, statistics)

    def _content(self, address: Address, model: str) -> PageContent:
        query = {name: value for name, value in (("model", model), ("stat", address.statistic)) if value}
        page, _, view, content = layout.resolve_url(address.path, query)
        notes = layout.omission_notes(page, self.run, view)
        first: list[Block] = [TextBlock(notes)] if notes else []
        if name := address.statistic:
            first.append(TextBlock([describe_statistic(name)], f"What {statistic(name).label} means", collapsed=True))
        blocks = {"": [*first, *content.sections.get("", ())], **{k: v for k, v in content.sections.items() if k}}
        if page is overview:
            terms = [f"{term.word}: {term.definition}" for term in assembly.collect_glossary(self.run)]
            blocks["How to read this"] = [TextBlock(terms, "Glossary", collapsed=True)]
        to_link = partial(self._file_link, model=model)
        tables = {heading: map(_without_grid, parts) for heading, parts in blocks.items()}
        sections = {
            heading: [static for part in parts if (static := static_block(part, to_link)) is not None]
            for heading, parts in tables.items()
        }
        return replace(content, sections={heading: parts for heading, parts in sections.items() if parts})

    def _addresses_of(self, page: Page) -> Iterator[Address]:
        controls = page.controls(self.run)
        if page is head:
            yield from (Address(f"{page.PATH}/{layer}.{number}", is_per_model=True) for layer, number in self.heads)
            return
        first = longest_ess_column(self.run.heads)
        names = sorted(assembly.run_statistics(self.run), key=lambda name: name != first)
        is_per_model = "model" in controls
        # A comparison uses the first statistic: the rest of its page is the same for every statistic.
        for name in names if is_per_model and "stat" in controls else [""]:
            yield Address(page.PATH, name, is_per_model)

    def _file_link(self, link: Link, model: str) -> Link:
        """The link to a file, from the view of `model`; without a target if the site has no such file."""
        return Link(link.text, self._find_target(link.href, model))

    def _target(self, href: str, model: str) -> str:
        """The file that an address of the app leads to, from the view of `model`; "" if the site has no such file."""
        query = {name: values[-1] for name, values in parse_qs(urlsplit(href).query).items()}
        path = urlsplit(href).path
        if not path.startswith("/") or query.keys() - SUPPORTED_PARAMETERS:
            return ""
        if path.startswith(f"{head.PATH}/"):
            layer, number = parse_head(path.removeprefix(f"{head.PATH}/"), self.run)
            path = f"{head.PATH}/{layer}.{number}"
        candidates = [Address(path, query.get("stat", "")), Address(path), *self._addresses.get(path, [])]
        file = next((address.file for address in candidates if address.file in self._files), "")
        other = query.get("model", model)
        return f"{file}#model={quote(other)}" if file and other != model else file


def _has_content(page: Page, run: Run) -> bool:
    """Whether the page has content for this run."""
    if isinstance(page, ProbePage):
        return has_tables(page.probe, run)
    if page is head:
        return len(run.heads) > 0
    if page is checkpoints and any(assembly.charts_for_page(assembly.render_context(run), checkpoints.PATH).values()):
        return True
    return page is not runs and (page is overview or bool(page.controls(run)))


def _without_grid(part: Block) -> Block:
    """The block; for a table of heads the heads with the statistic of the page: every other one has its own page."""
    if not isinstance(part, HeadTable):
        return part
    name = part.highlighted_column
    columns = ("kv_group", name, f"{name}_low", f"{name}_high", "baseline", "change")
    selected = part.heads[[column for column in columns if column in part.heads]]
    table = statistics_table(f"{part.caption}: {count_nouns(len(selected), 'heads')}", selected)
    identifiers = part.heads[["layer", "head"]].itertuples(index=False, name=None)
    rows = [
        [Link(f"L{layer}H{number}", f"{head.PATH}/{layer}.{number}"), *row]
        for (layer, number), row in zip(identifiers, table.rows, strict=True)
    ]
    return SortableTable(table.caption, ["head", *table.column_names], rows)
