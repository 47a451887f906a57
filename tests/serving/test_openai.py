"""The OpenAI routes, through OpenAI's own client, unchanged."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from serving.conftest import NAME, Live
from support import tiny

CHAT = [{"role": "user", "content": "How was your week?"}]
GREEDY = {"model": NAME, "max_tokens": 8, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


class TestWhole:
    def test_the_model_is_listed_and_found(self, live: Live) -> None:
        assert [model.id for model in live.openai.models.list()] == [NAME]
        assert live.openai.models.retrieve(NAME).owned_by == "steerscope"
        with pytest.raises(openai.NotFoundError, match="does not exist: this server has 'tiny'"):
            live.openai.models.retrieve("gpt-4")

    def test_a_chat_is_answered_as_the_engine_answers_it(self, live: Live) -> None:
        answer = live.openai.chat.completions.create(messages=CHAT, **GREEDY)
        choice = answer.choices[0]
        assert (choice.message.role, choice.finish_reason, answer.model) == ("assistant", "length", NAME)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT) + "<|im_start|>assistant\n"
        ids = tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]
        same = live.openai.completions.create(prompt=ids, **GREEDY)
        assert same.choices[0].text == choice.message.content
        assert same.usage == answer.usage

    def test_several_prompts_and_choices_come_in_order(self, live: Live) -> None:
        options = {"model": NAME, "max_tokens": 5, "temperature": 1.0, "seed": 5, "extra_body": {"ignore_eos": True}}
        both = live.openai.completions.create(prompt=["one two", "three"], n=2, **options)
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        first = live.openai.completions.create(prompt="one two", n=2, **options)
        assert [c.text for c in both.choices[:2]] == [c.text for c in first.choices]
        assert first.choices[0].text != first.choices[1].text
        streamed = ["", "", "", ""]
        for chunk in live.openai.completions.create(prompt=["one two", "three"], n=2, stream=True, **options):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == [choice.text for choice in both.choices]

    def test_echo_gives_the_prompt_back(self, live: Live) -> None:
        plain = live.openai.completions.create(prompt="one two", **GREEDY).choices[0].text
        assert (
            live.openai.completions.create(prompt="one two", echo=True, **GREEDY).choices[0].text == "one two" + plain
        )
        chunks = live.openai.completions.create(prompt="one two", echo=True, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "one two" + plain

    def test_a_stop_string_ends_the_text_before_it(self, live: Live) -> None:
        whole = live.openai.completions.create(prompt="one two", **{**GREEDY, "max_tokens": 30}).choices[0].text
        stop = whole[9:13]
        cut = live.openai.completions.create(prompt="one two", stop=[stop], **{**GREEDY, "max_tokens": 30}).choices[0]
        assert cut.text == whole[: whole.index(stop)]
        assert cut.finish_reason == "stop"

    def test_log_probabilities_of_both_routes_agree(self, live: Live) -> None:
        chat = live.openai.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content
        assert content is not None
        assert len(content) == 8
        assert all(one.logprob == max(top.logprob for top in one.top_logprobs) for one in content), "greedy"
        assert b"".join(bytes(one.bytes or []) for one in content).decode(errors="replace") == (
            chat.choices[0].message.content
        )
        streamed = []
        for chunk in live.openai.chat.completions.create(
            messages=CHAT, logprobs=True, top_logprobs=3, stream=True, **GREEDY
        ):
            if chunk.choices and chunk.choices[0].logprobs and chunk.choices[0].logprobs.content:
                streamed += chunk.choices[0].logprobs.content
        assert [one.token for one in streamed] == [one.token for one in content]
        assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content], abs=1e-4)
        old = live.openai.completions.create(prompt="one two", logprobs=2, **GREEDY).choices[0].logprobs
        assert old is not None
        assert old.tokens is not None
        assert old.top_logprobs is not None
        assert old.text_offset == [sum(map(len, old.tokens[:i])) for i in range(8)]
        assert [max(top.values()) for top in old.top_logprobs] == old.token_logprobs


@pytest.mark.slow
class TestStreams:
    def test_a_chat_begins_with_its_role_and_ends_with_its_reason_and_usage(self, live: Live) -> None:
        whole = live.openai.chat.completions.create(messages=CHAT, **GREEDY)
        chunks = list(
            live.openai.chat.completions.create(
                messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        )
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].usage == whole.usage
        assert all(c.usage is None for c in chunks[:-1])
        assert len({c.id for c in chunks}) == 1

    async def test_the_async_client_streams_many_at_once(self, live: Live) -> None:
        async def one(i: int) -> tuple[str, str]:
            asked = {**GREEDY, "temperature": 1.0, "seed": i, "max_tokens": 12}
            async with live.async_openai as client:
                text = ""
                async for chunk in await client.chat.completions.create(messages=CHAT, stream=True, **asked):
                    text += chunk.choices[0].delta.content or ""
                whole = await client.chat.completions.create(messages=CHAT, **asked)
            return text, whole.choices[0].message.content or ""

        answers = await asyncio.gather(*(one(i) for i in range(8)))
        assert all(streamed == whole for streamed, whole in answers)
        assert len({whole for _, whole in answers}) > 1

    def test_streamed_text_is_the_whole_text_for_two_hundred_requests(self, live: Live) -> None:
        """Random prompts with emoji and other scripts, sampling, several choices, and stop strings that begin and end
        inside tokens."""
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda number: self._compare(live, number), range(200)))
        assert sum(stops for stops, _ in found) > 50
        assert sum(cut for _, cut in found) > 50, "the stop strings cut texts"

    def _compare(self, live: Live, number: int) -> tuple[bool, bool]:
        """One random request, streamed and whole; whether it had a stop string, and whether that changed its text."""
        rng = random.Random(number)
        words = [*tiny.TEXT.split(), "🎉", "👩‍👩‍👧", "héllo", "你好", "\n", "\u202e", "\x00"]
        body: dict[str, object] = {
            "temperature": rng.choice([0.0, 0.8, 1.5]),
            "seed": number,
            "max_tokens": rng.randint(1, 24),
            "n": rng.choice([1, 1, 1, 2]),
            "ignore_eos": rng.random() < 0.8,
            "top_p": rng.choice([1.0, 0.9]),
            "repetition_penalty": rng.choice([1.0, 1.2]),
        }
        text = " ".join(rng.choices(words, k=rng.randint(1, 12)))
        chat = rng.random() < 0.5
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        route = "/v1/chat/completions" if chat else "/v1/completions"
        first = _texts(live.http.post(route, json=body).json())
        if number % 2 and len(first[0]) > 3:
            at = rng.randrange(len(first[0]) - 2)
            body["stop"] = [first[0][at : at + rng.randint(1, 4)], "zzzz"]
        answer = live.http.post(route, json=body).json()
        whole, streamed = _texts(answer), _streamed(live, route, {**body, "stream": True})
        assert streamed == (whole, [choice["finish_reason"] for choice in answer["choices"]]), body
        return "stop" in body, whole != first


def _texts(answer: dict) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


def _streamed(live: Live, route: str, body: dict[str, object]) -> tuple[list[str], list[str | None]]:
    texts, reasons = [""] * int(str(body["n"])), [None] * int(str(body["n"]))
    with live.http.stream("POST", route, json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return texts, reasons  # type: ignore[return-value]
