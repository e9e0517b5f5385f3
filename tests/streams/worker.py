"""The process in which CUDA is made up: runs what a line of JSON asks for, and answers with a line.

A request names a ``case`` (with ``order``, ``seed`` and perhaps a ``mutation``) or a ``scene``; an answer has the
``error``, or the ``stats``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from typing import Any

from tests.streams.device import Order
from tests.streams.mutations import MUTATIONS, PACE
from tests.streams.runs import Bench
from tests.streams.scenes import SCENES


def answer(bench: Bench, asked: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for."""
    try:
        if "scene" in asked:
            scene, order = SCENES[asked["scene"]]
            bench.play(scene, order)
            return {"stats": {}}
        settings = dict(asked.get("settings", {}))
        case = asked.get("case")
        if asked.get("mutation"):
            mutation = {**MUTATIONS, **PACE}[asked["mutation"]]
            case, settings = mutation.case, {**mutation.settings, **settings, "change": mutation.change}
        return {"stats": bench.run(case, Order(*asked["order"]), asked["seed"], **settings)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main() -> None:
    """Answer requests until there are no more."""
    logging.disable(logging.CRITICAL)  # failures are injected
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    bench = Bench()
    for line in sys.stdin:
        print(json.dumps(answer(bench, json.loads(line)), default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
