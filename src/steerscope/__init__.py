"""See into a language model and steer it, at serving speed.

```python
import steerscope as ss

happy = ss.load_vector("happy.safetensors")
with ss.load("smollm2-135m") as model:
    short = ss.Sampling(max_tokens=20)
    plain = model.generate("How was your week?", short, capture=ss.Capture(layers="8-12"))
    steered = model.generate("How was your week?", short, steer=happy.add(1.7, layers=19))
    print(plain.rows[12].shape, plain.text, steered.text)
```

Names are imported when they are first used, so that `import steerscope` itself is quick.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steerscope.capture.rows import Rows, load_rows
    from steerscope.capture.store import ActivationStore
    from steerscope.client import AsyncClient, Client
    from steerscope.engines.load import load, load_engine
    from steerscope.engines.results import EndEvent, Generation, RuleEvent, TokenEvent, TokenPrompt
    from steerscope.lenses.pack import Pack
    from steerscope.lenses.readings import Firing, Reading
    from steerscope.specs.capture import Capture
    from steerscope.specs.chat import Message
    from steerscope.specs.errors import InvalidRequest, SteerscopeError
    from steerscope.specs.sampling import Sampling
    from steerscope.specs.steering import Ablate, Add, Cap, Steering
    from steerscope.specs.watch import Rule, Watch, all_of, any_of, flag, not_, steer, stop, when
    from steerscope.vectors.files import load as load_vector
    from steerscope.vectors.files import save as save_vector
    from steerscope.vectors.vector import SteeringVector

__version__ = "0.1.0"

_WHERE = {
    "Ablate": "specs.steering",
    "ActivationStore": "capture.store",
    "Add": "specs.steering",
    "AsyncClient": "client",
    "Cap": "specs.steering",
    "Capture": "specs.capture",
    "Client": "client",
    "EndEvent": "engines.results",
    "Firing": "lenses.readings",
    "Generation": "engines.results",
    "InvalidRequest": "specs.errors",
    "Message": "specs.chat",
    "Pack": "lenses.pack",
    "Reading": "lenses.readings",
    "Rows": "capture.rows",
    "Rule": "specs.watch",
    "RuleEvent": "engines.results",
    "Sampling": "specs.sampling",
    "Steering": "specs.steering",
    "SteeringVector": "vectors.vector",
    "SteerscopeError": "specs.errors",
    "TokenEvent": "engines.results",
    "TokenPrompt": "engines.results",
    "Watch": "specs.watch",
    "all_of": "specs.watch",
    "any_of": "specs.watch",
    "flag": "specs.watch",
    "load": "engines.load",
    "load_engine": "engines.load",
    "load_rows": "capture.rows",
    "load_vector": "vectors.files:load",
    "not_": "specs.watch",
    "save_vector": "vectors.files:save",
    "steer": "specs.watch",
    "stop": "specs.watch",
    "when": "specs.watch",
}

__all__ = [
    "Ablate",
    "ActivationStore",
    "Add",
    "AsyncClient",
    "Cap",
    "Capture",
    "Client",
    "EndEvent",
    "Firing",
    "Generation",
    "InvalidRequest",
    "Message",
    "Pack",
    "Reading",
    "Rows",
    "Rule",
    "RuleEvent",
    "Sampling",
    "Steering",
    "SteeringVector",
    "SteerscopeError",
    "TokenEvent",
    "TokenPrompt",
    "Watch",
    "all_of",
    "any_of",
    "flag",
    "load",
    "load_engine",
    "load_rows",
    "load_vector",
    "not_",
    "save_vector",
    "steer",
    "stop",
    "when",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'steerscope' has no attribute {name!r}")
    module, _, original = _WHERE[name].partition(":")
    value = getattr(importlib.import_module(f"steerscope.{module}"), original or name)
    globals()[name] = value
    return value
