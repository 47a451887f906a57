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

Names are imported on first use, which keeps `import steerscope` quick.
"""

import importlib
from typing import TYPE_CHECKING

from steerscope.version import __version__ as __version__

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

_MODULES = {
    "capture.rows": "Rows load_rows",
    "capture.store": "ActivationStore",
    "client": "AsyncClient Client",
    "engines.load": "load load_engine",
    "engines.results": "EndEvent Generation RuleEvent TokenEvent TokenPrompt",
    "lenses.pack": "Pack",
    "lenses.readings": "Firing Reading",
    "specs.capture": "Capture",
    "specs.chat": "Message",
    "specs.errors": "InvalidRequest SteerscopeError",
    "specs.sampling": "Sampling",
    "specs.steering": "Ablate Add Cap Steering",
    "specs.watch": "Rule Watch all_of any_of flag not_ steer stop when",
    "vectors.files": "load_vector save_vector",
    "vectors.vector": "SteeringVector",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
_RENAMED = {"load_vector": "load", "save_vector": "save"}  # in their module

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
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'steerscope' has no attribute {name!r}")
    module = importlib.import_module(f"steerscope.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, _RENAMED.get(name, name))
    return value
