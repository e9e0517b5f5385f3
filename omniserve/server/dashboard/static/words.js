// What the words of the page mean, each once: for the list on the page, and for what hovers over the numbers.

import { make } from "./elements.js";

export const WORDS = {
  LS: "Latency-sensitive requests: somebody waits for the answer. They come first. OpenAI's service tiers default, auto and priority are LS.",
  BE: "Best-effort requests: they fill the gaps that LS requests leave. Batch jobs and the service tier flex are BE.",
  TTFT: "Time to first token: from the request's arrival to the first piece of its answer.",
  TPOT: "Time per output token: mean time between two tokens of an answer, after the first.",
  "p50, p99": "Half of the requests had less than p50, and 99 of 100 less than p99.",
  SLO: "Service level objective: the TTFT and the TPOT that a request should not exceed.",
  Attainment: "The share of requests that kept their objective (“SLO kept”).",
  Rejected: "An LS request whose first token would come too late, or one for which the queue has no place, is answered with status 429 at once.",
  KV: "Keys and values: what attention remembers of each token of a prompt and its answer, in blocks of memory.",
  "Device, host tier": "KV lies in the memory of the device that runs the model (the device tier) or in CPU memory (the host tier), where CPU threads compute the attention of BE requests.",
  "Piggyback row": "A BE token whose attention came back from the host tier, and which joins a step of the device at the layer that it left.",
  Step: "One pass of the model over a batch: pieces of prompts, and a next token for each answer.",
  Prediction: "The server predicts from its latency profile how long a step takes, and from that the TTFT of a request.",
};

export function fillWords(list) {
  list.replaceChildren(...Object.entries(WORDS).map(([word, text]) => make("div", {}, make("dt", {}, word), make("dd", {}, text))));
}
