"""The entry point `vllm.general_plugins`, called by vLLM in every process it starts.

It wraps one method of vLLM's worker class. The wrapper looks whether the engine asked for taps
(`additional_config["steerscope"]`, or the environment variable STEERSCOPE); if not, vLLM stays as it is.
"""

import functools
from typing import Any

RPC = ("attach_arena", "detach_arena", "register", "unregister", "finish", "settle", "describe", "stats")


def register() -> None:
    """Idempotent: vLLM may call it more than once, and our engine calls it too."""
    from vllm.v1.worker import gpu_worker

    _wrap(gpu_worker.Worker)


def _wrap(worker_class: type) -> None:
    inner = worker_class.load_model  # type: ignore[attr-defined]
    if getattr(inner, "steerscope", False):
        return

    @functools.wraps(inner)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        inner(self, *args, **kwargs)
        from steerscope.engines.vllm.settings import asked_for

        settings = asked_for(self.vllm_config)
        if settings is not None:
            install(self, settings)

    load_model.steerscope = True  # type: ignore[attr-defined]
    worker_class.load_model = load_model  # type: ignore[attr-defined]


def install(worker: Any, settings: Any) -> None:  # noqa: ANN401
    from steerscope.engines.vllm.guards import check_version
    from steerscope.engines.vllm.worker import WorkerTaps

    check_version()
    taps = WorkerTaps(worker, settings)
    for name in RPC:
        setattr(worker, f"steerscope_{name}", getattr(taps, name))
    worker.steerscope = taps
