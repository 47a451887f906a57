"""The state of a training run: ops, Adam's moments and the best ops so far, in one small file."""

import json
import math
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from steerscope.files import atomic_path, reading
from steerscope.training.learnable import Learnable

_MOMENTS = ("exp_avg", "exp_avg_sq")


class State:
    def __init__(self, ops: Learnable) -> None:
        self.ops, self.optimizer = ops, torch.optim.Adam(ops.parameters())
        self.step = self.best_epoch = 0
        self.epochs = -1  # that were validated; before the first step 0
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = self._copy()

    def judge(self, loss: float, epoch: int) -> None:
        """Keep a copy of the current ops if they are the best so far."""
        self.epochs = epoch
        if loss < self.best_loss:
            self.best_loss, self.best_epoch, self.best = loss, epoch, self._copy()

    def advance(self, learning_rate: float, tokens: int) -> None:
        """Take one step along the gradients of a loss that was summed over `tokens` tokens."""
        for parameter in self.ops.parameters():
            assert parameter.grad is not None
            parameter.grad /= tokens
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def use_best(self) -> None:
        self.ops.load_state_dict(self.best)

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.ops.state_dict().items()}

    def save(self, path: Path) -> None:
        tensors = {f"now.{name}": tensor for name, tensor in self._copy().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.ops.named_parameters():
            for moment in _MOMENTS if self.step else ():
                tensors[f"{moment}.{name}"] = self.optimizer.state[parameter][moment].cpu()
        # JSON has no infinity; a state is saved only after it was judged, by a number
        about = {key: getattr(self, key) for key in ("step", "best_epoch", "epochs", "best_loss")}
        data = safetensors.torch.save(tensors, {"format": "steerscope-training", "state": json.dumps(about)})
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)

    def load(self, path: Path) -> None:
        """Restore the state that `save` wrote."""
        with reading(path, "checkpoint of a training run"):
            with safe_open(str(path), framework="pt") as file:
                about = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            self.ops.load_state_dict(_under("now.", tensors))
            self.best = _under("best.", tensors)
            self.step, self.best_epoch, self.epochs = about["step"], about["best_epoch"], about["epochs"]
            self.best_loss = about["best_loss"]
            for name, parameter in self.ops.named_parameters():
                if self.step:
                    found = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS}
                    self.optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **found}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
