"""An engine in a process of its own, for benchmarks in which several engines take turns."""

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.gpu.cores import confine
from steerscope.bench.one import about
from steerscope.bench.workload import Setup
from steerscope.specs.errors import SteerscopeError

START_S, RUN_S = 900.0, 300.0


class ChildFailed(SteerscopeError):
    pass


def serve(
    pipe: Connection, kind: str, setup: Setup, scratch: Path, budget: int, noop: bool, without: Sequence[str]
) -> None:
    """Start an engine without some fast paths, then answer one order at a time. vLLM is imported only from here on."""
    os.environ["STEERSCOPE_NOOP"] = str(int(noop))
    from bench.gpu.drivers import make_driver
    from bench.gpu.profiled import profile
    from bench.gpu.without import Parts, taken_out
    from steerscope.bench.drivers import Ours

    try:
        with taken_out(without):
            driver = make_driver(kind, setup, scratch, budget)
        gc.collect()
        gc.freeze()  # a sweep over vLLM's modules in the middle of a round would be noise
        pipe.send(about(setup) | {"engine": driver.describe()})
        while (order := pipe.recv())[0] != "close":
            what, cell, seed, *how = order
            try:
                if what == "load":
                    driver.setup = setup = setup.model_copy(update=seed)
                    pipe.send({})
                elif what == "cores":
                    confine(seed)
                    pipe.send({})
                elif what == "profile":
                    assert isinstance(driver, Ours)
                    pipe.send(profile(driver, setup, cell))
                else:
                    names = how.pop() if len(how) == 3 else ()
                    with taken_out(names, Parts.of(driver) if names else None):
                        run = driver.run(setup.prompts(seed), cell, *how)
                    pipe.send(asdict(run))
            except Exception as error:  # this cell has no figures; the next may
                traceback.print_exc()
                pipe.send({"error": f"{type(error).__name__}: {error}"})
        driver.close()
        pipe.send({"closed": True})
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send({"fatal": f"{type(error).__name__}: {error}"})


class Child:
    """An engine in a process of its own."""

    def __init__(
        self,
        kind: str,
        setup: Setup,
        scratch: Path,
        budget: int = 0,
        noop: bool = False,
        without: Sequence[str] = (),
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.kind, began = kind, time.perf_counter()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, kind, setup, scratch, budget, noop, without))
        self._process.start()
        theirs.close()
        self._began = began
        self.about: dict[str, Any] = {}

    def ready(self) -> None:
        """Wait until it is up."""
        if not self.about:
            self.about = self._answer(START_S)
            self.about["start_s"] = time.perf_counter() - self._began

    def order(self, *order: Any, limit: float = RUN_S) -> dict[str, Any]:
        self._pipe.send(order)
        return self._answer(limit)

    def _answer(self, limit: float) -> dict[str, Any]:
        try:
            found = self._pipe.recv() if self._pipe.poll(limit) else {"fatal": f"no answer in {limit:.0f} s"}
        except EOFError:
            found = {"fatal": "the process died"}
        if "fatal" in found:
            self.stop()
            raise ChildFailed(f"{self.kind}: {found['fatal']}")
        return found

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        try:
            self.order("close", limit=60)
            self._process.join(30)
        except (ChildFailed, OSError):
            pass
        self.stop()

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
