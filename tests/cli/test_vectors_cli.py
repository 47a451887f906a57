"""`steerscope vectors`: show, convert, compare and arith."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import Result

from steerscope import SteeringVector, load_vector, save_vector

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

Cli = Callable[..., Result]
Refused = Callable[..., list[str]]

A = {1: [3.0, 4.0], 2: [1.0, 0.0]}
B = {1: [4.0, 3.0], 2: [0.0, 2.0]}


def vector(directions: dict[int, list[float]], **about: str) -> SteeringVector:
    tensors = {layer: torch.tensor(numbers) for layer, numbers in directions.items()}
    return SteeringVector(tensors, provenance={"name": "made"}, **about)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_vector(vector(A, model="org/name", method="mean difference", site="mlp_out"), "a.safetensors")
    save_vector(vector(B, site="mlp_out"), "b.safetensors")
    save_vector(vector({2: [1.0, 1.0], 5: [1.0, 1.0]}, site="mlp_out"), "c.safetensors")
    return tmp_path


@pytest.fixture
def done(cli: Cli) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        result = cli("vectors", *arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


Done = Callable[..., str]


def cells(text: str) -> list[list[str]]:
    """The rows of a drawn table, without its head."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


# --- show


@pytest.mark.usefixtures("folder")
def test_show_tells_layers_norms_and_origin(done: Done) -> None:
    facts = cells(done("show", "a.safetensors"))
    assert ["site", "mlp_out"] in facts
    assert ["hidden", "2"] in facts
    assert ["model", "org/name"] in facts
    assert ["method", "mean difference"] in facts
    assert ["provenance: name", '"made"'] in facts
    assert facts[-2:] == [["1", "5", "torch.float32"], ["2", "1", "torch.float32"]]


@pytest.mark.usefixtures("folder")
def test_show_does_not_read_markup_in_names(done: Done) -> None:
    save_vector(SteeringVector.shared(torch.ones(4), model="[red]m[/red] [/]"), "[b]x.safetensors")
    text = done("show", "[b]x.safetensors")
    assert "[red]m[/red] [/]" in text
    assert "[b]x.safetensors" in text
    assert cells(text)[-1] == ["shared", "2", "torch.float32"]


def capping(path: Path) -> None:
    vectors = {f"v{layer}": {"vector": torch.ones(2), "layer": layer} for layer in (3, 4)}
    both = [{"vector": "v3", "cap": 1.0}, {"vector": "v4", "cap": 2.0}]
    experiments = [{"id": "layers_3:5-p0.5", "interventions": both}, {"id": "one", "interventions": both[1:]}]
    torch.save({"vectors": vectors, "experiments": experiments}, path)


def test_show_lists_the_experiments_of_a_capping_config(done: Done, folder: Path) -> None:
    capping(folder / "capping_config.pt")
    assert cells(done("show", "capping_config.pt")) == [["layers_3:5-p0.5", "2", "3, 4"], ["one", "1", "4"]]


@pytest.mark.parametrize("name", ["gone.safetensors", "gone.pt"])
@pytest.mark.usefixtures("folder")
def test_show_names_a_file_that_is_not_there(refused: Refused, name: str) -> None:
    assert refused("vectors", "show", name) == [f"{name} does not exist"]


def test_show_names_a_file_that_is_no_vector(refused: Refused, folder: Path) -> None:
    (folder / "junk.safetensors").write_bytes(b"junk")
    torch.save({"x": 1}, folder / "junk.pt")
    for name in ("junk.safetensors", "junk.pt"):
        (line,) = refused("vectors", "show", name)
        assert name in line


# --- extract


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--out", "v.gguf"), "cannot write v.gguf: GGUF has no place for layer 0 (llama.cpp refuses direction.0);"),
        (("--out", "v.gguf", "--layers", "0-3"), "cannot write v.gguf: GGUF has no place for layer 0"),
        (("--out", "v.gguf", "--layers", "1", "--site", "attn_out"), "cannot write v.gguf: llama.cpp would apply it"),
        (("--out", "v.bin"), "cannot write v.bin: unknown suffix '.bin'"),
        (("--out", "nowhere/v.safetensors"), "cannot write nowhere/v.safetensors: the folder "),
    ],
)
@pytest.mark.usefixtures("folder")
def test_extract_refuses_a_file_that_cannot_hold_the_vector_before_it_loads_a_model(
    refused: Refused, options: tuple[str, ...], line: str
) -> None:
    (found,) = refused("vectors", "extract", "--model", "./no-such-model", "--data", "happy_sad", *options)
    assert found.startswith(line)


def test_extract_writes_a_gguf_of_layers_from_1_on(done: Done, folder: Path, model: str) -> None:
    done("extract", "--model", model, "--data", "happy_sad", "--layers", "1-2", "--out", "v.gguf")
    assert load_vector(folder / "v.gguf").layers == (1, 2)


# --- convert


@pytest.mark.usefixtures("folder")
def test_convert_keeps_every_bit_there_and_back(done: Done) -> None:
    save_vector(vector({1: [0.1, -7e-5], 2: [1 / 3, 9.0]}, model="m"), "own.safetensors")
    done("convert", "own.safetensors", "there.gguf")
    assert Path("there.gguf").read_bytes().startswith(b"GGUF")
    done("convert", "there.gguf", "back.safetensors")
    assert load_vector("back.safetensors").equals(load_vector("own.safetensors"))


def test_convert_reads_persona_files_by_key_and_default(done: Done, folder: Path) -> None:
    role = {"pos_3": torch.full((2, 4), 5.0), "pos_2": torch.full((2, 4), 3.0)}
    torch.save(role, folder / "role.pt")
    torch.save({"activations": {"default_1": torch.full((2, 4), 1.0)}}, folder / "elsewhere.pt")
    done("convert", "role.pt", "plain.safetensors", "--key", "pos_2")
    assert load_vector("plain.safetensors")[1].tolist() == [3.0] * 4
    done("convert", "role.pt", "difference.safetensors", "--key", "pos_2-default_1", "--default", "elsewhere.pt")
    assert load_vector("difference.safetensors")[1].tolist() == [2.0] * 4
    done("convert", "role.pt", "usual.safetensors", "--default", "elsewhere.pt")
    assert load_vector("usual.safetensors")[0].tolist() == [4.0] * 4


def test_convert_refuses_what_it_cannot_write_and_leaves_nothing(refused: Refused, folder: Path) -> None:
    before = sorted(folder.iterdir())
    for target in ("a.bin", "no/such/folder/a.safetensors", "a.gguf"):  # mlp_out has no place in a GGUF
        (line,) = refused("vectors", "convert", "a.safetensors", target)
        assert target in line
    assert sorted(folder.iterdir()) == before


# --- compare


@pytest.mark.usefixtures("folder")
def test_compare_gives_the_cosine_of_each_pair_at_each_common_layer(done: Done) -> None:
    assert cells(done("compare", "a.safetensors", "b.safetensors")) == [["1", "+0.9600"], ["2", "+0.0000"]]
    three = done("compare", "a.safetensors", "b.safetensors", "c.safetensors")
    assert "a.safetensors · c.safetensors" in three
    assert cells(three) == [["1", "+0.9600", "—", "—"], ["2", "+0.0000", "+0.7071", "+0.7071"]]


@pytest.mark.usefixtures("folder")
def test_compare_as_json_is_a_symmetric_matrix_per_layer(done: Done) -> None:
    found = json.loads(done("compare", "a.safetensors", "b.safetensors", "c.safetensors", "--json"))
    assert found["files"] == ["a.safetensors", "b.safetensors", "c.safetensors"]
    half = math.sqrt(0.5)
    expected = [[1, 0, half], [0, 1, half], [half, half, 1]]
    assert list(found["cosine"]) == ["1", "2"]
    assert found["cosine"]["1"][2] == [None, None, None]
    assert found["cosine"]["2"] == [pytest.approx(row) for row in expected]


@pytest.mark.usefixtures("folder")
def test_compare_takes_shared_vectors(done: Done) -> None:
    save_vector(SteeringVector.shared(torch.tensor([1.0, 0.0]), site="mlp_out"), "s.safetensors")
    assert cells(done("compare", "s.safetensors", "s.safetensors")) == [["shared", "+1.0000"]]
    assert cells(done("compare", "a.safetensors", "s.safetensors")) == [["1", "+0.6000"], ["2", "+1.0000"]]


@pytest.mark.usefixtures("folder")
def test_compare_refuses_what_cannot_be_compared(refused: Refused) -> None:
    save_vector(vector({7: [1.0, 1.0]}, site="mlp_out"), "far.safetensors")
    save_vector(vector({1: [1.0, 1.0, 1.0]}), "wide.safetensors")
    assert "give at least two" in refused("vectors", "compare", "a.safetensors")[0]
    assert "a layer in common" in refused("vectors", "compare", "a.safetensors", "far.safetensors")[0]
    assert len(refused("vectors", "compare", "a.safetensors", "wide.safetensors")) == 2  # size and site
    assert refused("vectors", "compare", "a.safetensors", "gone.safetensors") == ["gone.safetensors does not exist"]


# --- arith


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a", A),
        ("-a", {1: [-3.0, -4.0], 2: [-1.0, 0.0]}),
        ("a + b", {1: [7.0, 7.0], 2: [1.0, 2.0]}),
        ("a - b", {1: [-1.0, 1.0], 2: [1.0, -2.0]}),
        ("0.5*a - b/2 + a", {1: [2.5, 4.5], 2: [1.5, -1.0]}),
        ("-(a*2 - b) * (1 - 3) / 4", {1: [1.0, 2.5], 2: [1.0, -1.0]}),
    ],
)
@pytest.mark.usefixtures("folder")
def test_arith_computes(done: Done, expression: str, expected: dict[int, list[float]]) -> None:
    done("arith", expression, "--out", "out.safetensors", "--set", "a=a.safetensors", "--set", "b=b.safetensors")
    found = load_vector("out.safetensors")
    assert {layer: found[layer].tolist() for layer in (1, 2)} == expected
    assert (found.site, found.model, found.method) == ("mlp_out", "org/name", expression)
    assert found.provenance["files"] == {"a": "a.safetensors", "b": "b.safetensors"}


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        ("a ** 2", "Pow is not allowed"),
        ("a @ b", "MatMult is not allowed"),
        ("a // 2", "FloorDiv is not allowed"),
        ("+a", "UAdd is not allowed"),
        ("not a", "Not is not allowed"),
        ("a if 1 else b", "IfExp is not allowed"),
        ("a.norms()", "Call is not allowed"),
        ("a.directions", "Attribute is not allowed"),
        ("__import__('os').system('touch hacked')", "Call is not allowed"),
        ("[a][0]", "Subscript is not allowed"),
        ("a * 'x'", "Constant is not allowed"),
        ("a * True", "Constant is not allowed"),
        ("a * 1j", "Constant is not allowed"),
        ("lambda: a", "Lambda is not allowed"),
        ("(z := a)", "NamedExpr is not allowed"),
        ("a * b", "cannot be computed"),
        ("a + 1", "cannot be computed"),
        ("1 - a", "cannot be computed"),
        ("2 / a", "cannot be computed"),
        ("a / 0", "cannot be computed"),
        ("a * (1 / (1 - 1))", "cannot be computed"),
        ("z + a", "z: is not set; add --set z=FILE"),
        ("1 + 2", "is a number, not a vector"),
        ("a +", "invalid syntax"),
        ("a; b", "invalid syntax"),
        ("", "invalid syntax"),
        ("a * 1" + "0" * 400, "too large"),
        ("-" * 5000 + "a", "write something like"),
        ("(" * 500 + "a" + ")" * 500, "write something like"),
    ],
)
def test_arith_refuses_everything_else(refused: Refused, folder: Path, expression: str, part: str) -> None:
    sets = ("--set", "a=a.safetensors", "--set", "b=b.safetensors")
    (line,) = refused("vectors", "arith", *sets, "--out", "out.safetensors", expression)
    assert part in line
    assert not (folder / "out.safetensors").exists()
    assert not (folder / "hacked").exists()


@pytest.mark.usefixtures("folder")
def test_arith_names_sets_and_layers_that_do_not_fit(refused: Refused) -> None:
    assert "write --set a=vector" in refused("vectors", "arith", "a", "--out", "out.safetensors", "--set", "a")[0]
    assert refused("vectors", "arith", "a", "--out", "out.safetensors", "--set", "a=gone.pt") == [
        "gone.pt does not exist"
    ]
    sets = ("--set", "a=a.safetensors", "--set", "c=c.safetensors")
    assert "layers" in refused("vectors", "arith", "a+c", "--out", "out.safetensors", *sets)[0]


# --- extract, and folders compared


def contrast(path: Path) -> Path:
    words = ["dog", "week", "work", "beach", "fox", "time"]
    lines = [{"positive": f"The {word} had a wonderful time", "negative": f"Then the {word} rained"} for word in words]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def asked(model: str, data: Path | str, out: Path | str) -> list[Path | str]:
    return ["--model", model, "--data", data, "--out", out]


def test_extract_writes_a_vector_that_steers_as_it_says(done: Done, cli: Cli, model: str, tmp_path: Path) -> None:
    data, out = contrast(tmp_path / "pairs.jsonl"), tmp_path / "pairs.safetensors"
    text = done("extract", *asked(model, data, out), "--layers", "1-3", "--strategy", "centred_pca", "--tokens", "all")
    assert [row[0] for row in cells(text)] == ["1", "2", "3"]
    vector = load_vector(out)
    assert (vector.layers, vector.method, vector.provenance["name"]) == ((1, 2, 3), "centred_pca", "pairs")
    (steer,) = [line.split()[2].rstrip(",") for line in text.splitlines() if line.startswith("try --steer ")]
    assert steer.startswith(f"{out}@")
    assert cli("generate", model, "The lazy dog", "--steer", steer, "--max-tokens", 2).exit_code == 0


def test_extract_as_json_tells_the_quality_of_each_layer(done: Done, model: str, tmp_path: Path) -> None:
    data, out = contrast(tmp_path / "pairs.jsonl"), tmp_path / "pairs.safetensors"
    told = json.loads(done("extract", *asked(model, data, out), "--heldout", data, "--json"))
    assert told["file"] == str(out)
    assert [one["layer"] for one in told["quality"]] == [0, 1, 2, 3]
    assert load_vector(out).provenance["recommended"]["layer"] == told["layer"]  # type: ignore[call-overload,index]


def test_compare_takes_folders_and_writes_a_page_and_tables(done: Done, tmp_path: Path) -> None:
    (tmp_path / "vectors").mkdir()
    for i in range(5):
        save_vector(vector({1: [1.0, i]}), tmp_path / "vectors" / f"v{i}.safetensors")
    rows = cells(done("compare", tmp_path / "vectors", "--out", tmp_path / "report"))
    assert len(rows) == 5
    assert all(row[i + 1] == "+1.0000" for i, row in enumerate(rows))
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"index.html", "cosine.parquet", "vectors.parquet"}


def test_compare_leaves_out_what_it_finds_that_is_no_vector_and_refuses_it_where_named(
    cli: Cli, refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "activations").mkdir()
    for i in range(2):
        save_vector(vector({1: [1.0, i]}), tmp_path / f"v{i}.safetensors")
        save_file({"means": torch.zeros(2, 3, 4)}, tmp_path / "activations" / f"{i}.safetensors")
    found = cli("vectors", "compare", tmp_path, "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["files"] == [str(tmp_path / f"v{i}.safetensors") for i in range(2)]
    assert "left out" in found.stderr
    assert "and 1 more" in found.stderr
    (line,) = refused("vectors", "compare", tmp_path, tmp_path / "activations" / "0.safetensors")
    assert "holds a tensor of shape [2, 3, 4]" in line
    none = cli("vectors", "compare", tmp_path / "activations")
    assert none.exit_code == 2
    assert "error: compare: there are 0 vectors; give at least two" in none.stderr


def test_extract_refuses_with_every_mistake_at_once(refused: Refused, model: str, tmp_path: Path) -> None:
    lines = refused(
        "vectors", "extract", *asked(model, "gone.jsonl", "x.safetensors"), "--strategy", "magic", "--tokens", "x"
    )
    assert len(lines) == 3
    assert lines[0] == "gone.jsonl: is no file and no shipped set; sets are calm_angry, happy_sad, hot_cold"
    assert not (tmp_path / "x.safetensors").exists()


def test_mistakes_in_what_to_extract_are_told_together(refused: Refused, model: str, tmp_path: Path) -> None:
    wrong = ["--layers", "9-1", "--tokens", "none", "--strategy", "magic"]
    lines = refused("vectors", "extract", *asked(model, "no_such_set", tmp_path / "v.safetensors"), *wrong)
    assert len(lines) == 4
    assert lines[3] == "layers: layer range '9-1' runs backwards; write '1-9'"
