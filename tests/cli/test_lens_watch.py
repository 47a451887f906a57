"""`steerscope lens watch` and `lens report`: what the lenses said arrives in the terminal, as JSON and on the page."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from lenses.packs import make
from steerscope.lenses import Pack

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

Cli = Callable[..., Result]
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make([3, 6, 12], hidden=64, calibrated=True)
    concepts = [c.model_copy(update={"name": f"<b>{c.id}</b>", "metrics": {"auroc": 0.91}}) for c in made.concepts]
    info = made.info.model_copy(update={"layer": 2, "model": "tiny"})
    folder = tmp_path_factory.mktemp("packs") / "pack"
    made.replace(info=info, concepts=concepts).save(folder)
    return folder


@pytest.fixture
def ask(cli: Cli, model: str, pack: Path) -> Callable[..., dict]:
    def run(*arguments: object) -> dict:
        base = ("lens", "watch", PROMPT, "--pack", pack, "--model", model, "--max-tokens", 8, "--json")
        result = cli(*base, *arguments)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def test_json_has_a_reading_for_every_row(ask: Callable[..., dict]):
    found = ask("--top-k", 2)
    rows = len(found["prompt_token_ids"]) + len(found["token_ids"]) - 1
    assert [reading["position"] for reading in found["readings"]] == list(range(rows))
    assert all(len(reading["concepts"]) <= 2 for reading in found["readings"])
    assert max(len(reading["concepts"]) for reading in found["readings"]) == 2
    assert {"id", "name", "path", "probability"} == set(found["readings"][0]["concepts"][0])
    assert (found["firings"], found["rule"]) == ([], None)


def test_a_text_is_stopped_and_flagged_by_what_was_asked_for(ask: Callable[..., dict], pack: Path):
    free = ask("--top-k", 21)
    last = free["readings"][-2]["concepts"][0]
    bound = last["probability"] / 2
    found = ask("--stop-when", f"{last['id']} > {bound:.4f}", "--flag-when", f"{last['id']}<0.01")
    assert found["finish_reason"] == "rule"
    assert found["rule"] == f"{last['id']} > {bound:.4f}"
    stop = next(f for f in found["firings"] if f["action"] == "stop")
    assert len(found["token_ids"]) == stop["token"] + 1
    assert found["token_ids"] == free["token_ids"][: stop["token"] + 1]
    assert Pack.load(pack).index(last["id"]) >= 0


def test_the_terminal_shows_prompt_text_rules_and_who_led(cli: Cli, model: str, pack: Path, ask: Callable[..., dict]):
    concept = ask()["readings"][-1]["concepts"][0]["id"]
    flags = ("--flag-when", f"{concept}>0.01", "--top-k", 2)
    result = cli("lens", "watch", PROMPT, "--pack", pack, "--model", model, "--max-tokens", 8, *flags)
    assert result.exit_code == 0, result.output
    shown = result.stdout
    assert "quick brown fox" in shown
    assert f"[{concept}>0.01: " in shown
    assert "leads on" in result.stderr
    assert "8 tokens in" in result.stderr
    plain = cli("generate", model, PROMPT, "--max-tokens", 8, "--json")
    tail = json.loads(plain.stdout)["text"].strip().split()
    assert all(word in shown for word in tail), "the text itself is there"


def test_a_page_holds_the_heat_map_the_tree_and_no_foreign_html(cli: Cli, model: str, pack: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    arguments = ("lens", "report", PROMPT, "--pack", pack, "--model", model, "--max-tokens", 8, "--out", page)
    result = cli(*arguments, "--flag-when", "c0.0>0.0001")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(page)
    text = page.read_text(encoding="utf-8")
    for plot in ("plot-heat", "plot-tree"):
        assert f'id="{plot}"' in text
    body = text.split("</script></head>")[1]
    assert '"type":"heatmap"' in body.replace(" ", "")
    assert '"type":"sunburst"' in body.replace(" ", "")
    assert "c0.0&gt;0.0001" in body, "the rule that fired is listed"
    assert "<b>c" not in body, "names are escaped"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stop-when", "anger"), "'anger': is not a condition; write 'concept>0.8'"),
        (("--stop-when", "a>1.2.3"), "'1.2.3' is not a number"),
        (("--top-k", 0), "top_k: cannot be 0; give at least 1"),
    ],
)
def test_mistakes_are_told(refused, model: str, pack: Path, arguments: tuple, message: str):
    lines = refused("lens", "watch", PROMPT, "--pack", pack, "--model", model, *arguments)
    assert any(message in line for line in lines), lines


def test_concepts_and_packs_that_do_not_fit_are_told(refused, model: str, pack: Path, tmp_path: Path):
    base = ("lens", "watch", PROMPT, "--model", model)
    lines = refused(*base, "--pack", pack, "--stop-when", "c0.7>0.5")
    assert "'c0.7' is not in pack 'test'; near it are" in lines[0]
    assert refused(*base, "--pack", tmp_path / "none")
    other = Pack.load(pack)
    other.replace(info=other.info.model_copy(update={"model": "org/other"})).save(tmp_path / "other")
    assert "trained on 'org/other'" in refused(*base, "--pack", tmp_path / "other")[0]
