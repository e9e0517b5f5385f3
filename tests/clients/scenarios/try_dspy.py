"""DSPy, which asks for fields in a form of its own, by a JSON schema or by calls."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices first

import dspy
from scripts import ANSWER, CITY, PLAIN, THOUGHT
from trial import BASE_URL, MODEL, best_effort, check, main

SERVER = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "none", "cache": False, "num_retries": 0}
model = dspy.LM(**SERVER)


class Ask(dspy.Signature):
    """Tell a city."""

    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    people: int = dspy.OutputField()


def told(answer):
    return {"name": answer.city, "people": answer.people}


@check
def chat():
    assert model("§plain§") == [PLAIN]


@check
def fields():
    with dspy.context(lm=model, adapter=dspy.ChatAdapter()):
        assert told(dspy.Predict(Ask)(question="§fields§")) == CITY


@check
def structured():
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        assert told(dspy.Predict(Ask)(question="§asked§")) == CITY


@check
def reasoning():
    answer = model("§think§")[0]
    assert answer == {"text": ANSWER, "reasoning_content": THOUGHT}, answer


@check
def flex():
    with best_effort():
        dspy.LM(**SERVER, extra_headers={"x-omniserve-service-tier": "flex"})("§plain§")


if __name__ == "__main__":
    main()
