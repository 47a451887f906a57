"""Specs of a request. Pure data: no torch is imported here."""

from steerscope.specs.capture import Capture
from steerscope.specs.chat import Message
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Ablate, Add, Cap, Steering, VectorData
from steerscope.specs.watch import Rule, Watch

__all__ = [
    "Ablate",
    "Add",
    "Cap",
    "Capture",
    "InvalidRequest",
    "Message",
    "Problem",
    "Rule",
    "Sampling",
    "Steering",
    "SteerscopeError",
    "VectorData",
    "Watch",
]
