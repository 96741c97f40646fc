"""Chapters of a report: the charts of a question, and the results in words that belong to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headscope.rendering import assembly
from headscope.rendering.blocks import Block, ChartGroup, RenderContext
from headscope.rendering.run_results import sentences_by_topic
from headscope.results.collection import results_by_probe


@dataclass
class Chapter:
    """The charts of a chapter, and the sentences about its results by topic."""

    blocks: list[Block] = field(default_factory=list)
    sentences: dict[str, list[str]] = field(default_factory=dict)


def collect_chapters(context: RenderContext) -> Mapping[str, Chapter]:
    """The chapters of a report by title. Claims and notes on models are not part of them."""
    chapters: dict[str, Chapter] = {}
    groups_by_probe: dict[str, list[ChartGroup]] = {}
    for probe, group in assembly.drawn_groups(context):
        groups_by_probe.setdefault(probe.name, []).append(group)
        chapters.setdefault(group.chapter, Chapter()).blocks.extend(group.charts)
    for name, results in results_by_probe(context.run).items():
        for topic, sentences in sentences_by_topic(results).items():
            chapter = chapters.setdefault(_chapter_title(topic, groups_by_probe.get(name, ())), Chapter())
            chapter.sentences.setdefault(topic, []).extend(sentences)
    return chapters


def _chapter_title(topic: str, groups: Sequence[ChartGroup]) -> str:
    """The chapter of a probe that is about the topic, else its first one; the topic itself if it has no charts."""
    return next(
        (group.chapter for group in groups if assembly.is_about(group, topic)), groups[0].chapter if groups else topic
    )
