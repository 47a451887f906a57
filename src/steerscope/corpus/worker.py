"""One worker of a capture job: `python -m steerscope.corpus.worker DIR WORKER WORKERS PARENT`."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from steerscope.capture.store import read_info
from steerscope.corpus.job import missing
from steerscope.corpus.reader import open_engine
from steerscope.corpus.run import REFUSED, read_shards
from steerscope.specs.errors import SteerscopeError


def main(folder: Path, worker: int, workers: int, parent: int) -> int:
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    info = read_info(folder)
    try:
        with open_engine(info) as engine:
            read_shards(engine, folder, [s for s in missing(folder, info) if s % workers == worker])
    except SteerscopeError as error:
        sys.stderr.write(f"{str(error).replace(chr(10), ' ')}\n")
        return REFUSED
    return 0


def _follow(parent: int) -> None:
    """End this worker when its parent has died, perhaps before the worker began."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and the processes of its engine
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:5])))
