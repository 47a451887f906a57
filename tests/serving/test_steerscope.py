"""What a request can ask of steerscope over HTTP, against the engine's own answers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors

from serving.conftest import Live
from steerscope import SteeringVector, load_vector, save_vector
from steerscope.engines.results import Generation
from steerscope.specs import Add, Capture, Sampling, Watch
from steerscope.specs.watch import flag, stop, when

PROMPT = "The quick brown fox"
BODY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
GREEDY = Sampling(max_tokens=6, ignore_eos=True)


def direct(live: Live, **options: object) -> Generation:
    return live.serving.engine.sync.generate(PROMPT, GREEDY, **options)  # type: ignore[call-overload]


def ask(live: Live, asked: dict[str, object], **more: object) -> dict:
    answer = live.http.post("/v1/completions", json={**BODY, "steerscope": asked, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def stream(live: Live, asked: dict[str, object]) -> list[dict]:
    with live.http.stream("POST", "/v1/completions", json={**BODY, "steerscope": asked, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def _tokens(chunk: dict) -> list[dict]:
    """A chat's opening chunk has none."""
    return chunk.get("steerscope", {}).get("tokens", [])


class TestSteering:
    def test_named_and_inline_vectors_steer_as_they_do_in_the_engine(self, live: Live, vectors: Path) -> None:
        joy = load_vector(vectors / "joy.safetensors")
        wanted = direct(live, steer=joy.add(5)).text
        assert wanted != direct(live).text
        for steer in (
            [{"op": "add", "vector": "joy", "scale": 5}],
            {"ops": [{"op": "add", "vector": "joy", "scale": 5}]},
            [{"op": "add", "vector": {str(k): joy[k].tolist() for k in (1, 2)}, "scale": 5}],
            [{"op": "add", "vector": joy[k].tolist(), "scale": 5, "layers": k} for k in (1, 2)],
        ):
            assert ask(live, {"steer": steer})["text"] == wanted
        assert ask(live, {"steer": "joy"})["text"] == direct(live, steer=joy.add(1)).text
        assert ask(live, {})["text"] == direct(live).text

    def test_tokens_come_one_by_one_with_ids_and_texts(self, live: Live) -> None:
        wanted = direct(live)
        whole = ask(live, {})["steerscope"]
        assert [token["id"] for token in whole["tokens"]] == wanted.token_ids
        assert "".join(token["t"] for token in whole["tokens"]) == wanted.text
        assert whole["finish"] == {"reason": "length", "stop_string": None, "rule": None}
        chunks = stream(live, {})
        assert [token for chunk in chunks for token in chunk["steerscope"]["tokens"]] == whole["tokens"]

    def test_the_default_acts_on_every_request_until_it_is_cleared(self, live: Live) -> None:
        plain = direct(live).text
        try:
            put = live.http.put("/v1/steering", json=[{"op": "add", "vector": "joy", "scale": 5}])
            assert put.status_code == 200
            assert put.json() == live.http.get("/v1/steering").json()
            assert put.json()["ops"][0]["vector"] == "joy"
            assert live.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] != plain
            reset = {"steer": {"ops": [], "reset": True}}
            assert ask(live, reset)["text"] == plain
            used = live.http.delete("/v1/vectors/joy")
            assert (used.status_code, used.json()["error"]["code"]) == (409, "vector_in_use")
            bad = live.http.put("/v1/steering", json=[{"op": "add", "vector": "nobody"}])
            assert bad.status_code == 400
            assert bad.json()["error"]["problems"][0]["param"] == "ops[0].vector"
        finally:
            assert live.http.delete("/v1/steering").json() == {"ops": [], "reset": False}
        assert live.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == plain

    def test_all_problems_come_at_once_with_the_fields_of_the_body(self, live: Live) -> None:
        asked = {
            "steer": [{"op": "add", "vector": "nobody"}, {"op": "add", "vector": "joy", "layers": 99}],
            "capture": {"layers": 50},
            "watch": {"pack": "nothing"},
        }
        answer = live.http.post("/v1/completions", json={**BODY, "steerscope": asked})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert [problem["param"] for problem in error["problems"]] == [
            "steerscope.steer[0].vector",
            "steerscope.steer[1].layers",
            "steerscope.watch.pack",
            "steerscope.capture.layers",
        ]
        assert all(problem["remedy"] and problem["remedy"] in error["message"] for problem in error["problems"])

    def test_a_steering_that_overflows_is_the_clients_mistake(self, live: Live) -> None:
        asked = {"steer": [{"op": "add", "vector": "joy", "scale": 3e38}]}
        answer = live.http.post("/v1/completions", json={**BODY, "max_tokens": 12, "steerscope": asked})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsteerable")
        assert ask(live, {})["text"] == direct(live).text


class TestWatching:
    def test_the_chunk_of_a_token_carries_the_reading_of_the_row_before(self, live: Live) -> None:
        wanted = direct(live, watch=Watch(pack="moods", top_k=2))
        p = len(wanted.prompt_token_ids)
        chunks = [chunk["steerscope"] for chunk in stream(live, {"watch": {"pack": "moods", "top_k": 2}})]
        readings = [reading for chunk in chunks for reading in chunk.get("readings", ())]
        assert [reading["position"] for reading in readings] == [r.position for r in wanted.readings]
        for found, reading in zip(readings, wanted.readings, strict=True):
            assert [(top["id"], tuple(top["path"])) for top in found["top"]] == [
                (c.id, c.path) for c in reading.concepts
            ]
            scores = [concept.probability for concept in reading.concepts]
            assert [top["score"] for top in found["top"]] == pytest.approx(scores, abs=1e-3)
            index = reading.position - p
            assert found["token_index"] == (index if index >= 0 else None)
        for chunk in chunks:
            for token in chunk["tokens"]:
                assert chunk["readings"][-1]["position"] == p + token["i"] - 1
        assert ask(live, {"watch": {"pack": "moods", "top_k": 2}})["steerscope"]["readings"] == readings

    def test_rules_are_told_with_the_token_they_came_with(self, live: Live) -> None:
        rules = [when("c0.0", above=0.0).then(flag("seen")), when("c0.1", above=0.0, for_tokens=7).then(stop("enough"))]
        wanted = direct(live, watch=Watch(pack="moods", rules=rules))
        plain = [json.loads(rule.to_json()) for rule in rules]
        for asked in ({"watch": {"pack": "moods", "rules": plain}}, {"watch": {"pack": "moods"}, "rules": plain}):
            found = ask(live, asked)
            told = found["steerscope"]["rules"]
            assert [(rule["name"], rule["action"], rule["position"]) for rule in told] == [
                (firing.rule, firing.action, firing.position) for firing in wanted.firings
            ]
            assert found["steerscope"]["finish"]["rule"] == wanted.rule
            assert found["text"] == wanted.text
            chunks = stream(live, asked)
            assert [rule for chunk in chunks for rule in chunk["steerscope"].get("rules", ())] == told
        assert wanted.rule == "enough"
        assert found["finish_reason"] == "stop"

    def test_packs_are_listed_with_their_concepts(self, live: Live) -> None:
        (found,) = live.http.get("/v1/lenses").json()["data"]
        assert (found["name"], found["count"], found["levels"], found["layer"]) == ("moods", 9, [3, 6], 3)
        tree = live.http.get("/v1/lenses/moods").json()
        assert [concept["level"] for concept in tree["concepts"]] == [0] * 3 + [1] * 6
        ids = {concept["id"] for concept in tree["concepts"]}
        assert all(set(concept["parents"]) <= ids for concept in tree["concepts"])
        assert live.http.get("/v1/lenses/none").status_code == 404


class TestCaptures:
    def test_rows_are_fetched_by_id_in_ranges_and_deleted(self, live: Live) -> None:
        asked = {"capture": {"layers": [1, 3], "sites": ["resid_post"], "tokens": "all"}}
        about = ask(live, asked)["steerscope"]["captures"]
        wanted = direct(live, capture=Capture(layers=[1, 3])).rows
        assert (about["rows"], about["layers"], about["sites"]) == (wanted.n, [1, 3], ["resid_post"])
        url = f"/v1/captures/{about['id']}"
        whole = live.http.get(url)
        tensors = load_tensors(whole.content)
        for layer in (1, 3):
            assert torch.allclose(tensors[f"layer.{layer}.resid_post"], wanted[layer], atol=1e-4)
        assert about["bytes"] == sum(t.numel() * t.element_size() for k, t in tensors.items() if k.startswith("layer"))
        part = live.http.get(url, headers={"Range": "bytes=5-24"})
        assert (part.status_code, part.content) == (206, whole.content[5:25])
        assert part.headers["content-range"] == f"bytes 5-24/{len(whole.content)}"
        assert live.http.get(url, headers={"Range": "bytes=-7"}).content == whole.content[-7:]
        assert live.http.get(url, headers={"Range": "bytes=99999999-"}).status_code == 416
        assert live.http.head(url).headers["content-length"] == str(len(whole.content))
        labels = live.http.get(f"{url}/labels").json()["labels"]
        assert labels["position"] == list(range(wanted.n))
        assert labels["token_id"] == wanted.labels.token_id.tolist()
        assert labels["phase"].count("generated") == 5
        assert live.http.delete(url).json()["deleted"] is True
        assert {live.http.get(url).status_code, live.http.get(f"{url}/labels").status_code} == {404}
        assert live.http.delete(url).status_code == 404

    def test_each_choice_has_rows_of_its_own_and_a_chat_has_roles(self, live: Live) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "max_tokens": 4, "seed": 3, "stream": True}
        body |= {"steerscope": {"capture": {"layers": 2}}, "ignore_eos": True}
        with live.http.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = [json.loads(x[6:]) for x in response.iter_lines() if x and x != "data: [DONE]"]
        ended = {c["choices"][0]["index"]: c for c in chunks if c["choices"][0]["finish_reason"]}
        ids = [ended[i]["steerscope"]["captures"]["id"] for i in (0, 1)]
        assert len(set(ids)) == 2
        for i in (0, 1):
            made = [t["id"] for c in chunks if c["choices"][0]["index"] == i for t in _tokens(c)]
            labels = live.http.get(f"/v1/captures/{ids[i]}/labels").json()["labels"]
            assert labels["token_id"][-3:] == made[:3]
            assert "user" in labels["role"]
            live.http.delete(f"/v1/captures/{ids[i]}")

    @pytest.mark.parametrize("name", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "cap-" + "0" * 32, "%00", "cap-"])
    def test_an_id_nobody_was_given_leads_nowhere(self, live: Live, name: str) -> None:
        assert live.http.get(f"/v1/captures/{name}").status_code == 404


class TestProjections:
    def test_tokens_are_projected_on_vectors_by_layer(self, live: Live, vectors: Path) -> None:
        rows = direct(live, capture=Capture(tokens="generated")).rows
        found = stream(live, {"project": ["joy", "calm"]})[-1]["steerscope"]["projections"]
        assert [*found["joy"]] == ["1", "2"]
        assert [*found["calm"]] == ["0", "1", "2", "3"]
        for name, layer in (("joy", 2), ("calm", 0)):
            vector = load_vector(vectors / f"{name}.safetensors")
            wanted = vector.projection(rows[layer], layer).tolist()
            assert found[name][str(layer)][:-1] == pytest.approx(wanted, abs=1e-3)
            assert found[name][str(layer)][-1] is None, "the last token has no row"
        assert live.serving.engine.budget.used == 0

    def test_a_capture_of_its_own_must_hold_what_is_projected(self, live: Live) -> None:
        both = ask(live, {"project": "joy", "capture": {"layers": "all"}})["steerscope"]
        assert both["captures"]["layers"] == [0, 1, 2, 3]
        assert [*both["projections"]["joy"]] == ["1", "2"]
        live.http.delete(f"/v1/captures/{both['captures']['id']}")
        for asked in ({"project": "joy", "capture": {"layers": 1}}, {"project": "nobody"}):
            refused = live.http.post("/v1/completions", json={**BODY, "steerscope": asked})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "steerscope.project"


class TestPrompts:
    CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "How was 你好 🎉 your week?"})
    ASKED = {"prompt": "message=1", "project": "joy", "watch": {"pack": "moods", "tokens": "generated | message=1"}}

    def test_a_message_is_told_token_by_token_with_readings_and_projections(self, live: Live, vectors: Path) -> None:
        body = {"messages": self.CHAT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        asked = self.ASKED
        whole = live.http.post("/v1/chat/completions", json={**body, "steerscope": asked}).json()
        found = whole["choices"][0]["steerscope"]
        assert "".join(token["t"] for token in found["prompt"]) == self.CHAT[1]["content"]
        rows = live.serving.engine.sync.chat(self.CHAT, GREEDY, capture=Capture(tokens="message=1")).rows
        places = list(rows.labels.position)
        assert [token["position"] for token in found["prompt"]] == places
        assert [token["id"] for token in found["prompt"]] == list(rows.labels.token_id)
        assert [one["position"] for one in found["readings"] if one["token_index"] is None] == places
        wanted = load_vector(vectors / "joy.safetensors").projection(rows[2], 2).tolist()
        assert found["prompt_projections"]["joy"]["2"] == pytest.approx(wanted, abs=1e-3)
        assert len(found["projections"]["joy"]["2"]) == 4
        streamed = {"messages": self.CHAT, "n": 2, "stream": True, "max_tokens": 4, "steerscope": asked}
        with live.http.stream("POST", "/v1/chat/completions", json=streamed) as response:
            chunks = [json.loads(x[6:]) for x in response.iter_lines() if x and x != "data: [DONE]"]
        told = [c["choices"][0]["index"] for c in chunks if c.get("steerscope", {}).get("prompt") == found["prompt"]]
        assert sorted(told) == [0, 1], "once for each choice"

    def test_other_tokens_are_chosen_as_everywhere_and_mistakes_told(self, live: Live) -> None:
        told = ask(live, {"prompt": "positions=[0, -1]"})["steerscope"]["prompt"]
        ids = live.serving.engine.tokenize(PROMPT).token_ids
        assert [(token["position"], token["id"]) for token in told] == [(0, ids[0]), (len(ids) - 1, ids[-1])]
        assert ask(live, {"prompt": "generated"})["steerscope"]["prompt"] == []
        for asked in ({"prompt": "message=0"}, {"prompt": "nonsense"}, {"prompt": 3}):
            refused = live.http.post("/v1/completions", json={**BODY, "steerscope": asked})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "steerscope.prompt")
        few = {"prompt": "all", "project": "joy", "capture": {"layers": "all", "tokens": "generated"}}
        assert live.http.post("/v1/completions", json={**BODY, "steerscope": few}).status_code == 400
        assert live.http.get("/v1/capabilities").json()["messages"] is True


class TestVectors:
    def test_a_vector_is_uploaded_swapped_listed_and_deleted_on_a_running_server(
        self, live: Live, tmp_path: Path
    ) -> None:
        first, second = (
            SteeringVector({2: torch.randn(64, generator=torch.Generator().manual_seed(i))}) for i in (1, 2)
        )
        texts = []
        for vector, file, status in ((first, "a.safetensors", 201), (second, "b.gguf", 200)):
            save_vector(vector, tmp_path / file)
            data = (tmp_path / file).read_bytes()
            if status == 201:
                done = live.http.post("/v1/vectors", params={"name": "mine"}, content=data)
            else:
                done = live.http.post("/v1/vectors", files={"file": (file, data)}, data={"name": "mine"})
            assert done.status_code == status, done.text
            assert done.json()["layers"] == [2]
            texts.append(ask(live, {"steer": [{"op": "add", "vector": "mine", "scale": 9}]})["text"])
            assert texts[-1] == direct(live, steer=Add(vector=vector, scale=9)).text
        assert texts[0] != texts[1]
        assert [one["name"] for one in live.http.get("/v1/vectors").json()["data"]] == ["calm", "joy", "mine"]
        about = live.http.get("/v1/vectors/mine").json()
        assert about["norms"]["2"] == pytest.approx(float(second[2].norm()), rel=1e-5)
        assert live.http.delete("/v1/vectors/mine").json()["deleted"] is True
        gone = live.http.post("/v1/completions", json={**BODY, "steerscope": {"steer": "mine"}})
        assert gone.status_code == 400
        assert {live.http.delete("/v1/vectors/mine").status_code, live.http.get("/v1/vectors/mine").status_code} == {
            404
        }

    @pytest.mark.parametrize("data", [b"", b"GGUF", b"PK\x03\x04" + b"0" * 40, b"\x80\x04pickle", b"\xff" * 8 + b"{}"])
    def test_what_is_no_vector_is_refused(self, live: Live, data: bytes) -> None:
        refused = live.http.post("/v1/vectors", params={"name": "bad"}, content=data)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_file")
        assert "/tmp" not in refused.text
        assert live.http.get("/v1/vectors/bad").status_code == 404

    @pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101, "nul\x00", "–"])
    def test_a_name_that_is_none_is_refused(self, live: Live, vectors: Path, name: str) -> None:
        data = (vectors / "joy.safetensors").read_bytes()
        refused = live.http.post("/v1/vectors", params={"name": name}, content=data)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "name"

    def test_a_vector_of_another_model_is_refused(self, live: Live, tmp_path: Path) -> None:
        for vector in (SteeringVector({1: torch.ones(32)}), SteeringVector({4: torch.ones(64)})):
            save_vector(vector, tmp_path / "v.safetensors")
            data = (tmp_path / "v.safetensors").read_bytes()
            assert live.http.post("/v1/vectors", params={"name": "other"}, content=data).status_code == 400


def test_capabilities_say_what_can_be_asked_for(live: Live) -> None:
    found = live.http.get("/v1/capabilities").json()
    assert (found["model"], found["layers"], found["hidden"], found["context"]) == ("tiny", 4, 64, 256)
    assert found["sites"] == ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]
    assert found["vectors"] == ["calm", "joy"]
    assert found["lenses"] == ["moods"]
    assert found["limits"]["max_body_bytes"] == 8 << 20
    assert np.all([found["steer"], found["capture"], found["watch"], found["chat"]])


def test_metrics_count_what_happened(live: Live) -> None:
    ask(live, {"watch": {"pack": "moods", "rules": [json.loads(when("c0.0", above=0.0).then(flag("x")).to_json())]}})
    live.http.post("/v1/completions", json={"nothing": 1})
    lines = live.http.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values["steerscope_ready"] == 1
    assert values["steerscope_generated_tokens_total"] >= 6
    assert values["steerscope_ttft_seconds_count"] >= 1
    assert values["steerscope_inter_token_seconds_count"] >= 5
    assert values["steerscope_readings_total"] >= 6
    assert values["steerscope_lens_seconds_total"] > 0
    assert values['steerscope_rule_firings_total{action="flag"}'] >= 1
    assert values['steerscope_rejected_total{reason="invalid_request"}'] >= 1
    assert values['steerscope_requests_total{route="/v1/completions",status="200"}'] >= 1
    assert values["steerscope_running_choices"] == 0
    assert values["steerscope_capture_bytes"] == 0
