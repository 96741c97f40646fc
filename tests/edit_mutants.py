"""Which mutants of the composition of edits do the laws find? `python -m tests.edit_mutants [WORD]` prints each one.

A mutant is one changed line of headscope in a temporary copy, on which `test_edit_laws.py` runs for three families.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAMILIES = "gpt_oss or gemma2 or llama-gqa or refused or conflict or last_token or padded"
EQUIVALENT = "kinds see each other"
"""Its masks are disjoint, so that nothing changes."""
MUTANTS = {
    "choices before biases": ("logit_edits", "logits.detach(), edit)", "record.own_logits(rows, keys), edit)"),
    "a bias of 0.9": ("logit_edits", "logits + mask * edit.kind.bias(", "logits + 0.9 * mask * edit.kind.bias("),
    "sink dropped": ("logit_edits", "    if sink is not None:\n        lse =", "    if False:\n        lse ="),
    "uniform sees hidden keys": ("logit_edits", "mask & (logits > -torch.inf)", "mask"),
    "only the last bias": (
        "logit_edits",
        "logits = logits + mask * edit.kind.bias(",
        "logits = record.own_logits(rows, keys) + mask * edit.kind.bias(",
    ),
    "only the last choice": ("logit_edits", "for choice in chosen:", "for choice in chosen[-1:]:"),
    "a recent key more": ("logit_edits", "(distance < self.recent)", "(distance <= self.recent)"),
    "a sink key more": ("logit_edits", "record.first_key < self.sink)", "record.first_key <= self.sink)"),
    "a head's key edit changes its group": (
        "edits",
        "return bool((grouped == grouped[:, :, :1]).all())",
        "return True",
    ),
    EQUIVALENT: ("edits", "new = kind(t[at], place)", "new = kind(edited[at], place)"),
    "first key ignored": ("edits", "return self.first_key + torch.arange(", "return torch.arange("),
    "rows after a cache counted from 0": (
        "edits",
        "self.key_tokens[self.k.shape[2] - self.q.shape[2] :]",
        "self.key_tokens[: self.q.shape[2]]",
    ),
    "conflicts not seen": ("edits", "if bool((owned & mask).any()):", "if False:"),
    "one token too far from the end": ("edits", "token + (length or 0) if", "token + (length or 0) + 1 if"),
    "soft cap dropped": ("edited_attention", "variant.softcap, sink,", "None, sink,"),
    "window dropped": ("edited_attention", "variant.scaling, variant.window,", "variant.scaling, None,"),
    "keys of another group": (
        "edited_attention",
        "groups = heads // per_group\n    sink",
        "groups = heads % layer.k.shape[1]\n    sink",
    ),
    "log-sum-exp of a bias lost": (
        "edited_attention",
        "yield sequences, heads, out[:, 0], lse[:, 0]\n    else",
        "yield sequences, heads, out[:, 0], 0 * lse[:, 0]\n    else",
    ),
    "outputs not edited": ("backend", "z = z if plan is None else plan.edited_outputs(z)", "z = z"),
    "edits leak between runs": ("../interventions/edits", "range(number, number + 1)", "None"),
    "runs start at their last layer": (
        "../interventions/replay",
        "first = min(first, layer",
        "first = min(len(self.layers) - 1, layer",
    ),
    "patched from the next token": (
        "../interventions/kinds",
        "(place.tokens + self.shift)",
        "(place.tokens + self.shift + 1)",
    ),
    "mean over dimensions": ("../interventions/kinds", "t.float().mean(-2,", "t.float().mean(-1,"),
    "steered away from the span": ("../interventions/kinds", "return (~self.span", "return (self.span"),
    "prefix a token short": (
        "../forward/frozen_prefix",
        "return int(self.keys.shape[2])",
        "return int(self.keys.shape[2]) - 1",
    ),
}


def survives(name: str) -> bool:
    """Whether the laws pass on a mutant."""
    module, old, new = MUTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "headscope"
        shutil.copytree(ROOT / "headscope", copy, ignore=shutil.ignore_patterns("examples", "__pycache__"))
        file = (copy / "attention" / f"{module}.py").resolve()
        source = file.read_text()
        assert source.count(old) == 1, f"{name}: '{old}' occurs {source.count(old)} times in {module}.py"
        file.write_text(source.replace(old, new))
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-n",
            "0",
            "-x",
            "-q",
            "-k",
            FAMILIES,
            "tests/test_edit_laws.py",
        ]
        paths = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        finished = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
        assert finished.returncode in (0, 1), finished.stdout.decode()[-2000:]
        return finished.returncode == 0


if __name__ == "__main__":
    for mutant in MUTANTS:
        if not sys.argv[1:] or sys.argv[1] in mutant:
            print(f"{'SURVIVES' if survives(mutant) else 'found'}: {mutant}", flush=True)
