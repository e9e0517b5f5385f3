// The box that sends one prompt, of a class of choice, and shows the answer as it comes and how long it took.

import { find, make, setText } from "./elements.js";
import { seconds } from "./format.js";
import { call } from "./server.js";

const KINDS = { LS: "latency-sensitive", BE: "best-effort" };
const PREDICTED = "x-omniserve-predicted-ttft-ms";

export class PromptBox {
  constructor() {
    this.form = find("prompt-form");
    this.output = find("prompt-output");
    this.result = find("prompt-result");
    this.classes = find("prompt-class");
    this.api = find("prompt-api");
    this.send = find("prompt-send");
    this.stop = find("prompt-stop");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    this.stop.addEventListener("click", () => this.abort?.abort());
    find("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  // about: what the server says of itself.
  offer(about) {
    this.classes.replaceChildren(...about.classes.map((each) => make("option", { value: each.name }, `${each.name} (${KINDS[each.kind]})`)));
    this.classes.disabled = false;
    this.model = about.model;
    const chat = this.api.querySelector("[value=chat]");
    chat.disabled = !about.chats;
    if (!about.chats) {
      this.api.value = "completion";
      this.api.title = "this model has no chat template";
    }
    find("prompt-tokens").max = about.max_tokens;
  }

  async #run() {
    const chat = this.api.value === "chat";
    const prompt = find("prompt").value;
    const body = {
      model: this.model,
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      max_tokens: find("prompt-tokens").valueAsNumber,
      service_tier: this.classes.value,
      stream: true,
      stream_options: { include_usage: true },
    };
    this.abort = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    this.output.textContent = "";
    this.result.classList.remove("error");
    setText(this.result, `Sent as ${body.service_tier}, waiting for the first token`);
    const times = { sent: performance.now() };
    try {
      const response = await call(chat ? "/v1/chat/completions" : "/v1/completions", { body, signal: this.abort.signal });
      times.predictedMs = response.headers.get(PREDICTED);
      for await (const event of events(response)) this.#take(event, times);
      setText(this.result, summary(times, body.service_tier));
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.result.classList.toggle("error", !stopped);
      const wait = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
      setText(this.result, stopped ? `Stopped. ${summary(times, body.service_tier)}` : `${error.message}.${wait}`);
    } finally {
      this.send.disabled = false;
      this.stop.disabled = true;
    }
  }

  #take(event, times) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) times.tokens = event.usage.completion_tokens;
    for (const choice of event.choices ?? []) {
      const { reasoning, content } = choice.delta ?? {};
      const gap = content && times.reasons ? "\n\n" : "";
      times.reasons = (times.reasons && !gap) || Boolean(reasoning);
      const text = choice.text ?? (reasoning ?? "") + gap + (content ?? "");
      if (text !== "") {
        times.last = performance.now();
        if (times.first === undefined) {
          times.first = times.last;
          setText(this.result, "Streaming");
        }
        const atEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 8;
        this.output.append(text);
        if (atEnd) this.output.scrollTop = this.output.scrollHeight;
      }
      if (choice.finish_reason) times.reason = choice.finish_reason;
    }
  }
}

function summary({ sent, first, last, tokens, predictedMs, reason }, tier) {
  if (first === undefined) return "No text came.";
  const parts = [`${tier}: TTFT ${seconds((first - sent) / 1000)}`];
  if (predictedMs) parts.push(`predicted ${seconds(predictedMs / 1000)}`);
  if (tokens > 1) parts.push(`TPOT ${seconds((last - first) / 1000 / (tokens - 1))}`);
  if (tokens !== undefined) parts.push(`${tokens} tokens`);
  if (reason) parts.push(reason === "length" ? "ended at the limit" : "ended by itself");
  return parts.join(", ");
}

// The JSON objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {}); // it may have failed already, which the caller knows
  }
}
