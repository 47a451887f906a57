"""Everything is computed where the weights are: no operation gets tensors of two devices, and the work is done there.

A GPU is not needed to see that. `meta` is a device of its own without numbers; what is taken from it comes as zeros.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from analysis.families import FAMILIES, family, named, saved
from steerscope.analysis.attention import attention_pass
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.layerwise import mlp_pass
from steerscope.analysis.susceptibility import susceptibility

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
WORK = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.sort.default)


class Elsewhere(TorchDispatchMode):
    """Counts the work by device, and raises where two devices meet (numbers without dimensions may)."""

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204, ARG002
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        devices = {one.device.type for one in tensors if one.dim()}
        assert len(devices) < 2 or func in MOVES, f"{func} of {devices}"
        if func in WORK:
            for device in devices:
                self.work[device] = self.work.get(device, 0) + 1
        if func is torch.ops.aten._local_scalar_dense.default and tensors[0].device.type == "meta":
            return False
        if (
            func is MOVES[0]
            and tensors[0].device.type == "meta"
            and (kwargs or {}).get("device") == torch.device("cpu")
        ):
            return torch.zeros(tensors[0].shape, dtype=(kwargs or {}).get("dtype") or tensors[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_all_work_is_done_on_the_device_that_was_asked_for(name: str, tmp_path: Path) -> None:
    base, tuned = (Checkpoint(saved(family(name, seed), tmp_path / str(seed))) for seed in (0, 1))
    directions = replace(named(3), layers=(1,))
    for run in (mlp_pass, attention_pass):
        with Elsewhere() as seen:
            found = run(base, directions, tuned, random=100, against=named(8), device="meta")
        assert found.tables["written"].num_rows == 3 * 2
        assert set(seen.work) == {"meta"}
        assert seen.work["meta"] > 10, "projections of two checkpoints, and ranks"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_finds_what_the_processor_finds(name: str, tmp_path: Path) -> None:
    base, tuned = (Checkpoint(saved(family(name, seed), tmp_path / str(seed))) for seed in (0, 1))
    asked = {susceptibility: (base, tuned, named(3)), mlp_pass: (base, named(3), tuned)}
    asked[attention_pass] = asked[mlp_pass]
    for run, given in asked.items():
        on_cpu, on_gpu = (run(*given, random=100, device=device).tables for device in ("cpu", "cuda"))
        assert set(on_cpu) == set(on_gpu)
        for name, expected in on_cpu.items():
            for column, kind in zip(expected.column_names, expected.schema.types, strict=True):
                a, b = (table[column].to_numpy() for table in (expected, on_gpu[name]))
                if pa.types.is_floating(kind):
                    np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4, err_msg=f"{name}.{column}")
                else:
                    assert b.tolist() == a.tolist(), (name, column)
