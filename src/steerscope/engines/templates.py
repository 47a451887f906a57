"""Request templates found again by the values of the specs they were made of."""

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple
from weakref import WeakValueDictionary

from steerscope.engines.plan import Plan, Planner, Prompt, RequestTemplate
from steerscope.specs.capture import Capture
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering
from steerscope.specs.watch import Watch

_MAX_KEPT = 128


class RequestSpecs(NamedTuple):
    """What one request asks for beside its prompt."""

    sampling: Sampling
    steering: Steering
    capture: Capture | None
    watch: Watch | None


class TemplateCache:
    """The last templates of an engine, and those of requests that still run. One with a watch is kept only as long as
    such a request runs: it holds a lens pack in memory."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[Hashable, RequestTemplate] = WeakValueDictionary()
        self._kept: deque[RequestTemplate] = deque(maxlen=_MAX_KEPT)

    def plan(self, planner: Planner, name: str, prompt: Prompt, specs: RequestSpecs, version: int) -> Plan:
        """Plan one request. `version` counts changes of what names in specs stand for."""
        planner.check_prompt(prompt, specs.sampling)
        if prompt.messages is not None:  # selectors may depend on the messages
            return Plan(name, 0, prompt, specs.sampling, planner.template(prompt, *specs))
        watch = specs.watch
        pack_kind = None if watch is None else type(watch.pack)  # a pack, or only a name that equals its own
        key = version, len(prompt.token_ids), specs, pack_kind
        template = self._known.get(key)
        if template is None or planner.problems:
            template = self._known[key] = planner.template(prompt, *specs)
            if watch is None:
                self._kept.append(template)
        return Plan(name, 0, prompt, specs.sampling, template)
