"""Many vectors side by side: numbers against plain loops, tables read back, and the page."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from steerscope.analysis import compare as module
from steerscope.analysis.compare import Comparison, save_tables, vector_files
from steerscope.analysis.report import comparison_page
from steerscope.specs.errors import InvalidRequest
from steerscope.vectors.files import save
from steerscope.vectors.vector import SteeringVector

HIDDEN = 16


def vector(base: int, method: str | None = None, layers: range | None = range(3), noise: float = 0.2) -> SteeringVector:
    """Vectors of one base are near each other at every layer."""
    generator = torch.Generator().manual_seed(base)
    directions = {layer: torch.randn(HIDDEN, generator=generator) for layer in range(3)}
    other = torch.Generator().manual_seed(1000 * base + len(method or ""))
    moved = {k: (k + 1) * (d + noise * torch.randn(HIDDEN, generator=other)) for k, d in directions.items()}
    if layers is None:
        return SteeringVector.shared(moved[0])
    return SteeringVector({layer: moved[layer] for layer in layers}, method=method)


def compare(vectors: dict[str, SteeringVector]) -> Comparison:
    return module.compare(list(vectors), list(vectors.values()))


def some() -> dict[str, SteeringVector]:
    return {
        "averaged/happy.safetensors": vector(1, "mean_difference"),
        "averaged/angry.safetensors": vector(2, "mean_difference"),
        "learned/happy.safetensors": vector(1, "learned", range(1, 2)),
        "probe/angry.safetensors": vector(2, "logistic_probe", range(2)),
        "learned/lone.safetensors": vector(3, "learned", range(2, 3)),
    }


def test_cosines_and_norms_are_those_of_each_pair_at_each_layer_both_have() -> None:
    vectors = some()
    found, values = compare(vectors), list(vectors.values())
    assert found.names == tuple(vectors)
    assert found.layers == (0, 1, 2)
    for k in range(3):
        for i, a in enumerate(values):
            assert (k in a.directions) == (not np.isnan(found.norms[k, i]))
            for j, b in enumerate(values):
                if k in a.directions and k in b.directions:
                    wanted = torch.nn.functional.cosine_similarity(a[k], b[k], dim=0)
                    assert found.cosine[k, i, j] == pytest.approx(float(wanted), abs=1e-6)
                    assert found.norms[k, i] == pytest.approx(float(a[k].norm()))
                else:
                    assert np.isnan(found.cosine[k, i, j])
    both = [found.cosine[0, 1, 3], found.cosine[1, 1, 3]]
    assert found.mean[1, 3] == pytest.approx(np.mean(both))
    assert np.isnan(found.mean[2, 4])


def test_near_vectors_share_a_cluster_and_stand_together() -> None:
    found = compare(some())
    happy, angry, learned, probe, lone = found.clusters
    assert happy == learned
    assert angry == probe
    assert len({happy, angry, lone}) == 3
    assert sorted(found.order) == list(range(5))
    in_order = [found.clusters[i] for i in found.order]
    assert in_order == sorted(in_order)


def test_a_learned_vector_is_held_against_the_averaged_one_of_its_name() -> None:
    one, *probe = compare(some()).agreement
    assert (one.learned, one.averaged, one.layer) == ("learned/happy.safetensors", "averaged/happy.safetensors", 1)
    assert one.cosine > 0.9
    assert (one.rank, one.of) == (1, 2)
    assert [(other.learned, other.layer) for other in probe] == [("probe/angry.safetensors", k) for k in (0, 1)]
    turned = {**some(), "averaged/happy.safetensors": -vector(1, "mean_difference")}
    far = compare(turned).agreement[0]
    assert (far.rank, far.of) == (2, 2)


def test_a_shared_vector_takes_part_at_all_layers_and_a_zero_one_is_like_none() -> None:
    zero = SteeringVector({0: torch.zeros(HIDDEN)})
    found = compare({"a": vector(1), "s": vector(1, layers=None), "z": zero})
    assert found.layers == (0, 1, 2)
    assert not np.isnan(found.cosine[:, :2, :2]).any()
    assert found.cosine[0, 2, 0] == 0
    assert compare({"a": vector(1, layers=None), "b": vector(2, layers=None)}).layers == (None,)


def test_what_cannot_be_compared_is_refused_with_every_reason() -> None:
    wide = SteeringVector({1: torch.ones(3)}, site="mlp_out")
    with pytest.raises(InvalidRequest) as caught:
        compare({"a": vector(1), "b": wide})
    assert [problem.field for problem in caught.value.problems] == ["hidden", "site"]
    with pytest.raises(InvalidRequest, match="no two vectors have a layer in common"):
        compare({"a": vector(1, layers=range(1)), "b": vector(1, layers=range(1, 2))})
    with pytest.raises(InvalidRequest, match="give at least two"):
        compare({"a": vector(1)})


def test_tables_hold_every_number_once(tmp_path: Path) -> None:
    found = compare(some())
    cosine, vectors = (pq.read_table(path).to_pylist() for path in save_tables(found, tmp_path))
    place = {name: i for i, name in enumerate(found.names)}
    assert len(cosine) == sum(int((~np.isnan(np.tril(x, -1)[np.tril_indices(5, -1)])).sum()) for x in found.cosine)
    for row in cosine:
        assert row["cosine"] == pytest.approx(found.cosine[row["layer"], place[row["a"]], place[row["b"]]])
    assert {(row["name"], row["layer"]) for row in vectors} == {
        (name, layer) for name, one in some().items() for layer in one.layers or ()
    }
    for row in vectors:
        assert row["norm"] == found.norms[row["layer"], place[row["name"]]]
        assert row["cluster"] == found.clusters[place[row["name"]]]


def test_folders_are_searched_and_what_is_no_vector_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "deep" / "chat").mkdir(parents=True)
    save(vector(1), tmp_path / "b.safetensors")
    save(vector(1, layers=range(1, 3)), tmp_path / "deep" / "a.gguf")
    for name in ("deep/chat/steering_vector.pt", "default_vectors.pt", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    found = vector_files([tmp_path, tmp_path / "b.safetensors"])
    wanted = ["b.safetensors", "deep/a.gguf", "deep/chat", "b.safetensors"]
    assert [str(path.relative_to(tmp_path)) for path, _ in found] == wanted
    assert [named for _, named in found] == [False, False, False, True]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="empty: holds no vector files"):
        vector_files([tmp_path / "empty"])


def test_the_page_shows_all_parts_and_escapes_names() -> None:
    text = comparison_page(compare({**some(), "averaged/<b>x.safetensors": vector(5, "mean_difference")}))
    assert "<b>x" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "&lt;b&gt;x" in text
    for part in ("plot-heat", "plot-norms", "Clusters", "1 of 3", "layer 2"):
        assert part in text
    plain = comparison_page(compare({"a": vector(1, layers=None), "b": vector(2, layers=None)}))
    assert "No learned vector has an averaged one of the same name beside it." in plain


def test_the_page_takes_any_path_as_a_name_and_calls_a_shared_layer_so() -> None:
    both = {".": vector(1, layers=None), "../x.v1": replace(vector(1, layers=None), method="learned")}
    assert "x.v1" in comparison_page(compare(both))
    shared = replace(vector(1, layers=None), method="learned")
    text = comparison_page(compare({"a/happy": vector(1, layers=None), "b/happy": shared}))
    assert "<td>shared</td>" in text
    assert "None" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
