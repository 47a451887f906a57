"""Kill a capture with SIGKILL at random moments of its work, going on with --resume each time, as often as asked; then
let it end. Print, in JSON, where the kills fell and the checksums of all stores that were finished, the first of which
was never killed.

    python tests/corpus/kill_script.py FOLDER KILLS SEED ARGUMENT...

The arguments are those of `steerscope capture run` without --out. Everything is imported once and forked from there,
so that a kill costs a second and not ten.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import steerscope.cli.main
import steerscope.engines.hf  # noqa: F401 (so that children need not)
from steerscope.capture.store import ActivationStore, committed
from steerscope.corpus import run


def start(out: Path, arguments: list[str]) -> int:
    """A child that has its engine and begins to read."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        real = run.ShardReader.read

        def read(*given):  # type: ignore[no-untyped-def]
            os.write(tell, b".")
            return real(*given)

        run.ShardReader.read = read  # type: ignore[method-assign]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        resume = ["--resume"] if (out / "store.json").is_file() else []
        try:
            steerscope.cli.main.app([*arguments, "--out", str(out), *resume], standalone_mode=False)
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(tell)
    os.read(ready, 1)  # nothing comes from a child that has nothing to do
    os.close(ready)
    return child


def main(folder: Path, kills: int, seed: int, arguments: list[str]) -> dict[str, object]:
    child, began = start(folder / "store-0", arguments), time.monotonic()
    assert os.waitpid(child, 0)[1] == 0
    span = time.monotonic() - began
    sums, where, moments = [ActivationStore(folder / "store-0").checksum], [], random.Random(seed)
    while len(where) < kills:
        out = folder / f"store-{len(sums)}"
        child = start(out, arguments)
        time.sleep(moments.uniform(0, span / 3))
        if os.waitpid(child, os.WNOHANG)[0]:
            sums.append(ActivationStore(out).checksum)  # it was quicker than we were: the next one
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = len([*out.glob("*/.steerscope-*")])
        where.append({"shards": len(committed(out)), "half_written": left})
    out = folder / f"store-{len(sums)}"
    assert os.waitpid(start(out, arguments), 0)[1] == 0
    return {"kills": where, "checksums": [*sums, ActivationStore(out).checksum], "last": str(out)}


if __name__ == "__main__":
    result = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    print(json.dumps(result))  # noqa: T201
