"""Vercel's AI SDK with its provider of OpenAI-compatible servers, in Node."""

from __future__ import annotations

import json
import os
import subprocess

from scripts import AFTER, ANSWER, CITY, PLAIN, THOUGHT
from trial import BASE_URL, MODEL, TOO_LONG, best_effort, check, main

HEAD = """
import { generateText, streamText, stepCountIs, tool, Output } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";
const server = { name: "omniserve", baseURL: %s, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true };
const model = createOpenAICompatible(server)(%s);
const tools = { weather: tool({
  description: "Tell the weather",
  inputSchema: z.object({ city: z.string(), days: z.number().int().optional() }),
  execute: async ({ city }) => "sunny in " + city + " §after§",
}) };
const City = z.object({ name: z.string(), people: z.number().int() });
const options = { model, maxRetries: 0, stopWhen: stepCountIs(3) };
const tell = (value) => console.log(JSON.stringify(value));
"""


def node(script: str) -> object:
    """Return what a script tells with its last line."""
    done = subprocess.run(
        ["node", "--input-type=module", "-e", HEAD % (json.dumps(BASE_URL), json.dumps(MODEL)) + script],
        cwd=os.environ["TRIAL_ENVIRONMENT"], text=True, capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(next((line for line in done.stderr.splitlines() if "Error" in line), done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


@check
def chat():
    told = node("""
        const { text, usage } = await generateText({ ...options, system: "Be brief.", prompt: "§plain§" });
        tell([text, usage.outputTokens > 5]);
    """)
    assert told == [PLAIN, True], told


@check
def stream():
    told = node("""
        const result = streamText({ ...options, prompt: "§plain§" });
        const parts = [];
        for await (const part of result.textStream) parts.push(part);
        tell([parts.join(""), parts.length > 3, (await result.usage).outputTokens > 5]);
    """)
    assert told == [PLAIN, True, True], told


@check
def tools():
    for key in ("weather", "two"):
        told = node(f"""
            const whole = await generateText({{ ...options, tools, prompt: "§{key}§" }});
            const streamed = streamText({{ ...options, tools, prompt: "§{key}§" }});
            tell([whole.text, await streamed.text, whole.steps[0].toolCalls.length]);
        """)
        assert told == [AFTER, AFTER, 1 if key == "weather" else 2], told


@check
def structured():
    for key in ("json", "think json"):
        told = node(f"""
            const whole = await generateText({{
              ...options, output: Output.object({{ schema: City }}), prompt: "§{key}§" }});
            const streamed = streamText({{ ...options, output: Output.object({{ schema: City }}), prompt: "§{key}§" }});
            tell([whole.output, await streamed.output]);
        """)
        assert told == [CITY, CITY], told


@check
def reasoning():
    told = node("""
        const whole = await generateText({ ...options, prompt: "§think§" });
        const streamed = streamText({ ...options, prompt: "§think§" });
        const messages = [
          { role: "user", content: "§think§" }, ...whole.response.messages, { role: "user", content: "§after§" }];
        const again = await generateText({ ...options, messages });
        tell([whole.text, whole.reasoningText, await streamed.text, await streamed.reasoningText, again.text,
          whole.usage.outputTokenDetails.reasoningTokens > 0]);
    """)
    assert told == [ANSWER, THOUGHT, ANSWER, THOUGHT, AFTER, True], told


@check
def flex():
    with best_effort(2):
        node("""
            const headers = { "x-omniserve-service-tier": "flex" };
            await generateText({ ...options, headers, prompt: "§plain§" });
            const providerOptions = { omniserve: { service_tier: "flex" } };
            await generateText({ ...options, providerOptions, prompt: "§plain§" });
            tell(null);
        """)


@check
def errors():
    told = node(f"""
        try {{ await generateText({{ ...options, prompt: {json.dumps(TOO_LONG)} }}); }}
        catch (error) {{ tell([error.statusCode, error.responseBody.includes("context_length_exceeded")]); }}
    """)
    assert told == [400, True], told


if __name__ == "__main__":
    main()
