"""Dialects: what each writes is told from text, however that comes; their grammars allow calls of the schemas."""

from __future__ import annotations

import copy
import json
import random

import jsonschema
import pytest
from dialect_samples import FORMS, harmony
from tokenizers import AddedToken
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.sampling.detokenizer import Detokenizer
from omniserve.sampling.grammar import GrammarCompiler, GrammarFailed, json_value
from omniserve.sampling.json_schema import UnsupportedSchema, enforceable
from omniserve.server.dialects import CALL_FORMS, THINKING, choose
from omniserve.server.dialects.base import Opening, joined
from omniserve.server.dialects.pythonic import Pythonic
from omniserve.server.tokenizing.text import TextCodec
from tests.masks import ids_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "where": {"type": "object"},
        "tags": {"type": "array"},
        "kinds": {"type": "array", "enum": ["a", "b"]},
        "dry": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = {"weather": WEATHER, "time": {"type": "object", "properties": {}}, "ns.tool-x": {}}
NESTED = {"where": {"at": [1, {"b": None}], "c": {}}, "tags": [], "days": 3, "dry": True}
NEXT = "<|end|><|start|>assistant"
ODD = 'Grüße "a" \\ b\n\n  {x} [y] 日本 🙂 </b> %'
CALLS = [
    [("weather", {"city": "Köln"})],
    [("weather", {"city": "Köln"}), ("time", {})],
    [("time", {}), ("weather", NESTED), ("time", {})],
    [("weather", {"city": ODD})],
    [("weather", {"city": "5", "days": 5})],
    [("weather", {"city": "true", "note": "null and void"})],
    [("weather", {"city": ""})],
    [("time", {})],
    [("weather", {"other": [1.5, "x"]})],
]
TEXTS_WITHOUT_CALLS = [
    "",
    "hello",
    "a < b, c > d. {x} [y] <tool <| <｜ [TOOL func",
    "say <think> or </think>",
    "  two \n\n lines\n ",
    "[1, 2] {",
]
COUNT = sorted(FORMS)
over_forms = pytest.mark.parametrize("name", COUNT)


def dialect_of(name):
    return choose("", calls=name)


def parsed(dialect, pieces, *, opening=None, several=True, tools=TOOLS):
    parser = dialect.parser(tools, opening=opening or Opening(), several=several)
    said = [parser.push(piece) for piece in pieces] + [parser.flush()]
    calls = [call for one in said for call in one.calls]
    assert [call.index for call in calls] == list(range(parser.num_calls))
    return (
        "".join(one.reasoning for one in said),
        "".join(one.text for one in said),
        [(call.name, call.arguments) for call in calls],
    )


def told(dialect, text, **more):
    """Return what is told from a text, which is the same wherever it is split."""
    whole = parsed(dialect, [text], **more)
    assert parsed(dialect, list(text), **more) == whole, text
    for at in range(1, len(text)):
        assert parsed(dialect, [text[:at], text[at:]], **more) == whole, (text[:at], text[at:])
    return whole


def streamed(dialect, pieces, *, several=True, tools=TOOLS):
    """Return the text and the calls, each from its pieces and whether it is complete, and the number of the pieces."""
    parser = dialect.parser(tools, opening=Opening(), several=several, streams=True)
    said = [parser.push(piece) for piece in pieces] + [parser.flush()]
    pieces = [call for one in said for call in one.calls]
    calls = joined(pieces)
    assert [call.index for call in calls] == list(range(parser.num_calls))
    assert len({(call.index, call.call_id, call.name) for call in pieces}) == len(calls)
    text = "".join(one.text for one in said)
    return text, [(call.name, call.arguments) for call in calls], [call.ends for call in calls], len(pieces)


def told_in_pieces(dialect, text, **more):
    """Return what a stream tells of a text, which is the same wherever that is split."""
    whole = streamed(dialect, [text], **more)[:3]
    letter_by_letter = streamed(dialect, text, **more)
    assert letter_by_letter[:3] == whole, text
    for at in range(1, len(text)):
        assert streamed(dialect, [text[:at], text[at:]], **more)[:3] == whole, (text[:at], text[at:])
    return letter_by_letter


def objects(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


@over_forms
def test_calls_are_told(name):
    sample, dialect = FORMS[name], dialect_of(name)
    for calls in CALLS:
        _, text, found = told(dialect, sample.write(calls))
        assert (text, objects(found)) == ("", calls)
        if sample.writes_json:
            assert [arguments for _, arguments in found] == [json.dumps(a, ensure_ascii=False) for _, a in calls]
        _, text, found = told(dialect, f"\n {sample.write(calls)} \n")
        assert (text.strip(), objects(found)) == ("", calls)


@over_forms
def test_other_texts_of_a_call_are_told(name):
    for text in FORMS[name].others:
        _, rest, calls = told(dialect_of(name), text)
        assert objects(calls) == [("weather", {"city": "Köln"})], text
        assert rest in ("", "I look.")


@over_forms
def test_text_without_calls_stays(name):
    for text in TEXTS_WITHOUT_CALLS:
        assert told(dialect_of(name), text) == ("", text, [])


@over_forms
def test_calls_are_told_in_pieces_as_they_are_written(name):
    sample, dialect = FORMS[name], dialect_of(name)
    long = [("weather", {"city": ODD, "days": 5, "where": NESTED["where"], "tags": ["x"], "note": None})]
    many = [("time", {}), ("weather", {"city": "Köln"}), ("ns.tool-x" if sample.writes_json else "time", {"a": "b c"})]
    texts = [sample.write(calls) for calls in (long, many, [("time", {})], [("weather", {"city": ""})])]
    around = [] if name == "openai" else [f"{texts[0]}\nand more", f" \n{texts[1]}\n"]
    for text in (*texts, *sample.others, *around):
        _, rest, calls = parsed(dialect, [text])
        assert told_in_pieces(dialect, text)[:3] == (rest, calls, [True] * len(calls)), text
        first = parsed(dialect, [text], several=False)[1:]
        assert streamed(dialect, text, several=False)[:3] == (*first, [True])
    num_pieces = streamed(dialect, texts[0])[3]
    is_python = hasattr(dialect, "calls") and isinstance(dialect.calls, Pythonic)
    assert num_pieces > (4 if is_python else 80 if sample.writes_json else 40)


@over_forms
def test_a_stream_tells_a_call_that_is_cut_off_as_far_as_it_came(name):
    sample, dialect = FORMS[name], dialect_of(name)
    text = sample.write([("weather", {"city": "Köln", "days": 5}), ("weather", {"city": "Bonn"})])
    wholes = [arguments for _, arguments in parsed(dialect, [text])[2]]
    sizes = set()
    for at in range(len(text)):
        rest, calls, ends, _ = streamed(dialect, text[:at])
        assert streamed(dialect, [text[:at]])[:3] == (rest, calls, ends)
        assert ends in ([], [True], [False], [True, False], [True, True])
        for whole, (_, told), is_whole in zip(wholes, calls, ends, strict=False):
            # What has no arguments so far, or between tags all of some, may lack only its end.
            assert (
                told == whole
                if is_whole and sample.writes_json and told != "{}"
                else whole.startswith(told.removesuffix("}"))
            )
        sizes.add(len(calls))
    assert sizes == {0, 1, 2}


@over_forms
def test_a_stream_keeps_the_text_of_what_is_certainly_no_call(name):
    sample, dialect = FORMS[name], dialect_of(name)
    for text in (sample.write([("wetter", {"city": "Köln"})]), "a < b, {x} [y] <tool <| <｜ [TOOL func", "[1, 2] {"):
        assert told_in_pieces(dialect, text)[:3] == (*parsed(dialect, [text])[1:], [])
    text = sample.write([("time", {}), ("wetter", {"city": "Köln"})])
    rest, calls, _, _ = told_in_pieces(dialect, text)
    assert "wetter" in rest and calls in ([("time", "{}")], []), "what follows a call that was told stays text"


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>', '{"a": NaN}'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": "x}}</tool_call>', '{"a": "x}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": 1</tool_call> bye', '{"a": 1'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>a</parameter> x </tool_call>",
         '{"city": "a</parameter> x </tool_call>'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=days>5</parameter></function> x </tool_call>",
         '{"days": 5'),
        ("pythonic", "[weather(city='a', days=f(5))]", '{"city": "a"'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>a<|"|>,days:x}<tool_call|>', '{"city": "a", "days": '),
    ],
)  # fmt: skip
def test_a_call_that_breaks_in_a_stream_stays_as_it_is_written(name, text, arguments):
    _, calls, _, _ = told_in_pieces(dialect_of(name), text)
    assert calls == [("weather", arguments)]
    assert parsed(dialect_of(name), [text])[2] == [], "where it can still be told, it stays text"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"city": "a"}, "name": "weather"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1], "parameters": {"city": "a"}}</tool_call>',
        '<tool_call>{"name": "weather"}</tool_call>',
        '<tool_call>{"say": "' + "a" * 2000 + '", "name": "weather", "arguments": {"city": "a"}}</tool_call>',
        '<tool_call>{"type": "function", "n": 1, "name": "weather", "arguments": {"city": "a"}, "x": 1}</tool_call>',
    ],
)
def test_a_call_is_told_as_a_whole_where_its_name_is_not_certain_in_time(text):
    _, rest, calls = parsed(dialect_of("hermes"), [text])
    found = streamed(dialect_of("hermes"), text)
    assert found[:2] == (rest, calls)


@over_forms
def test_what_is_no_call_stays_text(name):
    sample, dialect = FORMS[name], dialect_of(name)
    unknown = sample.write([("wetter", {"city": "Köln"})])
    _, text, calls = told(dialect, unknown)
    assert calls == [] and "wetter" in text and "Köln" in text
    _, text, calls = told(dialect, sample.cut)
    assert calls == [] and (text == sample.cut or name == "openai")
    if sample.writes_json:
        broken = sample.write([("weather", {"city": "Köln"})]).replace('"Köln"', '"Köln')
        assert told(dialect, broken)[2] == []
        broken = sample.write([("weather", {"city": "Köln"})]).replace('"Köln"', "NaN")
        assert told(dialect, broken)[2] == []
        twice = sample.write([("weather", {"a": 1})]).replace('{"a": 1}', '{"a": 1.10, "b": 1e400}')
        assert told(dialect, twice)[2] == [("weather", '{"a": 1.10, "b": 1e400}')], "the text is passed on"


@over_forms
def test_text_around_calls_stays(name):
    sample, dialect = FORMS[name], dialect_of(name)
    call = sample.write([("weather", {"city": "Köln"})])
    if name == "openai":
        said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        assert told(dialect, said + call)[1:] == ("I look.", [("weather", '{"city": "Köln"}')])
        return
    _, text, calls = told(dialect, f"{call} and more")
    assert (text.strip(), len(calls)) == ("and more", 1)
    if not sample.only_at_start:
        _, text, calls = told(dialect, f"I look.\n{call}\nbye")
        assert (text.split(), len(calls)) == (["I", "look.", "bye"], 1)
        unknown = sample.write([("wetter", {})])
        _, text, calls = told(dialect, f"a {unknown} b {call}")
        assert len(calls) == 1 and "wetter" in text and text.startswith("a ") and " b" in text
    else:
        assert told(dialect, f"I look. {call}") == ("", f"I look. {call}", [])


@over_forms
def test_answer_ends_with_its_first_call_if_there_is_one_only(name):
    text = FORMS[name].write([("time", {}), ("weather", {"city": "Köln"})])
    assert told(dialect_of(name), f"{text} and more", several=False)[1:] == ("", [("time", "{}")])


@over_forms
def test_call_that_lacks_only_its_end_is_one(name):
    whole = FORMS[name].write([("weather", {"city": "Köln"})])
    dialect = dialect_of(name)
    form = dialect.calls if name != "openai" else None
    for end in filter(None, (getattr(form, "closing", ""), getattr(form, "end", ""))):
        whole = whole.rstrip().removesuffix(end)
        _, text, calls = told(dialect, whole)
        assert (text, objects(calls)) == ("", [("weather", {"city": "Köln"})])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("city", "5", "5"),
        ("city", '"a"', '"a"'),
        ("city", " a ", " a "),
        ("days", "5", 5),
        ("days", " 5 ", 5),
        ("days", "five", "five"),
        ("dry", "True", True),
        ("dry", "false", False),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "5", "5"),
        ("where", '{"a": [1]}', {"a": [1]}),
        ("where", "{a}", "{a}"),
        ("tags", "['a']", "['a']"),
        ("kinds", '["a"]', ["a"]),
        ("other", "5", 5),
        ("other", "hello", "hello"),
        ("other", "[1", "[1"),
    ],
)
def test_values_have_the_types_of_the_schema(name, key, written, value):
    call = FORMS[name].write([("weather", {key: written})])
    _, _, calls = told(dialect_of(name), call)
    assert objects(calls) == [("weather", {key: value})]


@pytest.mark.parametrize(
    ("key", "attribute", "written", "value"),
    [
        ("city", ' string="true"', "5", "5"),
        ("days", ' string="true"', "5", "5"),
        ("days", ' string="false"', "5", 5),
        ("days", ' string="false"', "five", "five"),
        ("city", ' string="false"', "5", 5),
        ("where", ' string="false"', '{"a": [1]} ', {"a": [1]}),
        ("dry", ' string="false"', "True", True),
        ("days", "", "5", 5),
        ("city", "", "5", "5"),
        ("city", ' string="true"', "\n a < b </｜DSML｜para \n", "\n a < b </｜DSML｜para \n"),
    ],
)
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
def test_attributes_of_dsml_say_what_is_a_text(name, key, attribute, written, value):
    call = FORMS[name].write([("weather", {key: "%"})]).replace(' string="true">%<', f"{attribute}>{written}<")
    assert objects(told(dialect_of(name), call)[2]) == [("weather", {key: value})]


BUILTIN = {name: {"type": "object", "properties": {"query": {"type": "string"}}} for name in (
    "brave_search", "wolfram_alpha", "ipython")}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<|python_tag|>brave_search.call(query="Köln")', [("brave_search", {"query": "Köln"})]),
        ('brave_search.call(query="Köln")', [("brave_search", {"query": "Köln"})]),
        ('wolfram_alpha.call(query="x^2 (1)", n="3")', [("wolfram_alpha", {"query": "x^2 (1)", "n": "3"})]),
        ('<|python_tag|>ipython.call(code="print(1)\nx")', [("ipython", {"code": "print(1)\nx"})]),
        ('brave_search.call(query="say "it" (now), a=5")', [("brave_search", {"query": 'say "it" (now), a=5'})]),
        ("ipython.call()", [("ipython", {})]),
        (
            '{"name": "ipython", "parameters": {}}; brave_search.call(query="a")',
            [("ipython", {}), ("brave_search", {"query": "a"})],
        ),
    ],
)
def test_calls_of_tools_that_llama_knows_are_told(text, calls):
    _, rest, found = told(dialect_of("llama3_json"), text, tools=BUILTIN)
    assert (rest, objects(found)) == ("", calls)


@pytest.mark.parametrize("text", [
    "brave_search.call(query=5)", 'brave_search.call("a")', 'brave_search.call(query="a', "brave_search.call",
    'brave_search.call(query="a", query="b")', 'weather.call(city="a")', 'I use brave_search.call(query="a")',
])  # fmt: skip
def test_what_is_no_call_of_such_a_tool_stays_text(text):
    assert told(dialect_of("llama3_json"), text, tools=BUILTIN | TOOLS) == ("", text, [])
    assert told(dialect_of("llama3_json"), 'brave_search.call(query="a")')[2] == [], "the tool is not offered"


def test_no_text_of_strict_tools_begins_as_a_call_of_such_a_tool():
    dialect, tokenizer = dialect_of("llama3_json"), byte_level_tokenizer()
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    rules = {"f": enforceable(EMPTY)}
    text = dialect.calls_grammar(rules, free_text=True, several=True, special=tokens, opening=Opening())
    grammar = compiler_of(tokenizer).compile(text).result()
    assert accepts(grammar, "brave people", tokenizer) and accepts(grammar, "a brave_search.call(", tokenizer)
    assert not accepts(grammar, ' brave_search.call(query="a")', tokenizer)


def test_numbers_are_passed_on_as_they_are_written():
    call = FORMS["qwen3_coder"].write([("weather", {"days": "1.10", "where": '{"x": 1e400}'})])
    assert told(dialect_of("qwen3_coder"), call)[2] == [("weather", '{"days": 1.10, "where": {"x": 1e400}}')]


@pytest.mark.parametrize("text", [
    "[weather('a')]", "[weather(**x)]", "[weather(city=f())]", "[weather(city=1j)]",
    "[weather(city={1: 2})]", "[weather]", "[weather(), 5]", "[f'{x}'()]", "[weather(city=b'a')]",
    "[weather(city=" + "[" * 300 + "]" * 300 + ")]",
])  # fmt: skip
def test_pythonic_calls_have_literals_alone(text):
    assert parsed(dialect_of("pythonic"), [text]) == ("", text, [])


def test_pythonic_values_become_json():
    text = "[ns.weather(city='a\\'b', days=-2, dry=True, tags=('x', None), where={'a': false, 'b': 1.5})]"
    _, _, [(name, arguments)] = parsed(dialect_of("pythonic"), [text], tools={"ns.weather": {}})
    expected = {"city": "a'b", "days": -2, "dry": True, "tags": ["x", None], "where": {"a": False, "b": 1.5}}
    assert (name, json.loads(arguments)) == ("ns.weather", expected)


def test_ids_are_those_that_templates_take():
    parser = dialect_of("kimi_k2").parser(TOOLS, opening=Opening())
    ids = [call.call_id for call in parser.push(FORMS["kimi_k2"].write([("time", {}), ("time", {})])).calls]
    assert ids == ["functions.time:0", "functions.time:1"]
    for name in ("mistral", "mistral_v3"):
        calls = dialect_of(name).parser(TOOLS, opening=Opening()).push(FORMS[name].write([("time", {})])).calls
        assert len(calls[0].call_id) == 9 and calls[0].call_id.isalnum()
    text = FORMS["mistral"].others[1]
    assert dialect_of("mistral").parser(TOOLS, opening=Opening()).push(text).calls[0].call_id == "abcdefghi"


@over_forms
def test_the_template_says_which_dialect_it_is(name):
    """Exactly one, so that none hides another."""
    template = FORMS[name].template
    found = {CALL_FORMS.get(each) for each in CALL_FORMS.names() if CALL_FORMS.get(each).is_of(template)}
    assert found == {CALL_FORMS.get(name)}


def test_the_template_says_how_thinking_is_marked():
    for template, begin in [
        ("<think>", "<think>"), ("{% if '</think>' in content %}", "<think>"), ("[THINK]a[/THINK]", "[THINK]"),
        ("Here is my thought process:", "Here is my thought process:"),
        ("thoughts between <think></think> and your response between <response></response>", "<think>"),
        ("<|channel>thought\n<channel|>", "<|channel>thought\n"),
    ]:  # fmt: skip
        assert choose(template).thinking.begin == begin
        assert len({id(THINKING.get(n)) for n in THINKING.names() if THINKING.get(n).is_of(template)}) == 1
    assert choose("<|tool_calls_section_begin|>").thinking is None
    assert choose("<|tool_calls_section_begin|></think>").thinking is THINKING.get("kimi_k2")
    assert choose("<think></think><response>").thinking is THINKING.get("granite33") is THINKING.get("ernie45")
    assert choose("<think></think><answer>").thinking is THINKING.get("hunyuan_a13b")
    for name in ("apertus", "cohere_command3", "longcat", "seed_oss"):
        assert choose(f"{{{{ thinking }}}}{THINKERS[name][0]}").thinking is THINKING.get(name)
    assert choose("plain").thinking is None and choose("plain").calls is None
    assert choose("<think><tool_call>", thinking="none").thinking is None
    assert choose("<think><tool_call>", calls="none").calls is None


def test_names_that_do_not_go_together_are_refused():
    harmony = FORMS["openai"].template
    assert type(choose(harmony)) is type(choose("", calls="openai")) is type(choose("", thinking="openai_gptoss"))
    assert not choose(harmony, thinking="none").knows_tools
    for more in ({"calls": "openai", "thinking": "qwen3"}, {"calls": "hermes", "thinking": "openai_gptoss"},
                 {"calls": "openai", "thinking": "none"}):  # fmt: skip
        with pytest.raises(ValueError, match="do not go together"):
            choose("", **more)
    with pytest.raises(ValueError, match="unknown tool-call parser 'herms'; known: apertus"):
        choose("", calls="herms")
    with pytest.raises(ValueError, match="unknown reasoning parser"):
        choose("", thinking="x")


THINKERS = {
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "granite33": ("<think>", "</think>"),
    "hunyuan_a13b": ("<think>", "</think>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}


@pytest.mark.parametrize("name", THINKERS)
def test_thinking_is_told_from_text(name):
    begin, end = THINKERS[name]
    dialect = choose("", calls="hermes", thinking=name)
    call = FORMS["hermes"].write([("time", {})])
    for lead, opening in (("", Opening(begin)), (begin, Opening()), (f"\n{begin}", Opening())):
        for thought in ("", "hm", "a\n\n b < c </thin [/ <tool_call>"):
            text = f"{lead}\n{thought}\n{end}\n\nhello \n"
            assert told(dialect, text, opening=opening) == (thought, "hello \n", [])
            assert told(dialect, f"{lead}{thought}{end}{call}", opening=opening) == (thought, "", [("time", "{}")])
        assert told(dialect, f"{lead}cut off ", opening=opening) == ("cut off", "", [])
    for text in ("hello", f"hello {begin}a{end}", begin[:3], "", f"a{end}b"):
        assert told(dialect, text) == ("", text, [])


def test_a_call_of_kimi_ends_its_thinking():
    dialect = choose("", calls="kimi_k2", thinking="kimi_k2")
    call = FORMS["kimi_k2"].write([("time", {})])
    assert told(dialect, f"<think>I look.{call}") == ("I look.", "", [("time", "{}")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>hm</think>\n<response>hello\n</response>\n", ("hm", "hello")),
        ("<think>hm</think><response> a </b> c", ("hm", "a </b> c")),
        ("<think>hm</think>a <response>b</response>", ("hm", "a <response>b</response>")),
        ("<response>hello</response> ", ("", "hello")),
        ("<think>hm</think><respon", ("hm", "<respon")),
        ("<think>hm</think><response>a</respon", ("hm", "a</respon")),
        ("hello </response>", ("", "hello </response>")),
    ],
)
def test_marks_of_an_answer_are_no_part_of_it(text, expected):
    assert told(choose("", calls="granite", thinking="granite33"), text) == (*expected, [])


def test_marks_of_an_answer_of_cohere_and_hunyuan_are_no_part_of_it():
    for name, begin, end in [
        ("cohere_command3", "<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("hunyuan_a13b", "<answer>", "</answer>")
    ]:  # fmt: skip
        dialect, (think, answer) = choose("", calls=name, thinking=name), THINKERS[name]
        assert told(dialect, f"{think}\nhm\n{answer}\n{begin}\nhello\n{end}") == ("hm", "hello", [])
        call = FORMS["jamba" if name == "hunyuan_a13b" else name].write([("time", {})])
        assert told(dialect, f"{think}hm{answer}{call}") == ("hm", "", [("time", "{}")])


def test_an_answer_between_marks_may_have_calls():
    dialect = choose("", calls="granite", thinking="granite33")
    call = FORMS["granite"].write([("time", {})])
    for text in (f"<think>hm</think>\n<response>{call}</response>", f"<think>hm</think>{call}"):
        assert told(dialect, text) == ("hm", "", [("time", "{}")])


def test_constraints_may_be_kept_between_the_marks_of_an_answer():
    dialect, tokenizer = choose("", thinking="granite33"), byte_level_tokenizer()
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    value = json_value(enforceable({"type": "integer"}))
    grammar = compiler_of(tokenizer).compile(dialect.value_grammar(value, special=tokens, opening=Opening())).result()
    for text, is_good in [
        ("<think>hm</think>\n<response>\n5\n</response>", True), ("<think>hm</think>5", True), ("5", True),
        ("<think>hm</think><response>x</response>", False), ("<think>hm</think><response>5", False),
    ]:  # fmt: skip
        assert accepts(grammar, text, tokenizer) == is_good, text


@pytest.mark.parametrize(
    ("prompt", "continued", "opening"),
    [
        ("<|user|>hi<|assistant|>", None, Opening()),
        ("<|user|>hi<|assistant|><think>\n", None, Opening("<think>")),
        ("<|user|>hi<|assistant|><think>\n\n</think>\n\n", None, Opening(may_think=False)),
        ("<|user|>what is <think>?<|assistant|>", None, Opening()),
        ("<|user|>hi<|assistant|><think>a b", "<think>a b", Opening("<think>")),
        ("<|user|>hi<|assistant|>a b", "a b", Opening(may_think=False)),
        ("<|user|>hi<|assistant|><think>a</think>b", "<think>a</think>b", Opening(may_think=False)),
    ],
)
def test_the_prompt_says_whether_it_ends_inside_thinking(prompt, continued, opening):
    assert choose("<think>").opening(prompt, continued) == opening


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<|channel|>analysis<|message|>hm{NEXT}<|channel|>final<|message|>hi", ("hm", "hi")),
        (f"<|channel|>analysis<|message|>a{NEXT}<|channel|>analysis<|message|>b<|end|>", ("a\nb", "")),
        ("<|channel|>final<|message|>hi<|return|>", ("", "hi")),
        (f"<|channel|>commentary<|message|>I look.{NEXT}<|channel|>final<|message|>hi", ("", "I look.\nhi")),
        ("<|channel|>analysis<|message|>cut", ("cut", "")),
        ("<|channel|>anal", ("", "")),
        ("<|start|>assistant<|channel|>final<|message|>x < y <|x", ("", "x < y <|x")),
        ("plain text", ("", "plain text")),
        ("to be", ("", "to be")),
        ("", ("", "")),
    ],
)  # fmt: skip
def test_channels_are_told(text, expected):
    assert told(dialect_of("openai"), text) == (*expected, [])


def test_calls_of_gpt_oss_follow_its_thinking():
    text = f"<|channel|>analysis<|message|>I look.{NEXT}{harmony([('weather', {'city': 'Köln'})])}<|call|>"
    assert told(dialect_of("openai"), text) == ("I look.", "", [("weather", '{"city": "Köln"}')])
    opening = dialect_of("openai").opening("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert opening == Opening("")
    opening = dialect_of("openai").opening("<|start|>assistant<|channel|>analysis<|message|>I th", "I th")
    assert told(dialect_of("openai"), "ink<|end|><|start|>assistant<|channel|>final<|message|>a", opening=opening)[
        :2
    ] == ("ink", "a")


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "code": {"type": "string", "pattern": "^[a-c]{2}-[0-9]$"},
        "kind": {"enum": ["a b", "</x>", "ö"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "where": {"$ref": "#/$defs/Place"},
        "dry": {"type": "boolean"},
    },
    "required": ["city", "code", "days"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"enum": [1, None]}}, "required": ["x"],
                        "additionalProperties": False}},
}  # fmt: skip
LOOSE = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def tokenizer_for(dialect, special):
    """Return a tokenizer that has a special token for each tag of a dialect, or none."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    if "<|end|>" in dialect.marks:
        tokenizer.eos_token = "<|system|>"
    begins = ("<|", "<｜", "｜", "[TOOL", "[ARGS", "[CALL", "</tool", "<tool_c", "<start_f", "<end_f", "<esc")
    tags = [mark for mark in dialect.marks if mark.startswith(begins)]
    whole = sorted({tag for tag in tags if not any(other != tag and other in tag for other in tags) and "{" not in tag})
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=True) for tag in whole if special])
    return tokenizer


def compiler_of(tokenizer):
    return GrammarCompiler(tokenizer, vocab_size=len(tokenizer) + 8, eos_token_ids=(tokenizer.eos_token_id,))


def walk(grammar, tokenizer, seed, most=3000):
    """Return the tokens of a random walk under a grammar."""
    rng, state, token_ids = random.Random(seed), grammar.start(), []
    while len(token_ids) < most:
        allowed = ids_of(state.allowed(), len(tokenizer))
        ends = tokenizer.eos_token_id in allowed and rng.random() < 0.5
        token_ids.append(tokenizer.eos_token_id if ends else rng.choice(allowed))
        state.accept(token_ids[-1])
        if token_ids[-1] == tokenizer.eos_token_id:
            return token_ids
    raise AssertionError(f"no end in {tokenizer.decode(token_ids)!r}")


def accepts(grammar, text, tokenizer):
    state = grammar.start()
    try:
        for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]:
            state.accept(token)
    except GrammarFailed:
        return False
    return True


@over_forms
@pytest.mark.parametrize("special", [False, True])
def test_what_a_grammar_of_calls_allows_is_a_call_of_the_schema(name, special):
    dialect = dialect_of(name)
    tokenizer = tokenizer_for(dialect, special)
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    schemas = {"f": SCHEMA, "g": LOOSE, "h": EMPTY}
    rules = {key: enforceable(schema) for key, schema in schemas.items()}
    names = set()
    for several in (False, True):
        text = dialect.calls_grammar(rules, free_text=False, several=several, special=tokens, opening=Opening())
        grammar = compiler_of(tokenizer).compile(text).result()
        for seed in range(8):
            if seed >= 4 and (not several or names == set(schemas)):
                break
            token_ids = walk(grammar, tokenizer, seed)
            shown = Detokenizer(tokenizer, shown=tokens.tags.values())
            written = shown.push(token_ids) + shown.flush()
            reasoning, rest, calls = parsed(dialect, [written], tools=schemas)
            assert rest == "" and (calls if several else len(calls) == 1), written
            assert not reasoning or name == "openai"
            for key, arguments in calls:
                jsonschema.validate(json.loads(arguments), schemas[key])
                names.add(key)
    assert names == set(schemas)


@over_forms
@pytest.mark.parametrize("special", [False, True])
def test_with_a_format_an_answer_is_calls_or_json_of_it(name, special):
    dialect = dialect_of(name)
    tokenizer = tokenizer_for(dialect, special)
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    text = dialect.calls_grammar(
        {"f": enforceable(SCHEMA)},
        free_text=False,
        several=False,
        otherwise=json_value(enforceable({**city, "additionalProperties": False})),
        special=tokens,
        opening=Opening(),
    )
    grammar = compiler_of(tokenizer).compile(text).result()
    seen = set()
    for seed in range(16):
        if seed >= 6 and len(seen) == 2:
            break
        token_ids = walk(grammar, tokenizer, seed)
        shown = Detokenizer(tokenizer, shown=tokens.tags.values())
        written = shown.push(token_ids) + shown.flush()
        _, rest, calls = parsed(dialect, [written], tools={"f": SCHEMA})
        seen.add(bool(calls))
        if calls:
            assert rest == "" and len(calls) == 1
            jsonschema.validate(json.loads(calls[0][1]), SCHEMA)
        else:
            jsonschema.validate(json.loads(rest), city)
    assert seen == {True, False}, "both are allowed"
    assert not accepts(grammar, "Rome", tokenizer)


@over_forms
@pytest.mark.parametrize("special", [False, True])
def test_grammar_of_strict_tools_allows_text_and_calls_of_the_schema(name, special):
    dialect, write = dialect_of(name), FORMS[name].write
    tokenizer = tokenizer_for(dialect, special)
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    rules = {"f": enforceable(SCHEMA), "h": enforceable(EMPTY)}
    text = dialect.calls_grammar(rules, free_text=True, several=True, special=tokens, opening=Opening())
    grammar = compiler_of(tokenizer).compile(text).result()
    good = {"city": "ab", "code": "ab-1", "days": 5}
    plain = "<|channel|>final<|message|>hello" if name == "openai" else "hello"
    assert accepts(grammar, plain, tokenizer)
    calls = write([("f", good)])
    if name == "mistral_v3":
        calls = calls.replace("] [", "][")
    if name in ("llama4_pythonic", "lfm2", "olmo3"):
        calls = calls.replace("'", '"')
    if name == "minimax_m2":
        calls = calls.replace("\n</minimax", "\n</minimax")
    assert accepts(grammar, calls, tokenizer)
    assert not accepts(grammar, calls.replace("ab-1", "ab_1"), tokenizer)
    assert not accepts(grammar, calls.replace("days", "weeks"), tokenizer)
    if not FORMS[name].only_at_start and name != "openai":
        assert accepts(grammar, f"hello {calls} bye", tokenizer)
        assert not accepts(grammar, f"hello {calls.replace('code', 'cod')} bye", tokenizer)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "gemma4", "functiongemma", "pythonic"])
def test_schemas_that_cannot_be_kept_are_refused(name):
    dialect = dialect_of(name)
    tokens = TextCodec(byte_level_tokenizer()).special_tokens(dialect)

    def grammar(schema):
        rules = {"f": enforceable(schema)}
        return dialect.calls_grammar(rules, free_text=False, several=True, special=tokens, opening=Opening())

    with pytest.raises(UnsupportedSchema, match="one by one"):
        grammar({"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}})
    if name != "pythonic":
        with pytest.raises(UnsupportedSchema, match="write a pattern"):
            grammar({"type": "object", "properties": {"a": {"type": "string", "format": "uri"}}})
        with pytest.raises(UnsupportedSchema, match="rename it"):
            grammar({"type": "object", "properties": {"a>": {"type": "string"}}})
    else:
        with pytest.raises(UnsupportedSchema, match="rename it"):
            grammar({"type": "object", "properties": {"a-b": {"type": "string"}}})
    tokenizer = byte_level_tokenizer()
    free = compiler_of(tokenizer).compile(grammar({"type": "object"})).result()
    write = FORMS["llama4_pythonic" if name == "pythonic" else name].write
    assert accepts(free, write([("f", {"a": 5, "b": 6})]), tokenizer)
    both = {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"]}, "d": {"type": "string", "format": "date"}},
    }
    rich = compiler_of(tokenizer).compile(grammar(both)).result()
    for value in ("x", None):
        text = write([("f", {"a": value, "d": "2024-02-29"})]).replace("'", '"').replace("None", "null")
        assert accepts(rich, text, tokenizer)
        assert not accepts(rich, text.replace("02-29", "02-30"), tokenizer)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [*THINKERS, "openai_gptoss"])
def test_constraints_begin_behind_thinking(name, special):
    dialect = choose("", calls="hermes" if name != "openai_gptoss" else "auto", thinking=name)
    begin, end = THINKERS.get(name, ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"))
    lead = "<|channel|>final<|message|>" if name == "openai_gptoss" else ""
    tokenizer = tokenizer_for(dialect, special)
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    value = json_value(enforceable({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))

    def grammar(opening):
        return compiler_of(tokenizer).compile(dialect.value_grammar(value, special=tokens, opening=opening)).result()

    good, bad = f'{lead}{{"a": 1}}', f'{lead}{{"b": 1}}'
    for text, opening, is_good in [
        (good, Opening(), True), (bad, Opening(), False), (f"{begin}hm {{}}{end}{good}", Opening(), True),
        (f"{begin}hm{end}{bad}", Opening(), False), (f"hm{end}{good}", Opening(begin), True),
        (f"hm{end}{bad}", Opening(begin), False), (good, Opening(begin), False),
    ]:  # fmt: skip
        assert accepts(grammar(opening), text, tokenizer) == is_good, (text, opening)
    if name != "openai_gptoss":
        closed = grammar(Opening(may_think=False))
        assert accepts(closed, good, tokenizer) and not accepts(closed, f"{begin}hm{end}{good}", tokenizer)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [*THINKERS, "openai_gptoss"])
def test_thinking_ends_when_its_budget_is_spent(name, special):
    dialect = choose("", thinking=name)
    begin, end = THINKERS.get(name, ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"))
    lead = "<|channel|>final<|message|>" if name == "openai_gptoss" else ""
    tokenizer = tokenizer_for(dialect, special)
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    most = 7 + len(tokenizer(end).input_ids)  # as text, the end counts, too
    opening = Opening(begin, budget=most)
    grammar = compiler_of(tokenizer).compile(dialect.text_grammar(special=tokens, opening=opening)).result()
    assert accepts(grammar, f"hm{end}{lead}hello", tokenizer)
    assert not accepts(grammar, f"{'hm ' * 20}{end}{lead}hello", tokenizer)
    for seed in range(5):
        state, rng, token_ids = grammar.start(), random.Random(seed), []
        for _ in range(60):
            token_ids.append(rng.choice(ids_of(state.allowed(), len(tokenizer))))
            state.accept(token_ids[-1])
            if token_ids[-1] == tokenizer.eos_token_id:
                break
        shown, parser = Detokenizer(tokenizer, shown=tokens.tags.values()), dialect.parser({}, opening=opening)
        num_thought = 0
        while parser.is_thinking:
            parser.push(shown.push([token_ids[num_thought]]))
            num_thought += 1
        assert num_thought <= most + len(end), "the end may be spelled letter by letter"
    none = dialect.text_grammar(special=tokens, opening=Opening(begin, budget=0))
    compiled = compiler_of(tokenizer).compile(none).result()
    assert accepts(compiled, f"{end}{lead}hello", tokenizer) and not accepts(compiled, f"a{end}{lead}hello", tokenizer)


@pytest.mark.parametrize("name", THINKERS)
def test_a_token_may_hold_an_end_of_thinking_and_what_is_around_it(name):
    """With a budget, too. What is behind the end keeps its grammar, wherever in a token the end is."""
    dialect, (begin, end) = choose("", thinking=name), THINKERS[name]
    lead = "" if dialect.thinking.answer is None else dialect.thinking.answer.begin
    cuts = [(f"hm{end[:cut]}", f"{end[cut:]}{lead}") for cut in range(len(end) + 1)]
    tokenizer = tokenizer_for(dialect, False)
    tokenizer.add_tokens(
        list(dict.fromkeys(each for first, second in cuts for each in (first, f"{second}{{", f"{second}x")))
    )
    tokens = TextCodec(tokenizer).special_tokens(dialect)

    def takes(grammar, *texts):
        state = grammar.start()
        try:
            for token in (*map(tokenizer.convert_tokens_to_ids, texts), tokenizer("}").input_ids[0]):
                state.allowed()
                state.accept(token)
        except GrammarFailed as failure:
            assert "panic" not in str(failure)
            return False
        return True

    for budget in (None, 40):
        opening = Opening(begin, budget=budget)
        text = dialect.value_grammar(json_value(EMPTY), special=tokens, opening=opening)
        grammar = compiler_of(tokenizer).compile(text).result()
        for first, second in cuts:
            assert takes(grammar, first, f"{second}{{"), (first, second, budget)
            assert not takes(grammar, first, f"{second}x"), (first, second, budget)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("calls", ["none", "hermes", "llama3_json"])
@pytest.mark.parametrize("name", THINKERS)
def test_budget_holds_where_the_model_may_think(name, special, calls):
    """The begin of thinking is no text then, with which the bound could be passed by."""
    begin, end = THINKERS[name]
    dialect = choose("", calls=calls, thinking=name)
    tokenizer = tokenizer_for(dialect, special)
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    opening = Opening(budget=8 + len(tokenizer(end).input_ids))
    if calls == "none":
        text = dialect.text_grammar(special=tokens, opening=opening)
    else:
        rules = {"f": enforceable(EMPTY)}
        text = dialect.calls_grammar(rules, free_text=True, several=True, special=tokens, opening=opening)
    grammar = compiler_of(tokenizer).compile(text).result()
    for good in ("hello", f"hello {begin} there", f"{begin}hm{end}hello", f"{begin}{end}", begin[:4], ""):
        assert accepts(grammar, good, tokenizer) or (good.endswith(" there") and special), good
    for bad in (f"{begin}{'hm ' * 30}{end}hello", f"{begin}hello", f"\n {begin}{'hm ' * 30}"):
        assert not accepts(grammar, bad, tokenizer), bad
    if calls != "none":
        call = FORMS[calls].write([("f", {})])
        assert accepts(grammar, call, tokenizer) and accepts(grammar, f"{begin}hm{end}{call}", tokenizer)
        assert not accepts(grammar, call.replace("{}", '{"a": 1}'), tokenizer)


@pytest.mark.parametrize("calls", ["hermes", "llama3_json"])
def test_thinking_may_mention_calls(calls):
    """Only calls behind it have to keep a schema."""
    tokenizer, dialect = byte_level_tokenizer(), choose("", calls=calls, thinking="qwen3")
    tokens = TextCodec(tokenizer).special_tokens(dialect)
    text = dialect.calls_grammar(
        {"f": enforceable(EMPTY)}, free_text=True, several=True, special=tokens, opening=Opening()
    )
    grammar = compiler_of(tokenizer).compile(text).result()
    call, bad = FORMS[calls].write([("f", {})]), FORMS[calls].write([("f", {"a": 1})])
    for good in (f"<think>as {bad} or</think>{call}", f"<think>{bad}</think>hello", call, "hello"):
        assert accepts(grammar, good, tokenizer), good
    assert not accepts(grammar, f"<think>hm</think>{bad}", tokenizer)
    assert not accepts(grammar, bad, tokenizer)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": [{}, 5]}}},
        {"properties": {"a": {"enum": [{}, []]}}},
        {"properties": {"a": {"$ref": 5}}},
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {}]}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"$ref": "#"},
        {"properties": {"a": {"anyOf": [True, 5, None]}}},
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
def test_values_are_read_whatever_the_schema(name, schema):
    """Of a tool that is not strict, nobody has checked it."""
    call = FORMS[name].write([("f", {"a": "5"})])
    _, _, calls = told(dialect_of(name), call, tools={"f": schema})
    assert objects(calls) in ([("f", {"a": 5})], [("f", {"a": "5"})])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "gemma4", "functiongemma"])
def test_alternatives_of_a_text_are_kept(name):
    dialect, tokenizer = dialect_of(name), byte_level_tokenizer()
    tokens = TextCodec(tokenizer).special_tokens(dialect)

    def grammar(value, **more):
        schema = enforceable({"type": "object", "properties": {"a": value}, "required": ["a"], **more})
        text = dialect.calls_grammar({"f": schema}, free_text=False, several=False, special=tokens, opening=Opening())
        return compiler_of(tokenizer).compile(text).result()

    def allows(compiled, value):
        return accepts(compiled, FORMS[name].write([("f", {"a": value})]), tokenizer)

    either = grammar({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]})
    assert allows(either, "ab") and allows(either, 12345) and not allows(either, "abc")
    with pytest.raises(UnsupportedSchema, match="each of the alternatives"):
        grammar({"anyOf": [{"type": "string"}, {"type": "null"}], "minLength": 3})
    numbers = enforceable({"type": "object", "additionalProperties": {"type": "integer"}})
    text = dialect.calls_grammar({"f": numbers}, free_text=False, several=False, special=tokens, opening=Opening())
    compiled = compiler_of(tokenizer).compile(text).result()
    assert allows(compiled, 5) and not allows(compiled, "x")


@pytest.mark.parametrize("body", [
    "call:weather{", "weather{}", "call:weather{city}", "call:weather{city:Köln}", 'call:weather{city:<|"|>Köln}',
    "call:weather{}}", "call:weather{} x", "call:weather[1]", "call:weather{a:[1}", "call:weather{a:" + "[" * 300,
])  # fmt: skip
def test_what_is_no_object_of_gemmas_stays_text(body):
    text = f"<|tool_call>{body}<tool_call|>"
    assert parsed(dialect_of("gemma4"), [text]) == ("", text, [])


def test_objects_of_gemma_become_json():
    text = '<|tool_call>call:weather{city:<|"|>a "b" }<tool_call|> {<|"|>,'
    text += 'where:{x:[1.10,True,None,{}],y:<|"|><|"|>},d:1e400}'
    _, rest, calls = told(dialect_of("gemma4"), f"{text}<tool_call|>")
    expected = '{"city": "a \\"b\\" }<tool_call|> {", "where": {"x": [1.10, true, null, {}], "y": ""}, "d": 1e400}'
    assert (rest, calls) == ("", [("weather", expected)])
