"""The calls that BFCL expects, written by each dialect: what is read of them, BFCL's own checker accepts.

From ``bfcl-eval``: questions with their functions, the possible answers, and the checker. Its package is installed
alone, as what it requires beside that is for models that it asks. Java and JavaScript have types of their own, and
turns of several messages are judged by what the functions do: these cases are left out.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

import jsonschema
import pytest
from dialect_samples import FORMS

from omniserve.server.dialects import choose
from omniserve.server.dialects.base import Opening
from tests.clients.install import Client, NotInstalled, environment

pytestmark = pytest.mark.slow
CACHE = Path(__file__).parents[2] / ".cache" / "clients"
BFCL = Client(name="bfcl-eval", packages=("bfcl-eval==2026.3.23",), without_dependencies=True)
CATEGORIES = [
    f"{live}{kind}" for live in ("", "live_") for kind in ("simple", "multiple", "parallel", "parallel_multiple")
]
TYPES = {"dict": "object", "float": "number", "tuple": "array"}


@pytest.fixture(scope="module")
def bfcl():
    """Return the folder of the data and the checker."""
    try:
        [site] = (environment(BFCL, CACHE, timeout_s=300.0) / "lib").glob("python*/site-packages")
    except NotInstalled as error:
        pytest.skip(str(error))
    models = types.ModuleType("bfcl_eval.constants.model_config")  # else it imports the clients of all models
    models.MODEL_CONFIG_MAPPING = {"any": types.SimpleNamespace(underscore_to_dot=False)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setitem(sys.modules, models.__name__, models)
        for kind in ("java", "js"):
            name = f"bfcl_eval.eval_checker.ast_eval.type_convertor.{kind}_type_converter"
            converter = types.ModuleType(name)
            setattr(converter, f"{kind}_type_converter", None)
            patch.setitem(sys.modules, name, converter)
        language = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
        checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker

        def accepts(case, calls, category):
            return checker(case["function"], calls, case["ground_truth"], language, category, "any")["valid"]

        yield site / "bfcl_eval" / "data", accepts


def cases_of(data, category):
    name = f"BFCL_v4_{category}{'_python' if category == 'simple' else ''}.json"
    cases, answers = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for folder in (data, data / "possible_answer")
    )
    assert [case["id"] for case in cases] == [answer["id"] for answer in answers]
    return [case | answer for case, answer in zip(cases, answers, strict=True)]


def first(options):
    """Return the first possible value; some cases have the value itself."""
    value = options[0] if isinstance(options, list) and options else options
    if isinstance(value, dict):
        return arguments_of(value)
    if isinstance(value, list):
        return [arguments_of(item) if isinstance(item, dict) else item for item in value]
    return value


def arguments_of(possible):
    """Return the first possible arguments; one that is empty is left out."""
    return {key: first(options) for key, options in possible.items() if first(options) != ""}


def schema_of(parameters):
    """Return JSON's schema of parameters whose types are Python's."""
    if isinstance(parameters, list):
        return [schema_of(part) for part in parameters]
    if not isinstance(parameters, dict):
        return parameters
    schema = {key: schema_of(value) for key, value in parameters.items()}
    kind = schema.get("type")
    if kind == "any":
        del schema["type"]
    elif isinstance(kind, str):
        schema["type"] = TYPES.get(kind, kind)
    return schema


def read(dialect, text, tools, size):
    """Return the calls that a text makes, which comes in pieces."""
    parser = dialect.parser(tools, opening=Opening())
    said = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.flush()]
    assert not "".join(one.text for one in said).strip(), text
    return [{call.name: json.loads(call.arguments)} for one in said for call in one.calls]


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_checker_accepts_the_calls_of_each_dialect(bfcl, category):
    data, accepts = bfcl
    num_cases = 0
    for case in cases_of(data, category):
        calls = [(name, arguments_of(one)) for answer in case["ground_truth"] for name, one in answer.items()]
        tools = {one["name"]: schema_of(one["parameters"]) for one in case["function"]}
        if not accepts(case, [dict([call]) for call in calls], category) or not all(
            jsonschema.Draft7Validator(tools[name]).is_valid(arguments) for name, arguments in calls
        ):
            continue  # the first of the values is none that the checker takes, or not of the type that the schema says
        num_cases += 1
        for name, sample in FORMS.items():
            dialect, text = choose("", calls=name), sample.write(calls)
            for size in (7, len(text)):
                assert accepts(case, read(dialect, text, tools, size), category), (name, case["id"], text)
    print(f"{category}: {num_cases} of {len(cases_of(data, category))} cases")
    assert num_cases > 0.9 * len(cases_of(data, category))
