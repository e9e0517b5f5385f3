// Which charts there are: of each its lines, its unit, what it means, and what it says while there is nothing to draw.
// A line with a format of its own is a number in the legend only. words: the label of a line for those who cannot see it.

import { number, percent, seconds, times } from "./format.js";

const CLASS_COLORS = ["one", "two", "three", "four"];
const NO_ENGINE = "Shows when the engine answers again.";

function latency(what, title, meaning, spec) {
  return {
    title: `${spec.name} ${title}`,
    meaning,
    format: seconds,
    scale: "log",
    objective: spec[`${what}_slo`],
    lines: [
      { name: `${what}_p99:${spec.name}`, label: "p99", color: "one" },
      { name: `${what}_p50:${spec.name}`, label: "p50", color: "two" },
    ],
    empty: `No ${spec.name} request has ended in this time. Send one above, and it shows here.`,
  };
}

// spec: the class whose latencies are shown; classes: all of them.
export function panels(spec, classes) {
  const byClass = (series, options = () => ({})) =>
    classes.slice(0, CLASS_COLORS.length).map((each, i) => ({
      name: `${series}:${each.name}`,
      label: each.name,
      color: CLASS_COLORS[i],
      ...options(each),
    }));
  return [
    latency("ttft", "time to first token (TTFT)", "From the request to its first token: half of the requests took less than p50, 99 of 100 less than p99.", spec),
    latency("tpot", "time per output token (TPOT)", "Mean time between two tokens of an answer, after the first: how fast it is written.", spec),
    {
      title: `${spec.name} SLO attainment`,
      meaning: "Share of the requests whose TTFT, or TPOT, was within its objective (SLO).",
      format: percent,
      top: 1,
      lines: [
        { name: `ttft_met:${spec.name}`, label: "TTFT kept", color: "one" },
        { name: `tpot_met:${spec.name}`, label: "TPOT kept", color: "two" },
      ],
      empty: `No ${spec.name} request with an objective has ended in this time. The share that kept it would show here.`,
    },
    {
      title: "BE output by attention, tokens/s",
      meaning: "Output of best-effort requests, by where their attention was computed: on the device or the host (CPU).",
      format: number,
      stacked: true,
      least: 10,
      lines: [
        { name: "be_host_rate", label: "host", color: "two" },
        { name: "be_device_rate", label: "device", color: "one" },
        { name: "be_prompt_rate", label: "prompts read", format: number },
      ],
      empty: NO_ENGINE,
    },
    {
      title: "KV memory in use",
      meaning: "KV is what attention keeps of each token. The host tier is CPU memory, for best-effort requests.",
      format: percent,
      top: 1,
      lines: [
        { name: "kv_device", label: "device tier", color: "one" },
        { name: "kv_host", label: "host tier", color: "two" },
      ],
      empty: NO_ENGINE,
    },
    {
      title: "Requests running and waiting",
      meaning: "In the running batch, and waiting for a place in it, by class.",
      format: number,
      least: 4,
      lines: [
        ...byClass("running", (each) => ({ label: `${each.name} running` })),
        ...byClass("waiting", (each) => ({ label: `${each.name} waiting` })),
      ],
      empty: NO_ENGINE,
    },
    {
      title: "Rejected within 60 s",
      meaning: "Requests answered with status 429, as their first token would come too late or too many wait.",
      format: number,
      least: 4,
      lines: byClass("rejected"),
      empty: "Shows a minute's rejections when the server has counted them.",
    },
    {
      title: "Piggyback rows, all layers, rows/s",
      meaning: "Best-effort tokens whose attention came back from the host tier, and which joined a step of the device.",
      format: number,
      least: 10,
      lines: [{ name: "piggyback_rate", label: "joined", color: "one", filled: true }],
      empty: NO_ENGINE,
    },
    {
      title: "Step times: mean error of predictions",
      meaning: "How far predicted step times were off. Drift: measured over what the latency profile says, 1 × if it still holds.",
      format: percent,
      least: 0.1,
      lines: [
        { name: "step_error", label: "error", color: "one" },
        { name: "step_drift", label: "drift", format: times },
        { name: `ttft_error_p50:${spec.name}`, label: "TTFT off by", format: seconds },
      ],
      empty: "No step in this time: the engine had nothing to do. Under load, the error shows here.",
    },
  ];
}
