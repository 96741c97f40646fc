"""python -m tests.zoo [TYPE ...]: a verdict for each type; without types, for all of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from zoo.command import main

main(sys.argv[1:])
