"""The provider for Inspect AI: an evaluation of a steered model through a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lenses import packs
from serving.live import Live, live
from steerscope.client import Client
from steerscope.specs import InvalidRequest, Sampling, Steering

pytestmark = pytest.mark.slow

inspect_ai = pytest.importorskip("inspect_ai")
STEER = [{"op": "add", "vector": [1.0] + [0.0] * 63, "scale": 40.0, "layers": 1}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("packs") / "moods"
    packs.make([3, 6], hidden=64).save(folder)
    with live(lenses=(str(folder),), any_model=True) as found:
        yield found


def test_an_evaluation_runs_on_a_steered_and_watched_model(server: Live, tmp_path: Path) -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes

    import steerscope.client.inspect_provider  # noqa: F401 (an installed package is found by its entry point)

    chat = [{"role": "user", "content": "The quick brown fox"}]
    with Client(server.url) as client:
        wanted = client.chat(chat, Sampling(max_tokens=8), steer=Steering.parse(STEER)).text
        assert wanted != client.chat(chat, Sampling(max_tokens=8)).text
    config = GenerateConfig(max_tokens=8, temperature=0)
    model = get_model(
        "steerscope/tiny", base_url=server.url, config=config, steer=STEER, watch='{"pack": "moods", "top_k": 2}'
    )
    task = Task(dataset=[Sample(input="The quick brown fox", target=wanted)], scorer=includes(ignore_case=False))
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.samples is not None
    output = log.samples[0].output
    assert output.completion == wanted
    assert output.usage is not None
    assert output.usage.output_tokens == len(output.metadata["steerscope"]["readings"]) + 1 - _prompt(output)
    assert output.metadata["steerscope"]["readings"][0]["concepts"]


def _prompt(output) -> int:  # type: ignore[no-untyped-def]
    """Readings of the prompt's rows come too."""
    return sum(one["token_index"] is None for one in output.metadata["steerscope"]["readings"])


async def test_what_the_server_cannot_do_is_refused(server: Live) -> None:
    from inspect_ai.model import ChatMessageUser, ContentImage, GenerateConfig

    from steerscope.client.inspect_provider import SteerscopeAPI

    api = SteerscopeAPI("tiny", base_url=server.url)
    words = [ChatMessageUser(content="hello")]
    with pytest.raises(InvalidRequest, match="logit_bias: is not supported"):
        await api.generate(words, [], "none", GenerateConfig(logit_bias={1: 2.0}))
    picture = [ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA==")])]
    with pytest.raises(InvalidRequest, match="is not text"):
        await api.generate(picture, [], "none", GenerateConfig())
    with pytest.raises(InvalidRequest, match="is no model argument"):
        SteerscopeAPI("tiny", base_url=server.url, strength=3)
    with pytest.raises(InvalidRequest):
        SteerscopeAPI("tiny", base_url=server.url, steer='[{"op": "push"}]')
    await api.aclose()
