"""The demo on the real SmolLM2, with fewer scales and shorter answers: it runs, and its facts hold."""

from pathlib import Path

import pytest

from steerscope.demo import run
from steerscope.demo.results import Results
from steerscope.lenses import Pack
from steerscope.progress import ProgressBars

pytestmark = pytest.mark.smollm


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    kept: list[Results] = []

    def reduced(model: str, bars: ProgressBars, packs: Path) -> Results:
        kept.append(measure(model, bars, packs, sweep_tokens=16, answer_tokens=24))
        return kept[-1]

    measure, out = run.measure, tmp_path_factory.mktemp("demo") / "demo-report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measure", reduced)
        patch.setattr(run, "SCALES", (-1.0, -run.SCALE, 0.0, run.SCALE, 1.0))
        run.run_demo(out)
    return out, kept[0]


def test_it_writes_one_page_and_a_pack_and_nothing_else(demo: tuple[Path, Results]) -> None:
    out, results = demo
    assert sorted(file.name for file in out.iterdir()) == ["index.html", "lenses"]
    assert len(Pack.load(out / "lenses")) == results.lenses.count > 20
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count("Plotly.newPlot(") >= 7
    assert f"{results.control.gap:.1f} nats" in page


def test_the_lenses_see_what_the_steering_does(demo: tuple[Path, Results]) -> None:
    _, results = demo
    _, happy, sad = results.lenses.maps
    assert results.lenses.text_auroc > 0.85
    assert happy.mean(0) - happy.mean(1) > sad.mean(0) - sad.mean(1)


def test_the_direction_tells_sentences_apart_that_it_has_not_seen(demo: tuple[Path, Results]) -> None:
    _, results = demo
    assert results.heldout_auroc > 0.9


def test_steering_moves_the_words_more_than_random_directions_do(demo: tuple[Path, Results]) -> None:
    _, results = demo
    up, plain, down = (results.dose(sign * results.scale).log_odds for sign in (1, 0, -1))
    assert up > plain > down
    assert up - down == pytest.approx(results.control.gap)
    assert results.control.z > 3
    assert results.control.gap > 2 * max(map(abs, results.control.random_gaps))


def test_the_unsteered_model_is_surprised_by_steered_answers_and_most_by_overdone_ones(
    demo: tuple[Path, Results],
) -> None:
    _, results = demo
    low, down, plain, up, high = (dose.perplexity for dose in results.doses)
    assert low > down > plain < up < high


def test_rows_lie_where_each_op_puts_them(demo: tuple[Path, Results]) -> None:
    _, results = demo
    for prompt in run.SHOWN_PROMPTS:
        place = {answer.condition: answer.projection for answer in results.answers if answer.prompt == prompt}
        assert list(place) == ["unsteered", "happy", "sad", "capped", "ablated"]
        assert place["happy"] > place["unsteered"] + 0.1 > place["sad"] + 0.2
        assert place["capped"] <= results.cap_at + 1e-4
    ablated = [answer.projection for answer in results.answers if answer.condition == "ablated"]
    assert max(ablated) - min(ablated) < 1e-4  # the component is gone, whatever was said


def test_the_heat_map_has_a_row_per_layer_and_a_column_per_shown_token(demo: tuple[Path, Results]) -> None:
    _, results = demo
    assert [heat.condition for heat in results.heat] == ["unsteered", "happy", "sad"]
    for heat in results.heat:
        assert len(heat.values) == results.layers
        assert {len(row) for row in heat.values} == {len(heat.tokens)}
        assert "".join(heat.tokens[: heat.answer_start]) == heat.prompt
