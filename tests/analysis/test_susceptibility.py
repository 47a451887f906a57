"""Changes of weights along directions: equal to the real modules' own, planted ones are found, chance is calibrated."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.susceptibility import ChangeSums, facing, susceptibility
from steerscope.specs.errors import BadFile, InvalidRequest
from support import tiny

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

HIDDEN = 64
Change = Callable[[str, nn.Parameter], Tensor | None]


def directions(count: int = 3, layers: int = 4, seed: int = 5) -> Directions:
    rows = np.random.default_rng(seed).standard_normal((layers, count, HIDDEN)).astype(np.float32)
    return Directions(tuple(f"d{i}" for i in range(count)), ("",) * count, tuple(range(layers)), rows)


def blocks(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 4)


def pair(folder: Path, change: Change, architecture: str = "llama") -> tuple[Checkpoint, Checkpoint, nn.Module]:
    """Base, tuned and the tuned model itself; `change` gives what is added to a parameter."""
    model = copy.deepcopy(tiny.model(architecture))
    model.save_pretrained(folder / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            added = change(name, parameter)
            if added is not None:
                parameter.add_(added)
    model.save_pretrained(folder / "tuned", max_shard_size="100KB")
    return Checkpoint(folder / "base"), Checkpoint(folder / "tuned"), model


def noise(seed: int = 0) -> Change:
    generator = torch.Generator().manual_seed(seed)

    def change(_name: str, parameter: nn.Parameter) -> Tensor | None:
        return 0.01 * torch.randn(parameter.shape, generator=generator) if parameter.dim() == 2 else None

    return change


WRITERS = {"self_attn.o_proj", "mlp.down_proj", "attention.dense", "mlp.dense_4h_to_h", "attn.c_proj", "mlp.c_proj"}


@pytest.mark.parametrize("architecture", sorted(set(tiny.ARCHITECTURES) - {"qwen3_moe"}))
def test_every_cell_is_what_the_real_modules_do_with_the_direction(architecture: str, tmp_path: Path) -> None:
    base, tuned, model = pair(tmp_path, noise(), architecture)
    named = directions()
    cells = susceptibility(base, tuned, named, random=20).tables["cells"].to_pylist()
    inside = [row for row in cells if "." in row["matrix"]]
    kinds = {row["matrix"] for row in inside}
    linear = {name for name, m in blocks(model)[0].named_modules() if hasattr(m, "weight") and m.weight.dim() == 2}
    assert kinds == linear
    for row in inside:
        layer, direction = row["layer"], named.at(row["layer"])[named.names.index(row["direction"])]
        before, after = (
            copy.deepcopy(blocks(one)[layer].get_submodule(row["matrix"])).double()
            for one in (tiny.model(architecture), model)
        )
        unit = torch.from_numpy(direction).double()
        unit /= unit.norm()
        size = before.nx if hasattr(before, "nx") else before.in_features  # Conv1D of GPT-2, or Linear
        with torch.no_grad():
            change = after(torch.eye(size).double()) - before(torch.eye(size).double())  # [in, out]
            writes = row["matrix"] in WRITERS
            along = change @ unit if writes else after(unit) - before(unit)
        vectors = change if writes else change.T
        assert row["side"] == ("writes" if writes else "reads")
        assert row["alignment"] == pytest.approx(float(along.norm() / change.norm()), abs=1e-5)
        cosines = (along / vectors.norm(dim=1)).abs()
        assert row["cosine"] == pytest.approx(float(cosines.mean()), abs=1e-5)
        assert row["largest"] == pytest.approx(float(cosines.max()), abs=1e-4)
        assert row["largest_at"] == int(cosines.argmax())


def test_the_embedding_counts_at_the_first_layer_and_the_head_at_the_last(tmp_path: Path) -> None:
    base, tuned, model = pair(tmp_path, noise())
    named = directions()
    cells = susceptibility(base, tuned, named, random=20).tables["cells"].to_pylist()
    for kind, layer, module in (("embedding", 0, "get_input_embeddings"), ("head", 3, "get_output_embeddings")):
        change = (getattr(model, module)().weight - getattr(tiny.model(), module)().weight).detach()
        unit = torch.from_numpy(named.at(layer)[1] / np.linalg.norm(named.at(layer)[1]))
        (row,) = [row for row in cells if row["matrix"] == kind and row["direction"] == "d1"]
        assert row["layer"] == layer
        assert row["alignment"] == pytest.approx(float((change @ unit).norm() / change.norm()), abs=1e-5)


def test_a_layers_profile_is_all_its_matrices_together_without_embedding_and_head(tmp_path: Path) -> None:
    base, tuned, _ = pair(tmp_path, noise())
    tables = susceptibility(base, tuned, directions(), random=20).tables
    norms = {(row["layer"], row["matrix"]): row["norm"] for row in tables["changes"].to_pylist()}
    for row in tables["profile"].to_pylist():
        cells = [
            (cell["alignment"] * norms[cell["layer"], cell["matrix"]], norms[cell["layer"], cell["matrix"]])
            for cell in tables["cells"].to_pylist()
            if (cell["layer"], cell["direction"]) == (row["layer"], row["direction"]) and "." in cell["matrix"]
        ]
        along, whole = (np.linalg.norm(part) for part in zip(*cells, strict=True))
        assert row["alignment"] == pytest.approx(along / whole, rel=1e-5)


def test_rows_that_come_in_parts_keep_their_places() -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = torch.zeros(9, HIDDEN), torch.randn(9, HIDDEN, generator=generator)
    after[4] = 0  # did not change
    units = torch.nn.functional.normalize(torch.randn(5, HIDDEN, generator=generator), dim=1)
    whole, parts = ChangeSums("reads"), ChangeSums("reads")
    whole.add(before, after, units)
    for start in range(0, 9, 2):
        parts.add(before[start : start + 2], after[start : start + 2], units)
    cosines = torch.nn.functional.cosine_similarity(after[:, None], units[None], dim=2).abs()
    for tally in (whole, parts):
        assert tally.where.tolist() == cosines.argmax(0).tolist()
        assert tally.largest == pytest.approx(cosines.max(0).values.numpy(), abs=1e-6)
        assert (tally.count, tally.seen) == (8, 9)


@pytest.mark.parametrize("matrix", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_planted_change_is_found_at_its_layer_and_matrix(matrix: str, tmp_path: Path) -> None:
    """A rank-one change along d1, a tenth of the noise that changed everything else."""
    named, more = directions(), noise()
    unit = torch.from_numpy(named.at(2)[1] / np.linalg.norm(named.at(2)[1]))

    def change(name: str, parameter: nn.Parameter) -> Tensor | None:
        added = more(name, parameter)
        if name != f"model.layers.2.{matrix}.weight" or added is None:
            return added
        writes = matrix in WRITERS
        other = torch.randn(parameter.shape[1 if writes else 0], generator=torch.Generator().manual_seed(1))
        planted = torch.outer(unit, other) if writes else torch.outer(other, unit)
        return added + planted * 0.5 * added.norm() / planted.norm()

    base, tuned, _ = pair(tmp_path, change)
    result = susceptibility(base, tuned, named)
    cells = sorted(result.tables["cells"].to_pylist(), key=lambda row: -row["z"])
    assert (cells[0]["layer"], cells[0]["matrix"], cells[0]["direction"]) == (2, matrix, "d1")
    assert cells[0]["p"] == pytest.approx(1 / 201), "none of 200 random directions reaches it: no p is smaller"
    assert cells[0]["z"] > 2 * cells[1]["z"]
    assert cells[1]["p"] > 0.01
    (peak,) = result.tables["peaks"].to_pylist()
    assert (peak["direction"], peak["layer"], peak["matrix"]) == ("d1", 2, matrix)


def low_rank(rank: int) -> Change:
    generator = torch.Generator().manual_seed(rank)

    def change(_name: str, parameter: nn.Parameter) -> Tensor | None:
        if parameter.dim() != 2:
            return None
        a = torch.randn(parameter.shape[0], rank, generator=generator)
        return 0.01 * a @ torch.randn(rank, parameter.shape[1], generator=generator)

    return change


@pytest.mark.parametrize("rank", [1, 4, None])
def test_random_directions_are_rarely_beyond_three_and_hardly_ever_significant(
    rank: int | None, tmp_path: Path
) -> None:
    base, tuned, _ = pair(tmp_path, noise() if rank is None else low_rank(rank))
    cells = susceptibility(base, tuned, directions(300, seed=9), random=300).tables["cells"]
    for key in ("z", "cosine_z"):
        z = cells.column(key).to_numpy()
        assert (np.abs(z) > 3).mean() < 0.01
        assert abs(z.mean()) < 0.1
        assert 0.9 < z.std() < 1.1
    least: dict[str, float] = {}
    for row in cells.to_pylist():
        least[row["direction"]] = min(row["p"], least.get(row["direction"], 1.0))
    assert np.mean([p <= 0.05 for p in least.values()]) < 0.1  # of all cells of a direction together


def test_few_random_directions_do_not_make_random_ones_significant(tmp_path: Path) -> None:
    base, tuned, _ = pair(tmp_path, noise())
    significant = []
    for seed in range(8):
        cells = susceptibility(base, tuned, directions(100, seed=9 + seed), random=20, seed=seed).tables["cells"]
        p = cells.column("p").to_numpy().reshape(-1, 100).min(0)  # of all cells of a direction together
        significant.append(np.mean(p <= 0.05))
    assert np.mean(significant) < 0.1


def test_one_layers_directions_may_be_used_everywhere_and_given_vectors_are_a_second_baseline(tmp_path: Path) -> None:
    base, tuned, _ = pair(tmp_path, noise())
    named, others = directions(), directions(10, seed=6)
    fixed = susceptibility(base, tuned, named, layer=2, against=others, random=20).tables["cells"].to_pylist()
    own = susceptibility(base, tuned, named, random=20).tables["cells"].to_pylist()
    same = [abs(a["alignment"] - b["alignment"]) < 1e-7 for a, b in zip(fixed, own, strict=True)]
    assert [row["layer"] == 2 for row in own] == same
    alone = susceptibility(base, tuned, others, layer=2, random=20).tables["cells"].to_pylist()
    row = fixed[4]
    beside = [o["alignment"] for o in alone if (o["layer"], o["matrix"]) == (row["layer"], row["matrix"])]
    assert row["against_z"] == pytest.approx((row["alignment"] - np.mean(beside)) / np.std(beside, ddof=1), abs=1e-4)


def test_only_layers_the_vectors_have_are_read_and_seeds_repeat(tmp_path: Path) -> None:
    base, tuned, _ = pair(tmp_path, noise())
    late = Directions(("d",), ("",), (3,), directions(1).rows[3:])
    seen: list[tuple[str, int, int]] = []
    result = susceptibility(base, tuned, late, random=20, progress=lambda *step: seen.append(step))
    assert set(result.tables["cells"].column("layer").to_pylist()) == {3}
    assert seen == [("layers", 1, 1)]
    again = susceptibility(base, tuned, late, random=20)
    assert result.tables["cells"].equals(again.tables["cells"])
    other = susceptibility(base, tuned, late, random=20, seed=1)
    assert result.tables["cells"].column("alignment").equals(other.tables["cells"].column("alignment"))
    assert not result.tables["cells"].column("z").equals(other.tables["cells"].column("z"))


def test_matrices_that_did_not_change_have_no_cells(tmp_path: Path) -> None:
    def change(name: str, parameter: nn.Parameter) -> Tensor | None:
        return torch.ones_like(parameter) if name == "model.layers.1.mlp.up_proj.weight" else None

    base, tuned, _ = pair(tmp_path, change)
    tables = susceptibility(base, tuned, directions(), random=20).tables
    assert {(row["layer"], row["matrix"]) for row in tables["cells"].to_pylist()} == {(1, "mlp.up_proj")}
    sizes = {(row["layer"], row["matrix"]): row["relative"] for row in tables["changes"].to_pylist()}
    assert len(sizes) == 4 * 7 + 2
    assert sizes[0, "mlp.up_proj"] == 0
    weight = base.layer(1)["mlp.up_proj.weight"]
    assert sizes[1, "mlp.up_proj"] == pytest.approx(weight.numel() ** 0.5 / float(weight.norm()), rel=1e-5)


def test_shapes_tell_who_reads_and_who_writes_and_names_only_where_a_matrix_is_square() -> None:
    shapes = {
        "a.mystery": (64, 128),
        "b.mystery": (128, 64),
        "c.o_proj": (64, 64),
        "d.mystery": (64, 64),
        "e.x": (9, 9),
    }
    weights = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    found = {kind: (side, len(rows)) for kind, side, rows in facing(weights, HIDDEN)}
    reads, writes = ("reads", 64), ("writes", 64)
    assert found == {"a.mystery": ("writes", 128), "b.mystery": ("reads", 128), "c.o_proj": writes, "d.mystery": reads}


def test_experts_of_one_kind_are_one_matrix(tmp_path: Path) -> None:
    base = Checkpoint(_saved(tmp_path, "qwen3_moe"))
    found: dict[str, int] = {}
    for kind, side, rows in facing(base.layer(0), HIDDEN):
        found[f"{kind} {side}"] = found.get(f"{kind} {side}", 0) + len(rows)
    assert found["mlp.experts.down_proj writes"] == 4 * 64
    assert found["mlp.experts.up_proj reads"] == 4 * 64
    assert found["mlp.gate reads"] == 4


def _saved(folder: Path, architecture: str, **changes: object) -> Path:
    tiny.model(architecture, **changes).save_pretrained(folder)
    return folder


def test_what_cannot_be_compared_is_told_at_once(tmp_path: Path) -> None:
    base = Checkpoint(_saved(tmp_path / "a", "llama"))
    short = Checkpoint(_saved(tmp_path / "b", "llama", layers=2, hidden_size=32))
    wide = Directions(("d",), ("",), (0,), np.ones((1, 1, 8), np.float32))
    with pytest.raises(InvalidRequest) as error:
        susceptibility(base, short, wide, layer=9, random=5, against=directions(2))
    fields = [problem.field for problem in error.value.problems]
    assert fields == ["tuned", "directions", "directions", "against", "random", "against"]
    with pytest.raises(InvalidRequest, match="is the base itself"):
        susceptibility(base, base, directions(), random=20)
    twin = Checkpoint(_saved(tmp_path / "twin", "llama"))
    with pytest.raises(InvalidRequest, match="nothing changed"):
        susceptibility(base, twin, directions(), random=20)
    other = Checkpoint(_saved(tmp_path / "c", "llama", intermediate_size=96))
    with pytest.raises(BadFile, match=r"differs in the shape of mlp.down_proj.weight, mlp.gate_proj.weight"):
        susceptibility(base, other, directions(), random=20)
    late = Directions(("d",), ("",), (7,), np.ones((1, 1, HIDDEN), np.float32))
    with pytest.raises(InvalidRequest, match="it has 0-3"):
        susceptibility(base, twin, late)
    zero = Directions(("d",), ("",), (1,), np.zeros((1, 1, HIDDEN), np.float32))
    with pytest.raises(InvalidRequest, match="one is zero at layer 1"):
        susceptibility(base, twin, zero)
