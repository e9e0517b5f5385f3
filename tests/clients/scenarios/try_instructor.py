"""Instructor, which makes models of pydantic from answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import instructor
import openai
from pydantic import BaseModel, field_validator
from scripts import CITY
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main, raised

raw = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)


class City(BaseModel):
    """A city."""

    name: str
    people: int


class Place(City):
    """A place."""


def user(text):
    return [{"role": "user", "content": text}]


@check
def by_tools():
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    city, answer = client.create_with_completion(
        model=MODEL, messages=user("§city§"), response_model=City, max_retries=0
    )
    assert city.model_dump() == CITY and answer.usage.completion_tokens > 0


@check
def by_schema():
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        client = instructor.from_openai(raw, mode=mode)
        city = client.create(model=MODEL, messages=user("§json§"), response_model=City, max_retries=0)
        assert city.model_dump() == CITY, mode


@check
def parallel_tools():
    client = instructor.from_openai(raw, mode=instructor.Mode.PARALLEL_TOOLS)
    places = client.create(model=MODEL, messages=user("§cities§"), response_model=Iterable[Place], max_retries=0)
    assert list(places) == [Place(name="Oslo", people=720000), Place(**CITY)]


@check
def stream():
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    parts = list(client.create_partial(model=MODEL, messages=user("§partial§"), response_model=City, max_retries=0))
    assert parts[-1].model_dump() == {"name": "Oslo", "people": 634000}


@check
def second_try():
    tries = []

    class Town(City):
        """A town."""

        @field_validator("people")
        @classmethod
        def _is_well_only_later(cls, people: int) -> int:
            tries.append(people)
            if len(tries) == 1:
                raise ValueError("think again")
            return people

    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    town = client.create(model=MODEL, messages=user("§town§"), response_model=Town, max_retries=1)
    assert len(tries) == 2 and town.model_dump() == CITY


@check
def reasoning():
    client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
    city, answer = client.create_with_completion(
        model=MODEL, messages=user("§think json§"), response_model=City, max_retries=0
    )
    assert city.model_dump() == CITY and answer.choices[0].message.reasoning_content == "A city, then."


@check
def flex():
    client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
    with best_effort():
        client.create(model=MODEL, messages=user("§json§"), response_model=City, max_retries=0, service_tier="flex")


@check
def errors():
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    raised(Exception, "context_length_exceeded", client.create, model=MODEL, messages=user(TOO_LONG),
           response_model=City, max_retries=0)  # fmt: skip


@check
async def concurrency():
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0) as some:
        client = instructor.from_openai(some, mode=instructor.Mode.TOOLS)
        cities = await asyncio.gather(
            *(client.create(model=MODEL, messages=user("§city§"), response_model=City) for _ in range(8))
        )
    assert [city.model_dump() for city in cities] == [CITY] * 8


if __name__ == "__main__":
    main()
