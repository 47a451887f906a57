"""The entry point `vllm.general_plugins`, called by vLLM in every process it starts.

It wraps two of vLLM's methods: the one that makes an engine's configuration, and the one that loads a worker's model.
Both do nothing unless the engine asks for taps (`additional_config["steerscope"]`, or the environment variable
STEERSCOPE).
"""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from steerscope.engines.vllm.wrap import wrap

_CLIENT = "STEERSCOPE_CLIENT"  # environment variable of the processes that an engine of ours starts


def register() -> None:
    """Idempotent: vLLM may call it more than once, and our engine calls it too."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_worker import Worker

    wrap(EngineArgs, "create_engine_config", _create_engine_config)
    wrap(Worker, "load_model", _load_model)


def _create_engine_config(inner: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    config = inner(self, *args, **kwargs)
    from steerscope.engines.vllm.settings import asked_for

    settings = asked_for(config)
    if settings is not None:
        from steerscope.engines.vllm.client import stock_frontend
        from steerscope.engines.vllm.guards import check_config, check_version

        check_version()
        check_config(config)
        # Every process must read the same, and the compile cache must see it, wherever it was said.
        config.additional_config = {**config.additional_config, **settings.sized(config).additional_config()}
        stock_frontend.install()
    return config


@contextmanager
def followed() -> Iterator[None]:
    """Workers started inside the block end when this process does, however it ends."""
    os.environ[_CLIENT] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_CLIENT, None)


def _follow() -> None:
    """vLLM's engine core outlives a client that is killed, but not its workers; with one device it mostly is one."""
    client = int(os.environ.pop(_CLIENT, 0))
    if client in (0, os.getpid()):
        return
    try:
        ended = os.pidfd_open(client)
    except ProcessLookupError:
        os._exit(1)
    except (OSError, AttributeError):  # a system that has no such thing
        return

    def follow() -> None:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="steerscope-follow", daemon=True).start()


def _load_model(inner: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    _follow()
    result = inner(self, *args, **kwargs)
    from steerscope.engines.vllm.settings import asked_for

    settings = asked_for(self.vllm_config)
    if settings is not None:
        from steerscope.engines.vllm.worker.worker import WorkerTaps

        taps = WorkerTaps(self, settings)
        for name, function in taps.rpc().items():
            setattr(self, f"steerscope_{name}", function)
        self.steerscope = taps
    return result
