"""The page in Chromium against a real server: on a tiny model what it does, on SmolLM2 what a person sees."""

import contextlib
import copy
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from safetensors import safe_open
from sklearn.linear_model import LogisticRegression

import steerscope
from lenses import packs
from serving.browser import Screen, chromium_path, screen, served, wait_for
from steerscope.engines.api import Engine
from steerscope.engines.hf import HFEngine
from steerscope.engines.load import load_engine
from steerscope.extraction import load_contrast_set, mean_difference, row_norms, sentence_rows, sentences
from steerscope.lenses.formats.probes import from_probes
from steerscope.serving.settings import ServerSettings
from steerscope.specs.watch import flag, when
from steerscope.vectors import files
from steerscope.vectors.vector import SteeringVector
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow

HIDDEN = 64
VALUES = "[...document.querySelectorAll('.answer .t')].map(t => Number(t.style.getPropertyValue('--v')))"
# What the browser itself says was done to the tokens, beside the page's own count.
COUNT_CHANGES = """() => {
  window.changes = { added: 0, removed: 0, styled: 0 };
  const tokens = (nodes) => [...nodes].reduce((n, node) => n + (node.nodeType === 1
    ? node.matches(".t") + node.querySelectorAll(".t").length : 0), 0);
  new MutationObserver((records) => {
    for (const record of records) {
      if (record.type === "attributes") window.changes.styled += record.target.matches(".t");
      else {
        window.changes.removed += tokens(record.removedNodes);
        window.changes.added += tokens(record.addedNodes);
      }
    }
  }).observe(document.querySelector("#log"), { childList: true, subtree: true, attributeFilter: ["style"] });
}"""


def tiny_engine() -> Engine:
    model = copy.deepcopy(tiny.model("llama", max_position_embeddings=4096))
    with torch.no_grad():
        model.lm_head.weight[:4] = 0  # never the likeliest: texts only end at their limit
    return HFEngine(model, tiny.tokenizer("bytes"), name="tiny")


@pytest.fixture(scope="module")
def furniture(tmp_path_factory: pytest.TempPathFactory) -> ServerSettings:
    """A pack of 21 lenses and two vectors."""
    folder = tmp_path_factory.mktemp("page")
    packs.make(hidden=HIDDEN).save(folder / "moods")
    draw = torch.Generator().manual_seed(0)
    for name in ("north", "east"):
        directions = {layer: torch.randn(HIDDEN, generator=draw) for layer in range(4)}
        (folder / "vectors").mkdir(exist_ok=True)
        files.save(SteeringVector(directions, model="tiny"), folder / "vectors" / f"{name}.safetensors")
    return ServerSettings(port=0, vectors=str(folder / "vectors"), lenses=(str(folder / "moods"),), any_model=True)


@pytest.fixture(scope="module")
def address(furniture: ServerSettings) -> Iterator[str]:
    chromium_path()
    with served(tiny_engine, furniture) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    path = chromium_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=path, args=["--headless", "--no-sandbox"], timeout=HUNG_S * 1000
        )
        yield made
        made.close()


@pytest.fixture
def page(browser, address: str) -> Iterator[Screen]:  # type: ignore[no-untyped-def]
    """A fresh visitor; whatever the test does, the console stays silent."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    with screen(context, address, maxTokens=24, penalty=1) as made:
        yield made
        assert made.errors == []
    context.close()


def test_a_message_is_answered_token_by_token_and_tokens_are_tinted(page: Screen) -> None:
    page.say("Hello")
    run = page.run()
    assert len(run["tokens"]) == 24
    assert page.page.locator(".answer .tokens").inner_text() == run["text"]
    assert page.js("document.querySelectorAll('.answer .t').length") == 24
    assert max(page.js(VALUES)) > 0
    assert sum(bool(top) for top in run["top"]) == 23  # the last token has no row
    assert "24 tokens" in page.page.locator(".foot").inner_text()


def test_everything_comes_from_the_server_itself(page: Screen) -> None:
    page.say("Hello")
    page.page.locator(".answer .t").nth(3).click()
    page.page.wait_for_selector("#tab-token .js-plotly-plot")
    hosts = {url.split("/")[2] for url in page.asked if not url.startswith(("data:", "blob:"))}
    assert hosts == {page.address.split("/")[2]}
    assert any(url.endswith("/ui/plotly.min.js") for url in page.asked)


def test_a_tint_follows_the_chosen_concept_or_vector(page: Screen) -> None:
    page.say("Hello")
    run, concepts = page.run(), page.js("steerscope.state.concepts")
    index = run["top"][5][0]
    page.page.click("#tint input")
    page.page.keyboard.type(concepts[index]["name"])
    page.page.keyboard.press("Enter")
    page.settle()
    tints = page.js(VALUES)
    for i, top in enumerate(run["top"]):
        scores = dict(zip(top[::2], top[1::2], strict=True))
        assert tints[i] == pytest.approx(scores.get(index, 0), abs=0.021)
    page.page.click("#tint input")
    page.page.keyboard.type("north")
    page.page.keyboard.press("Enter")
    page.settle()
    tones = set(page.js("[...document.querySelectorAll('.answer .t')].map(t => t.style.getPropertyValue('--tone'))"))
    assert {"var(--cool)", "var(--heat)"} <= tones


def test_the_message_is_tinted_read_and_pointed_at_like_an_answer(page: Screen) -> None:
    page.say("How was your week at work?")
    said, answer = page.run()["said"], page.run()
    assert page.page.locator(".said").inner_text() == "How was your week at work?"
    spans = page.page.locator(".said .t")
    assert spans.count() == len(said["tokens"]) == len([top for top in said["top"] if top])
    tints = page.js(VALUES.replace(".answer", ".said"))
    assert tints == pytest.approx([top[1] for top in said["top"]], abs=0.021)  # by the leading concept
    assert said["prompt"] + len(said["tokens"]) < answer["prompt"], "the template's own text lies between"
    i = next(i for i, text in enumerate(said["tokens"]) if text.strip().isalpha())
    spans.nth(i).hover()
    card, concepts = page.page.locator("#card"), page.js("steerscope.state.concepts")
    assert concepts[said["top"][i][0]]["name"] in card.inner_text()
    assert card.locator(".spark").count() == 2
    page.page.locator(".said .tokens").focus()
    for key in ("Home", "ArrowRight", "Enter"):
        page.page.keyboard.press(key)
    assert page.js("steerscope.state.pinned.i") == 1
    assert "your message" in page.page.locator("#tab-token").inner_text()
    assert page.page.locator("#tab-token .found li").count() == len(said["top"][1]) // 2
    page.page.click("#tint input")
    page.page.keyboard.type("north")
    page.page.keyboard.press("Enter")
    page.settle()
    told = "[...document.querySelectorAll('.said .t')].map(t => t.style.getPropertyValue('--tone'))"
    projected = page.js(told)
    assert "var(--cool)" in projected or "var(--heat)" in projected
    page.page.reload()  # at once
    page.page.wait_for_selector('#status[data-state="ready"]')
    page.page.wait_for_selector(".said .t")
    wait_for(lambda: page.js(told) == projected or page.page.wait_for_timeout(40), "the tint from before")
    kept = page.js("import('./ui/js/exporting.js').then((found) => found.conversation())")
    message = kept["turns"][0]["answers"][0]["message"]
    assert [token["id"] for token in message["tokens"]] == said["ids"]
    assert [len(token["top"]) for token in message["tokens"]] == [len(top) // 2 for top in said["top"]]
    assert len(message["projections"]["north"]["0"]) == len(said["tokens"])
    page.shot("message")


def test_with_rules_only_the_answer_is_read(page: Screen) -> None:
    page.js("steerscope.settings.rules = []")
    page.say("Hello")
    assert page.sent[-1]["steerscope"]["watch"]["tokens"] == "generated | message=0"
    page.js(f"steerscope.settings.rules = [{when('c0.0', above=0.0).then(flag('any')).to_json()}]")
    page.again()
    assert page.sent[-1]["steerscope"]["watch"]["tokens"] == "generated"
    assert page.run()["said"]["top"] == []
    assert page.run()["firings"][0]["position"] >= page.run()["prompt"]


def test_a_slider_changes_the_next_answer(page: Screen) -> None:
    page.say("Hello")
    plain = page.run()["text"]
    page.again()
    assert page.run()["text"] == plain
    page.steer("north", 1.5)
    assert "north +1.50" in page.page.locator("#next").inner_text()
    page.again()
    added = {"op": "add", "vector": "north", "layers": [0, 1, 2, 3], "scale": 1.5}
    assert page.sent[-1]["steerscope"]["steer"] == [added]
    assert page.run()["text"] != plain
    assert page.page.locator(".answer-head .chip").inner_text() == "north +1.50"


def test_caps_ablations_layers_and_tokens_are_sent_as_the_panel_shows_them(page: Screen) -> None:
    card = page.page.locator('[data-vector="east"]')
    card.locator(".vector-head input").set_checked(True, force=True)
    card.get_by_role("button", name="Cap").click()
    for name, value in (("At least, as a number", "-1.5"), ("At most, as a number", "2.5")):
        card.get_by_label(name).fill(value)
        card.get_by_label(name).press("Enter")
    card.locator("select").select_option("generated")
    layer = card.get_by_label("Layers: from")
    layer.focus()
    layer.press("ArrowRight")
    page.say("Hello")
    cap = {"op": "cap", "vector": "east", "layers": [1, 2, 3], "tokens": "generated", "min": -1.5, "max": 2.5}
    assert page.sent[-1]["steerscope"]["steer"] == [cap]
    seen = page.run()["projections"]["east"]
    assert all(-1.6 <= value <= 2.6 for k in (1, 2, 3) for value in seen[str(k)] if value is not None)
    card.get_by_role("button", name="Ablate").click()
    page.again()
    assert page.sent[-1]["steerscope"]["steer"][0]["op"] == "ablate"
    assert page.run()["status"] == "done"


def test_a_and_b_answer_the_same_prompt_with_and_without_the_steering(page: Screen) -> None:
    page.say("Hello")
    plain = page.run()["text"]
    page.page.click("#new")
    page.steer("north", 1.5)
    page.page.locator("#compare").set_checked(True, force=True)
    page.say("Hello")
    a, b = page.run(0), page.run(1)
    assert b["text"] == plain
    assert a["text"] != plain
    assert page.page.locator(".answers.pair .answer").count() == 2
    assert page.page.locator(".lane").count() == 2
    page.page.locator(".keep input").nth(1).check()
    page.say("And then?")
    assert page.sent[-1]["messages"][1] == {"role": "assistant", "content": plain}


def test_pointing_at_a_token_shows_its_concepts_with_their_paths_and_projections(page: Screen) -> None:
    page.say("Hello")
    run, concepts = page.run(), page.js("steerscope.state.concepts")
    below = [bool(top) and len(concepts[top[0]]["path"]) > 1 for top in run["top"]]
    i = next(i for i, found in enumerate(below) if found and run["tokens"][i].strip())
    page.page.locator(".answer .t").nth(i).hover()
    card = page.page.locator("#card")
    best = concepts[run["top"][i][0]]
    assert best["name"] in card.inner_text()
    assert " › ".join(best["path"][:-1]) in card.inner_text()
    assert card.locator(".spark").count() == 2
    page.page.locator(".answer .tokens").focus()
    page.page.keyboard.press("Home")
    page.page.keyboard.press("ArrowRight")
    assert "token 1" in card.inner_text()
    page.page.keyboard.press("Enter")
    assert page.js("steerscope.state.pinned.i") == 1
    assert page.page.locator("#tab-token .found li").count() == len(run["top"][1]) // 2
    page.page.wait_for_selector("#tab-token .js-plotly-plot .scatterlayer .trace")
    assert page.page.locator("#tab-token .scatterlayer .trace").count() == 2


def test_the_heat_map_has_a_row_per_concept_and_leads_back_to_tokens(page: Screen) -> None:
    page.say("Hello")
    run = page.run()
    seen = {index for top in run["top"] for index in top[::2]}
    names = page.page.locator(".rows-names button")
    assert names.count() == len(seen)
    painted = page.js(
        "(() => { const c = document.querySelector('.lane canvas'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const found = new Set();"
        "for (let i = 0; i < d.length; i += 4) found.add(`${d[i]},${d[i + 1]},${d[i + 2]}`); return found.size; })()"
    )
    assert painted > 10
    page.page.locator(".lane").click(position={"x": 13 * 4 + 5, "y": 30})
    assert page.js("steerscope.state.pinned.i") == 4
    names.first.click()
    assert page.js("steerscope.settings.tint.kind") == "concept"
    page.page.get_by_role("button", name="Tree").click()
    page.page.locator(".lane").focus()
    page.page.keyboard.press("ArrowRight")
    assert page.page.locator("#live").text_content()


def test_rules_are_made_in_the_panel_and_their_firings_marked(page: Screen) -> None:
    page.say("Hello")
    concepts, run = page.js("steerscope.state.concepts"), page.run()
    index = run["top"][6][0]
    page.page.click('[data-tab="watch"]')
    for action in ("flag", "stop"):
        page.page.get_by_label("Concept of the rule").click()
        page.page.keyboard.type(concepts[index]["name"])
        page.page.keyboard.press("Enter")
        page.page.get_by_label("Above, as a number").fill(str(run["top"][6][1] - 0.01))
        page.page.get_by_label("Above, as a number").press("Tab")
        page.page.get_by_label("What the rule does").select_option(action)
        page.page.get_by_role("button", name="Add the rule").click()
    page.again()
    ruled = page.run()
    assert {one["action"] for one in ruled["firings"]} == {"flag", "stop"}
    assert ruled["finish"] == "rule"
    at = ruled["firings"][0]["at"]
    assert len(ruled["tokens"]) == at + 2  # what fires on row t keeps token t+1
    assert "fired" in page.page.locator(".answer .t").nth(at).get_attribute("class").split()
    assert page.page.locator(".fire").count() == 2


def test_a_conversation_is_exported_with_readings_and_activations(page: Screen, tmp_path: Path) -> None:
    page.page.click('[data-tab="run"]')
    page.page.get_by_label("Keep activations for export").set_checked(True, force=True)
    page.page.locator("#compare").set_checked(True, force=True)
    page.say("Hello")
    rows = page.run()["capture"]["rows"]

    def saved(item: str) -> Path:
        page.page.click("#export > button")
        with page.page.expect_download() as download:
            page.page.get_by_role("menuitem", name=item).click()
        download.value.save_as(tmp_path / item)
        return tmp_path / item

    told = json.loads(saved("Conversation").read_text())
    answers = told["turns"][0]["answers"]
    assert [answer["side"] for answer in answers] == ["A", "B"]
    assert "".join(token["t"] for token in answers[0]["tokens"]) == answers[0]["text"]
    known = {concept["id"] for concept in told["concepts"]}
    assert all(one["id"] in known for token in answers[0]["tokens"] for one in token["top"])
    assert len(answers[0]["projections"]["north"]["0"]) >= 23
    with safe_open(saved("Activations"), "pt") as kept:
        tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
    layers = [tensor for tensor in tensors.values() if tensor.shape[-1:] == (HIDDEN,)]
    assert {name.split(".")[1] for name in tensors} == {"a", "b"}
    assert {tensor.shape[-2] for tensor in layers} == {rows}


KEPT = """() => new Promise((done) => {
  indexedDB.open("steerscope", 1).onsuccess = ({ target: { result: db } }) => {
    const asked = db.transaction("kept").objectStore("kept").get("conversation");
    asked.onsuccess = () => {
      db.close();
      done(asked.result?.turns.map((turn) => turn.runs.map((run) => run.status)));
    };
  };
})"""


def test_a_reload_keeps_the_conversation_and_every_setting(page: Screen) -> None:
    page.steer("north", 0.75)
    page.say("Hello")
    text, tints = page.run()["text"], page.js("document.querySelector('.answer .tokens').innerHTML")
    wait_for(lambda: page.js(KEPT) == [["done"]] or page.page.wait_for_timeout(40), "the conversation on the disk")
    page.page.reload()
    page.page.wait_for_selector('#status[data-state="ready"]')
    page.settle()
    assert page.run()["text"] == text
    assert page.js("document.querySelector('.answer .tokens').innerHTML") == tints
    assert page.page.locator('[data-vector="north"] input[type=number]').first.input_value() == "0.75"
    page.page.click("#new")
    assert page.page.locator(".blank").is_visible()
    wait_for(lambda: page.js(KEPT) == [] or page.page.wait_for_timeout(40), "an empty conversation on the disk")
    page.page.reload()
    page.page.wait_for_selector('#status[data-state="ready"]')
    assert page.js("steerscope.state.turns.length") == 0


@pytest.mark.long
def test_two_thousand_tokens_cost_the_document_each_token_once(page: Screen) -> None:
    page.js("steerscope.settings.maxTokens = 2000")
    page.js(COUNT_CHANGES)
    before = page.js("({ ...steerscope.work })")
    page.say("Hello")
    work, changes = page.js("({ ...steerscope.work })"), page.js("window.changes")
    assert len(page.run()["tokens"]) == 2000
    tokens = 2000 + len(page.run()["said"]["tokens"])  # the message has some too
    assert changes == {"added": tokens, "removed": 0, "styled": 2 * (work["tints"] - before["tints"])}
    assert work["spans"] - before["spans"] == tokens
    assert work["tints"] - before["tints"] <= tokens
    # A frame draws at most the columns in sight, so the heat map's work is frames times a constant.
    sight = page.js("Math.ceil(document.querySelector('.lane').clientWidth / steerscope.settings.column) + 1")
    frames = work["frames"] - before["frames"]
    assert work["columns"] - before["columns"] <= 2 * sight * frames
    assert frames <= 2000 + 10
    # Looking around on all of it touches no token but those that change.
    spans, tints = work["spans"], work["tints"]
    last = max(i for i, text in enumerate(page.run()["tokens"]) if text.strip().isalnum())
    page.page.locator(".answer .t").nth(last).hover()
    page.page.locator(".lane").hover()
    page.page.mouse.wheel(-4000, 0)
    page.settle()
    work = page.js("({ ...steerscope.work })")
    assert (work["spans"], work["tints"]) == (spans, tints)
    page.js("document.querySelector('#theme').click()")
    page.settle()
    assert page.js("steerscope.work.tints") == tints  # colours are the style sheet's
    page.shot("two-thousand-tokens")


def test_what_the_server_refuses_is_told_with_every_problem(page: Screen) -> None:
    page.js("Object.assign(steerscope.settings, { temperature: -1, seed: -0.5 })")
    page.say("Hello")
    told = page.page.locator(".problem").inner_text()
    assert "temperature" in told
    assert "seed" in told
    page.js("Object.assign(steerscope.settings, { temperature: 0, seed: 0 })")
    page.page.get_by_role("button", name="Try again").click()
    page.until("steerscope.state.running === 0")
    assert page.run()["status"] == "done"
    assert all("400" in error for error in page.errors)  # the browser's own line about the refusal
    page.errors.clear()


def test_stopping_keeps_what_was_written(page: Screen) -> None:
    page.js("steerscope.settings.maxTokens = 3000")
    page.page.fill("#prompt", "Hello")
    page.page.keyboard.press("Enter")
    page.until("steerscope.state.turns[0]?.runs[0].tokens.length > 20")
    page.page.keyboard.press("Escape")
    page.until("steerscope.state.running === 0")
    page.settle()
    assert page.run()["status"] == "stopped"
    assert "stopped" in page.page.locator(".foot").inner_text()


def test_a_lost_server_is_told_and_found_again(page: Screen) -> None:
    page.say("Hello")
    page.page.context.set_offline(True)
    page.page.fill("#prompt", "Still there?")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector('#status[data-state="offline"]')
    assert "cannot be reached" in page.page.locator("#notice").inner_text()
    page.shot("disconnected")
    page.page.context.set_offline(False)
    with contextlib.suppress(PlaywrightTimeout):  # by itself it looks now and then, too
        page.page.get_by_role("button", name="Try now").click(timeout=3_000)
    page.page.wait_for_selector('#status[data-state="ready"]')
    assert page.page.locator("#notice").is_hidden()
    page.page.get_by_role("button", name="Try again").click()
    page.until("steerscope.state.running === 0")
    assert page.run()["status"] == "done"
    page.errors.clear()  # the browser tells each failed request


def test_vectors_are_uploaded_and_deleted_while_the_server_runs(page: Screen, tmp_path: Path) -> None:
    files.save(SteeringVector({1: torch.ones(HIDDEN)}, model="tiny"), tmp_path / "west.safetensors")
    page.page.set_input_files('#tab-steer input[type="file"]', tmp_path / "west.safetensors")
    page.page.wait_for_selector('[data-vector="west"]')
    page.page.on("dialog", lambda dialog: dialog.accept())
    page.page.get_by_label("Delete west from the server").click()
    page.page.wait_for_selector('[data-vector="west"]', state="detached")


def test_a_key_is_asked_for_when_the_server_wants_one(browser, furniture: ServerSettings) -> None:  # type: ignore[no-untyped-def]
    settings = ServerSettings.parse({**dict(furniture), "api_key": "a-secret"})
    context = browser.new_context()
    with served(tiny_engine, settings) as address:
        page = context.new_page()
        page.goto(address)
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_label("API key").fill("a-secret")
        page.keyboard.press("Enter")
        page.wait_for_selector('#status[data-state="ready"]')
        page.reload()
        page.wait_for_selector('#status[data-state="ready"]')
    context.close()


def test_a_server_that_still_loads_says_so_and_is_then_used(browser, furniture: ServerSettings) -> None:  # type: ignore[no-untyped-def]
    loaded = threading.Event()

    def slow() -> Engine:
        assert loaded.wait(HUNG_S)
        return tiny_engine()

    context = browser.new_context(viewport={"width": 1440, "height": 900})
    with served(slow, furniture, ready=False) as address:
        made = Screen(context.new_page(), address)
        made.listen()
        made.page.goto(address)
        made.page.wait_for_selector("#notice progress")
        assert "loading the model" in made.page.locator("#notice").inner_text()
        assert made.page.locator(".tries button").first.is_disabled()
        made.shot("loading")
        loaded.set()
        made.page.wait_for_selector('#status[data-state="ready"]')
        made.page.locator(".tries button").first.click()
        made.until("steerscope.state.turns.length === 1 && steerscope.state.running === 0")
        assert made.errors == []
    context.close()


# --- on a real model


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SmolLM2 with a vector and two lenses made from a few sentences about being glad and being sad."""
    chromium_path()
    folder = tmp_path_factory.mktemp("smollm")
    (folder / "vectors").mkdir()
    with steerscope.load("smollm2-135m") as model:
        data = load_contrast_set()
        pairs = data.extraction[:12]
        norms, vector = row_norms(model, sentences(pairs)), mean_difference(model, pairs).normalised()
        push = {layer: vector[layer] * norms[layer] / 6 for layer in range(10, 16)}
        files.save(SteeringVector(push, model=model.facts.name), folder / "vectors" / "happy.safetensors")
        rows = sentence_rows(model, sentences(pairs), layers=15)[:, 0].numpy()
        glad = np.arange(len(rows)) < len(pairs)
        probes = {"gladness": LogisticRegression(C=0.01, max_iter=500).fit(rows, glad)}
        probes["gloom"] = LogisticRegression(C=0.01, max_iter=500).fit(rows, ~glad)
        from_probes(probes, model=model.facts.name, layer=15).save(folder / "moods")
    settings = ServerSettings(port=0, vectors=str(folder / "vectors"), lenses=(str(folder / "moods"),))
    with served(lambda: load_engine("smollm2-135m"), settings) as address:
        yield address


@pytest.mark.smollm
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_a_person_steers_smollm_and_sees_it(browser, smollm: str, scheme: str) -> None:  # type: ignore[no-untyped-def]
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    with screen(context, smollm, maxTokens=32) as page:
        page.shot(f"{scheme}-empty")
        page.say("How was your day?")
        plain = page.run()["text"]
        page.steer("happy", 0.5)
        page.page.locator("#compare").set_checked(True, force=True)
        page.page.fill("#prompt", "How was your day, really?")
        page.page.keyboard.press("Enter")
        page.until("steerscope.state.turns.at(-1).runs[0].tokens.length > 8")
        page.shot(f"{scheme}-live")
        page.until("steerscope.state.running === 0")
        page.settle()
        a, b = page.run(0), page.run(1)
        assert a["text"] != b["text"]
        assert a["text"].strip()
        assert plain.strip()
        gladness = page.js("steerscope.state.concepts.findIndex(c => c.name === 'gladness')")

        def mean(run: dict) -> float:
            return float(np.mean([dict(zip(t[::2], t[1::2], strict=True)).get(gladness, 0) for t in run["top"]]))

        assert mean(a) > mean(b)  # it was steered towards what the lens reads
        page.page.locator('[data-run] .t >> text="I"').first.hover()
        page.shot(f"{scheme}-hover")
        page.page.locator(".answers.pair .t").nth(4).click()
        page.page.wait_for_selector("#tab-token .js-plotly-plot .trace")
        page.shot(f"{scheme}-token")
        for name, wide, tall in (("tablet", 1024, 768), ("phone", 390, 844)):
            page.page.set_viewport_size({"width": wide, "height": tall})
            page.page.wait_for_timeout(400)  # the panel slides away
            page.shot(f"{scheme}-{name}")
            sideways = "document.documentElement.scrollWidth <= innerWidth"
            assert page.js(sideways), f"the page scrolls sideways at {wide}"
        assert page.errors == []
    context.close()
