"""Inspect, the framework for evaluations."""

from __future__ import annotations

import os

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ResponseSchema
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel
from scripts import AFTER, PLAIN
from trial import BASE_URL, MODEL, best_effort, check, main

os.environ |= {"OMNISERVE_BASE_URL": BASE_URL, "OMNISERVE_API_KEY": "none"}


class City(BaseModel):
    name: str
    people: int


@tool
def weather():
    async def execute(city: str, days: int = 1) -> str:
        """Tell the weather.

        Args:
            city: Where.
            days: How long.
        """
        return "sunny §after§"

    return execute


def accuracy(samples, solver=None, **options):
    """Return the share of samples in whose answers their targets are."""
    task = Task(dataset=samples, solver=solver or generate(), scorer=includes())
    log = eval(task, model=f"openai-api/omniserve/{MODEL}", display="plain", log_dir="logs", **options)[0]
    assert log.status == "success", log.error.message
    assert log.stats.model_usage[f"openai-api/omniserve/{MODEL}"].output_tokens > 0
    return log.results.scores[0].metrics["accuracy"].value


@check
def chat():
    samples = [Sample(input=f"{i} §plain§", target=PLAIN) for i in range(20)]
    assert accuracy(samples, max_connections=10) == 1


@check
def tools():
    samples = [Sample(input="§weather§", target=AFTER), Sample(input="§two§", target=AFTER)]
    assert accuracy(samples, solver=[use_tools(weather()), generate()]) == 1


@check
def structured():
    schema = ResponseSchema(name="city", json_schema=json_schema(City))
    samples = [Sample(input="§json§", target="2800000")]
    assert accuracy(samples, solver=generate(response_schema=schema)) == 1


@check
def flex():
    with best_effort():
        samples = [Sample(input="§plain§", target=PLAIN)]
        solver = generate(extra_headers={"x-omniserve-service-tier": "flex"})
        assert accuracy(samples, solver=solver) == 1


if __name__ == "__main__":
    main()
