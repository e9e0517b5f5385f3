"""Instructor, which makes models of pydantic from answers, with Anthropic's API."""

from __future__ import annotations

import asyncio

import anthropic
import instructor
from pydantic import BaseModel
from scripts import CITY
from trial import MODEL, TOO_LONG, URL, best_effort, check, main, raised

raw = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ASKED = {"model": MODEL, "max_tokens": 300, "max_retries": 0}


class City(BaseModel):
    """A city."""

    name: str
    people: int


def user(text):
    return [{"role": "user", "content": text}]


@check
def by_tools():
    client = instructor.from_anthropic(raw, mode=instructor.Mode.ANTHROPIC_TOOLS)
    city, answer = client.create_with_completion(**ASKED, messages=user("§city§"), response_model=City)
    assert city.model_dump() == CITY and answer.usage.output_tokens > 0


@check
def by_json():
    client = instructor.from_anthropic(raw, mode=instructor.Mode.ANTHROPIC_JSON)
    city = client.create(**ASKED, messages=user("§prompted§"), response_model=City)
    assert city.model_dump() == CITY


@check
def stream():
    client = instructor.from_anthropic(raw, mode=instructor.Mode.ANTHROPIC_TOOLS)
    parts = list(client.create_partial(**ASKED, messages=user("§partial§"), response_model=City))
    assert parts[-1].model_dump() == {"name": "Oslo", "people": 634000}


@check
def flex():
    client = instructor.from_anthropic(raw, mode=instructor.Mode.ANTHROPIC_TOOLS)
    with best_effort():
        client.create(**ASKED, messages=user("§city§"), response_model=City, extra_body={"service_tier": "flex"})


@check
def errors():
    client = instructor.from_anthropic(raw, mode=instructor.Mode.ANTHROPIC_TOOLS)
    raised(Exception, "prompt is too long", client.create, **ASKED, messages=user(TOO_LONG), response_model=City)


@check
async def concurrency():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as some:
        client = instructor.from_anthropic(some, mode=instructor.Mode.ANTHROPIC_TOOLS)
        cities = await asyncio.gather(
            *(client.create(**ASKED, messages=user("§city§"), response_model=City) for _ in range(8))
        )
    assert [city.model_dump() for city in cities] == [CITY] * 8


if __name__ == "__main__":
    main()
