"""Run headscope commands in forks of one process that has imported torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import headscope

# Waits for a line with the arguments of a command and what it needs, and forks a process that runs it.
FORK_LOOP = """
import gc, json, os, sys
import torch

gc.freeze()  # else every child copied what it inherited, to count references to it
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # makes torch's thread pool anew, which two threads at once cannot do after a fork
        for number, name in ((1, order["stdout"]), (2, order["stderr"])):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.path[:0] = order["packages"]
        sys.argv = ["headscope", *order["arguments"]]
        try:
            from headscope.cli import app  # which looks for probes
            app.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
        os._exit(code)  # real processes have the interpreter's own end, which is slow after a fork
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

# Runs a study once, so that all is imported.
WARM_UP = """
import os, sys
import torch
from headscope.cli import app, execute, print_result
from headscope.study.config import read_study

torch.set_num_threads(1)
stdout = os.dup(1)
os.dup2(2, 1)
print_result(execute(read_study(sys.argv[1], {}), sys.argv[2], False, True), as_json=False, show_all=False)
sys.stdout.flush()
os.dup2(stdout, 1)
"""

# Imports what commands need, but looks for no probe: each command does that, among the packages that it is given.
IMPORTS = """
import headscope.rendering.html_page, headscope.rendering.terminal, headscope.study.runner
from headscope.base import plugins
from headscope.models import loading
from headscope.positions import model

assert plugins.probes.cache_info().currsize == 0
"""


class Server:
    """Runs commands in processes that need not import torch again."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process

    def begin(self, output: Path, *arguments: object) -> int:
        """Start a command that writes all it prints to `output`; returns its process id."""
        output.unlink(missing_ok=True)
        return self._begin(output, output, arguments)

    def run(self, folder: Path, *arguments: object, packages: Path) -> tuple[int, str, str]:
        """Run a command that also finds the Python packages in `packages`: exit code, stdout, stderr."""
        files = folder / "stdout", folder / "stderr"
        for file in files:
            file.unlink(missing_ok=True)
        self._begin(*files, arguments, packages)
        code = self.end()
        return code, *(file.read_text(encoding="utf-8") for file in files)

    def _begin(self, stdout: Path, stderr: Path, arguments: tuple[object, ...], *packages: Path) -> int:
        order = {
            "stdout": str(stdout),
            "stderr": str(stderr),
            "packages": [*map(str, packages)],
            "arguments": [*map(str, arguments)],
        }
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin)
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """The exit code of what was begun last."""
        return self._number()


@contextmanager
def serving(first: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that executes the code `first` (`WARM_UP` or `IMPORTS`) with these arguments before any command."""
    command = [sys.executable, "-c", first + FORK_LOOP, *map(str, arguments)]
    paths = [str(Path(headscope.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = {**(environment or os.environ), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=variables
    ) as process:
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()
