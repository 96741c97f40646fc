"""Run headscope commands in forks of one process that has imported torch."""

import subprocess
from pathlib import Path

# Runs the study once, so that all is imported, then forks a command for each line.
SERVER = """
import gc, os, sys
import torch
from headscope.cli import app as cli
from headscope.cli import execute, print_result
from headscope.study.config import read_study

torch.set_num_threads(1)
stdout = os.dup(1)
os.dup2(2, 1)
print_result(execute(read_study(sys.argv[1], {}), sys.argv[2], False, True), as_json=False, show_all=False)
sys.stdout.flush()
os.dup2(stdout, 1)
gc.freeze()  # else every child copies what it inherited, to count references to it
for line in sys.stdin:
    output, *arguments = line.split()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # makes torch's thread pool anew, which two threads at once cannot do after a fork
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv = ["headscope", *arguments]
        try:
            cli.main()
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(ended.code or 0)  # real processes have the interpreter's own end, which is slow after a fork
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Server:
    """Runs commands in processes that need not import torch again."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process

    def begin(self, output: Path, *arguments: object) -> int:
        assert self.process.stdin is not None
        print(output, *arguments, file=self.process.stdin)
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """The exit code of what was begun last."""
        return self._number()
