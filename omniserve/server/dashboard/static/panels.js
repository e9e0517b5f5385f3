// Which charts there are: of each its lines, its unit and what it says while there is nothing to draw.
// A line with a format of its own is a number in the legend only. words: the label of a line for those who cannot see it.

import { number, percent, seconds, times } from "./format.js";

const CLASS_COLORS = ["one", "two", "three", "four"];

function latency(what, title, spec) {
  return {
    title: `${spec.name} ${title}`,
    format: seconds,
    scale: "log",
    objective: spec[`${what}_slo`],
    lines: [
      { name: `${what}_p99:${spec.name}`, label: "p99", color: "one" },
      { name: `${what}_p50:${spec.name}`, label: "p50", color: "two", thin: true },
    ],
    empty: `No ${spec.name} request has ended lately. Send one below.`,
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
    latency("ttft", "time to first token (TTFT)", spec),
    latency("tpot", "time per output token (TPOT)", spec),
    {
      title: `${spec.name} SLO attainment`,
      format: percent,
      top: 1,
      lines: [
        { name: `ttft_met:${spec.name}`, label: "TTFT kept", color: "one" },
        { name: `tpot_met:${spec.name}`, label: "TPOT kept", color: "two" },
      ],
      empty: `No ${spec.name} request with an objective has ended lately.`,
    },
    {
      title: "BE output by attention, tokens/s",
      format: number,
      stacked: true,
      least: 10,
      lines: [
        { name: "be_host_rate", label: "host", color: "two" },
        { name: "be_device_rate", label: "device", color: "one" },
        { name: "be_prompt_rate", label: "prompts", format: number },
      ],
      empty: "The engine has told nothing yet.",
    },
    {
      title: "KV memory in use",
      format: percent,
      top: 1,
      lines: [
        { name: "kv_device", label: "device tier", color: "one" },
        { name: "kv_host", label: "host tier", color: "two" },
      ],
      empty: "The engine has told nothing yet.",
    },
    {
      title: "Requests waiting, running (dashed)",
      format: number,
      least: 4,
      lines: [
        ...byClass("waiting", (each) => ({ words: `${each.name} waiting` })),
        ...byClass("running", (each) => ({ words: `${each.name} running`, dashed: true })),
      ],
      empty: "The engine has told nothing yet.",
    },
    {
      title: "Rejected within 60 s",
      format: number,
      least: 4,
      lines: byClass("rejected"),
      empty: "The server has told nothing yet.",
    },
    {
      title: "Piggyback rows, all layers, rows/s",
      format: number,
      least: 10,
      lines: [{ name: "piggyback_rate", label: "joined", color: "one", filled: true }],
      empty: "The engine has told nothing yet.",
    },
    {
      title: "Step times: mean error of predictions",
      format: percent,
      least: 0.1,
      lines: [
        { name: "step_error", label: "error", color: "one", filled: true },
        { name: "step_drift", label: "drift", format: times },
        { name: `ttft_error_p50:${spec.name}`, label: "TTFT off by", format: seconds },
      ],
      empty: "The engine has told nothing yet.",
    },
  ];
}
