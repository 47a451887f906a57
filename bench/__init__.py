"""Programs that measure or attack steerscope: run them from the root of the repository, `python -m bench.NAME`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for `support`: oracles that tests and programs share
