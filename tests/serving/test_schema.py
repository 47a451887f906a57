"""Everything that the OpenAPI description allows, and much that it does not, without one answer of 5xx."""

from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case, GenerationMode, openapi
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from serving.live import Live, live, tiny_engine
from steerscope.serving.app import create_app
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow

EXAMPLES = 40


def _configured(modes: list[GenerationMode]) -> SchemathesisConfig:
    generation = GenerationConfig(modes=modes, max_examples=EXAMPLES)
    return SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(max_body_bytes=1 << 20) as found:
        yield found


schema = openapi.from_dict(create_app(tiny_engine).openapi(), config=_configured(list(GenerationMode)))


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
def test_no_answer_is_the_servers_fault(case: Case, server: Live) -> None:
    if isinstance(case.body, dict):  # what is asked for in earnest would run long
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 3)
        if isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 3)
        if case.path == "/v1/jobs":
            case.body["max_tokens"] = 3
    response = case.call(base_url=server.url, timeout=HUNG_S)
    assert response.status_code < 500, (response.status_code, response.text[:500])
    if (
        response.status_code >= 400
        and case.method != "HEAD"
        and response.headers.get("content-type", "") == "application/json"
    ):
        assert response.json()["error"]["message"]


def test_the_server_works_after_all_that(server: Live) -> None:
    assert server.idle()
    httpx.delete(f"{server.url}/v1/steering")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
